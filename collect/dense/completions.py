"""Texts that exist already, whoever wrote them, labelled in the place of the target's own: one target pass a text.

At temperature 0 the positions count after which a text goes on as the target itself would. Above it a text is taken for what
it says it is, a sample of the target's: then noise is drawn given the text (`gumbel_given`), so that text and noise
together have the law of plain sampling, and every position is an exact anchor; other verifications than `match` need none.
Texts that were not sampled so are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ...decode.models.cache import CachedModel
from ...decode.models.outputs import check_rows, stored
from ...decode.models.pair import Pair
from ...decode.settings import Settings
from ...decode.verify.noise import best_of_rows
from ...decode.verify.sampler import Sampler
from ...policies.errors import InputError
from ...policies.features import TARGET_HIDDEN
from ..prompts import sample_text
from ..schema import PromptTask
from .collector import Written, text_columns
from .given_text import gumbel_given
from .unroll import Unroller

Completions: TypeAlias = "Mapping[str, str | Sequence[int]] | Mapping[tuple[str, str], str | Sequence[int]]"
"""By prompt id, or by (prompt id, sample): what followed the prompt, as a text or as token ids."""

_CHUNK = 64
"""Positions whose noise is drawn together: it takes several rows of float64 each."""


@torch.inference_mode()
def completion_rows(
    pair: Pair,
    unroller: Unroller,
    batch: Sequence[PromptTask],
    completions: Completions,
    max_new_tokens: int,
) -> list[Mapping[str, Any]]:
    """Return the rows of completions.

    Args:
        pair: target and draft.
        unroller: of the pair's draft.
        batch: the prompts.
        completions: see `Completions`.
        max_new_tokens: anchors lie before it.

    Raises:
        InputError: a prompt has no completion, or one that is none.
    """
    chunks = []
    for one in batch:
        prompt = one.tokens
        text = completion_ids(pair, completions, one.prompt_id, one.sample)[: max_new_tokens + unroller.depth]
        # Rounds begin after the first token, as in `dense_rows`.
        if len(text) < 2:
            continue
        rows, states = target_rows(pair, prompt, text, TARGET_HIDDEN in unroller.hidden)
        sampled = sampled_rows(pair, Settings(unroller.temperature, shaping=unroller.shaping), prompt, text, rows)
        noise = None
        if unroller.temperature > 0:
            text = text[: possible(sampled, text)]
            if unroller.verification == "match":
                noise = given_noise(pair, sampled[: len(text)], len(prompt), text, one.key)
        ended = bool(text) and text[-1] in pair.eos
        if unroller.temperature > 0:
            # Nobody can write the text on: an anchor needs K tokens after it, unless EOS ended the text before.
            last = min(max_new_tokens, len(text) if ended else len(text) - unroller.depth + 1)
            anchors = list(range(1, last))
        else:
            last = min(max_new_tokens, len(text))
            anchors = own_anchors(text, best_of_rows(sampled).tolist(), last, unroller.depth, ended)
        if not anchors:
            continue
        anchor = torch.tensor(anchors, device=pair.device)
        for draw in range(unroller.draws):
            written = Written(one, text, rows[: len(text)], last, anchor, states, noise, draw)
            chunks.append(text_columns(unroller, written))
    return chunks


def find_completion(completions: Completions, prompt_id: str, sample: str) -> str | Sequence[int] | None:
    """Return the completion of a sample of a prompt, or None. A prompt without samples may be given by its id alone."""
    keyed: Mapping[Any, str | Sequence[int]] = completions
    found = keyed.get((prompt_id, sample))
    return keyed.get(prompt_id) if found is None and not sample else found


def completion_ids(pair: Pair, completions: Completions, prompt_id: str, sample: str) -> list[int]:
    """Return the tokens of the completion of a sample of a prompt, up to the first that ends a text.

    Raises:
        InputError: there is none, or an id is not one of the vocabulary.
    """
    found = find_completion(completions, prompt_id, sample)
    if found is None:
        raise InputError(f"--completions: {sample_text(prompt_id, sample)} has none")
    if isinstance(found, str):
        assert pair.tokenizer is not None
        found = list(pair.tokenizer(found, add_special_tokens=False)["input_ids"])
    if odd := [token for token in found if not 0 <= token < pair.vocabulary]:
        name = sample_text(prompt_id, sample)
        raise InputError(f"--completions: {name} has the token {odd[0]}; expected ids below {pair.vocabulary}")
    return next((list(found[: at + 1]) for at, token in enumerate(found) if token in pair.eos), list(found))


def own_anchors(text: Sequence[int], own: Sequence[int], last: int, depth: int, ended: bool) -> list[int]:
    """Return the anchors 1 .. last - 1 after which `depth` tokens of the text, or all up to its EOS, are the target's own.

    Args:
        text: given.
        own: what the target would have said in the place of each token.
        last: of the text.
        depth: K.
        ended: the text ends with EOS.
    """
    out = []
    for anchor in range(1, last):
        end = anchor + depth
        if end > len(text) and not ended:
            break
        if list(text[anchor:end]) == list(own[anchor:end]):
            out.append(anchor)
    return out


def target_rows(pair: Pair, prompt: list[int], text: list[int], hidden: bool = False) -> tuple[Tensor, Tensor | None]:
    """Return [L, V], the target's rows that each token of the text would be drawn from, and their states [L, H] float16."""
    capacity, reading = len(prompt) + len(text), pair.readings[0]
    model = CachedModel(pair.target, capacity, pair.vocabulary, hidden, device=pair.device, reading=reading)
    # The row after the last token would be of a token that the text does not have.
    rows = model.read(torch.tensor([[*prompt, *text[:-1]]], device=pair.device), rows=len(text))[0]
    check_rows(rows)
    return rows, None if model.states is None else stored(model.states[0, -len(text) :])


def sampled_rows(pair: Pair, settings: Settings, prompt: Sequence[int], text: Sequence[int], rows: Tensor) -> Tensor:
    """Return [L, V], what each token of the text is sampled from: `target_rows`, processed."""
    temperature = settings.temperature
    sampler = Sampler(settings.shaping.build(temperature, prompt, pair.eos, pair.device), temperature)
    return sampler(rows, lambda: [[*prompt, *text[:at]] for at in range(len(text))])


def possible(sampled: Tensor, text: Sequence[int]) -> int:
    """Return how many tokens of the text come before the first that cannot be drawn from its row of `sampled` [L, V]."""
    own = sampled.gather(-1, torch.tensor(list(text), device=sampled.device)[:, None])[:, 0]
    there = (own > -torch.inf).tolist()
    return there.index(False) if False in there else len(there)


def given_noise(pair: Pair, sampled: Tensor, start: int, text: Sequence[int], key: int) -> Tensor:
    """Return [L, V], noise under which the text, from position `start` on, is what the target draws from `sampled` [L, V]."""
    tokens = torch.tensor(list(text), dtype=torch.int64, device=pair.device)
    at = torch.arange(start, start + len(text), device=pair.device)
    parts = [
        gumbel_given(key, here, logits, own).to(pair.logits_dtype)
        for here, logits, own in zip(at.split(_CHUNK), sampled.split(_CHUNK), tokens.split(_CHUNK), strict=True)
    ]
    return torch.cat(parts) if parts else sampled.new_zeros(0, pair.vocabulary)
