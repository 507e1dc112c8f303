"""vLLM's logistic model of acceptance on one feature of the draft, learned while decoding."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from ..arguments import validate_int, validate_number
from ..contract import Array, DraftStep, RoundOutcome, State, StopPolicy
from ..kernels.compiled import kernel, known_depths, sigmoid

EDGE = 1e-3  # of a probability: log-odds stay within +-7, so that no token outweighs hundreds
RIDGE, MAX_STEP = 1e-6, 4.0  # of the precision; of a weight in one round


@kernel("void(f4[:,:,::1], b1[:,::1], i8[:,::1], i8, b1, f8[:,::1], f8[:,::1], f8[:,::1], f8[:,::1])")
def follow_survival(
    features: Any, alive: Any, parent: Any, depth: int, begins: bool, model: Any, before: Any, seen: Any, survival: Any
) -> None:  # fmt: skip
    """Write the survival [S, B], given that of the depth before [S, B'], and the best log-odds to `seen` [S, K]."""
    for s in range(alive.shape[0]):
        seen[s, depth - 1] = -np.inf
        for b in range(alive.shape[1]):
            survival[s, b] = 0.0
            if alive[s, b]:
                prob = min(max(np.float64(features[s, b, 0]), EDGE), 1.0 - EDGE)
                odds = np.log(prob / (1.0 - prob))
                seen[s, depth - 1] = max(seen[s, depth - 1], odds)
                inherited = 1.0 if begins else before[s, parent[s, b]]
                survival[s, b] = sigmoid(model[s, 0] * odds + model[s, 1]) * inherited


@kernel("void(b1[::1], b1[::1], i8[::1], i8[::1], f8, f8[:,::1], f8[:,::1])")
def newton_step(active: Any, cut: Any, accepted: Any, verified: Any, decay: float, seen: Any, model: Any) -> None:
    """Take a Newton step on the accept bits of a round; see `Online`."""
    for s in range(model.shape[0]):
        slope, level = model[s, 0], model[s, 1]
        a, b, d = decay * model[s, 2], decay * model[s, 3], decay * model[s, 4]
        to_slope, to_level, samples = 0.0, 0.0, 0
        for j in range(min(known_depths(active[s], cut[s], accepted[s], verified[s]), seen.shape[1])):
            odds = seen[s, j]
            if odds == -np.inf:
                continue
            samples += 1
            prob = sigmoid(slope * odds + level)
            error, spread = (1.0 if j < accepted[s] else 0.0) - prob, prob * (1.0 - prob)
            # Curvature and slope at the weights from before the round, so that the order of depths does not matter.
            a, b, d = a + spread * odds * odds, b + spread * odds, d + spread
            to_slope, to_level = to_slope + error * odds, to_level + error
        if samples:
            model[s, 2], model[s, 3], model[s, 4] = a, b, d
            # Once the prior has decayed, rounds with equal odds do not determine both weights, and after many rounds with
            # one outcome the curvature is almost 0. Other rounds are not affected by the ridge and the bound.
            a, d = a + RIDGE, d + RIDGE
            determinant = a * d - b * b
            slope_step, level_step = (
                (d * to_slope - b * to_level) / determinant,
                (a * to_level - b * to_slope) / determinant,
            )
            model[s, 0] = slope + min(max(slope_step, -MAX_STEP), MAX_STEP)
            model[s, 1] = level + min(max(level_step, -MAX_STEP), MAX_STEP)


class Online(StopPolicy):
    """Draft while S_j, the product of the modelled acceptance probabilities, is at least a threshold.

    P(x_j accepted) = sigmoid(w z + b) with z = logit(max q_j), as vLLM learns it for any drafter (vLLM #52228): one PRE
    feature, hence lossless. It starts from w = 1, b = 0 and takes one Newton step a round on the accept bits of that round:
    precision <- decay precision + sum p (1 - p) (z, 1)(z, 1)', weights <- weights + precision^-1 sum (accepted - p) (z, 1).
    A step changes a weight by 4 at most. The weights pass from text to text. vLLM uses them for the token budget of a batch.
    For one stream that is a threshold on S_j. In a tree the best branch of a depth is its sample. Prior and decay are ours:
    vLLM does not state its values.

    The state, all float64, is (slope, intercept, precision of the slope, of both and of the intercept [S, 5]; best log-odds
    by depth of this round [S, K], -infinity if not called; survival of the last depth [S, B]).
    """

    reads_seconds: ClassVar[bool] = False
    features = ("top1",)
    carries: ClassVar[bool] = True

    def __init__(self, threshold: float = 0.4, prior: float = 20.0, decay: float = 0.999, max_depth: int = 20) -> None:
        self.threshold = validate_number("online", "threshold", threshold, 0.0, 1.0)
        self.prior = validate_number("online", "prior", prior, 1e-3)
        self.decay = validate_number("online", "decay", decay, 0.0, 1.0)
        self.max_depth = validate_int("online", "max_depth", max_depth)
        self.name = f"online:{threshold:g}"

    def start(self, streams: int, keys: Array) -> State:
        """Return the state of streams without rounds: sigmoid(logit(max q)) = max q, the probability under the draft."""
        model, seen = (1.0, 0.0, self.prior, 0.0, self.prior), np.full((streams, self.max_depth), -np.inf)
        return np.tile(model, (streams, 1)), seen, np.ones((streams, 1))

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Keep the branches with enough survival, and store the log-odds."""
        model, seen, before = state
        survival, seen, begins = np.empty(step.alive.shape), seen.copy(), step.depth <= self.first
        follow_survival(step.features, step.alive, step.parent, step.depth, begins, model, before, seen, survival)
        return step.alive & (survival >= self.threshold), (model, seen, survival)

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        """Return the state after a Newton step on the round's accept bits."""
        model, seen, survival = state
        model = model.copy()
        newton_step(outcome.active, outcome.cut, outcome.accepted, outcome.verified, self.decay, seen, model)
        return model, np.full_like(seen, -np.inf), survival
