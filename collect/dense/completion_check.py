"""Whether completions were sampled from the target as a run assumes: surprise and entropy of the tokens must balance.

For a token x drawn from p the mean of log p(x) is -H(p), whatever p is. Texts of another temperature, filter or model differ
from that by some hundredths of a nat a token, which a few dozen texts show.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from ...decode.models.pair import Pair
from ...decode.settings import Settings
from ...policies.errors import InputError, SpecstopWarning
from ...policies.learned import sampling_text
from ..prompts import Prompt, spread
from .completions import Completions, completion_ids, sampled_rows, target_rows

MOST_ERRORS = 4.0
"""Standard errors from 0 beyond which texts are refused."""

MOST_TEXTS, FEWEST_TEXTS = 1024, 8
"""Texts that are looked at, spread over all of them; and how many it takes for an answer."""

MUCH = 0.01
"""Share of tokens that could not have been drawn from which on a run says so."""


@dataclass(frozen=True)
class Balance:
    """What was found.

    Attributes:
        texts, tokens: looked at.
        impossible: tokens among them of probability 0, left out of the mean.
        mean: of log p(x) + H(p) over the other tokens, in nats.
        standard_error: of it, clustered by text.
    """

    texts: int
    tokens: int
    impossible: int
    mean: float
    standard_error: float

    @property
    def errors(self) -> float:
        """How many standard errors the mean is from 0."""
        # No spread, as of a single text or of rows in which one token alone can be drawn: nothing speaks against the texts.
        return abs(self.mean) / self.standard_error if self.standard_error > 0 else 0.0


@torch.inference_mode()
def balance(
    pair: Pair, settings: Settings, prompts: Sequence[tuple[Prompt, list[int]]], completions: Completions, most: int
) -> Balance:
    """Return how well texts fit the distribution that they are taken for.

    Args:
        pair: its target.
        settings: temperature and shaping.
        prompts: with their token ids.
        completions: see `Completions`.
        most: tokens of a text that are looked at.
    """
    sums, counts, impossible = [], [], 0
    for one, prompt in spread(prompts, MOST_TEXTS):
        text = completion_ids(pair, completions, one.id, one.sample)[:most]
        if not text:
            continue
        rows = target_rows(pair, prompt, text)[0]
        logs = torch.log_softmax(sampled_rows(pair, settings, prompt, text, rows).double(), -1)
        own = logs.gather(-1, torch.tensor(text, device=logs.device)[:, None])[:, 0]
        # What cannot be drawn adds 0 to the entropy; 0 times -inf would make it NaN.
        entropy = -(logs.exp() * logs.clamp_min(-1e30)).sum(-1)
        there = own > -torch.inf
        sums.append(float((own + entropy)[there].sum()))
        counts.append(int(there.sum()))
        impossible += len(text) - counts[-1]
    total = sum(counts)
    mean = sum(sums) / max(total, 1)
    # The mean is a ratio of sums over texts of unequal length. Its variance by linearisation, clustered by text:
    # G / (G - 1) sum (s_i - mean n_i)^2 / (sum n_i)^2, s_i the sum over text i and n_i its tokens.
    squares = sum((part - mean * count) ** 2 for part, count in zip(sums, counts, strict=True))
    groups = len(sums)
    error = math.sqrt(squares * groups / max(groups - 1, 1)) / max(total, 1)
    return Balance(groups, total + impossible, impossible, mean, error)


def check_completions(
    pair: Pair, settings: Settings, prompts: Sequence[tuple[Prompt, list[int]]], completions: Completions, most: int
) -> dict[str, float]:
    """Refuse prompts without a completion, and texts that were not sampled as `settings` say; arguments as of `balance`.

    Returns:
        What was found; nothing at temperature 0, where a text counts as far as it is the target's own.

    Raises:
        InputError: there is none, it has ids beyond the vocabulary, or the mean is beyond `MOST_ERRORS`.
    """
    for prompt, _ in prompts:  # of all, before any work
        completion_ids(pair, completions, prompt.id, prompt.sample)
    if settings.temperature == 0.0:
        return {}
    found = balance(pair, settings, prompts, completions, most)
    sampling = sampling_text(settings.temperature, settings.shaping.to_dict())
    if found.texts < FEWEST_TEXTS:
        _warn(f"{found.texts} texts are too few to tell whether they were sampled from the target at {sampling}")
    elif found.errors > MOST_ERRORS:
        raise InputError(
            f"--completions: these texts were not sampled from this target at {sampling}: log p + entropy is "
            f"{found.mean:+.3f} a token, {found.errors:.1f} standard errors from 0; say how they were sampled "
            "(--temperature, --top-p, ...), or leave --completions out for the target's own texts"
        )
    if found.impossible > MUCH * found.tokens:
        _warn(
            f"{found.impossible / found.tokens:.1%} of the tokens cannot be drawn at {sampling}; of each text what "
            "comes before the first of them is used"
        )
    return asdict(found)


def _warn(text: str) -> None:
    warnings.warn(f"--completions: {text}", SpecstopWarning, stacklevel=4)
