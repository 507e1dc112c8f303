"""What a round costs: the one function that turns a round into seconds.

The live loop (for `RoundOutcome.seconds`), replay and the derived stop rule all read costs from here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from .batch import BatchCosts
from .tables import ChainCosts, CostTable, Price, at_context, filled_up

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Costs:
    """Seconds of rounds of a pair on a machine, at two context lengths; between and beyond them they are linear in it.

    Attributes:
        low, high: the tables at a short and a long context.
        step_s: outside the models, per drafted token.
        round_s: outside the models, per round.
        prefill_s: reading a prompt: (constant, per token).
        decision_s: decisions, by the policy's `cost_name`; a number is that of each.
        tree_outside_s: outside the models in a round of a tree: (per round, per draft step, per drafted token); None = as
            in a chain, where each step drafts one.
        batch: what texts that are decoded side by side cost; None = not measured.
        plain_outside_s: outside the models in a round that drafts nothing and asks nobody; None = as in any other.
        carry_over: share of a round's seconds by which the verifications after it take longer. All costs are charged for
            it but those in `decision_s`, for which `decision` does it.
    """

    low: CostTable
    high: CostTable
    step_s: float
    round_s: float
    prefill_s: tuple[float, float]
    decision_s: Mapping[str, float | Price] = field(default_factory=dict)
    _: KW_ONLY
    tree_outside_s: tuple[float, float, float] | None = None
    batch: BatchCosts | None = None
    plain_outside_s: float | None = None
    carry_over: float = 0.0

    @property
    def max_depth(self) -> int:
        """The deepest chain whose verification was measured."""
        return len(self.low.verify_s) - 1

    def between(self, context: float, of: Callable[[CostTable], Sequence[float]]) -> list[float]:
        """Return seconds that `of` takes from the tables, at a context length (`at_context`)."""
        low, high = (np.array(of(side), dtype=np.float64) for side in (self.low, self.high))
        out: list[float] = self._at_context(low, high, context).tolist()
        return out

    def _at_context(self, low: Array, high: Array, context: ArrayLike) -> Array:
        return at_context(low, high, (self.low.context, self.high.context), context)

    def decision(self, name: str) -> Price:
        """Return what decisions of the policy whose `cost_name` is `name` cost; nothing where they were not measured."""
        price = Price.read(self.decision_s.get(name, 0.0))
        return price.times(1.0 / (1.0 - self.carry_over)) if self.carry_over else price

    def padded(self) -> tuple[int, ...]:
        """Return for n = 0..K drafted tokens how many are best verified: filling up to a clearly cheaper size pays."""
        # One answer for both contexts: the live loop takes it once, before any text.
        return tuple(filled_up(np.array([self.low.verify_s, self.high.verify_s])).tolist())

    def round_seconds(
        self,
        context: Array,
        drafted: Array,
        verified: Array,
        backlog: Array,
        decisions: Array,
        decision: float | Price,
        fed: Array | None = None,
    ) -> Array:
        """Return [S] float64 seconds of rounds, [R, S] of contexts [R, S].

        Args:
            context: [S] or [R, S] tokens committed before the round.
            drafted, verified: [S] int64, tokens drawn, tokens sent to the target.
            backlog: [S] committed tokens that the draft has not read yet.
            decisions: [S] times the policy was asked.
            decision: of the policy.
            fed: [S, K] int64, of trees: how many tokens the draft read at each of its steps; None = chains, one a step.
        """
        decided = Price.read(decision).of(decisions)
        if fed is not None:
            per_round, per_step, per_token = self.tree_outside_s or (self.round_s, self.step_s, 0.0)
            outside = per_round + per_step * (fed > 0).sum(1) + per_token * drafted
            calls = self._tree_calls(verified, backlog, fed)
        else:
            outside = self.round_s + self.step_s * drafted
            calls = self._calls(drafted, self._padded[verified], backlog)  # chains alone are filled up by the loop
        if self.plain_outside_s is not None:
            outside = np.where((drafted == 0) & (decisions == 0), self.plain_outside_s, outside)
        low, high = calls
        out: Array = self._at_context(low, high, context) + outside + decided
        return out

    def first_draft_s(self, context: Array) -> Array:
        """Return [R] float64 seconds of a round's first draft step that reads one token, at contexts [R]."""
        low, high = self._first_step(np.ones(1, dtype=np.int64))
        return self._at_context(low, high, context)

    def _first_step(self, backlog: Array) -> Array:
        """Return [2, S] seconds of the first draft step of a round, at the two contexts."""
        # A backlog of 0, that of a drafter which reads nothing, costs what 1 does: so it was timed.
        costs = self._costs
        out: Array = costs.first + costs.more * (backlog > 1) + np.maximum(backlog - 2, 0) * costs.token
        return out

    def _tree_calls(self, verified: Array, backlog: Array, fed: Array) -> Array:
        """Return [2, S] seconds of the model calls of trees, at the two contexts."""
        rows, sent = int(fed.max(initial=0)), int(verified.max(initial=0))
        draft = np.array([side.tree_draft(rows) for side in (self.low, self.high)])  # [2, rows + 1], 0 of no rows
        verify = np.array([side.tree_verify(sent) for side in (self.low, self.high)])  # [2, sent + 1]
        first = self._first_step(backlog) * (fed[:, 0] > 0)  # [2, S]
        out: Array = first + draft[:, fed[:, 1:]].sum(-1) + verify[:, verified]
        return out

    def _calls(self, drafted: Array, verified: Array, backlog: Array) -> Array:
        """Return [2, S] seconds of the model calls of chains, at the two contexts."""
        costs = self._costs
        drafts = self._first_step(backlog) + costs.second * (drafted > 1) + costs.later * np.maximum(drafted - 2, 0)
        out: Array = drafts * (drafted > 0) + costs.verify[:, verified]
        return out

    @cached_property
    def _padded(self) -> Array:
        return np.array(self.padded(), dtype=np.int64)

    @cached_property
    def _costs(self) -> ChainCosts:
        return ChainCosts(self.low, self.high)

    def chain_costs(self, context: float, decision: float | Price, first: int = 0, depth: int | None = None) -> Array:
        """Return [K + 1] float64, the seconds of a round that drafts k = 0..K tokens at `context`, backlog 1.

        A policy that is asked from depth `first` on decides k - first + 1 times, but not at depth K.
        """
        depth = self.max_depth if depth is None else depth
        k = np.arange(depth + 1)
        asked = np.maximum(np.minimum(k, depth - 1) - first + 1, 0)
        one = np.ones_like(k)
        return self.round_seconds(one * context, k, k, one, asked, decision)

    def prefill_seconds(self, length: Array) -> Array:
        """Return [S] float64 seconds to read prompts of `length` [S] tokens with the target."""
        return self.prefill_s[0] + self.prefill_s[1] * np.asarray(length, dtype=np.float64)
