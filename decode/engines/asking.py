"""Who asks a policy inside an engine: rows that come and go, outcomes that are known a step later, and an engine that must
live on whatever the policy does.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np

from ...policies import state
from ...policies.baselines.fixed import FixedLength
from ...policies.contract import (
    Array,
    DraftStep,
    DraftTree,
    RoundOutcome,
    State,
    StopPolicy,
    checked_keep,
    checked_observe,
    checked_select,
    checked_start,
)
from ...policies.errors import SpecstopWarning
from ...policies.features.history import History
from ...policies.plugin_code import reason


class Asking:
    """A policy and the R rows of an engine, of which some take part in a step.

    A policy that raises an error or breaks the contract is named once and replaced by a fixed length.

    Args:
        policy: asked.
        rows: R.
        depth: K, the most tokens that the engine takes of a draft.
        fallback: length that is drafted after a failure.

    Attributes:
        policy: the one in charge.
        first, trims, selects: of it; `selects` whether it chooses among what was drafted.
        history: of the rows of the step.
        states: of all rows, as they are between steps.
    """

    def __init__(self, policy: StopPolicy, rows: int, depth: int, fallback: int) -> None:
        self._rows, self._depth, self._fallback = rows, depth, min(fallback, depth)
        self._here = np.zeros(0, dtype=np.int64)
        self._histories = self.history = History.start(rows)
        self.states: State = None
        self._state: State = None
        self._take_charge(policy.limited(depth))
        self._guarded(lambda: self._start_all())

    def _take_charge(self, policy: StopPolicy) -> None:
        self.policy = policy
        self.first, self.trims, self.depth = policy.first, policy.trims, min(policy.max_depth, self._depth)
        self.selects = type(policy).select is not StopPolicy.select
        self._observes = type(policy).observe is not StopPolicy.observe

    def _start_all(self) -> None:
        self.states = checked_start(self.policy, self._rows, np.arange(self._rows, dtype=np.int64))

    def renew(self, rows: Array, keys: Array) -> None:
        """Go on to other texts in `rows` [n], of keys [n] int64; a policy that carries its state keeps it there."""
        if not len(rows):
            return
        self._histories = state.put(self._histories, rows, History.start(len(rows)))
        if not self.policy.carries:
            self._guarded(lambda: self._start(rows, keys))

    def _start(self, rows: Array, keys: Array) -> None:
        self.states = state.put(self.states, rows, checked_start(self.policy, len(rows), keys))

    def attend(self, rows: Array) -> None:
        """Begin a step of these rows [S]: what is asked from here on is of them, in this order."""
        self._here = rows
        self.history, self._state = state.take(self._histories, rows), state.take(self.states, rows)

    def leave(self) -> None:
        """End the step: keep what the policy remembers of its rows."""
        self._guarded(self._put_back)

    def _put_back(self) -> None:
        self.states = state.put(self.states, self._here, self._state) if self.states is not None else None
        if self.states is None and self._state is not None:  # of a policy that remembers nothing before it was asked
            self.states = state.put(_blank(self._state, self._rows), self._here, self._state)

    def keep(self, step: DraftStep) -> Array:
        """Return [S, 1] bool, the drafts to extend."""
        try:
            kept, self._state = checked_keep(self.policy, step, self._state)
        except Exception as error:  # a plugin may raise anything; the engine must live
            self._fail(error)
            return step.alive & (step.depth < self._fallback)
        return kept

    def select(self, tree: DraftTree) -> Array | None:
        """Return [S, N] bool, the tokens to verify; None = all."""
        try:
            return checked_select(self.policy, tree, self._state)
        except Exception as error:  # a plugin may raise anything; the engine must live
            self._fail(error)
            return None

    def heard(self, rows: Array, outcome: RoundOutcome) -> None:
        """Take in what came of the last drafts of `rows` [n].

        Args:
            rows: those that had a draft, whose outcome is known now.
            outcome: of n rounds.
        """
        if not len(rows):
            return
        before = state.take(self._histories, rows)
        counts = outcome.active & ~outcome.cut
        self._histories = state.put(self._histories, rows, before.after(outcome.accepted, outcome.verified, counts))
        if self._observes:
            self._guarded(lambda: self._observe(rows, outcome))

    def _observe(self, rows: Array, outcome: RoundOutcome) -> None:
        after = checked_observe(self.policy, outcome, state.take(self.states, rows))
        self.states = state.put(self.states, rows, after)

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # a plugin may raise anything; the engine must live
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Say once what failed and go on with the fixed fallback length."""
        name = self.policy.name
        warnings.warn(
            f"policy {name} failed ({reason(error).removeprefix(f'{name}: ')}); drafting {self._fallback} tokens a step "
            "from here on",
            SpecstopWarning,
            stacklevel=2,
        )
        self._take_charge(FixedLength(self._fallback))
        self.states = self._state = None


def _blank(like: State, rows: int) -> State:
    """Return the state of R rows of which nothing is known, of the form of another one."""
    return state.take(like, np.zeros(rows, dtype=np.int64))
