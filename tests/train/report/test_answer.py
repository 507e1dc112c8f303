"""What a report answers: what to deploy and why, and what is wrong with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from specstop.decode.compare.intervals import Ratio, Resamples
from specstop.train.report.answer import answer, findings, why
from specstop.train.report.insight import StopCost
from specstop.train.report.records import Line


def line(name: str, kind: str, rate: float) -> Line:
    one = Ratio(rate, rate, rate)
    return Line(name, kind, 100.0 * rate, one, one, one)


def spread(boot: Resamples, low: float, high: float) -> Any:
    count = 1 + boot.replicates + boot.prompts
    values = np.linspace(low, high, count)
    values[0] = (low + high) / 2
    return values


BOOT = Resamples([str(i) for i in range(8)], 0)
FIXED = [line("plain decoding", "fixed", 1.0), line("best fixed", "fixed", 1.5)]


def test_a_policy_is_deployed_only_where_it_is_clear() -> None:
    lines = [*FIXED, line("quick", "learned", 1.62), line("sure", "rule", 1.6)]
    to_best = {"quick": spread(BOOT, 0.95, 1.21), "sure": spread(BOOT, 1.02, 1.11)}
    found = answer(lines, "fixed:3", BOOT, to_best)
    assert found is not None
    assert (found.deploy, found.use, found.candidate, found.above) == (True, "sure", "sure", 1.0)
    assert found.headline.startswith("Deploy sure: 1.60 times as fast as plain decoding")
    unsure = answer(lines, "fixed:3", BOOT, {**to_best, "sure": spread(BOOT, 0.99, 1.14)})
    assert unsure is not None
    assert (unsure.deploy, unsure.use, unsure.candidate) == (False, "fixed:3", "quick")
    assert unsure.headline.startswith("Do not deploy a policy here, use fixed:3: 1.50 times")
    assert "not clear of 1" in unsure.headline
    assert unsure.above == pytest.approx(0.81, abs=0.01)
    assert "in 80.8%" in unsure.sure or "in 80.7%" in unsure.sure


def test_slower_policies_and_few_prompts_are_said_to_be_so() -> None:
    lines = [*FIXED, line("x", "learned", 1.4)]
    slow = answer(lines, "fixed:3", BOOT, {"x": spread(BOOT, 0.9, 0.97)})
    assert slow is not None
    assert slow.headline.endswith("below 1.")
    assert slow.sure == "x is ahead of the best fixed length (fixed:3) in none of 2,000 resamples of the 8 prompts."
    few = Resamples([str(i) for i in range(7)], 0)
    found = answer(lines, "fixed:3", few, {"x": spread(few, 1.01, 1.05)})
    assert found is not None
    assert (found.deploy, found.use) == (False, "fixed:3")
    assert found.headline.endswith("from too few prompts.")
    assert found.sure.endswith("fewer than 8 are too few to say.")


def test_on_trees_the_best_static_tree_is_the_rival() -> None:
    lines = [*FIXED, line("best static tree", "static", 1.7), line("x", "learned", 1.6)]
    found = answer(lines, "fixed:3", BOOT, {"x": spread(BOOT, 0.9, 0.97)})
    assert found is not None
    assert (found.deploy, found.use) == (False, "best static tree")
    assert "the best fixed length (fixed:3) and the best static tree" in found.headline


def test_where_none_pays_the_answer_speaks_of_a_policy_that_was_given() -> None:
    lines = [*FIXED, line("Hugging Face default", "rule", 1.5), line("mine", "rule", 1.4)]
    to_best = {name: spread(BOOT, 0.9, 0.97) for name in ("Hugging Face default", "mine")}
    found = answer(lines, "fixed:3", BOOT, to_best)
    assert found is not None
    assert (found.deploy, found.candidate) == (False, "mine")
    assert "The fastest policy given, mine, is 0." in found.headline


def test_without_a_policy_there_is_no_answer() -> None:
    assert answer(FIXED, "fixed:3", BOOT, {}) is None


def stop(name: str, *ms: float) -> StopCost:
    return StopCost(name, 10, 1, 1, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, (ms[0], ms[1], ms[2], 0.0))


@pytest.mark.parametrize(
    ("mine", "words"),
    [
        (
            (0.1, 0.2, 0.05),
            ("avoids 50%", "10.0 ms (best fixed: 20.0)", "20.0 ms (40.0)", "5.0 ms in", "leaves a gain"),
        ),
        ((0.3, 0.2, 0.5), ("avoids 17%", "which is more than it saves")),
        ((0.5, 0.4, 0.0), ("adds 50%",)),
    ],
)
def test_why_says_what_stops_and_decisions_cost(mine: tuple[float, ...], words: tuple[str, ...]) -> None:
    text = " ".join(why("x", [stop("best fixed", 0.2, 0.4, 0.0), stop("x", *mine)]))
    assert all(word in text for word in words), text


def test_findings_name_what_cannot_or_should_not_be() -> None:
    lines = [*FIXED, line("x", "learned", 1.6), line("y", "rule", 1.4)]
    above, below = spread(BOOT, 1.01, 1.05), spread(BOOT, 0.9, 0.95)
    found = findings(lines, BOOT, ["x"], {"x": above, "y": below, "best fixed": above}, {"x": above, "y": below})
    assert len(found) == 3
    assert "x is faster than the oracle bound" in found[0]
    assert found[1].startswith("x is above the achievable estimate beyond its interval (1.030 times")
    assert found[2].startswith("y is slower than the best static tree")
