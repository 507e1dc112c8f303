"""Texts that leave the plain one: at a tie of the two best tokens, which rounding decides, or for no such reason."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..models.cache import CachedModel
from ..models.pair import Pair
from ..models.reading.self_check import ROUNDING
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
    """Return how many greedy texts leave the plain one at a tie, and how many for no such reason.

    It is a tie if the scores of the two best tokens differ by no more than rounding in the target's type explains.

    Args:
        pair: whose target decodes.
        settings: of the run, at temperature 0.
        prompts: token ids.
        texts, base: of the prompts, by the method and by plain decoding.
    """
    ties = wrong = 0
    for prompt, text, plain in zip(prompts, texts, base, strict=True):
        if text.tokens == plain.tokens:
            continue
        shared = zip(text.tokens, plain.tokens, strict=False)
        first = next((at for at, (own, other) in enumerate(shared) if own != other), None)
        # A text that ends where the other goes on has no token to compare.
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
