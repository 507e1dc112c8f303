"""What a policy says of itself is checked where it enters: class, attribute, what was expected, what came."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from specstop.collect.exploring import exploring
from specstop.collect.store import Trace
from specstop.decode.hf.stopping import PolicyStoppingCriteria
from specstop.decode.loop import Settings, Speculator
from specstop.decode.models.pair import Pair
from specstop.decode.profile import add_decisions
from specstop.policies.contract import Array, DraftStep, State, StopPolicy
from specstop.policies.errors import PolicyError
from specstop.policies.fixed import Confidence
from specstop.policies.host import validate_policy, with_costs
from specstop.policies.profile import Profile
from specstop.policies.registry import BUILTINS, load_policy
from specstop.train.evaluate.evaluate import evaluate
from specstop.train.replay.run import replay
from specstop.train.replay.traces.arrays import trace_arrays


class Mine(StopPolicy):
    features, name, max_depth = ("top1",), "mine", 4

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        return step.alive, state


def fail(*args: Any) -> Any:
    raise KeyError("inside a plugin")


WRONG: list[tuple[str, Any, str]] = [
    *(("features", value, "tuple") for value in ("entropy", None, 7, ["entropy"], ("top1", "top1"))),
    ("features", (1, 2), "the int 1"),
    ("features", ("entrpy",), "did you mean 'entropy'"),
    ("features", property(fail), "KeyError: 'inside a plugin'"),
    *(("hidden", value, "tuple") for value in ("draft_hidden", None)),
    ("hidden", ("draft_hiden",), "did you mean 'draft_hidden'"),
    *(("sizes", value, "whole numbers") for value in (3, {"draft_hidden": "wide"})),
    *(("unasked", value, "whole numbers") for value in (3, {8: -1}, {"8": 3})),
    *((name, value, "whole number") for name in ("max_depth", "first") for value in ("4", -1, 2.5, None, True)),
    ("max_depth", property(lambda self: 4), "max_depth"),
    *(("name", value, "one line of text") for value in ("", None, "a\nb", "\ud800")),
    ("cost_name", 5, "one line of text"),
    *((name, 1, "True or False") for name in ("trims", "carries", "reads_clock", "joint")),
    ("reads_clock", np.bool_(True), "True or False"),
    *(("limited", value, "limited(3)") for value in (lambda self, depth: None, lambda self, depth: self)),
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
    assert text.startswith("Odd") and message in text and "\n" not in text


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (Mine, "expected a policy, not the class Mine; write Mine(...)"),
        (None, "expected a StopPolicy, not None"),
        ("fixed:4", "expected a StopPolicy, not the str 'fixed:4'"),
        (
            dataclass(frozen=True)(type("Frozen", (Mine,), {}))(),
            "Frozen: ",
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
    with pytest.raises(PolicyError, match=r"^Odd\.features: .*did you mean 'entropy'"):
        enter(made("features", ("entrpy",)))
    with pytest.raises(PolicyError, match=r"^expected a policy, not the class Confidence; write Confidence\(\.\.\.\)$"):
        enter(Confidence)
