"""The learned policy for trees: extend and verify the nodes whose calibrated expected gain is worth their time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from .contract import DraftStep, DraftTree, RoundOutcome, State
from .errors import PolicyError
from .heads import Head
from .learned import Facts, LearnedPolicy
from .rules import Rule
from .tree_calibration import PathCalibrator
from .tree_one import FEW, Level, OneTree
from .tree_rule import Array, TreeRule

_LEAST = 1e-9

Levels = Sequence[tuple[Array, Array]]
"""Of each depth that was asked about: survival [S, B], -1 where a stream or branch was not, and `next` [S, B]."""


class TreeGain(LearnedPolicy):
    """Follows the survival of every node, the calibrated chance that its path is accepted, and buys what is worth its price.

    The expected accepted length of a set of nodes is the sum of their survivals (OPT-Tree, arXiv 2406.17276, eq. 5), here of
    a fitted head in the place of the draft's own probabilities. After each depth the branches are extended whose expected
    children pay for the draft step and for their verification (`TreeRule`), so that doubt between candidates widens the tree
    and doubt about all of them ends it. At the end the best nodes are verified, as many as pay for themselves.

    It reads the drawn tokens and leaves some out, so it is for `match` verification, and for temperature 0.

    Args:
        name, features, head: see `LearnedPolicy`; the head reads scalars only.
        accept, following: calibrate the outputs along paths.
        rule: prices, look-ahead, and the tree that rounds draft.
        max_depth: K.
        facts: see `Facts`.
    """

    accept: PathCalibrator
    following: PathCalibrator
    rule: TreeRule  # type: ignore[assignment]  # asked of whole levels, not of single branches

    def __init__(
        self,
        name: str,
        features: Sequence[str],
        head: Head,
        accept: PathCalibrator,
        following: PathCalibrator,
        rule: TreeRule,
        max_depth: int,
        facts: Facts | None = None,
    ) -> None:
        if not isinstance(rule, TreeRule) or not all(isinstance(c, PathCalibrator) for c in (accept, following)):
            raise PolicyError("a tree policy has the rule gain and calibrations of paths")
        super().__init__(name, features, head, accept, following, cast(Rule, rule), max_depth, facts)
        if self.vectors:
            raise PolicyError(f"{name}: a tree policy reads scalars only, not {', '.join(self.vectors)}")
        vars(self)["keep_one"] = None  # several branches
        self._one = OneTree(head, accept, following, rule, self.first)

    def with_rule(self, rule: Rule | TreeRule) -> TreeGain:
        """Return this policy under other prices."""
        parts = (self.name, self.features, self.head, self.accept, self.following)
        return TreeGain(*parts, cast(TreeRule, rule), self.max_depth, self.facts)

    def probabilities(self, features: Tensor, depth: int, *_: Any) -> tuple[Tensor, Tensor]:
        """Return calibrated (accept, next), each [S, B], of branches whose parents are accepted."""
        ranks, logits = self._ranks_and_logits(features, depth)
        certain = np.ones(logits.shape[:-1])
        accept, following = (
            c.of(certain, logits[..., at], depth, ranks) for at, c in enumerate((self.accept, self.following))
        )
        return torch.from_numpy(accept), torch.from_numpy(following)

    def _ranks_and_logits(self, features: Tensor, depth: int) -> tuple[Array, Array]:
        logits: Array = self.head.logits(features, depth).cpu().double().numpy()
        return self.rule.ranks(depth, features.shape[1]), logits

    def start(self, streams: int, key: Tensor) -> State:
        """Return no levels."""
        return ()

    def keep(self, step: DraftStep, state: State) -> tuple[Tensor, State]:
        """Keep the branches that are worth another draft step; the state is what is known of each depth."""
        if len(step.alive) == 1 and int(step.alive.sum()) <= FEW:
            alive, parent, columns = (v.tolist() for v in (step.alive[0], step.parent[0], step.features[0].T))
            kept, state = self.keep_few(step.depth, alive, parent, columns, state)
            return step.alive & torch.tensor([kept], device=step.alive.device), state
        known = self._known(step.depth, state)
        mask, fresh = self._keep_many(step, _arrays(known))
        return step.alive & mask.to(step.alive.device), (*known, fresh) if step.depth else known

    def keep_few(
        self,
        depth: int,
        alive: Sequence[bool],
        parent: Sequence[int],
        columns: Sequence[Sequence[float]],
        state: State,
    ) -> tuple[list[bool], State]:
        """Decide for one stream; see `StopPolicy.keep_few`."""
        if sum(alive) > FEW:
            flags, above = (torch.tensor([values], device="cpu") for values in (alive, parent))
            features = torch.tensor(columns, dtype=torch.float32, device="cpu").T[None]
            mask, state = self.keep(DraftStep(depth, flags, above, features), state)
            kept: list[bool] = mask[0].tolist()
            return kept, state
        known = self._known(depth, state)
        kept, survival, following = self._one.keep(depth, alive, parent, columns, known)
        return kept, (*known, (survival, following)) if depth else known

    def _known(self, depth: int, state: State) -> tuple[Any, ...]:
        levels: tuple[Any, ...] = state[: max(depth - max(self.first, 1), 0)]
        return levels

    def _keep_many(self, step: DraftStep, known: Levels) -> tuple[Tensor, Any]:
        depth, alive = step.depth, step.alive.cpu().numpy()
        ranks, logits = self._ranks_and_logits(step.features, depth)
        if depth and self.rule.floor:
            alive = alive & (self._expected(step, known, ranks) >= self.rule.floor)
        if depth == 0:
            survival = np.ones(alive.shape)
        else:
            survival = self.accept.of(self._above(step, known), logits[..., 0], depth, ranks)
        following = self.following.of(survival, logits[..., 1], depth, ranks) / np.maximum(survival, _LEAST)
        survival = np.where(alive, survival, -1.0)
        following = np.where(alive, following, 0.0)
        levels = [values for values, _ in known] + [survival] * (depth > 0)
        mask = torch.from_numpy(self.rule.extend(depth, survival, following, levels))
        if len(alive) == 1:
            return mask, (survival[0].tolist(), following[0].tolist())
        return mask, (torch.from_numpy(survival), torch.from_numpy(following))

    def _expected(self, step: DraftStep, known: Levels, ranks: Array) -> Array:
        """Return [S, B], what survival is expected of the branches, given the ones above."""
        if step.depth == 1 or not known:
            return np.broadcast_to(self.rule.mean_survival(step.depth, len(ranks)), step.alive.shape)
        parent = step.parent.cpu().numpy()
        survival, chances = (np.take_along_axis(values, parent, 1) for values in known[-1])
        expected: Array = np.maximum(survival, 0.0) * self.rule.share(chances, ranks)
        return expected

    def _above(self, step: DraftStep, known: Levels) -> Array:
        """Return [S, B], the survival of the parents: 1 for the root, the mean where the policy was not asked."""
        parent = step.parent.cpu().numpy()
        if step.depth == 1:
            return np.ones(parent.shape)
        if not known:
            mean: Array = self.rule.mean_survival(step.depth - 1, int(parent.max()) + 1)[parent]
            return mean
        above: Array = np.maximum(np.take_along_axis(known[-1][0], parent, 1), 0.0)
        return above

    def select(self, tree: DraftTree, state: State) -> Tensor:
        """Return the nodes that are worth their verification."""
        if len(tree.drawn) == 1:
            above, depths, there = (values[0].tolist() for values in (tree.parent, tree.depth, tree.drawn))
            return torch.tensor([self.select_few(above, depths, there, state)], device=tree.drawn.device)
        drawn, parent, depth = (values.cpu().numpy() for values in (tree.drawn, tree.parent[0], tree.depth[0]))
        survival = self.node_survival(parent, depth, state, len(drawn))
        mask = self.rule.choose(np.where(drawn, survival, -1.0))
        return torch.from_numpy(mask & drawn).to(tree.drawn.device)

    def select_few(
        self, parent: Sequence[int], depth: Sequence[int], drawn: Sequence[bool], state: State
    ) -> list[bool]:
        """Select for one stream; see `StopPolicy.select_few`."""
        return self._one.select(parent, depth, drawn, state)

    def node_survival(self, parent: Array, depth: Array, state: State, streams: int) -> Array:
        """Return [S, N], the survival of all nodes; of those never asked about what is expected, given the node above.

        Args:
            parent, depth: [N] of the nodes.
            state: after drafting.
            streams: S.
        """
        rule, known = self.rule, _arrays(state)
        out, following = np.empty((streams, len(parent))), np.empty((streams, len(parent)))
        for d in range(1, int(depth.max(initial=0)) + 1):
            nodes = (depth == d).nonzero()[0]
            above = parent[nodes]
            ranks = _ranks(above)
            if d == 1:
                inherited, chance = np.ones((streams, len(nodes))), np.full((streams, len(nodes)), rule.typical(1))
            else:
                inherited, chance = out[:, above], following[:, above]
            out[:, nodes] = inherited * rule.share(chance, ranks)
            following[:, nodes] = rule.typical(d + 1)
            at = d - max(self.first, 1)
            if 0 <= at < len(known) and known[at][0].shape[1] == len(nodes):
                survival, chance = known[at]
                asked = survival >= 0.0
                out[:, nodes] = np.where(asked, np.minimum(survival, inherited), out[:, nodes])
                following[:, nodes] = np.where(asked, chance, following[:, nodes])
        return out

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        """Forget the round's levels."""
        return self.forget(state)

    def forget(self, state: State) -> State:
        """Return no levels; see `StopPolicy.forget`."""
        return ()


def _arrays(levels: Sequence[Level] | Sequence[tuple[Tensor, Tensor]]) -> Levels:
    """Return the levels as arrays; those of one stream are kept as lists."""
    return [
        (np.array([one]), np.array([two])) if isinstance(one, list) else (one.numpy(), cast(Tensor, two).numpy())
        for one, two in levels
    ]


def _ranks(above: Array) -> Array:
    """Return the rank of each node among its siblings, which stand in order."""
    same = above[:, None] == above[None]
    ranks: Array = np.tril(same, -1).sum(1)
    return ranks
