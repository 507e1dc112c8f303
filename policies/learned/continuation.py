"""A learned policy whose head says outright what drafting on is worth: no survival product, no threshold of depth."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..contract import DraftStep, State
from ..errors import PolicyError
from ..features import Kind, feature
from ..heads.build import Head
from ..rules.base import Rule
from ..rules.chains import Continuation
from .calibration import Array, Calibrator
from .policy import Facts, LearnedPolicy


def remembered(features: Sequence[str]) -> list[int]:
    """Return the places of those features that differ from depth to depth: what is worth remembering of the depth before."""
    return [at for at, name in enumerate(features) if feature(name).kind in (Kind.PRE, Kind.POST) and name != "depth"]


def head_names(features: Sequence[str], rule: object) -> tuple[str, ...]:
    """Return the columns of the head: the features, and after them those of the depth before if the rule remembers them."""
    if not (isinstance(rule, Continuation) and rule.remembers):
        return tuple(features)
    return (*features, *(features[at] for at in remembered(features)))


class ContinuationPolicy(LearnedPolicy):
    """Drafts on while the second output of the head, in tokens, is above the rule's margin; arguments as of `LearnedPolicy`.

    A rule that remembers shows the head two depths at once: what is seen here, and what was seen where the policy was asked
    before in this round (0 at its first decision). One token says little of the run that it stands in; two say more, and the
    numbers are there already. The state is what is remembered of the last depth, [S, B, M] float32.

    Raises:
        PolicyError: the head reads hidden states.
    """

    def __init__(
        self,
        name: str,
        features: Sequence[str],
        head: Head,
        rule: Continuation,
        max_depth: int,
        facts: Facts | None = None,
    ) -> None:
        super().__init__(name, features, head, Calibrator(), Calibrator(), rule, max_depth, facts)
        if self.hidden:
            raise PolicyError(
                f"{name}: expected a head of scalar features for the rule continuation, not one that reads "
                f"{', '.join(self.hidden)}; choose another head or rule"
            )
        self._margin = rule.margin
        self._memory = np.array(remembered(self.features) if rule.remembers else [], dtype=np.int64)

    def with_rule(self, rule: Rule) -> ContinuationPolicy:
        """Return this policy under another margin or first decision."""
        if not isinstance(rule, Continuation):
            raise PolicyError(f"{self.name}: a head of values goes with the rule continuation, not {rule.kind}")
        return ContinuationPolicy(self.name, self.features, self.head, rule, self.max_depth, self.facts)

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Keep the branches that are worth drafting on."""
        rows = step.features
        if len(self._memory):
            rows, state = self._with_memory(step, state)
        at = np.flatnonzero(step.alive)
        value = self.head.scores(rows.reshape(step.alive.size, rows.shape[-1])[at], step.depth)[:, 1]
        kept = np.zeros(step.alive.shape, dtype=np.bool_)
        kept.flat[at] = value > self._margin
        return kept, state

    def _with_memory(self, step: DraftStep, state: State) -> tuple[Array, Array]:
        """Return the features and after them what is remembered of the parents [S, B, F + M], and what to remember."""
        features, count = step.features, step.features.shape[-1]
        now: Array = features.take(self._memory, -1)  # a copy: what a step shows is the caller's
        rows = np.empty((*step.alive.shape, count + len(self._memory)), dtype=np.float32)  # [S, B, F + M]
        rows[..., :count] = features
        if step.depth <= self.first:
            rows[..., count:] = 0.0
        else:  # a branch that is alone is the parent of all
            rows[..., count:] = state if state.shape[1] == 1 else np.take_along_axis(state, step.parent[..., None], 1)
        return rows, now
