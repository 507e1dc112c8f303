"""`PolicyHost`, the only code that calls a policy in a round, and the validation of policies from plugins."""

from __future__ import annotations

import copy
import dataclasses
import reprlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .contract import Array, DraftStep, DraftTree, RoundOutcome, State, StopPolicy
from .errors import PolicyError, PolicyFailure, SpecstopWarning, close_match
from .failures import PACKAGE, plugin_errors, policy_failure
from .features import FEATURES, HIDDEN_STATES, History, all_features, complete_features, feature
from .profile import Profile


def take(state: State, rows: Array | slice) -> State:
    """Return the state of a subset of its streams.

    Args:
        state: None, an array, or nested tuples or dataclasses of arrays; the first axis of each is S.
        rows: [R] int64 numbers of streams, [S] bool, or a slice.
    """
    return _map(lambda array: array[rows], state)


def put(state: State, rows: Array | slice, other: State) -> State:
    """Return the state of S streams with `rows` (see `take`) replaced by the R rows of `other`; None = zeros.

    Arrays with other further axes, such as memories that grow with a text, are padded with zeros.
    """
    if other is None:
        other = _map(lambda array: np.zeros_like(array[rows]), state)

    def replaced(array: Array, new: Array) -> Array:
        out, padded = _padded([array, new])
        out[rows] = padded
        return out

    return _map(replaced, state, other)


def _padded(arrays: Sequence[Array]) -> list[Array]:
    """Return copies of arrays, padded with zeros to common sizes of all axes but the first."""
    shape = np.max([array.shape[1:] for array in arrays], axis=0, initial=0).astype(int)
    return [np.pad(array, [(0, 0), *((0, n) for n in shape - array.shape[1:])]) for array in arrays]


def _map(apply: Callable[..., Array], *states: State) -> State:
    """Return a state of the same form with `apply` called on corresponding arrays."""
    first = states[0]
    if any(type(state) is not type(first) for state in states):
        raise PolicyFailure(
            f"the states of a policy are of types {', '.join(type(state).__name__ for state in states)}"
        )
    if first is None:
        return None
    if isinstance(first, np.ndarray):
        return apply(*states)
    if isinstance(first, tuple):
        if len({len(state) for state in states}) > 1:
            raise PolicyFailure("the states of a policy are from different depths of a round")
        return tuple(_map(apply, *parts) for parts in zip(*states, strict=True))
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        # By position: the fields of a state are the parameters of its constructor, in order.
        names = [field.name for field in dataclasses.fields(first)]
        return type(first)(*(_map(apply, *(getattr(state, name) for state in states)) for name in names))
    raise PolicyFailure(
        f"a state must be None, an array, or tuples or dataclasses of arrays, not {type(first).__name__}"
    )


class PolicyHost:
    """Calls a policy for S streams, and owns its state and their history.

    Results of plugins are validated, and plugins receive copies of arrays. Policies of specstop are trusted.

    Args:
        policy: the policy.
        profile: models the seconds of rounds; None = rounds take 0 seconds.
        batch: streams that share a verification; 1 = each stream is verified alone.
        drafters: that a policy which routes chooses from.
        fallback: replaces the policy after a failure, with one warning; None = failures are raised.
        on_decision: called after each decision of the original policy with the step and the new state.
        on_outcome: called after each round of the original policy; may return a policy that replaces it.
        on_replaced: called with each policy that replaces another one.
        clock: returns the measured seconds of the round, for a policy that reads the clock.

    Attributes:
        policy: the policy that is called.
        first, trims, lengths: of the policy.
        selects, observes: whether the policy implements `select` and `observe`.
        state, history: of the S streams.
        failure: of the original policy; None if it has not failed.
    """

    def __init__(
        self,
        policy: StopPolicy,
        *,
        profile: Profile | None = None,
        batch: int = 1,
        drafters: int = 1,
        fallback: StopPolicy | None = None,
        on_decision: Callable[[DraftStep, State], None] | None = None,
        on_outcome: Callable[[RoundOutcome], StopPolicy | None] | None = None,
        on_replaced: Callable[[StopPolicy], None] | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.profile, self.batch, self.clock, self._drafters = profile, batch, clock, drafters
        self._fallback, self._original, self._warned = fallback, policy, False
        self.on_decision, self._on_outcome, self._on_replaced = on_decision, on_outcome, on_replaced
        self.failure: PolicyFailure | None = None
        self.history, self.state = self._new_history(0), None
        self._use(policy)

    def _use(self, policy: StopPolicy) -> None:
        self.policy, self._trusted = policy, is_trusted(policy)
        self.first, self.trims, self.lengths = policy.first, policy.trims, policy.lengths
        self.selects = type(policy).select is not StopPolicy.select
        self.observes = type(policy).observe is not StopPolicy.observe
        self._has_custom_features = any(feature(name).function for name in policy.features)

    def _replace(self, policy: StopPolicy) -> None:
        self._use(policy)
        self.state = None
        if self._on_replaced is not None:
            self._on_replaced(policy)

    def reset(self) -> None:
        """Use the original policy again, without state from earlier streams."""
        if self.policy is not self._original:
            self._replace(self._original)
        self.failure = None
        self.history, self.state = self._new_history(0), None

    def restart(self) -> None:
        """Forget the streams of an interrupted run, unless the policy carries its state."""
        if not self.policy.carries:
            self.history, self.state = self._new_history(0), None

    def start(self, keys: Array) -> None:
        """Begin new streams, one for each of `keys` [S] int64."""
        self.history = self._new_history(len(keys))
        self.state = self._call("start", len(keys), keys)

    def _new_history(self, streams: int) -> History:
        return History.start(streams, self._drafters)

    def refill(self, rows: Array, keys: Array) -> None:
        """Begin new texts with `keys` [R] in the streams `rows` [R]; state is kept if the policy carries it."""
        if not len(self.history.record):
            # Streams without a text start with key 0 until they are refilled, unless the policy carries its state.
            all_keys = np.zeros(self.batch, dtype=np.int64)
            all_keys[rows] = keys
            return self.start(all_keys)
        self.history = put(self.history, rows, self._new_history(len(rows)))
        if not self.policy.carries:
            started = self._call("start", len(keys), keys)
            is_whole = len(rows) == len(self.history.record)
            self._change_state(lambda: started if is_whole else put(self.state, rows, started))
        return None

    def take(self, rows: Array) -> None:
        """Continue with the streams `rows` [R] only, in that order."""
        self.history = take(self.history, rows)
        self._change_state(lambda: take(self.state, rows))

    def _change_state(self, change: Callable[[], State]) -> None:
        """Set the state to the result of `change`, which fails if the state of a plugin does not consist of arrays."""
        try:
            self.state = change()
        except Exception as error:  # the state of a plugin may be anything
            self._fall_back(error, "selecting the streams of its state")

    def fixed_length(self, alive: Array) -> int | None:
        """Return how many tokens to draft without calling the policy, for `alive` [S, B]; None = call it."""
        if not self.policy.unasked:
            return None
        return self.policy.unasked.get(int(np.count_nonzero(alive.any(1))) if self.batch > 1 else 1)

    def keep(self, step: DraftStep) -> Array:
        """Return [S, B] bool, the branches to extend."""
        kept: Array
        if self._has_custom_features:
            step = self._completed(step)
        kept, self.state = self._call("keep", step)
        if self.on_decision is not None and self.policy is self._original:
            self.on_decision(step, self.state)
        return kept

    def _completed(self, step: DraftStep) -> DraftStep:
        """Return the step with the features of the policy, given the built-in ones that they are computed from."""
        with plugin_errors(self.policy, "computing its features"):
            values = complete_features(self.policy.features, step.features, step.depth == 0)
        return dataclasses.replace(step, features=np.where(step.alive[..., None], values, np.float32(0.0)))

    def select(self, tree: DraftTree) -> Array | None:
        """Return [S, N] bool, the nodes to verify; None = all."""
        mask: Array | None = self._call("select", tree)
        return mask

    def end_round(self, round: Any) -> None:
        """Write the modelled seconds to a round (`decode.round_state.RoundState`), and observe it."""
        if self.profile is not None and np.count_nonzero(round.active):
            round.seconds = self._modelled_seconds(self.profile, round) * round.active
        seconds = round.seconds
        if self.policy.reads_clock and self.clock is not None:
            seconds = np.full(len(round.active), self.clock())
        cut = round.cut & round.active
        drafting = round.drafting if self._drafters > 1 else None
        self.observe(RoundOutcome(round.active, round.drafted, round.verified, round.accepted, cut, seconds, drafting))

    def observe(self, outcome: RoundOutcome) -> None:
        """Update the history after a round, and call the policy's `observe`."""
        self.history = self.history.after(outcome)
        if self.observes:
            self.state = self._call("observe", outcome)
        if self._on_outcome is not None and self.policy is self._original:
            replacement = self._on_outcome(outcome)
            if replacement is not None:
                self._replace(replacement)

    def _modelled_seconds(self, profile: Profile, round: Any) -> Array:
        decision_s, counts = profile.decision(self.policy.cost_name), (round.context, round.drafted, round.verified)
        if self.batch > 1 and profile.batch is not None and round.fed_by_step is None:  # trees have no costs by batch
            context, drafted, verified, decisions = (values[round.active] for values in (*counts, round.decisions))
            return np.full(len(round.active), profile.batch_seconds(context, drafted, verified, decisions, decision_s))
        return profile.round_seconds(*counts, round.backlog, round.decisions, decision_s, round.fed_by_step)

    def _call(self, method: str, *args: Any) -> Any:
        """Call a method of the policy, with the state except for `start`. After a failure, call the fallback."""
        try:
            state = () if method == "start" else (self.state,)
            if self._trusted:
                return getattr(self.policy, method)(*args, *state)
            with plugin_errors(self.policy, f"{method}()"):
                answer = getattr(self.policy, method)(*map(_copy, args), *state)
                if method == "keep":
                    if not (isinstance(answer, tuple) and len(answer) == 2):
                        raise PolicyFailure(
                            f"{self.policy.name}: keep() must return (mask, state), not {_describe(answer)}"
                        )
                    return self._validated(method, answer[0], args[0].alive) & args[0].alive, answer[1]
                if method == "select" and answer is not None:
                    return self._validated(method, answer, args[0].drawn)
                return answer
        except Exception as error:  # a plugin may raise anything
            self._fall_back(error, f"{method}()")
        return self._call(method, *args)

    def _fall_back(self, error: Exception, action: str) -> None:
        """Use the fallback from here on. Raises the error if there is none."""
        if self._fallback is None or self.policy is self._fallback:
            raise error
        # A copy has no traceback, which would keep the frames of the loop alive.
        self.failure = copy.copy(policy_failure(error, self.policy, action))
        if not self._warned:
            reason = self.failure.text.removeprefix(f"{self.policy.name}: ")
            text = f"policy {self.policy.name} failed ({reason}); using {self._fallback.name} from here on"
            warnings.warn(text, SpecstopWarning, stacklevel=5)
        self._warned = True
        self._replace(self._fallback)

    def _validated(self, method: str, mask: Any, like: Array) -> Array:
        if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_ or mask.shape != like.shape:
            kind = f"{mask.dtype} of shape {mask.shape}" if isinstance(mask, np.ndarray) else type(mask).__name__
            expected = f"a bool array of shape {like.shape}"
            raise PolicyFailure(f"{self.policy.name}: {method}() must return {expected}, not {kind}")
        return mask


def _copy(value: Any) -> Any:
    """Return a copy of an argument of a policy: an array, a mapping or dataclass of arrays, or a number."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, Mapping):
        return {name: _copy(inner) for name, inner in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value)(*(_copy(getattr(value, field.name)) for field in dataclasses.fields(value)))
    return value


def is_trusted(policy: StopPolicy) -> bool:
    """Whether a policy and all policies that it calls are part of specstop."""
    return type(policy).__module__.startswith(PACKAGE) and all(map(is_trusted, policy.parts))


_TYPES: Mapping[str, tuple[type, str]] = {
    **dict.fromkeys(("name", "cost_name"), (str, "one line of text")),
    **dict.fromkeys(("first", "max_depth"), (int, "a whole number, 0 or more")),
    **dict.fromkeys(
        ("trims", "carries", "reads_clock", "reads_seconds", "joint", "routes", "joins"), (bool, "True or False")
    ),
}
"""Type and description of the plain attributes of a policy."""


def _is_valid(value: Any, kind: Any) -> bool:
    if type(value) is not kind:
        return False
    return value.isprintable() and bool(value.strip()) if isinstance(value, str) else value >= 0


def validate_policy(policy: Any) -> StopPolicy:
    """Return the policy.

    Raises:
        PolicyError: it is not a policy, or an attribute of a plugin's is wrong.
    """
    if isinstance(policy, type) and issubclass(policy, StopPolicy):
        raise PolicyError(f"expected a policy, not the class {policy.__name__}; write {policy.__name__}(...)")
    if not isinstance(policy, StopPolicy):
        raise PolicyError(f"expected a StopPolicy, not {_describe(policy)}")
    if is_trusted(policy):
        return policy
    who = type(policy).__name__  # its `name` is not validated yet
    with plugin_errors(who, "reading its attributes"):
        for name, (kind, expected) in _TYPES.items():
            if not _is_valid(value := getattr(policy, name), kind):
                raise PolicyError(f"{who}.{name}: expected {expected}, not {_describe(value)}")
        names = policy.features
        is_built_in = isinstance(names, tuple) and FEATURES.keys() >= set(names)
        _validate_names(f"{who}.features", names, FEATURES if is_built_in else all_features())
        _validate_names(f"{who}.hidden", policy.hidden, HIDDEN_STATES)
        for name in ("unasked", "sizes"):  # `sizes` only of policies that require widths of hidden states
            counts = getattr(policy, name, {})
            keys = counts if name == "unasked" else ()
            if not isinstance(counts, Mapping) or not all(_is_valid(x, int) for x in (*keys, *counts.values())):
                raise PolicyError(f"{who}.{name}: expected a mapping to whole numbers, not {_describe(counts)}")
        depth = max(policy.max_depth - 1, 0)
        shorter = policy.limited(depth)
        if not isinstance(shorter, StopPolicy) or not _is_valid(shorter.max_depth, int) or shorter.max_depth > depth:
            raise PolicyError(f"{who}.limited: expected limited({depth}) to draft no deeper than {depth}")
    return policy


def with_costs(policy: StopPolicy, profile: Profile | None) -> StopPolicy:
    """Return a policy with the costs of a profile, if there is one and the policy uses costs.

    Raises:
        PolicyFailure: a plugin raised an error.
        PolicyError: it is not a policy, or it returned something else.
    """
    if profile is None:
        return policy
    validate_policy(policy)
    with plugin_errors(policy, "with_costs()"):
        priced = policy.with_costs(profile)
    return validate_policy(priced)


def _validate_names(where: str, names: Any, valid: Mapping[str, Any]) -> None:
    """Raise `PolicyError` unless `names` is a tuple of valid names without repetitions."""
    if not isinstance(names, tuple) or len(set(names)) < len(names):
        raise PolicyError(f"{where}: expected a tuple of different names, not {_describe(names)}")
    for name in names:
        if name not in valid:
            hint = f"{close_match(str(name), valid)}; expected names among {', '.join(valid)}"
            raise PolicyError(f"{where}: unknown name {_describe(name)}{hint}")


def _describe(value: Any) -> str:
    """Return a short representation of a value with its type."""
    text = "".join(c if c.isprintable() else "?" for c in reprlib.repr(value))
    return text if value is None or isinstance(value, bool) else f"the {type(value).__name__} {text}"
