"""Depth and width together: expand and verify the nodes whose expected gain is worth their time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from ..builtins import builtin
from ..contract import Array, DraftStep, DraftTree, RoundOutcome, State, StopPolicy
from ..costs import extend
from .scores import check_number, check_whole
from .trees import kernels, node_values, with_level


@builtin("gain", "step", "gain:0.1 expands and verifies nodes worth their price in tokens")
class Gain(StopPolicy):
    """Buy draft steps and verified nodes with expected tokens, the survival of a node read off the draft's own probabilities.

    A node is accepted with probability s = (product of q along its path)^power. Prices are in tokens: rho, the tokens per
    second that are had otherwise, times seconds.

    * After each depth the m best branches are expanded, m the one that maximises
      follow (s_1 + ... + s_m) - draft(m) - verify m, or none, which ends drafting. So doubt widens the tree as long as rows
      are cheap, and ends it where a step is not worth it.
    * Of all that was drawn the n best nodes are verified, n the one that maximises s_1 + ... + s_n - target(n).

    It reads the drawn tokens and leaves some out, so it is for `match` verification, and for temperature 0. Expected accepted
    length as a sum of path probabilities is OPT-Tree's (arXiv 2406.17276, eq. 5); prices at the own rate are ours.

    Args:
        step: of a draft step of one row.
        row: of each further row.
        verify: of verifying one more node.
        power: below 1 the target accepts more than the draft believes.
        follow: the probability that something below a node is accepted, if it is.
        max_depth: levels.
        draft_prices, target_prices: tables in the place of the three prices: of a step of 1, 2, ... rows, and of
            verifying 0, 1, ... nodes; beyond them prices go on as at their end.
    """

    reads_seconds: ClassVar[bool] = False
    features = ("path_logprob",)
    _called: ClassVar[str] = "gain"

    def __init__(
        self,
        step: float = 0.1,
        row: float = 0.01,
        verify: float = 0.02,
        power: float = 1.0,
        follow: float = 0.8,
        max_depth: int = 20,
        draft_prices: Sequence[float] = (),
        target_prices: Sequence[float] = (),
    ) -> None:
        step, row, verify = (
            check_number(self._called, name, value, 0.0)
            for name, value in (("step", step), ("row", row), ("verify", verify))
        )
        self.power = check_number(self._called, "power", power, 0.0)
        self.follow = check_number(self._called, "follow", follow, 0.0)
        self.max_depth = check_whole(self._called, "max_depth", max_depth)
        self.draft_prices = tuple(draft_prices) or (step, step + row)  # `extended` goes on along the line
        self.target_prices = tuple(target_prices) or (0.0, verify)
        ends = self.target_prices
        # A node's share on average: while drafting nobody knows how many will be verified, thus at which step of the table.
        self.verify = (ends[-1] - ends[0]) / max(len(ends) - 1, 1)
        self.name = self._called if draft_prices else f"{self._called}:{step:g}"

    def start(self, streams: int, keys: Array) -> State:
        """Return no levels."""
        return ()

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Keep the branches that are worth another draft step, and remember the paths' probabilities."""
        levels, kept = with_level(state, step, self.power * step.features[:, :, 0]), np.empty_like(step.alive)
        table = extend(self.draft_prices, kept.shape[1])
        kernels().keep_worth(levels[-1], step.alive, self.follow, self.verify, table, kept)
        return kept, levels

    def select(self, tree: DraftTree, state: State) -> Array:
        """Return the nodes that are worth their verification."""
        values, kept = node_values(state, tree), np.empty_like(tree.drawn)
        table = extend(self.target_prices, kept.shape[1] + 1)
        kernels().keep_worth(values, tree.drawn, 1.0, 0.0, table[1:] - table[0], kept)  # verifying none is paid anyway
        return kept

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        """Forget the round's levels."""
        return ()
