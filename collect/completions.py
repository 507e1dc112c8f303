"""Completions: texts that already exist, labelled with one target pass per text.

At temperature 0 those positions are anchors after which a text continues as the target itself would. Above it a text is
taken as a sample of the target. Under `match`, noise is drawn given the text (`gumbel_given`), so that text and noise
together have the distribution of plain sampling and every position is an exact anchor; other verifications need no noise.
Texts that were not sampled so are refused (`check_sampled`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..decode.models.cache import CachedModel
from ..decode.models.outputs import check_rows, stored
from ..decode.models.pair import Pair
from ..decode.prompts import as_token_ids
from ..decode.settings import Settings
from ..decode.verify.noise import best_of_rows
from ..decode.verify.sampler import Sampler
from ..policies.contract import Array
from ..policies.errors import InputError, SpecstopWarning
from ..policies.learned import sampling_text
from .given_text import gumbel_given
from .prompts import Prompt, sample_text, select_evenly
from .proposals import TargetText
from .schema import PromptTask

Completions: TypeAlias = "Mapping[str, str | Sequence[int]] | Mapping[tuple[str, str], str | Sequence[int]]"
"""By prompt id, or by (prompt id, sample): what followed the prompt, as a text or as token ids."""

CompletionIds: TypeAlias = Mapping[tuple[str, str], list[int]]
"""By (prompt id, sample): token ids up to the first that ends a text."""

_CHUNK = 64
"""Number of positions for which noise is drawn together: it takes several rows of float64 each."""

MAX_ERRORS = 4.0
"""Standard errors from 0 beyond which texts are refused."""

MAX_TEXTS, MIN_TEXTS = 1024, 8
"""Most texts that are checked, and the smallest number that gives an answer."""

MAX_IMPOSSIBLE = 0.01
"""Share of tokens of probability 0 from which on a warning is issued."""


def encode_completions(pair: Pair, completions: Completions, prompts: Sequence[Prompt]) -> CompletionIds:
    """Return the token ids of the completion of each prompt. One without a sample may be found by the prompt's id alone.

    Raises:
        InputError: the completion of a prompt is missing, or it is neither a text nor token ids of the vocabulary.
    """
    by_name: Mapping[Any, Any] = completions
    encoded = {}
    for prompt in prompts:
        name, key = sample_text(prompt.id, prompt.sample), (prompt.id, prompt.sample)
        completion = by_name.get(key, None if prompt.sample else by_name.get(prompt.id))
        if completion is None:
            raise InputError(f"--completions: {name} has none")
        if isinstance(completion, str):
            assert pair.tokenizer is not None
            completion = pair.tokenizer(completion, add_special_tokens=False)["input_ids"]
        try:
            tokens = as_token_ids(completion)
        except InputError:
            raise InputError(f"--completions: {name}: expected a text or token ids, not {completion!r:.40}") from None
        if unknown := [token for token in tokens if not 0 <= token < pair.vocabulary]:
            raise InputError(f"--completions: {name} has the token {unknown[0]}; expected ids below {pair.vocabulary}")
        end = next((at for at, token in enumerate(tokens, 1) if token in pair.eos), None)
        encoded[key] = tokens[:end]
    return encoded


def completed_texts(
    pair: Pair, settings: Settings, batch: Sequence[PromptTask], completions: CompletionIds, with_noise: bool,
    with_states: bool,
) -> Iterator[TargetText]:  # fmt: skip
    """Yield the completions of a batch of prompts that have anchors.

    Args:
        pair, settings: target, temperature, limit, tree and sampling parameters.
        batch: the prompts.
        completions: of all of them.
        with_noise, with_states: whether noise and hidden states of the target are computed too.
    """
    depth, limit, temperature = settings.topology.deepest, settings.max_new_tokens, settings.temperature
    for task in batch:
        text = completions[task.prompt_id, task.sample][: limit + depth]
        if len(text) < 2:  # rounds begin after the first token
            continue
        rows, states = target_rows(pair, task.tokens, text, with_states)
        sampled, noise = sampled_rows(pair, settings, task.tokens, text, rows), None
        agrees = np.ones(len(text), dtype=bool)
        if temperature > 0:  # only what precedes the first token of probability 0 can be a sample
            token_logits = sampled.gather(-1, torch.tensor(text, device=sampled.device)[:, None])[:, 0]
            text = text[: [*(token_logits > -torch.inf).tolist(), False].index(False)]
            noise = given_noise(pair, sampled[: len(text)], len(task.tokens), text, task.key) if with_noise else None
        else:
            agrees = np.array(text) == best_of_rows(sampled).cpu().numpy()
        ended = bool(text) and text[-1] in pair.eos
        anchors = agreeing_anchors(agrees[: len(text)], depth, ended)
        # A text that was cut off at the limit belongs to the trace as far as it has labels.
        length = min(limit, len(text) if ended or temperature == 0 else len(text) - depth + 1)
        anchors = anchors[anchors < length]
        if len(anchors):
            anchor = torch.from_numpy(anchors).to(pair.device)
            yield TargetText(task, text, rows[: len(text)], noise, states, length, anchor)


def agreeing_anchors(agrees: Array, depth: int, ended: bool) -> Array:
    """Return the anchors of a text after which `depth` tokens, or all up to EOS, are the target's, ascending from 1.

    Args:
        agrees: [L] bool, whether each token is the target's.
        depth: K.
        ended: whether the text ends with EOS; otherwise what follows its end is unknown.
    """
    padded = np.append(agrees, np.full(depth, ended))
    windows = np.lib.stride_tricks.sliding_window_view(padded, depth)[: len(agrees)]
    anchors: Array = np.flatnonzero(windows.all(1))
    return anchors[anchors > 0]


def target_rows(pair: Pair, prompt: list[int], text: list[int], hidden: bool = False) -> tuple[Tensor, Tensor | None]:
    """Return [L, V], the target's raw rows before each token of a text, and their hidden states [L, H] float16."""
    capacity, reading = len(prompt) + len(text), pair.readings[0]
    model = CachedModel(pair.target, capacity, pair.vocabulary, hidden, device=pair.device, reading=reading)
    rows = model.read(torch.tensor([[*prompt, *text[:-1]]], device=pair.device), rows=len(text))[0]
    check_rows(rows)
    return rows, None if model.states is None else stored(model.states[0, -len(text) :])


def sampled_rows(pair: Pair, settings: Settings, prompt: Sequence[int], text: Sequence[int], rows: Tensor) -> Tensor:
    """Return [L, V], the processed `target_rows` from which each token of the text is sampled."""
    temperature = settings.temperature
    sampler = Sampler(settings.sampling.build(temperature, prompt, pair.eos, pair.device), temperature)
    return sampler(rows, lambda: [[*prompt, *text[:at]] for at in range(len(text))])


def given_noise(pair: Pair, sampled: Tensor, start: int, text: Sequence[int], key: int) -> Tensor:
    """Return [L, V] noise under which the text, from position `start` on, is what the target draws from `sampled` [L, V]."""
    tokens = torch.tensor(list(text), dtype=torch.int64, device=pair.device)
    position = torch.arange(start, start + len(text), device=pair.device)
    chunks = zip(position.split(_CHUNK), sampled.split(_CHUNK), tokens.split(_CHUNK), strict=True)
    parts = [gumbel_given(key, at, logits, token).to(pair.logits_dtype) for at, logits, token in chunks]
    return torch.cat(parts) if parts else sampled.new_zeros(0, pair.vocabulary)


@torch.inference_mode()
def sampling_balance(
    pair: Pair, settings: Settings, prompts: Sequence[list[int]], texts: Sequence[list[int]]
) -> dict[str, float]:
    """Return the mean of log p(x) + H(p) over the tokens of texts: 0 in expectation if each x is drawn from p.

    Texts of another temperature, filter or model differ from it by some hundredths of a nat per token, which a few dozen
    texts reveal.

    Args:
        pair: provides the target.
        settings: temperature and sampling parameters.
        prompts: token ids of each prompt; at most `MAX_TEXTS` of them are checked, evenly spaced.
        texts: token ids of the completion of each.

    Returns:
        Numbers of `texts`, of `tokens` and of `impossible` ones (probability 0, which the mean excludes); `mean` in nats and
        its `standard_error`, clustered by text.
    """
    balances = []  # (sum of log p + H, tokens with p > 0, tokens) of each text
    for prompt, text in select_evenly([item for item in zip(prompts, texts, strict=True) if item[1]], MAX_TEXTS):
        rows = target_rows(pair, prompt, text)[0]
        logs = torch.log_softmax(sampled_rows(pair, settings, prompt, text, rows).double(), -1)
        token_logs = logs.gather(-1, torch.tensor(text, device=logs.device)[:, None])[:, 0]
        # Impossible tokens add 0 to the entropy; 0 times -inf would be NaN.
        entropy = -(logs.exp() * logs.clamp_min(-1e30)).sum(-1)
        possible = token_logs > -torch.inf
        balances.append((float((token_logs + entropy)[possible].sum()), int(possible.sum()), len(text)))
    sums, counts, tokens = np.array(balances).reshape(-1, 3).T
    groups, drawn = len(balances), max(counts.sum(), 1.0)
    mean = sums.sum() / drawn
    # A ratio of sums over texts of unequal length; variance by linearisation, clustered by text:
    # G / (G - 1) sum (s_i - mean n_i)^2 / (sum n_i)^2, s_i the sum over text i and n_i its tokens.
    error = math.sqrt(((sums - mean * counts) ** 2).sum() * groups / max(groups - 1, 1)) / drawn
    return {
        "texts": groups, "tokens": int(tokens.sum()), "impossible": int(tokens.sum() - counts.sum()),
        "mean": float(mean), "standard_error": float(error),
    }  # fmt: skip


def check_sampled(
    pair: Pair, settings: Settings, prompts: Sequence[list[int]], texts: Sequence[list[int]]
) -> dict[str, float]:
    """Refuse texts that were not sampled as `settings` say; arguments and result as of `sampling_balance`.

    Raises:
        InputError: the mean is more than `MAX_ERRORS` standard errors from 0.
    """
    result = sampling_balance(pair, settings, prompts, texts)
    sampling = sampling_text(settings.temperature, settings.sampling.to_dict())
    mean, error = result["mean"], result["standard_error"]
    if result["texts"] < MIN_TEXTS:
        _warn(f"{result['texts']} texts are too few to test whether they were sampled from the target at {sampling}")
    elif abs(mean) > MAX_ERRORS * error > 0:  # an error of 0, as of rows with one possible token, decides nothing
        raise InputError(
            f"--completions: these texts were not sampled from this target at {sampling}: log p + entropy is "
            f"{mean:+.3f} a token, {abs(mean) / error:.1f} standard errors from 0; give the --temperature and --sampling "
            "that they were sampled with, or leave out --completions to let the target generate the texts"
        )
    if result["impossible"] > MAX_IMPOSSIBLE * result["tokens"]:
        _warn(
            f"{result['impossible'] / result['tokens']:.1%} of the tokens cannot be drawn at {sampling}; of each text what "
            "comes before the first of them is used"
        )
    return result


def _warn(text: str) -> None:
    warnings.warn(f"--completions: {text}", SpecstopWarning, stacklevel=4)
