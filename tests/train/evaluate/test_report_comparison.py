"""A report beside an earlier one: paired over common prompts, without intervals elsewhere."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contract_policies import DEPTH
from specstop.collect.store import Trace
from specstop.policies.errors import InputError
from specstop.policies.fixed import Confidence, FixedLength
from specstop.policies.profile import Profile
from specstop.train.evaluate.evaluate import evaluate
from specstop.train.evaluate.pricing import ProfileBootstrap
from specstop.train.evaluate.records import REPORT_SCHEMA
from specstop.train.evaluate.report_comparison import compare_reports, read_report
from specstop.train.replay.arrays import trace_arrays
from specstop.train.replay.run import replay
from timed import timed_profile

PROMPTS = [f"p{i}" for i in range(20)]
LINES = ("plain decoding", "best fixed", "mine", "oracle bound")
Data = dict[str, Any]


def report(details: Data | None = None, scale: float = 1.0, **facts: Any) -> Data:
    """Return a report whose lines have the ratio `scale` to the best fixed length."""
    ratio = {"value": scale, "low": 0.9 * scale, "high": 1.1 * scale}
    lines = [{"name": name, "tokens_per_s": 100.0, "to_best_fixed": ratio} for name in LINES]
    base = {"traces": "a", "temperature": 0.7, "pair": {"target": "1", "draft": "2"}, "profile": {"device": "cpu"}}
    details = {} if details is None else {"per_prompt": details}
    return {"schema": REPORT_SCHEMA, "kind": "report", "lines": lines, "facts": base | facts, "details": details}


def figures(
    prompts: list[str], seed: int, speed: float = 1.0, profile: str = "one", pace: float = 0.0, is_timed: bool = True,
    pace_error: float = 0.0, units: list[str] | None = None,
) -> Data:  # fmt: skip
    """Return figures by prompt.

    The draws of `profile` share a factor of standard deviation `pace`; the error of its mean pace is `pace_error`.
    """
    hard = dict(zip(PROMPTS, np.random.default_rng(0).uniform(1.0, 3.0, len(PROMPTS)), strict=True))
    noise = np.random.default_rng(seed)
    seconds = {
        name: [hard[p] / speed * float(noise.uniform(0.98, 1.02)) for p in prompts]
        for name in LINES
        if "bound" not in name
    }
    drawn = np.exp(pace * np.random.default_rng([len(profile), seed]).standard_normal(200)).tolist() if is_timed else []
    timings = {"fingerprint": profile, "is_timed": is_timed, "pace_error": pace_error}
    return {
        "clusters": prompts, "units": units or prompts, "tokens": [60.0] * len(prompts), "seconds": seconds,
        "profile": {**timings, "factors": dict.fromkeys(seconds, drawn)},
    }  # fmt: skip


def changes(before: Data, after: Data) -> dict[str, tuple[Any, Any]]:
    """Return the ratios of tokens/s and of the ratios to the best fixed length by line."""
    return {name: (speed, over_best) for name, speed, over_best in compare_reports(before, after)["rows"]}


def speed(before: Data, after: Data) -> tuple[float, float, float]:
    """Return value and interval of tokens/s now / before."""
    ratio = changes(report(before), report(after))["mine"][0]
    return ratio["value"], ratio["low"], ratio["high"]


def test_a_report_and_itself_differ_in_nothing() -> None:
    one = report(figures(PROMPTS, 1))
    section = compare_reports(one, copy.deepcopy(one))
    assert section["text"] == "Ratios are over 20 common prompts. Also different: nothing."
    assert [row[0] for row in section["rows"]] == list(LINES)
    same = {"value": 1.0, "low": 1.0, "high": 1.0}
    assert all(row[1:] == (same, same) for row in section["rows"][:3]) and section["rows"][3][1:] == ("-", "-")


def test_the_change_is_the_ratio_of_rates_over_common_prompts() -> None:
    before, after = figures(PROMPTS[:15], 1), figures(PROMPTS[5:][::-1], 2, speed=1.1)
    section = compare_reports(report(before), report(after))
    assert "10 common prompts" in section["text"]
    common = set(PROMPTS[5:15])
    spent = [
        sum(s for p, s in zip(f["clusters"], f["seconds"]["mine"], strict=True) if p in common) for f in (before, after)
    ]
    value, low, high = speed(before, after)
    assert value == pytest.approx(spent[0] / spent[1])
    # Prompts differ threefold, which pairing takes out.
    assert 1.07 < low < value < high < 1.13 and high - low < 0.06


@pytest.mark.parametrize("details", [None, figures(PROMPTS[:10], 1)], ids=["no figures", "other prompts"])
def test_without_common_prompts_there_is_no_interval(details: Data | None) -> None:
    before, after = report(details), report(figures(PROMPTS[11:], 1), 1.5)
    assert changes(before, after)["mine"] == ("-", {"value": pytest.approx(1.5), "low": None, "high": None})
    assert "no common prompts" in compare_reports(before, after)["text"]


def test_what_differs_is_named() -> None:
    other = report(temperature=0.0, pair={"target": "1", "draft": "9"}, profile={"device": "cuda"})
    other["lines"][2]["name"] = "other"
    section = compare_reports(report(), other)
    for text in (
        "temperature (0.7 before, 0.0 now)",
        "pair: draft (2 before, 9 now)",
        "profile: device (cpu before, cuda",
    ):
        assert text in section["text"]
    assert "mine (before)" in section["text"] and "other (now)" in section["text"] and len(section["rows"]) == 3


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: [], "expected a report"),
        (lambda raw: {**raw, "kind": "profile"}, "expected a report"),
        (lambda raw: {**raw, "schema": 9}, "schema"),
        (lambda raw: {k: v for k, v in raw.items() if k != "lines"}, "damaged"),
        (lambda raw: {**raw, "lines": [{**raw["lines"][0], "to_best_fixed": {"value": "fast"}}]}, "damaged"),
    ],
)
def test_a_damaged_report_is_refused_in_one_line(tmp_path: Path, damage: Any, message: str) -> None:
    (tmp_path / "report.json").write_text(json.dumps(damage(report())))
    with pytest.raises(InputError, match=message) as caught:
        compare_reports(report(), read_report(tmp_path))
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="does not exist"):
        read_report(tmp_path / "nowhere")


def test_the_error_of_one_profile_cancels_and_that_of_two_does_not() -> None:
    """Costs are known up to 4%: on one profile the change is as certain as prompts are, on two up to 4% times root 2."""

    def change(profile: str, pace: float) -> tuple[float, float, float]:
        after = figures(PROMPTS, 1, 1.01, profile=profile, pace=pace)
        noise = np.random.default_rng(5).uniform(0.98, 1.02, len(PROMPTS))
        after["seconds"]["mine"] = (np.array(after["seconds"]["mine"]) * noise).tolist()
        return speed(figures(PROMPTS, 1, pace=pace), after)

    exact, shared, two = change("one", 0.0), change("one", 0.04), change("another", 0.04)
    assert shared == pytest.approx(exact)
    assert np.log(two[2] / two[1]) == pytest.approx(2 * 1.96 * 0.04 * 2**0.5, rel=0.2)
    assert np.log(exact[2] / exact[1]) < 0.25 * np.log(two[2] / two[1])


@pytest.fixture(scope="module")
def reports(sides: tuple[Trace, Trace], full_profile: Profile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Reports on profiles of one machine: `one` and `two` are separate timings, `again` is `one`, `none` has no timings."""
    folder, machine = tmp_path_factory.mktemp("reports"), full_profile.with_decisions({"confidence": 5e-5})
    timed = {seed: timed_profile(machine, ["confidence"], pace=0.06, jitter=0.1, seed=seed) for seed in (1, 4)}
    for name, profile, seed in (
        ("one", timed[1], 0),
        ("again", timed[1], 1),
        ("two", timed[4], 0),
        ("none", machine, 0),
    ):
        profile.save(folder / f"{name}.json")
        evaluate(sides[1], folder / f"{name}.json", [Confidence(0.6, DEPTH)], out=folder / name, seed=seed)
    return folder


def test_two_timings_of_one_machine_do_not_differ(reports: Path) -> None:
    one, two, none = (read_report(reports / name) for name in ("one", "two", "none"))
    assert abs(changes(one, two)["plain decoding"][0]["value"] - 1.0) > 0.02
    for ratios in changes(one, two).values():
        assert all(ratio["low"] <= 1.0 <= ratio["high"] for ratio in ratios)
    assert "changes of the machine" in compare_reports(one, two)["text"]
    assert "later report's profile has no repeated" in compare_reports(one, none)["text"]


def test_one_profile_has_the_same_draws_in_every_report(reports: Path, sides: tuple[Trace, Trace]) -> None:
    """Whatever the seed, equal lines differ in nothing. The factors are those of the texts, priced round by round."""
    one, again = (read_report(reports / name) for name in ("one", "again"))
    for ratios in changes(one, again).values():
        assert tuple(ratios[0].values()) == pytest.approx((1.0, 1.0, 1.0), abs=1e-8)
    profile, arrays = Profile.load(reports / "one.json"), trace_arrays(sides[1])
    factors = one["details"]["per_prompt"]["profile"]["factors"]
    assert set(factors) == {line["name"] for line in one["lines"]}
    for name, policy in (("plain decoding", FixedLength(0)), ("confidence:0.6", Confidence(0.6, DEPTH))):
        rounds, drawn = replay(arrays, policy, profile), ProfileBootstrap(profile).profiles
        measured, *under = (float(rounds.text_seconds(costs).sum()) for costs in (profile, *drawn))
        assert factors[name] == pytest.approx([seconds / measured for seconds in under], abs=1e-8)
