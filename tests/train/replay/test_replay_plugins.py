"""Plugins in replay: a failure is one line that ends it, and what a plugin writes into changes no figure."""

from __future__ import annotations

from typing import Any

import pytest
from specstop.collect.store import Trace
from specstop.policies.contract import Array, DraftStep, State, StopPolicy
from specstop.policies.errors import PolicyFailure
from specstop.policies.profile import Profile
from specstop.train.evaluate.evaluate import evaluate
from specstop.train.replay.arrays import TraceArrays, trace_arrays
from specstop.train.replay.run import replay


class Good(StopPolicy):
    """Drafts on after likely tokens."""

    features, name, max_depth = ("drawn_prob",), "mine", 4

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        return step.alive & (step.features[..., 0] > 0.3), state


METHODS = ("start", "keep", "select", "observe")


def fail(*args: Any) -> Any:
    raise SystemExit("bye")


@pytest.fixture(scope="module")
def arrays(traces: dict[float, Trace]) -> TraceArrays:
    return trace_arrays(traces[0.7])


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        *(({method: fail}, rf"^mine: {method}\(\) failed: SystemExit: bye$") for method in METHODS),
        ({"keep": lambda *args: 1 / 0}, r"^mine: keep\(\) failed: ZeroDivisionError: division by zero$"),
        ({"keep": lambda self, step, state: None}, r"^mine: keep\(\) must return \(mask, state\)"),
        (
            {"keep": lambda self, step, state: (step.alive[:1], state)},
            r"^mine: keep\(\) must return .*\(8, 1\), not .*\(1, 1\)$",
        ),
        ({"select": lambda self, tree, state: 3}, r"^mine: select\(\) must return a bool array.*, not int$"),
    ],
)
def test_a_failure_is_one_line_that_names_the_policy(
    arrays: TraceArrays, traces: dict[float, Trace], profile: Profile, methods: dict[str, Any], message: str
) -> None:
    policy = type("Bad", (Good,), methods)()
    with pytest.raises(PolicyFailure, match=message):
        replay(arrays, policy, profile)
    (failure,) = evaluate(traces[0.7], profile.with_decisions({"mine": 1e-5}), [policy]).failed
    assert failure.policy == "mine" and failure.file == __file__ and failure.line
