"""What a report answers: what to deploy and why, and what is wrong with it."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from specstop.decode.benchmark import Ratio
from specstop.policies.errors import InputError
from specstop.policies.measurements import Noise
from specstop.train.evaluate.records import DEPLOY, INCONCLUSIVE, NOISY, REFUSE, TOO_FEW, Line
from specstop.train.evaluate.statistics import Clusters, form_clusters
from specstop.train.evaluate.verdict import answer, doubts, findings, verdict
from synthetic import synthetic_trace


def line(name: str, kind: str, rate: float) -> Line:
    one = Ratio(rate, rate, rate)
    return Line(name, kind, 100.0 * rate, one, one, one)


FIXED = [line("plain decoding", "fixed", 1.0), line("best fixed", "fixed", 1.5)]


def clusters(count: int) -> Clusters:
    return Clusters(tuple(map(str, range(count))))


def policy(name: str, kind: str, rate: float, ratio: Ratio, count: int = 40, **parts: Ratio) -> Line:
    return replace(line(name, kind, rate), to_rival=ratio, verdict=verdict(ratio, count, parts), parts=parts)


def test_a_policy_is_deployed_only_if_its_interval_lies_above_1() -> None:
    quick = policy("quick", "learned", 1.62, Ratio(1.08, 0.95, 1.21))
    sure = policy("sure", "rule", 1.6, Ratio(1.07, 1.02, 1.11))
    result = answer([*FIXED, quick, sure], "fixed:3", clusters(40))
    assert result is not None
    assert (result.verdict, result.deploy, result.use, result.candidate) == (DEPLOY, True, "sure", "sure")
    assert "1.60 times as fast as plain decoding" in result.headline and "1.020 to 1.110" in result.headline
    assert "all 2 policies at once" in result.interval and "40 prompts" in result.interval
    alone = answer([*FIXED, quick], "fixed:3", clusters(40))
    assert alone is not None
    assert (alone.verdict, alone.use, alone.candidate) == (INCONCLUSIVE, "fixed:3", "quick")
    # The lower end is log(1.08 / .95) = .128 from the value, which is log(1.08) = .077 from 1: 40 (.128 / .077)^2 prompts.
    needed = int(re.search(r"About (\d+) prompts", alone.headline)[1])  # type: ignore[index]
    assert needed == pytest.approx(40 * (math.log(1.08 / 0.95) / math.log(1.08)) ** 2, abs=1)


@pytest.mark.parametrize(
    ("ratio", "count", "parts", "expected"),
    [
        (Ratio(0.95, 0.9, 0.99), 40, {}, REFUSE),
        (Ratio(1.3, 1.288, 1.314), 19, {}, TOO_FEW),
        (Ratio(0.95, 0.9, 0.99), 1, {}, TOO_FEW),
        (Ratio(1.0, 0.9, 1.1), 40, {}, INCONCLUSIVE),
        (Ratio(1.1, 1.02, 1.2), 40, {"profile": Ratio(1.1, 0.99, 1.2)}, NOISY),
        (Ratio(1.1, 0.97, 1.2), 40, {"prompts": Ratio(1.1, 1.05, 1.2)}, NOISY),
        (Ratio(1.1, 1.02, 1.2), 40, {"profile": Ratio(1.1)}, DEPLOY),
    ],
)
def test_every_interval_has_a_verdict(ratio: Ratio, count: int, parts: dict[str, Ratio], expected: str) -> None:
    result = answer([*FIXED, policy("x", "learned", 1.4, ratio, count, **parts)], "fixed:3", clusters(count))
    assert result is not None
    assert result.verdict == expected
    assert (result.use, result.deploy) == (("x", True) if expected == DEPLOY else ("fixed:3", False))


def test_a_report_that_contradicts_itself_deploys_nothing() -> None:
    top = policy("x", "learned", 1.7, Ratio(1.1, 1.05, 1.2))
    quiet = Noise(10, 0.1, 0.0, 0.0, 0.0, 1)
    busy = replace(quiet, phases=12.0)
    for below, share, noise, word in (
        (["x"], 0.5, quiet, "faster than the oracle bound"),
        ([], 1.2, quiet, "at most 1 is possible"),
        ([], 0.5, busy, "13.0 times"),
        ([], 0.5, quiet, ""),
    ):
        lines = [*FIXED, replace(top, oracle_share=Ratio(share, share, share))]
        reasons = doubts(lines, below, SimpleNamespace(noise=noise))  # type: ignore[arg-type]
        result = answer(lines, "fixed:3", clusters(40), doubts=reasons)
        assert result is not None
        assert (result.verdict == NOISY) == bool(word) and word in result.headline
        assert result.deploy != bool(word)


def test_the_primary_policy_is_what_the_answer_is_about() -> None:
    mine = policy("mine", "learned", 1.5, Ratio(1.0, 0.9, 1.1))
    other = policy("other", "learned", 1.7, Ratio(1.1, 1.05, 1.2))
    result = answer([*FIXED, mine, other], "fixed:3", clusters(40), primary="mine")
    assert result is not None
    assert (result.verdict, result.candidate) == (INCONCLUSIVE, "mine")
    assert "primary policy" in result.headline and "primary policy" in result.interval


def test_on_trees_the_best_static_tree_is_the_rival() -> None:
    lines = [*FIXED, line("best static tree", "static", 1.7), policy("x", "learned", 1.6, Ratio(0.94, 0.9, 0.97))]
    result = answer(lines, "fixed:3", clusters(40))
    assert result is not None
    assert (result.deploy, result.use) == (False, "best static tree")
    assert "the best fixed length (fixed:3) and the best static tree" in result.headline


def test_clusters_are_prompts_or_groups() -> None:
    prompts, groups = [f"p{i}" for i in range(100)], [f"g{i // 20}" for i in range(100)]
    tokens = [50] * 100
    for by, count in (("prompt", 100), ("group", 5)):
        chosen = form_clusters(prompts, groups, tokens, by)
        assert (chosen.count, chosen.unit, chosen.largest) == (count, f"{by}s", 1 / count)
    # A prompt of two groups counts for one of them: clusters are disjoint.
    shared = form_clusters([*prompts[:99], "p0"], groups, tokens, "group")
    assert shared.of[0] == shared.of[99] == "g0" and shared.count == 5
    for by, names in (("groups", groups), ("group", [""] * 100)):
        with pytest.raises(InputError, match="cluster"):
            form_clusters(prompts, names, tokens, by)


def test_a_prompt_with_most_of_the_tokens_is_named() -> None:
    for longest, share in ((9, 0), (60, 23), (200, 50)):
        arrays = synthetic_trace([[0] * longest, *[[1] * 9] * 20], 3)
        chosen = form_clusters(arrays.clusters, arrays.groups, arrays.text_tokens.tolist())
        warnings = findings(SimpleNamespace(noise=None), chosen, arrays.prompt_ids)  # type: ignore[arg-type]
        assert len(warnings) == bool(share) and all(
            f"prompt '0' has {share}% of all tokens" in text for text in warnings
        )
        ratio = Ratio(1.1, 1.05, 1.2)
        top = replace(line("x", "rule", 1.6), to_rival=ratio, verdict=verdict(ratio, 21, None, chosen.largest))
        result = answer([*FIXED, top], "fixed:3", chosen)
        assert result is not None
        assert result.verdict == (TOO_FEW if share == 50 else DEPLOY)
        assert ("one has 50% of all tokens" in result.headline) == (share == 50)
