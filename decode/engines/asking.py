"""Who asks a policy inside an engine: rows that come and go, outcomes that are known a step later, and an engine that must
live on whatever the policy does.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...policies import state
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
from ...policies.features import Layout
from ...policies.features.history import History
from ...policies.fixed import FixedLength
from ...policies.plugin_code import Failure
from ..policy.runner import warn_failed
from ..topology import chain


class Asking:
    """A policy and the R rows of an engine, of which some take part in a step.

    A policy that raises an error or breaks the contract is named once and replaced by a fixed length.

    Args:
        policy: asked.
        rows: R.
        depth: K, the most tokens that the engine takes of a draft.
        fallback: length that is drafted after a failure.

    Attributes:
        policy: the one that is asked.
        failure: of the one given; None = it has not failed.
        first, trims, selects: of it; `selects` whether it chooses among what was drafted.
        layout, topology: of its features, and the chain that is drafted.
        listens: it is told what came of drafts, or reads features of it.
        history: of the rows of the step.
    """

    def __init__(self, policy: StopPolicy, rows: int, depth: int, fallback: int) -> None:
        self._rows, self._depth, self._fallback = rows, depth, min(fallback, depth)
        self._here = np.zeros(0, dtype=np.int64)
        self.history = History.start(rows)
        self._past = self.history.record.copy()  # [R, .], `History.record` of every row
        # Rows do not share arrays between steps: a state's width may say how deep a round has come.
        self._kept: list[tuple[State, int]] = [(None, 0)] * rows
        self._state: State = None
        self.failure: Failure | None = None
        self._use(policy.limited(depth))
        # Texts bring keys of their own (`renew`); a policy that carries its state keeps these.
        every = np.arange(rows, dtype=np.int64)
        self._guarded(lambda: self._start(every, every))

    def _use(self, policy: StopPolicy) -> None:
        self.policy = policy
        self.first, self.trims, self.depth = policy.first, policy.trims, min(policy.max_depth, self._depth)
        self.layout, self.topology = Layout(policy.features), chain(self.depth)
        self.selects = type(policy).select is not StopPolicy.select
        self._observes = type(policy).observe is not StopPolicy.observe
        self.listens = self._observes or bool(self.layout.history)

    def _store(self, rows: Array, found: State) -> None:
        """Keep the state of rows [n] until they are wanted again."""
        for at, row in enumerate(rows.tolist()):
            self._kept[row] = found, at

    def state_of(self, rows: Array) -> State:
        """Return the state of rows [n]."""
        parts: list[tuple[State, list[int]]] = []
        # Neighbours that were stored together are taken together.
        for row in rows.tolist():
            found, at = self._kept[row]
            if not parts or parts[-1][0] is not found:
                parts.append((found, []))
            parts[-1][1].append(at)
        taken = [state.take(found, np.array(at)) for found, at in parts]
        like = next((one for one in taken if one is not None), None)
        # A policy may remember nothing of rows that it was not asked about.
        return state.join(
            [state.empty(like, len(at)) if one is None else one for one, (_, at) in zip(taken, parts, strict=True)]
        )

    def renew(self, rows: Array, keys: Array) -> None:
        """Go on to other texts in `rows` [n], of keys [n] int64; a policy that carries its state keeps it there."""
        if not len(rows):
            return
        self._past[rows] = History.start(len(rows)).record
        if not self.policy.carries:
            self._guarded(lambda: self._start(rows, keys))

    def _start(self, rows: Array, keys: Array) -> None:
        self._store(rows, checked_start(self.policy, len(rows), keys))

    def attend(self, rows: Array) -> None:
        """Begin a step of these rows [S]: what is asked from here on is of them, in this order."""
        self._here = rows
        self.history, self._state = History(self._past[rows]), self.state_of(rows)

    def leave(self) -> None:
        """End the step: keep what the policy remembers of its rows."""
        self._store(self._here, self._state)

    def unasked(self, alive: Array) -> int | None:
        """See `rounds.Runner`."""
        unasked = self.policy.unasked
        return unasked.get(int(np.count_nonzero(alive.any(1)))) if unasked else None

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
            rows: those whose outcome is known now.
            outcome: of n rounds.
        """
        if not len(rows):
            return
        before = History(self._past[rows])
        self._past[rows] = before.after(outcome.accepted, outcome.verified, outcome.active, outcome.cut).record
        if self._observes:
            self._guarded(lambda: self._observe(rows, outcome))

    def _observe(self, rows: Array, outcome: RoundOutcome) -> None:
        self._store(rows, checked_observe(self.policy, outcome, self.state_of(rows)))

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # a plugin may raise anything; the engine must live
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Warn once and go on with the fixed fallback length."""
        self.failure = Failure.of(self.policy, error)
        warn_failed(self.failure, f"{self._fallback} tokens a step")
        self._use(FixedLength(self._fallback))
        # What the one before remembers means nothing to its successor.
        self._kept, self._state = [(None, 0)] * self._rows, None
