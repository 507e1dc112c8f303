"""Off-policy estimators of what a policy would bring, from rounds that another one logged.

Vocabulary and interface are those of Open Bandit Pipeline (`obp.ope`; it needs Python below 3.10, so this is own code): n
rounds, an action each of A, its probability under the logging policy (`pscore`), a reward, and the evaluated policy as
probabilities of actions (`action_dist` [n, A, L], `position` [n] among L; here L = 1). With w = pi_e(a | x) / pscore:

| class | value |
|---|---|
| `InverseProbabilityWeighting` | sum w r / n: unbiased where pscore is right and never 0 where pi_e acts |
| `SelfNormalizedInverseProbabilityWeighting` | sum w r / sum w: a little biased, consistent, steadier |
| `DirectMethod` | sum q(x, pi_e) / n: as good as the regression q, which its interval takes as given |
| `DoublyRobust` | sum q(x, pi_e) + w (r - q(x, a)) / n: unbiased as the first, with less noise where q is good |

(Strehl et al. 2010; Swaminathan and Joachims 2015; Dudik, Langford and Li, arXiv 1103.4601.) Each is a ratio of two sums over
rounds, which `terms` returns; so ratios of values, such as tokens per second, are ratios of sums as well.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from ...policies.errors import InputError
from ..report.intervals import Resamples

Array = np.ndarray[Any, Any]
Model = Callable[[], tuple[Array, Array]]
"""Returns [n] q(x, pi_e) and [n] q(x, a)."""


class OffPolicyEstimator(ABC):
    """What all estimators have."""

    estimator_name: ClassVar[str]

    def terms(
        self,
        reward: Array,
        action: Array,
        pscore: Array,
        action_dist: Array,
        position: Array | None = None,
        estimated_rewards_by_reg_model: Array | None = None,
    ) -> tuple[Array, Array]:
        """Return ([n], [n]), the numerator and the denominator of each round; the value is sum over sum.

        Args:
            reward: [n].
            action: [n] what the logging policy did.
            pscore: [n] its probability of that.
            action_dist: [n, A, L] what the evaluated policy would do.
            position: [n] among L; None = the first.
            estimated_rewards_by_reg_model: [n, A, L], q(x, a), where the estimator reads it.

        Raises:
            InputError: shapes that differ, probabilities that are none, or no regression where one is needed.
        """
        weight = importance(reward, action, pscore, action_dist, position)
        # The regression is asked for by those that read it alone: the others may be given none.
        return self._terms(
            reward, weight, lambda: modelled(action, action_dist, position, estimated_rewards_by_reg_model)
        )

    @abstractmethod
    def _terms(self, reward: Array, weight: Array, model: Model) -> tuple[Array, Array]:
        """Return what `terms` does, given w."""

    def estimate_policy_value(
        self,
        reward: Array,
        action: Array,
        pscore: Array,
        action_dist: Array,
        position: Array | None = None,
        estimated_rewards_by_reg_model: Array | None = None,
    ) -> float:
        """Return the value; arguments as of `terms`."""
        above, below = self.terms(reward, action, pscore, action_dist, position, estimated_rewards_by_reg_model)
        return float(above.sum() / below.sum())

    def estimate_interval(
        self,
        reward: Array,
        action: Array,
        pscore: Array,
        action_dist: Array,
        position: Array | None = None,
        estimated_rewards_by_reg_model: Array | None = None,
        *,
        alpha: float = 0.05,
        n_bootstrap_samples: int = 2000,
        random_state: int = 0,
        clusters: Sequence[Any] | None = None,
    ) -> dict[str, float]:
        """Return the value as "mean", and both ends of its interval; NaN where all rounds are of one cluster.

        Args:
            reward, action, pscore, action_dist, position, estimated_rewards_by_reg_model: as of `terms`.
            alpha: 1 less the level.
            n_bootstrap_samples: resamples.
            random_state: of the draws.
            clusters: [n] what is drawn together, such as the prompt; None = each round alone.
        """
        above, below = self.terms(reward, action, pscore, action_dist, position, estimated_rewards_by_reg_model)
        made = Resamples(range(len(above)) if clusters is None else clusters, random_state, n_bootstrap_samples)
        found = made.interval(made.total(above) / made.total(below), 1.0 - alpha)
        level = f"{100 * (1.0 - alpha):.1f}% CI"
        low, high = (math.nan if end is None else end for end in (found.low, found.high))
        return {"mean": found.value, f"{level} (lower)": low, f"{level} (upper)": high}


class InverseProbabilityWeighting(OffPolicyEstimator):
    """w r, averaged over rounds."""

    estimator_name = "ipw"

    def _terms(self, reward: Array, weight: Array, model: Model) -> tuple[Array, Array]:
        return weight * reward, np.ones(len(reward))


class SelfNormalizedInverseProbabilityWeighting(OffPolicyEstimator):
    """w r over w."""

    estimator_name = "snipw"

    def _terms(self, reward: Array, weight: Array, model: Model) -> tuple[Array, Array]:
        # Errors of numerator and denominator go together, so that much of them cancels; E[w] = 1 makes it consistent.
        return weight * reward, weight


class DirectMethod(OffPolicyEstimator):
    """q(x, pi_e), averaged over rounds."""

    estimator_name = "dm"

    def _terms(self, reward: Array, weight: Array, model: Model) -> tuple[Array, Array]:
        return model()[0], np.ones(len(reward))


class DoublyRobust(OffPolicyEstimator):
    """q(x, pi_e) + w (r - q(x, a)), averaged over rounds."""

    estimator_name = "dr"

    def _terms(self, reward: Array, weight: Array, model: Model) -> tuple[Array, Array]:
        expected, here = model()
        return expected + weight * (reward - here), np.ones(len(reward))


ESTIMATORS: tuple[OffPolicyEstimator, ...] = (
    InverseProbabilityWeighting(),
    SelfNormalizedInverseProbabilityWeighting(),
    DirectMethod(),
    DoublyRobust(),
)


def importance(reward: Array, action: Array, pscore: Array, action_dist: Array, position: Array | None = None) -> Array:
    """Return [n], w = pi_e(a | x) / pscore.

    Raises:
        InputError: shapes that differ, or probabilities outside (0, 1] and [0, 1].
    """
    rounds = len(reward)
    if rounds == 0 or any(np.shape(x) != (rounds,) for x in (reward, action, pscore)):
        shapes = ", ".join(str(np.shape(x)) for x in (reward, action, pscore))
        raise InputError(f"expected `reward`, `action` and `pscore` of one length above 0, not {shapes}")
    if np.ndim(action_dist) != 3 or len(action_dist) != rounds:
        raise InputError(f"expected `action_dist` [{rounds}, actions, positions], not {np.shape(action_dist)}")
    if not ((pscore > 0) & (pscore <= 1)).all():
        raise InputError(
            f"expected `pscore` above 0 and at most 1, not {float(np.min(pscore)):g} to {np.max(pscore):g}"
        )
    if not np.allclose(action_dist.sum(1), 1.0) or (action_dist < 0).any():
        raise InputError("expected `action_dist` to hold probabilities that sum to 1 over the actions")
    weight: Array = _at(action_dist, action, position) / pscore
    return weight


def _at(values: Array, action: Array, position: Array | None) -> Array:
    at: Array = values[np.arange(len(action)), action, 0 if position is None else position]
    return at


def modelled(action: Array, action_dist: Array, position: Array | None, predicted: Array | None) -> tuple[Array, Array]:
    """Return [n] q(x, pi_e) and [n] q(x, a)."""
    if predicted is None or np.shape(predicted) != np.shape(action_dist):
        came = "none" if predicted is None else str(np.shape(predicted))
        raise InputError(f"expected `estimated_rewards_by_reg_model` {np.shape(action_dist)}, not {came}")
    place = np.zeros(len(action), dtype=np.int64) if position is None else position
    rows = np.arange(len(action))
    expected: Array = (predicted[rows, :, place] * action_dist[rows, :, place]).sum(1)
    return expected, _at(predicted, action, position)
