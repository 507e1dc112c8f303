"""Differences between speculative and plain texts: near ties of the two best tokens and unexplained differences."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..models.cache import CachedModel
from ..models.pair import Pair
from ..models.self_check import ROUNDING
from ..records import Generation
from ..settings import Settings
from ..verify.sampling import Sampler


def count_differences(
    pair: Pair,
    settings: Settings,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Generation],
    base: Sequence[Generation],
) -> tuple[int, int]:
    """Count the greedy texts that differ from plain decoding, at a tie and for other reasons.

    A tie means that the scores of the two best tokens differ by no more than the rounding error of the target's dtype.

    Args:
        pair: Models of the run.
        settings: Settings of the run, at temperature 0.
        prompts: Token ids of the prompts.
        texts: Texts of the method, one per prompt.
        base: Texts of plain decoding, one per prompt.

    Returns:
        Number of differences at a tie and number of other differences.
    """
    ties = wrong = 0
    for prompt, text, plain in zip(prompts, texts, base, strict=True):
        if text.tokens == plain.tokens:
            continue
        shared = zip(text.tokens, plain.tokens, strict=False)
        first = next((at for at, (token, other) in enumerate(shared) if token != other), None)
        # If one text is a prefix of the other, there is no token to compare.
        if first is not None and _is_tie(pair, settings, prompt, plain.tokens[:first]):
            ties += 1
        else:
            wrong += 1
    return ties, wrong


@torch.inference_mode()
def _is_tie(pair: Pair, settings: Settings, prompt: Sequence[int], generated: Sequence[int]) -> bool:
    text = [*prompt, *generated]
    cache = CachedModel(pair.target, len(text), pair.vocabulary, device=pair.device, reading=pair.readings[0])
    logits = cache.read(torch.tensor([text], device=pair.device), 1)[0]
    processors = settings.shaping.build(0.0, len(prompt), () if settings.ignore_eos else pair.eos, pair.device)
    best = Sampler(processors, 0.0, ())(logits, lambda: [text]).topk(2, -1).values[0]
    spread = logits[logits.isfinite()].std(correction=0)
    return bool(best[0] - best[1] <= ROUNDING.get(pair.target.dtype, ROUNDING[torch.bfloat16]) * spread)
