"""What a policy says of itself is checked where it enters: class, attribute, what was expected, what came."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from specstop.collect.explore import exploring
from specstop.collect.store.folder import Trace
from specstop.decode.hf.stopping import PolicyStoppingCriteria
from specstop.decode.loop import Settings, Speculator
from specstop.decode.models.pair import Pair
from specstop.decode.profile import add_decisions
from specstop.policies.contract import DraftStep, State, StopPolicy
from specstop.policies.errors import PolicyError
from specstop.policies.features import FEATURES
from specstop.policies.fixed import Confidence
from specstop.policies.profile import Profile
from specstop.policies.registry import BUILTINS, load_policy
from specstop.policies.typing import Array
from specstop.policies.validation import validate_policy, with_costs
from specstop.train.replay.run import replay
from specstop.train.replay.traces.arrays import trace_arrays
from specstop.train.report.evaluate import evaluate


class Mine(StopPolicy):
    features, name, max_depth = ("top1",), "mine", 4

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        return step.alive, state


def fail(*args: Any) -> Any:
    raise KeyError("inside a plugin")


COUNT, FLAG, LINE = "a whole number, 0 or more", "True or False", "one line of text"

WRONG: list[tuple[str, Any, str]] = [
    ("features", "entropy", "expected a tuple of feature names, not the str 'entropy'; write ('entropy',)"),
    ("features", "entrpy", "expected a tuple of feature names, not the str 'entrpy'"),
    ("features", None, "expected a tuple of feature names, not None"),
    ("features", 7, "expected a tuple of feature names, not the int 7"),
    ("features", ["entropy"], "expected a tuple of feature names, not the list ['entropy']"),
    ("features", (1, 2), "expected a tuple of feature names, not the tuple (1, 2)"),
    (
        "features",
        ("entrpy",),
        f"unknown feature the str 'entrpy' (did you mean 'entropy'?); known: {', '.join(FEATURES)}",
    ),
    ("features", ("top1", "top1"), "expected each feature once, but 'top1' is there twice"),
    ("features", property(fail), "reading its attributes failed: KeyError: 'inside a plugin'"),
    (
        "hidden",
        "draft_hidden",
        "expected a tuple of hidden state names, not the str 'draft_hidden'; write ('draft_hidden',)",
    ),
    ("hidden", None, "expected a tuple of hidden state names, not None"),
    ("hidden", ("draft_hiden",), "unknown hidden state the str 'draft_hiden' (did you mean 'draft_hidden'?)"),
    ("sizes", 3, "expected whole numbers by name of a hidden state, not the int 3"),
    (
        "sizes",
        {"draft_hidden": "wide"},
        "expected whole numbers by name of a hidden state, not the dict {'draft_hidden': 'w",
    ),
    ("max_depth", "4", f"expected {COUNT}, not the str '4'"),
    ("max_depth", -1, f"expected {COUNT}, not the int -1"),
    ("max_depth", 2.5, f"expected {COUNT}, not the float 2.5"),
    ("max_depth", None, f"expected {COUNT}, not None"),
    ("max_depth", True, f"expected {COUNT}, not True"),
    ("max_depth", property(lambda self: 4), "expected an attribute that can be set on a copy"),
    ("unasked", 3, "expected whole numbers by whole numbers, not the int 3"),
    ("unasked", {8: -1}, "expected whole numbers by whole numbers, not the dict"),
    ("unasked", {"8": 3}, "expected whole numbers by whole numbers, not the dict"),
    ("first", "0", f"expected {COUNT}, not the str '0'"),
    ("first", -1, f"expected {COUNT}, not the int -1"),
    ("first", 0.5, f"expected {COUNT}, not the float 0.5"),
    ("first", None, f"expected {COUNT}, not None"),
    ("name", "", f"expected {LINE}, not the str ''"),
    ("name", None, f"expected {LINE}, not None"),
    ("name", "a\nb", f"expected {LINE}, not the str 'a\\nb'"),
    ("name", "\ud800", f"expected {LINE}, not the str '\\ud800'"),
    ("cost_name", 5, f"expected {LINE}, not the int 5"),
    ("trims", 1, f"expected {FLAG}, not the int 1"),
    ("trims", "no", f"expected {FLAG}, not the str 'no'"),
    ("carries", None, f"expected {FLAG}, not None"),
    ("reads_clock", np.bool_(True), f"expected {FLAG}, not the bool np.True_"),
    ("joint", 1, f"expected {FLAG}, not the int 1"),
    ("keep", None, "expected a method, not None"),
    ("start", 3, "expected a method, not the int 3"),
    ("select", "all", "expected a method, not the str 'all'"),
    ("observe", [], "expected a method, not the list []"),
    ("limited", lambda self, depth: None, "expected limited(3) to draft no deeper than 3"),
    ("limited", lambda self, depth: self, "expected limited(3) to draft no deeper than 3"),
]


def made(attribute: str, value: Any) -> StopPolicy:
    policy: StopPolicy = type("Odd", (Mine,), {attribute: value})()
    return policy


@pytest.mark.parametrize(("attribute", "value", "message"), WRONG)
def test_a_wrong_attribute_is_named_with_what_was_expected_and_what_came(
    attribute: str, value: Any, message: str
) -> None:
    with pytest.raises(PolicyError) as caught:
        validate_policy(made(attribute, value))
    text = str(caught.value)
    where = "Odd: " if "reading" in message else f"Odd.{attribute}: "
    assert text.startswith(where + message) and "\n" not in text


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (Mine, "expected a policy, not the class Mine; write Mine(...)"),
        (None, "expected a StopPolicy, not None"),
        ("fixed:4", "expected a StopPolicy, not the str 'fixed:4'"),
        (
            dataclass(frozen=True)(type("Frozen", (Mine,), {}))(),
            "Frozen.max_depth: expected an attribute that can be set on a copy (cannot assign",
        ),
    ],
)
def test_what_is_no_policy_is_told_so(policy: Any, message: str) -> None:
    with pytest.raises(PolicyError) as caught:
        validate_policy(policy)
    assert str(caught.value).startswith(message)


def test_every_policy_that_comes_with_specstop_passes_and_is_returned() -> None:
    for policy in (Mine(), Mine().limited(0), *map(load_policy, BUILTINS)):
        assert validate_policy(policy) is policy


def entrances(pair: Pair, traces: dict[float, Trace], profile: Profile) -> dict[str, Callable[[Any], Any]]:
    arrays = trace_arrays(traces[0.7])
    return {
        "the loop": lambda policy: Speculator(pair, policy, Settings()),
        "transformers' own loop": PolicyStoppingCriteria,
        "collect": lambda policy: exploring(policy, 0.1, 4),
        "replay": lambda policy: replay(arrays, policy, profile),
        "evaluate": lambda policy: evaluate(traces[0.7], profile, [policy]),
        "prices": lambda policy: add_decisions(profile, [policy], 48),
    }


def test_costs_that_a_plugin_takes_are_checked(profile: Profile) -> None:
    class Broken(Mine):
        def with_costs(self, profile: Profile) -> StopPolicy:
            raise KeyError("verify")

    class Nothing(Mine):
        def with_costs(self, profile: Profile) -> StopPolicy:
            return None  # type: ignore[return-value]

    mine = Mine()
    assert with_costs(mine, None) is mine is with_costs(mine, profile)
    for policy, message in ((Broken(), r"with_costs\(\)"), (Nothing(), "expected a StopPolicy, not None")):
        with pytest.raises(PolicyError, match=message):
            with_costs(policy, profile)


@pytest.mark.parametrize("entrance", ["the loop", "transformers' own loop", "collect", "replay", "evaluate", "prices"])
def test_it_is_checked_wherever_it_enters(
    entrance: str, pair: Pair, traces: dict[float, Trace], profile: Profile
) -> None:
    enter = entrances(pair, traces, profile)[entrance]
    with pytest.raises(
        PolicyError, match=r"^Odd\.features: unknown feature the str 'entrpy' \(did you mean 'entropy'\?\)"
    ):
        enter(made("features", ("entrpy",)))
    with pytest.raises(PolicyError, match=r"^expected a policy, not the class Confidence; write Confidence\(\.\.\.\)$"):
        enter(Confidence)
