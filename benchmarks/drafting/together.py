"""Suffix and draft model at once: from which chance on the suffix should draft, found on training prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specstop.policies import FixedLength
from specstop.train.drafters.choice import SureChoice, choose_sure
from specstop.train.replay.traces.arrays import trace_arrays

from .ground import Ground


@dataclass(frozen=True)
class Together:
    """What was found.

    Attributes:
        spec: for `--drafter`.
        length: of the chains of both.
        rate: tokens a second on test prompts, replayed.
        alone: of each of the two in its best length.
    """

    spec: str
    length: int
    rate: float
    alone: dict[str, float]


def together(ground: Ground, first: str = "suffix", other: str = "model") -> Together:
    """Return the best of lengths and chances on training prompts, and what it gives on test prompts."""
    sides = [ground.traces(name) for name in (first, other)]
    profiles = ground.profile(first), ground.profile(other)
    fitted, held = [trace_arrays(trace) for trace, _ in sides], [arrays for _, arrays in sides]
    found = {k: choose_sure(*fitted, FixedLength(k), profiles) for k in range(1, ground.depth + 1)}

    def best(rate: Callable[[SureChoice], float]) -> int:
        return max(found, key=lambda k: rate(found[k]))

    def tested(k: int, sures: tuple[float, ...] = ()) -> SureChoice:
        return choose_sure(*held, FixedLength(k), profiles, sures)

    alone = {first: tested(best(lambda f: f.first)).first, other: tested(best(lambda f: f.other)).other}
    k = best(lambda f: max(f.rate, f.first))
    if found[k].fastest != "both" or found[k].sure is None:
        spec = first if found[k].fastest == "first" else other
        return Together(spec, k, alone[spec], alone)
    sure = found[k].sure
    return Together(f"{first}?sure={sure:g}+{other}", k, tested(k, (sure,)).rates[sure], alone)
