"""Two reports: paired over common prompts, without intervals elsewhere."""

from __future__ import annotations

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
from specstop.train.evaluate.report_comparison import Change, ReportComparison, compare_reports, read_report
from specstop.train.replay.arrays import trace_arrays
from specstop.train.replay.rounds import scaled
from specstop.train.replay.run import replay
from timed import timed_profile


def compare(one: Path, two: Path) -> ReportComparison:
    return compare_reports(read_report(one), read_report(two))


def change(found: ReportComparison, name: str) -> Change:
    return next(x for x in found.changes if x.name == name)


PROMPTS = [f"p{i}" for i in range(20)]
LINES = ("plain decoding", "best fixed", "mine", "oracle bound")


def line(name: str, rate: float, low: float, value: float, high: float) -> dict[str, Any]:
    ratio = {"value": value, "low": low, "high": high}
    kind = "bound" if "bound" in name else "rule"
    return {"name": name, "kind": kind, "tokens_per_s": rate, "to_best_fixed": ratio, "note": ""}


def written(folder: Path, scale: float = 1.0, details: Any = None, **facts: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [line(name, 100.0 * scale + at, 0.9 * scale, 1.0 * scale, 1.1 * scale) for at, name in enumerate(LINES)]
    base = {
        "traces": "a",
        "prompts": 20,
        "temperature": 0.7,
        "pair": {"target": "1", "draft": "2"},
        "profile": {"device": "cpu"},
    }
    raw = {
        "schema": REPORT_SCHEMA,
        "kind": "report",
        "lines": lines,
        "facts": {**base, **facts},
        "details": details or {},
    }
    (folder / "report.json").write_text(json.dumps(raw))
    return folder


def figures(
    prompts: list[str],
    seed: int,
    speed: float = 1.0,
    profile: str = "one",
    pace: float = 0.0,
    is_timed: bool = True,
    pace_error: float = 0.0,
    units: list[str] | None = None,
) -> dict[str, Any]:
    """Return figures by prompt.

    The draws of `profile` share a factor of standard deviation `pace`; the error of its mean pace is `pace_error`.
    """
    chance = np.random.default_rng(0)
    hard = {p: float(chance.uniform(1.0, 3.0)) for p in PROMPTS}
    noise = np.random.default_rng(seed)
    seconds = {
        name: [hard[p] / speed * float(noise.uniform(0.98, 1.02)) for p in prompts]
        for name in LINES
        if "bound" not in name
    }
    drawn = np.exp(pace * np.random.default_rng([len(profile), seed]).standard_normal(200)).tolist() if is_timed else []
    made = {
        "clusters": prompts,
        "units": units or prompts,
        "prompts": prompts,
        "tokens": [60.0] * len(prompts),
        "seconds": seconds,
        "profile": {
            "fingerprint": profile,
            "is_timed": is_timed,
            "pace_error": pace_error,
            "factors": dict.fromkeys(seconds, drawn),
        },
    }
    return {"per_prompt": made}


def test_a_report_and_itself_differ_in_nothing(tmp_path: Path) -> None:
    one = written(tmp_path / "a", details=figures(PROMPTS, 1))
    found = compare(one, one / "report.json")
    assert (found.prompts, found.differs, found.caveats) == (20, (), ())
    assert [x.name for x in found.changes] == list(LINES)
    for x in found.changes:
        assert x.before == x.after
        if "bound" not in x.name:
            assert x.speed is not None
            assert (x.speed.value, x.speed.low, x.speed.high) == (1.0, 1.0, 1.0)
            assert x.speed == x.over_best
    assert change(found, "oracle bound").speed is None


def test_groups_that_a_report_resampled_are_resampled_here(tmp_path: Path) -> None:
    groups = [f"g{at // 5}" for at in range(len(PROMPTS))]
    gains = []
    for name, units in (("p", None), ("g", groups)):
        sides = [
            written(tmp_path / f"{name}{seed}", details=figures(PROMPTS, seed, units=units if seed == 2 else None))
            for seed in (1, 2)
        ]
        gains.append(change(compare(*sides), "best fixed").speed)
    assert gains[0].value == gains[1].value and gains[0] != gains[1]


def test_paired_over_common_prompts_is_the_ratio_of_rates_there(tmp_path: Path) -> None:
    mine, other = figures(PROMPTS[:15], 1), figures(PROMPTS[5:][::-1], 2, speed=1.1)
    found = compare(written(tmp_path / "a", details=mine), written(tmp_path / "b", details=other))
    assert found.prompts == 10
    gain = change(found, "mine").speed
    common = PROMPTS[5:15]
    spent = [
        sum(
            s
            for p, s in zip(f["per_prompt"]["clusters"], f["per_prompt"]["seconds"]["mine"], strict=True)
            if p in common
        )
        for f in (mine, other)
    ]
    assert gain is not None
    assert gain.value == pytest.approx(spent[0] / spent[1])
    assert 1.07 < gain.low < gain.value < gain.high < 1.13
    # Prompts differ threefold, which pairing takes out.
    assert gain.high - gain.low < 0.06


@pytest.mark.parametrize("details", [None, figures(PROMPTS[:10], 1)], ids=["no figures", "other prompts"])
def test_without_common_prompts_there_is_no_interval(tmp_path: Path, details: Any) -> None:
    one = written(tmp_path / "a", details=details)
    found = compare(one, written(tmp_path / "b", 1.5, details=figures(PROMPTS[11:], 1)))
    mine = change(found, "mine")
    assert (found.prompts, mine.speed, found.caveats) == (0, None, ())
    assert mine.over_best is not None
    assert (mine.over_best.value, mine.over_best.low) == (pytest.approx(1.5), None)
    assert "no common prompts" in found.section()["text"]


def test_what_differs_is_named(tmp_path: Path) -> None:
    one = written(tmp_path / "a")
    two = written(tmp_path / "b", temperature=0.0, pair={"target": "1", "draft": "9"}, profile={"device": "cuda"})
    assert compare(one, two).differs == (
        ("temperature", "0.7", "0.0"),
        ("pair: draft", "2", "9"),
        ("profile: device", "cpu", "cuda"),
    )


def test_lines_of_one_report_alone_are_shown(tmp_path: Path) -> None:
    one, two = written(tmp_path / "a"), written(tmp_path / "b")
    raw = json.loads((two / "report.json").read_text())
    raw["lines"][2]["name"] = "other"
    (two / "report.json").write_text(json.dumps(raw))
    found = compare(one, two)
    assert {x.name for x in found.changes} == {*LINES, "other"}
    assert (change(found, "mine").after, change(found, "other").before) == (None, None)
    assert change(found, "mine").speed is None
    section = found.section()
    assert "mine (before)" in section["text"] and "other (now)" in section["text"]
    json.dumps(section, allow_nan=False)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: [], "expected a report of `specstop evaluate`"),
        (lambda raw: {**raw, "kind": "profile"}, "expected a report of `specstop evaluate`"),
        (lambda raw: {**raw, "schema": 9}, "schema 2"),
        (lambda raw: {k: v for k, v in raw.items() if k != "lines"}, r"damaged .KeyError.'lines'.."),
        (lambda raw: {**raw, "lines": [{**raw["lines"][0], "tokens_per_s": "fast"}]}, "damaged .ValueError"),
    ],
)
def test_a_damaged_report_is_one_clear_line(tmp_path: Path, damage: Any, message: str) -> None:
    good, bad = written(tmp_path / "a"), written(tmp_path / "b")
    raw = json.loads((bad / "report.json").read_text())
    (bad / "report.json").write_text(json.dumps(damage(raw)))
    with pytest.raises(InputError, match=message) as caught:
        compare(good, bad)
    assert "\n" not in str(caught.value)


def test_a_missing_report_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere, which does not exist"):
        read_report(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"empty/report.json, which does not exist"):
        read_report(tmp_path / "empty")
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(InputError, match="cannot be read"):
        read_report(tmp_path / "x.json")


# Two profiles


def test_the_error_of_one_profile_cancels_and_that_of_two_does_not(tmp_path: Path) -> None:
    """Known up to 4% each: on one profile B / A is as certain as prompts are, on two up to 4% times the root of 2."""

    def gain(name: str, **options: Any) -> tuple[float, float]:
        one = written(tmp_path / name / "a", details=figures(PROMPTS, 1, **{**options, "profile": "one"}))
        details = figures(PROMPTS, 1, 1.01, **options)
        noise = np.random.default_rng(5).uniform(0.98, 1.02, len(PROMPTS))
        seconds = details["per_prompt"]["seconds"]
        seconds["mine"] = (np.array(seconds["mine"]) * noise).tolist()
        found = change(compare(one, written(tmp_path / name / "b", details=details)), "mine").speed
        assert found is not None and found.low is not None and found.high is not None
        return found.low, found.high

    exact, shared = gain("exact", profile="one"), gain("shared", profile="one", pace=0.04)
    assert shared == pytest.approx(exact)
    low, high = np.log(gain("two", profile="another", pace=0.04))
    assert high - low == pytest.approx(2 * 1.96 * 0.04 * 2**0.5, rel=0.2)
    assert np.log(exact[1] / exact[0]) < 0.25 * (high - low)


def test_a_pace_that_all_rounds_share_cancels_in_ratios_to_the_best_fixed_length(tmp_path: Path) -> None:
    one = written(tmp_path / "a", details=figures(PROMPTS, 1, pace=0.04))
    two = written(tmp_path / "b", details=figures(PROMPTS, 1, 1.04, profile="another", pace=0.04))
    mine = change(compare(one, two), "mine")
    assert mine.speed is not None and mine.speed.value == pytest.approx(1.04)
    assert mine.speed.low is not None and mine.speed.low < 1.0
    over = mine.over_best
    assert over is not None
    assert (over.value, over.low, over.high) == pytest.approx((1.0, 1.0, 1.0))


def test_the_mean_paces_of_two_profiles_have_errors_of_their_own(tmp_path: Path) -> None:
    one = written(tmp_path / "a", details=figures(PROMPTS, 1, pace_error=0.03))
    for name, profile, expected in (("b", "another", 0.03 * 2**0.5), ("c", "one", 0.0)):
        details = figures(PROMPTS, 1, 1.01, profile=profile, pace_error=0.03)
        gain = change(compare(one, written(tmp_path / name, details=details)), "mine").speed
        assert gain is not None and gain.low is not None and gain.high is not None
        assert np.log(gain.high / gain.low) == pytest.approx(2 * 2.15 * expected, rel=0.1, abs=1e-9)


@pytest.mark.parametrize("profile", ["one", "another"])
def test_a_profile_without_timings_is_named(tmp_path: Path, profile: str) -> None:
    one, two = figures(PROMPTS, 1), figures(PROMPTS, 2, profile=profile, is_timed=False)
    if profile == "one":
        one["per_prompt"]["profile"] = two["per_prompt"]["profile"]
    found = compare(written(tmp_path / "a", details=one), written(tmp_path / "b", details=two))
    untimed = [caveat for caveat in found.caveats if "no repeated timings" in caveat]
    assert len(untimed) == (2 if profile == "one" else 1) and "later" in untimed[-1]


def test_prompts_are_paired_by_their_text(tmp_path: Path) -> None:
    one, two = figures(PROMPTS, 1), figures(PROMPTS, 2)
    two["per_prompt"]["prompts"] = PROMPTS[::-1]
    found = compare(written(tmp_path / "a", details=one), written(tmp_path / "b", details=two))
    again = compare(tmp_path / "a", written(tmp_path / "c", details=figures(PROMPTS, 2)))
    assert found.changes == again.changes and found.prompts == len(PROMPTS)


@pytest.fixture(scope="module")
def machine(full_profile: Profile) -> Profile:
    """True costs of a machine."""
    return full_profile.with_decisions({"confidence": 5e-5})


@pytest.fixture(scope="module")
def reports(sides: tuple[Trace, Trace], machine: Profile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Reports of one policy on profiles of one machine: `one` and `two` timed it on their own, `again` is `one` once more."""
    folder = tmp_path_factory.mktemp("reports")
    timed = {seed: timed_profile(machine, ["confidence"], pace=0.06, jitter=0.1, seed=seed) for seed in (1, 4)}
    for name, profile, seed in (
        ("one", timed[1], 0),
        ("again", timed[1], 1),
        ("two", timed[4], 0),
        ("none", machine, 0),
    ):
        profile.save(folder / f"{name}.json")
        profile = Profile.load(folder / f"{name}.json")
        evaluate(sides[1], profile, [Confidence(0.6, DEPTH)], out=folder / name, seed=seed, sweep=False)
    return folder


def test_two_timings_of_one_machine_do_not_differ(reports: Path) -> None:
    found = compare(reports / "one", reports / "two")
    assert len(found.caveats) == 1 and "changes of the machine" in found.caveats[0]
    plain = change(found, "plain decoding").speed
    assert plain is not None and abs(plain.value - 1.0) > 0.02
    for line in found.changes:
        for ratio in (line.speed, line.over_best):
            assert ratio is not None and ratio.low is not None and ratio.high is not None
            assert ratio.low <= 1.0 <= ratio.high, line.name


def test_one_profile_has_the_same_draws_in_every_report(reports: Path) -> None:
    """Whatever the seed: lines that are the same differ in nothing."""
    found = compare(reports / "one", reports / "again")
    assert found.caveats == ()
    for line in found.changes:
        assert line.speed is not None
        assert (line.speed.value, line.speed.low, line.speed.high) == pytest.approx((1.0, 1.0, 1.0), abs=1e-8)


def test_a_report_holds_what_each_draw_of_the_timings_changes(reports: Path, sides: tuple[Trace, Trace]) -> None:
    """The seconds of the texts, round by round, under the draw over those under the profile as measured."""
    profile, arrays = Profile.load(reports / "one.json"), trace_arrays(sides[1])
    report, drawn = read_report(reports / "one"), ProfileBootstrap(profile).profiles
    factors = report["details"]["per_prompt"]["profile"]["factors"]
    assert set(factors) == {line["name"] for line in report["lines"]}
    for name, policy in (("plain decoding", FixedLength(0)), ("confidence:0.6", Confidence(0.6, DEPTH))):
        rounds = replay(arrays, policy, profile)
        measured, *under = (float(rounds.text_seconds(costs).sum()) for costs in (profile, *drawn))
        assert factors[name] == pytest.approx([seconds / measured for seconds in under], abs=1e-8)


def test_costs_that_nobody_timed_are_no_certain_ones(reports: Path) -> None:
    found = compare(reports / "one", reports / "none")
    assert "later report's profile has no repeated" in found.caveats[0]


def test_the_fingerprint_of_a_profile_is_that_of_its_model_calls(machine: Profile) -> None:
    timed = timed_profile(machine, ["confidence"], jitter=0.1)
    assert timed.fingerprint == timed.with_decisions({"mine": 1e-4}).fingerprint
    others = [timed_profile(machine, jitter=0.1, seed=1), scaled(timed, draft=2.0), machine]
    assert len({timed.fingerprint, *(other.fingerprint for other in others)}) == 4
