"""A learned policy whose head says outright what drafting on is worth: no survival product, no threshold of depth."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .calibration import Calibrator
from .contract import DraftStep, State
from .errors import PolicyError
from .features import Kind, feature
from .heads import Head
from .heads_base import NO_ARRAYS, Arrays
from .learned import Facts, LearnedPolicy
from .rules import Continuation, Rule


def remembered(features: Sequence[str]) -> list[int]:
    """Return the places of those features that differ from depth to depth: what is worth remembering of the depth above."""
    return [at for at, name in enumerate(features) if feature(name).kind in (Kind.PRE, Kind.POST) and name != "depth"]


def head_names(features: Sequence[str], rule: object) -> tuple[str, ...]:
    """Return the columns of the head: the features, and behind them those of the depth above if the rule remembers them."""
    if not (isinstance(rule, Continuation) and rule.remembers):
        return tuple(features)
    return (*features, *(features[at] for at in remembered(features)))


class ContinuationPolicy(LearnedPolicy):
    """Drafts on while the second output of the head, in tokens, is above the rule's margin; arguments as of `LearnedPolicy`.

    A rule that remembers shows the head two depths at once: what is seen here, and what was seen where the policy was asked
    before in this round (0 at its first decision). One token says little of the run that it stands in; two say more, and the
    numbers are there already.
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
        self._margin = rule.margin
        self._memory = remembered(self.features) if rule.remembers else []
        self._nothing = [0.0] * len(self._memory)

    def with_rule(self, rule: Rule) -> ContinuationPolicy:
        """Return this policy under another margin or first decision."""
        if not isinstance(rule, Continuation):
            raise PolicyError(f"{self.name}: a head of values goes with the rule continuation, not {rule.kind}")
        return ContinuationPolicy(self.name, self.features, self.head, rule, self.max_depth, self.facts)

    def keep_one(
        self, depth: int, features: Sequence[float], state: State, vectors: Arrays = NO_ARRAYS
    ) -> tuple[bool, State]:
        """Decide for one row; see `StopPolicy.keep_one`. The state is what is remembered of this depth."""
        row: Sequence[float] = features
        if self._memory:
            row = [*features, *(state if depth > self.first else self._nothing)]
            state = [features[at] for at in self._memory]
        return self.head.logits_one(row, depth)[1] > self._margin, state

    def keep(self, step: DraftStep, state: State) -> tuple[Tensor, State]:
        """Keep the branches that are worth drafting on; the state is what is remembered of this depth, by branch."""
        x = step.features
        if self._memory:
            now = x[..., self._memory]
            before = torch.zeros_like(now)
            if step.depth > self.first:
                before = state.gather(1, step.parent[..., None].expand(-1, -1, now.shape[-1]))
            x, state = torch.cat([x, before], -1), now
        return step.alive & (self.head.logits(x, step.depth)[..., 1] > self._margin), state
