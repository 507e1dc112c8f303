"""Suffix and draft model at once: from which chance on the suffix should draft, on training prompts."""

from __future__ import annotations

from specstop.policies.fixed import FixedLength
from specstop.train.drafters.choice import SureChoice, choose_sure
from specstop.train.replay.traces.arrays import trace_arrays

from .ground import Ground


def together(ground: Ground, first: str = "suffix", other: str = "model") -> tuple[str, SureChoice]:
    """Return the drafter that is fastest with one of the fixed lengths, and what its chances give on training prompts."""
    sides = [trace_arrays(ground.traces(name)[0]) for name in (first, other)]
    profiles = ground.profile(first), ground.profile(other)
    tried = [choose_sure(*sides, FixedLength(k), profiles) for k in range(1, ground.depth + 1)]
    best = max(tried, key=lambda one: max(one.rate, one.first))
    specs = {"first": first, "other": other, "both": f"{first}?confidence={best.sure or 0:g}+{other}"}
    return specs[best.fastest], best
