"""Suffix and draft model at once: from which chance on the suffix should draft, found on training prompts."""

from __future__ import annotations

from specstop.train.replay.traces.arrays import trace_arrays
from specstop.train.report.comparing.drafters import BothChoice, choose_both

from .ground import Ground


def together(ground: Ground, first: str = "suffix", other: str = "model") -> BothChoice:
    """Return the best of lengths and chances on training prompts, and what it gives on test prompts."""
    sides = [ground.traces(name) for name in (first, other)]
    mine, theirs = (trace_arrays(trace) for trace, _ in sides)
    profiles = ground.profile(first), ground.profile(other)
    return choose_both((mine, theirs), profiles, (sides[0][1], sides[1][1]))
