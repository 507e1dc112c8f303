"""Who asks a policy: what it remembers of S streams, what it is told of their rounds, and who takes over when it fails."""

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
from ...policies.features.history import HISTORY_FEATURES, History
from ...policies.learned.policy import LearnedPolicy
from ...policies.plugin_code import Failure
from ...policies.profile import Profile
from ..drafted import Finished
from .drift_monitor import best_fixed, describe, make_watch


class PolicyRunner:
    """A policy and S streams: its state and their history, which it owns; what a policy raises goes to the caller.

    Args:
        policy: asked.
        profile: prices rounds; None = they take no time.
        together: the streams are verified together; chains then take each as long as all do, where the profile has batches.

    Attributes:
        policy: the one that is asked.
        first, trims, selects: of it; `selects` whether it chooses among what was drafted.
        state: its state.
        history: of the streams.
    """

    def __init__(self, policy: StopPolicy, profile: Profile | None = None, together: bool = False) -> None:
        self.profile, self._together = profile, together
        self.state: State = None
        self.history = History.start(0)
        self._use(policy)

    def _use(self, policy: StopPolicy) -> None:
        self.policy = policy
        self.first, self.trims = policy.first, policy.trims
        self.selects = type(policy).select is not StopPolicy.select
        self.observes = type(policy).observe is not StopPolicy.observe

    def start(self, keys: Array) -> None:
        """Begin with fresh streams, one for each of `keys` [S] int64."""
        self.history = History.start(len(keys))
        self.state = checked_start(self.policy, len(keys), keys)

    def refill(self, rows: Array, keys: Array) -> None:
        """Go on to the next text in the streams `rows` [R], of keys [R]: a policy that carries its state keeps it there."""
        self.history = state.put(self.history, rows, History.start(len(rows)))
        if not self.policy.carries:
            fresh = checked_start(self.policy, len(rows), keys)
            self.state = fresh if len(rows) == len(self.history.record) else state.put(self.state, rows, fresh)

    def take(self, rows: Array) -> None:
        """Go on with the streams `rows` [R] alone, in that order."""
        self.history, self.state = state.take(self.history, rows), state.take(self.state, rows)

    def unasked(self, alive: Array) -> int | None:
        """Return how many tokens are drafted without asking, by how many streams of `alive` draft; None = it is asked."""
        if not self.policy.unasked:
            return None
        return self.policy.unasked.get(int(np.count_nonzero(alive.any(1))) if self._together else 1)

    def keep(self, step: DraftStep) -> Array:
        """Return [S, B] bool, the branches to extend."""
        kept, self.state = checked_keep(self.policy, step, self.state)
        return kept

    def select(self, tree: DraftTree) -> Array | None:
        """Return [S, N] bool, the nodes to verify; None = all."""
        return checked_select(self.policy, tree, self.state)

    def finished(self, made: Finished) -> None:
        """Take in a round: history, its seconds, and what the policy makes of it."""
        self.history = self.history.after(made.accepted, made.found.verified, made.active, made.cut)
        made.seconds = self.seconds(made) * made.active
        if self.observes:
            self.state = checked_observe(self.policy, outcome(made, made.seconds), self.state)

    def seconds(self, made: Finished) -> Array:
        """Return [S] float64, what the profile says that a round took."""
        if self.profile is None:
            return np.zeros(len(made.active))
        found, price = made.found, self.profile.decision(self.policy.cost_name)
        if self._together and self.profile.batch is not None and found.fed_by_step is None:
            # Only streams that had a round are part of what the batch cost. Trees have no price by batch.
            columns = (made.context, found.drafted, found.verified, found.decisions)
            shared = self.profile.batch_seconds(*(column[made.active] for column in columns), price)
            return np.full(len(made.active), shared)
        return self.profile.round_seconds(
            made.context, found.drafted, found.verified, made.backlog, found.decisions, price, found.fed_by_step
        )


def outcome(made: Finished, seconds: Array) -> RoundOutcome:
    """Return what a policy hears of a round."""
    found = made.found
    return RoundOutcome(made.active, found.drafted, found.verified, made.accepted, made.cut & made.active, seconds)


def warn_failed(failure: Failure, instead: str) -> None:
    """Warn that a policy has failed, and what is drafted instead of what it says."""
    text = f"policy {failure.policy} failed ({failure.text}); drafting {instead} from here on"
    warnings.warn(text, SpecstopWarning, stacklevel=3)


class MonitoredRunner(PolicyRunner):
    """Streams under a policy that cannot harm their texts: one that raises or breaks the contract is named once and replaced.

    Args:
        policy: the user's.
        profile: see `PolicyRunner`.
        chain: whether no round has more than one branch.
        fallback: length that is drafted after a failure.
        mode: of the drift monitor: off, warn, or fallback (`drift_monitor`).
        streams: S.

    Attributes:
        failure: of the user's policy since it was last asked anew (`renew`); None = it has not failed.
        replaced: called with a policy that takes over.
        elapsed: seconds since the round began, for a policy that reads the clock.
    """

    def __init__(
        self,
        policy: StopPolicy,
        profile: Profile | None,
        chain: bool,
        fallback: int,
        mode: str = "off",
        streams: int = 1,
    ) -> None:
        super().__init__(policy, profile, together=streams > 1)
        self._streams = streams
        self._given, self._chain, self._fallback, self._mode = policy, chain, fallback, mode
        self._watch = make_watch(policy, mode, chain)
        self._warned = self._begun = False
        self.failure: Failure | None = None
        self.replaced: Callable[[StopPolicy], None] = lambda policy: None
        self.elapsed: Callable[[], float] = lambda: 0.0

    def _use(self, policy: StopPolicy) -> None:
        super()._use(policy)
        self._reads_history = any(name in HISTORY_FEATURES for name in policy.features)

    def renew(self) -> None:
        """Ask the user's policy again and forget what it has carried from text to text."""
        if self.policy is not self._given:
            self._use(self._given)
            self.replaced(self._given)
        self._watch = make_watch(self.policy, self._mode, self._chain)
        self._begun, self.failure = False, None

    def restart(self) -> None:
        """Begin all streams anew with the next texts, unless the policy carries its state: a run may have been cut off."""
        self._begun = self._begun and self.policy.carries

    def begin(self, rows: Array, keys: Array) -> None:
        """Go on to other texts in the streams `rows` [R], of `keys` [R]."""
        try:
            if self._begun:
                self.refill(rows, keys)
            else:
                # Streams without a text yet begin too, with key 0. `refill` begins them anew, with their own, unless the
                # policy carries its state.
                every = np.zeros(self._streams, dtype=np.int64)
                every[rows] = keys
                self.start(every)
        except Exception as error:  # a plugin may raise anything; the text must not suffer
            self._fail(error)
        self._begun = True

    def keep(self, step: DraftStep) -> Array:
        """See `PolicyRunner.keep`."""
        try:
            kept = super().keep(step)
        except Exception as error:  # a plugin may raise anything; the text must not suffer
            self._fail(error)
            return step.alive & (step.depth < self._fallback)
        if self._watch is not None and step.depth:  # before the first token there is nothing to survive
            assert isinstance(self.policy, LearnedPolicy)
            self._watch.decided(step.depth, self.policy.latest(self.state)[:, 0], step.alive[:, 0])
        return kept

    def select(self, tree: DraftTree) -> Array | None:
        """See `PolicyRunner.select`."""
        try:
            return super().select(tree)
        except Exception as error:  # a plugin may raise anything; the text must not suffer
            self._fail(error)
            return None

    def finished(self, made: Finished) -> None:
        """See `PolicyRunner.finished`; what nobody reads is left out, as it would cost every round some microseconds."""
        if self._reads_history:
            self.history = self.history.after(made.accepted, made.found.verified, made.active, made.cut)
        if self._watch is not None:
            self._compare(made)
        if not self.observes:
            return
        try:
            seconds = np.zeros(len(made.active))
            if self.policy.reads_clock:
                seconds += self.elapsed()
            elif self.policy.reads_seconds:
                seconds = self.seconds(made)
            self.state = checked_observe(self.policy, outcome(made, seconds), self.state)
        except Exception as error:  # a plugin may raise anything; the text must not suffer
            self._fail(error)

    def _compare(self, made: Finished) -> None:
        """Compare live acceptance with what the policy predicted; warn, or fall back, once it leaves the band."""
        assert self._watch is not None
        self._watch.finished(made.accepted, made.found.verified, made.active & ~made.cut)
        band = self._watch.band()
        if band is None or not band.left:
            return
        message = describe(self.policy, band)
        if self._mode == "fallback":
            length = best_fixed(self.policy, self._watch.conditional(), self._fallback, self._streams)
            self._replace(FixedLength(length))
            message += f"; drafting {length} tokens a round from here on"
        # Told once; `renew` watches again.
        self._watch = None
        warnings.warn(message, SpecstopWarning, stacklevel=2)

    def _fail(self, error: Exception) -> None:
        """Warn once and go on with the fixed fallback length."""
        self.failure = Failure.of(self.policy, error)
        if not self._warned:
            warn_failed(self.failure, f"{self._fallback} tokens a round")
        self._warned = True
        self._watch = None
        self._replace(FixedLength(self._fallback))

    def _replace(self, policy: StopPolicy) -> None:
        """Ask another policy, which remembers nothing."""
        self._use(policy)
        self.state = None
        self.replaced(policy)
