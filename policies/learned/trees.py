"""The learned policy for trees: extend and verify the nodes whose calibrated expected gain is worth their time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, cast

import numpy as np

from ..contract import Array, DraftStep, DraftTree, RoundOutcome, State
from ..errors import PolicyError
from ..heads.base import NO_HIDDEN, Hidden
from ..heads.build import Head
from ..rules.base import Rule
from ..tree_rules import TreeRule, kernels
from .policy import Facts, LearnedPolicy
from .tree_calibration import PathCalibrator

Known = tuple[Array, Array]
"""Survival, -1 where it was not read, and next: [S, 2, N] of all nodes that were asked about, [S, 2, B] of the last depth."""

_NOTHING = np.zeros((0, 2))


class TreeGain(LearnedPolicy):
    """Follows the survival of every node, the calibrated chance that its path is accepted, and buys what is worth its price.

    The expected accepted length of a set of nodes is the sum of their survivals (OPT-Tree, arXiv 2406.17276, eq. 5), here of
    a fitted head in the place of the draft's own probabilities. After each depth the branches are extended whose expected
    children pay for the draft step and for their verification (`TreeRule`), so that doubt between candidates widens the tree
    and doubt about all of them ends it. At the end the best nodes are verified, as many as pay for themselves.

    It reads the drawn tokens and leaves some out, so it is for `match` verification, and for temperature 0. The state is
    `Known` within a round, None between rounds.

    Args:
        name, features, head: see `LearnedPolicy`; the head reads scalars only.
        accept, next_: calibrate the outputs along paths.
        rule: prices, look-ahead, and the tree that rounds draft.
        max_depth: K.
        facts: see `Facts`.
    """

    reads_seconds: ClassVar[bool] = False
    accept: PathCalibrator
    next: PathCalibrator
    rule: TreeRule

    def __init__(
        self,
        name: str,
        features: Sequence[str],
        head: Head,
        accept: PathCalibrator,
        next_: PathCalibrator,
        rule: TreeRule,
        max_depth: int,
        facts: Facts | None = None,
    ) -> None:
        if not isinstance(rule, TreeRule) or not all(isinstance(c, PathCalibrator) for c in (accept, next_)):
            raise PolicyError("a tree policy has the rule gain and calibrations of paths")
        super().__init__(name, features, head, accept, next_, rule, max_depth, facts)
        if self.hidden:
            raise PolicyError(f"{name}: a tree policy reads scalars only, not {', '.join(self.hidden)}")
        self._maps: dict[tuple[int, int], Array] = {}

    def with_rule(self, rule: Rule) -> TreeGain:
        """Return this policy under other prices."""
        parts = (self.name, self.features, self.head, self.accept, self.next)
        return TreeGain(*parts, cast(TreeRule, rule), self.max_depth, self.facts)

    def probabilities(self, features: Array, depth: int, hidden: Hidden = NO_HIDDEN) -> tuple[Array, Array]:
        """Return calibrated (accept, next), each [S, B], of branches whose parents are accepted."""
        rows = np.ascontiguousarray(features, dtype=np.float32).reshape(-1, features.shape[-1])
        scores = self.head.scores(rows, depth).reshape(*features.shape[:-1], 2)
        ranks, certain = self.rule.level(depth, features.shape[-2]).ranks, np.ones(features.shape[:-1])
        accept, next_ = (
            calibrator.of(certain, scores[..., at], depth, ranks)
            for at, calibrator in enumerate((self.accept, self.next))
        )
        return accept, next_

    def _maps_of(self, depth: int, branches: int) -> Array:
        """Return [2, B, 3], the calibration of both outputs by branch."""
        key = depth, branches
        if key not in self._maps:
            ranks = self.rule.level(depth, branches).ranks
            self._maps[key] = np.stack([c.maps(depth, ranks) for c in (self.accept, self.next)])
        return self._maps[key]

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Keep the branches that are worth another draft step."""
        depth, rule, (streams, branches) = step.depth, self.rule, step.alive.shape
        unknown = state is None or depth <= max(self.first, 1)  # above the first decision nothing was read
        known, before = cast(Known, (np.empty((streams, 2, 0)),) * 2 if unknown else state)
        rows, parent_chance, read = rule.ask(depth, step.alive, step.parent, step.features, before)
        scores = self.head.scores(read, depth) if len(rows) else _NOTHING
        values = np.empty((streams, 2, branches))
        kernels().survive(scores, rows, parent_chance, self._maps_of(depth, branches), depth == 0, values)
        if depth == 0:  # the root is no node
            return rule.extend(0, values, rule.price(known)), None
        known = np.concatenate((known, values), 2)  # [S, 2, N + B]
        return rule.extend(depth, values, rule.price(known)), (known, values)

    def node_survival(self, tree: DraftTree, state: State) -> Array:
        """Return [S, N], the survival of the nodes; of those never read what is expected; -1 if not drawn."""
        parent, depth, drawn = (np.ascontiguousarray(values) for values in (tree.parent, tree.depth, tree.drawn))
        known = np.empty((len(drawn), 2, 0)) if state is None else cast(Known, state)[0]
        return self.rule.survival(parent, depth, drawn, known)

    def select(self, tree: DraftTree, state: State) -> Array:
        """Return the nodes that are worth their verification."""
        return self.rule.select(self.node_survival(tree, state))

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        """Forget the round."""
        return None
