"""`PolicyHost`, the only code that calls a policy in a round."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from .contract import DraftStep, DraftTree, RoundOutcome, State, StopPolicy
from .errors import PolicyFailure, SpecstopWarning
from .history import History
from .profile import Profile
from .state import empty, join, put, take
from .typing import Array
from .validation import Failure, is_trusted, plugin_errors


class FinishedRound(Protocol):
    """The part of `decode.round_state.RoundState` that `PolicyHost.finished` reads. All arrays are [S]."""

    active: Array
    context: Array
    backlog: Array
    drafted: Array
    verified: Array
    decisions: Array
    accepted: Array
    seconds: Array

    @property
    def cut(self) -> Array:
        """[S] bool, an end of text or a length limit ended the round."""

    @property
    def fed_by_step(self) -> Array | None:
        """[S, K] int64, rows fed at each depth of a tree; None for chains."""


class Monitor(Protocol):
    """Observes decisions and outcomes of a host, and may replace its policy."""

    def on_decision(self, step: DraftStep, state: State) -> None:
        """Record a decision; `state` is the policy's after it."""

    def on_outcome(self, outcome: RoundOutcome) -> StopPolicy | None:
        """Record a round; return the policy to use from here on, None = the same."""

    def reset(self) -> None:
        """Forget earlier rounds."""


class PolicyHost:
    """Calls a policy for S streams, and owns its state and their history.

    Results of plugins are validated, and plugins receive copies of arrays. Policies of specstop are trusted.

    Args:
        policy: the policy.
        profile: models the seconds of rounds; None = rounds take 0 seconds.
        batch: streams that share a verification; 1 = each stream is verified alone.
        fallback: replaces the policy after a failure, with one warning; None = failures are raised.
        monitor: observes decisions and outcomes.
        on_replaced: called with each policy that replaces another one.
        clock: returns the measured seconds of the round, for a policy that reads the clock.

    Attributes:
        policy: the policy that is called.
        first, trims: of the policy.
        selects, observes: whether the policy implements `select` and `observe`.
        state, history: of the S streams.
        failure: of the given policy; None if it has not failed.
    """

    def __init__(
        self,
        policy: StopPolicy,
        *,
        profile: Profile | None = None,
        batch: int = 1,
        fallback: StopPolicy | None = None,
        monitor: Monitor | None = None,
        on_replaced: Callable[[StopPolicy], None] | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.profile, self.batch, self.clock = profile, batch, clock
        self._fallback, self._given, self._on_replaced = fallback, policy, on_replaced
        self._monitor, self._warned = monitor, False
        self.failure: Failure | None = None
        self.state: State = None
        self.history = History.start(0)
        # By row: history and state that contain it, and its index in them.
        self._stored: dict[int, tuple[History, State, int]] = {}
        self._use(policy)

    def _use(self, policy: StopPolicy) -> None:
        self.policy, self._trusted = policy, is_trusted(policy)
        self.first, self.trims = policy.first, policy.trims
        self.selects = type(policy).select is not StopPolicy.select
        self.observes = type(policy).observe is not StopPolicy.observe

    def _replace(self, policy: StopPolicy) -> None:
        self._use(policy)
        self.state = None
        self._stored = {row: (history, None, at) for row, (history, _, at) in self._stored.items()}
        if self._on_replaced is not None:
            self._on_replaced(policy)

    def reset(self) -> None:
        """Use the given policy again, without state from earlier streams."""
        if self.policy is not self._given:
            self._use(self._given)
            if self._on_replaced is not None:
                self._on_replaced(self._given)
        if self._monitor is not None:
            self._monitor.reset()
        self.failure = None
        self.history, self.state = History.start(0), None

    def restart(self) -> None:
        """Forget the streams of an interrupted run, unless the policy carries its state."""
        if not self.policy.carries:
            self.history, self.state = History.start(0), None

    def start(self, keys: Array) -> None:
        """Begin new streams, one for each of `keys` [S] int64."""
        self.history = History.start(len(keys))
        self.state = self._start(keys)

    def refill(self, rows: Array, keys: Array) -> None:
        """Begin new texts with `keys` [R] in the streams `rows` [R]; state is kept if the policy carries it."""
        if not len(self.history.record):
            # Streams without a text start with key 0 until they are refilled, unless the policy carries its state.
            all_keys = np.zeros(self.batch, dtype=np.int64)
            all_keys[rows] = keys
            return self.start(all_keys)
        self.history = put(self.history, rows, History.start(len(rows)))
        if not self.policy.carries:
            fresh = self._start(keys)
            self.state = fresh if len(rows) == len(self.history.record) else put(self.state, rows, fresh)
        return None

    def take(self, rows: Array) -> None:
        """Continue with the streams `rows` [R] only, in that order."""
        self.history, self.state = take(self.history, rows), take(self.state, rows)

    def store_rows(self, rows: Array) -> None:
        """Store the current streams under these row numbers [S], for an engine whose requests come and go."""
        # Rows keep their own state instead of one padded array: its width may depend on the depth that a round reached.
        for at, row in enumerate(rows.tolist()):
            self._stored[row] = self.history, self.state, at

    def load_rows(self, rows: Array) -> None:
        """Continue with stored streams [S], in this order."""
        parts: list[tuple[History, State, list[int]]] = []
        for row in rows.tolist():
            history, state, at = self._stored[row]
            if not parts or parts[-1][0] is not history or parts[-1][1] is not state:
                parts.append((history, state, []))
            parts[-1][2].append(at)  # adjacent rows that were stored together are taken in one call
        self.history = join([take(history, np.array(at)) for history, _, at in parts])
        states = [take(state, np.array(at)) for _, state, at in parts]
        like = next((state for state in states if state is not None), None)
        sizes = [len(at) for *_, at in parts]
        self.state = join([empty(like, n) if s is None else s for s, n in zip(states, sizes, strict=True)])

    def refill_rows(self, rows: Array, keys: Array) -> None:
        """Begin new texts with `keys` [R] in stored rows [R]; state is kept if the policy carries it."""
        if not self.policy.carries:
            self.start(keys)
        else:
            new = np.array([row for row in rows.tolist() if row not in self._stored], dtype=np.int64)
            if len(new):
                self.start(new)  # a row outlives its texts, so its number is the key
                self.store_rows(new)
            self.load_rows(rows)
            self.history = History.start(len(rows))
        self.store_rows(rows)

    def fixed_length(self, alive: Array) -> int | None:
        """Return how many tokens to draft without calling the policy, for `alive` [S, B]; None = call it."""
        if not self.policy.unasked:
            return None
        return self.policy.unasked.get(int(np.count_nonzero(alive.any(1))) if self.batch > 1 else 1)

    def keep(self, step: DraftStep) -> Array:
        """Return [S, B] bool, the branches to extend."""
        try:
            if self._trusted:
                kept, self.state = self.policy.keep(step, self.state)
            else:
                kept, self.state = self._keep(step)
        except Exception as error:  # a plugin may raise anything
            self._fail(error)
            return self.policy.keep(step, None)[0]
        if self._monitor is not None and self.policy is self._given:
            self._monitor.on_decision(step, self.state)
        return kept

    def _keep(self, step: DraftStep) -> tuple[Array, State]:
        with plugin_errors(self.policy, "keep()"):
            alive, parent, features, batch = (a.copy() for a in (step.alive, step.parent, step.features, step.batch))
            shown = DraftStep(step.depth, alive, parent, features, _copies(step.hidden), batch)
            answer = self.policy.keep(shown, self.state)
            if not (isinstance(answer, tuple) and len(answer) == 2):
                raise PolicyFailure(
                    f"{self.policy.name}: keep() must return (mask, state), not {type(answer).__name__}"
                )
            mask, state = answer
            _validate_mask(mask, step.alive, f"{self.policy.name}: keep()")
            return mask & step.alive, state

    def select(self, tree: DraftTree) -> Array | None:
        """Return [S, N] bool, the nodes to verify; None = all."""
        try:
            if self._trusted:
                return self.policy.select(tree, self.state)
            with plugin_errors(self.policy, "select()"):
                mask = self.policy.select(DraftTree(**_copies(vars(tree))), self.state)
                if mask is not None:
                    _validate_mask(mask, tree.drawn, f"{self.policy.name}: select()")
                return mask
        except Exception as error:  # a plugin may raise anything
            self._fail(error)
            return None

    def finished(self, played: FinishedRound) -> None:
        """Record a round: set its modelled seconds, update the history, call `observe`."""
        if self.profile is not None:
            played.seconds = self._modelled_seconds(self.profile, played) * played.active
        seconds = played.seconds
        if self.policy.reads_clock and self.clock is not None:
            seconds = np.full(len(played.active), self.clock())
        cut = played.cut & played.active
        self.observe(RoundOutcome(played.active, played.drafted, played.verified, played.accepted, cut, seconds))

    def observe(self, outcome: RoundOutcome) -> None:
        """Update the history after a round, and call the policy's `observe`."""
        self.history = self.history.after(outcome.accepted, outcome.verified, outcome.active, outcome.cut)
        if self.observes:
            try:
                if self._trusted:
                    self.state = self.policy.observe(outcome, self.state)
                else:
                    with plugin_errors(self.policy, "observe()"):
                        self.state = self.policy.observe(RoundOutcome(**_copies(vars(outcome))), self.state)
            except Exception as error:  # a plugin may raise anything
                self._fail(error)
        if self._monitor is not None and self.policy is self._given:
            other = self._monitor.on_outcome(outcome)
            if other is not None:
                self._replace(other)

    def _modelled_seconds(self, profile: Profile, played: FinishedRound) -> Array:
        price = profile.decision(self.policy.cost_name)
        if self.batch > 1 and profile.batch is not None and played.fed_by_step is None:  # trees have no price by batch
            columns = played.context, played.drafted, played.verified, played.decisions
            context, drafted, verified, decisions = (column[played.active] for column in columns)
            shared = profile.batch_seconds(context, drafted, verified, decisions, price)
            return np.full(len(played.active), shared)
        return profile.round_seconds(
            played.context, played.drafted, played.verified, played.backlog, played.decisions, price, played.fed_by_step
        )

    def _start(self, keys: Array) -> State:
        try:
            if self._trusted:
                return self.policy.start(len(keys), keys)
            with plugin_errors(self.policy, "start()"):
                return self.policy.start(len(keys), keys.copy())
        except Exception as error:  # a plugin may raise anything
            self._fail(error)
            return None

    def _fail(self, error: Exception) -> None:
        """Replace the policy after an error; warn at the first one."""
        if self._fallback is None:
            raise error
        self.failure = Failure.of(self.policy, error)
        if not self._warned:
            text = (
                f"policy {self.failure.policy} failed ({self.failure.text}); using {self._fallback.name} from here on"
            )
            warnings.warn(text, SpecstopWarning, stacklevel=4)
        self._warned = True
        self._replace(self._fallback)


def _copies(arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {name: values.copy() for name, values in arrays.items()}


def _validate_mask(mask: Any, like: Array, who: str) -> None:
    if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_:
        kind = mask.dtype if isinstance(mask, np.ndarray) else type(mask).__name__
        raise PolicyFailure(f"{who} must return a bool array, not {kind}")
    if mask.shape != like.shape:
        raise PolicyFailure(f"{who} must return shape {like.shape}, not {mask.shape}")
