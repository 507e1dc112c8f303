"""The learned policy for trees: extends and verifies the nodes whose calibrated expected gain is worth their time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, cast

import numpy as np

from .calibration import PathCalibrator
from .contract import DraftStep, DraftTree, RoundOutcome, State
from .errors import PolicyError
from .heads.base import Head
from .learned import LearnedPolicy, TrainingMetadata
from .rules import Rule
from .tree_rules import TreeRule, kernels
from .typing import Array

_NO_SCORES = np.zeros((0, 2))


class TreeGain(LearnedPolicy):
    """Tracks the survival of every node, the calibrated probability that its path is accepted, and keeps what pays.

    The expected accepted length of a set of nodes is the sum of their survivals (OPT-Tree, arXiv 2406.17276, eq. 5). After
    each depth the branches are extended whose expected children pay for the draft step and for their verification
    (`TreeRule`); at the end the best nodes are verified, as many as pay for themselves. It reads drawn tokens and removes
    some, so it is for `match` verification or temperature 0. The head reads scalars only.

    The state within a round is (survival, -1 where not read, and next of all nodes that were asked about [S, 2, N], those of
    the last depth [S, 2, B]).
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
        metadata: TrainingMetadata | None = None,
    ) -> None:
        if not isinstance(rule, TreeRule) or not all(isinstance(c, PathCalibrator) for c in (accept, next_)):
            raise PolicyError("a tree policy has the rule gain and calibrations of paths")
        super().__init__(name, features, head, accept, next_, rule, max_depth, metadata)
        if self.hidden:
            raise PolicyError(f"{name}: a tree policy reads scalars only, not {', '.join(self.hidden)}")
        self._maps: dict[tuple[int, int], Array] = {}

    def with_rule(self, rule: Rule) -> TreeGain:
        """Return this policy with other prices."""
        parts = (self.name, self.features, self.head, self.accept, self.next)
        return TreeGain(*parts, cast(TreeRule, rule), self.max_depth, self.metadata)

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Keep the branches that are worth another draft step."""
        depth, rule, (streams, branches) = step.depth, self.rule, step.alive.shape
        unknown = state is None or depth <= max(self.first, 1)  # above the first decision nothing was read
        known, before = (np.empty((streams, 2, 0)),) * 2 if unknown else state
        rows, parent_chance, read = rule.ask(depth, step.alive, step.parent, step.features, before)
        scores = self.head.scores(read, depth) if len(rows) else _NO_SCORES
        if (depth, branches) not in self._maps:
            ranks = rule.level(depth, branches).ranks
            self._maps[depth, branches] = np.stack(
                [c.maps(depth, ranks) for c in (self.accept, self.next)]
            )  # [2, B, 3]
        values = np.empty((streams, 2, branches))
        kernels().survive(scores, rows, parent_chance, self._maps[depth, branches], depth == 0, values)
        if depth == 0:  # the root is no node
            return rule.extend(0, values, rule.price(known)), None
        known = np.concatenate((known, values), 2)  # [S, 2, N + B]
        return rule.extend(depth, values, rule.price(known)), (known, values)

    def node_survival(self, tree: DraftTree, state: State) -> Array:
        """Return [S, N], the survival of the nodes: expected if never read, -1 if not drawn."""
        parent, depth, drawn = (np.ascontiguousarray(values) for values in (tree.parent, tree.depth, tree.drawn))
        return self.rule.survival(parent, depth, drawn, np.empty((len(drawn), 2, 0)) if state is None else state[0])

    def select(self, tree: DraftTree, state: State) -> Array:
        """Return the nodes that are worth their verification."""
        return self.rule.select(self.node_survival(tree, state))

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        """Reset the state of the round."""
        return None
