"""Dynamic Depth Decoding: draft while the beam as a whole is likely enough."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..arguments import validate_int, validate_number
from ..contract import Array, DraftStep, State, StopPolicy
from ..kernels.compiled import argsort_desc, kernel


@kernel("void(f4[:,:,::1], b1[:,::1], i8, f8, b1[:,::1])")
def keep_beam(features: Any, alive: Any, width: int, threshold: float, kept: Any) -> None:
    """Mark the `width` best branches [S, B] if log sum e^value over them reaches the threshold; `kept` is all False."""
    values, order = np.empty(alive.shape[1]), np.empty(alive.shape[1], dtype=np.int64)
    for s in range(alive.shape[0]):
        for b in range(alive.shape[1]):
            values[b] = features[s, b, 0] if alive[s, b] else -np.inf
        argsort_desc(values, order)
        count, best, mass = min(width, order.shape[0]), values[order[0]], 0.0
        for i in range(count):
            mass += np.exp(values[order[i]] - best)  # relative to the best, which does not underflow
        if best > -np.inf and best + np.log(mass) >= threshold:
            for i in range(count):
                kept[s, order[i]] = alive[s, order[i]]


class DDD(StopPolicy):
    """Draft while log sum_i exp(log q of path i) over the beam is at least a threshold.

    Dynamic Depth Decoding (arXiv 2409.00142, eq. 2) on EAGLE-2's beam: the `width` best branches of a depth, 10, at most 11
    steps, checked at a few depths only, because each check costs a synchronisation. The paper states neither the depths nor
    the threshold; the defaults, every second depth from the third on and exp(-0.5) of the mass, are ours.
    """

    features = ("path_logprob",)

    def __init__(
        self, threshold: float = -0.5, begin: int = 3, every: int = 2, width: int = 10, max_depth: int = 11
    ) -> None:
        self.threshold = float(np.float32(validate_number("ddd", "threshold", threshold, -100.0, 0.0)))
        counts = {"begin": begin, "every": every, "width": width, "max_depth": max_depth}
        self.begin, self.every, self.width, self.max_depth = (validate_int("ddd", k, v) for k, v in counts.items())
        self.name = f"ddd:{threshold:g}"

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Keep the beam, or nothing."""
        checked = step.depth >= self.begin and (step.depth - self.begin) % self.every == 0
        kept = np.zeros_like(step.alive)
        keep_beam(step.features, step.alive, self.width, self.threshold if checked else -math.inf, kept)
        return kept, state
