"""Two reports side by side: paired where they can be, honest where they cannot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contract_policies import DEPTH
from specstop.collect.store.folder import Trace
from specstop.policies.errors import InputError
from specstop.policies.fixed import Confidence, FixedLength
from specstop.policies.profile import Profile
from specstop.train.evaluate.evaluate import evaluate
from specstop.train.evaluate.pricing import ProfileBootstrap
from specstop.train.evaluate.records import REPORT_SCHEMA
from specstop.train.replay.log import play, scaled
from specstop.train.replay.traces.arrays import trace_arrays
from specstop.train.report.comparing.compare import DIFFERENT, PAIRED, SAME, UNKNOWN, UNPAIRED, compare
from specstop.train.report.comparing.read import per_prompt_figures, read_report
from timed import timed_profile

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
    made = per_prompt_figures(
        prompts,
        [60.0] * len(prompts),
        seconds,
        prompt_ids=prompts,
        fingerprint=profile,
        is_timed=is_timed,
        pace_error=pace_error,
        factors=dict.fromkeys(seconds, drawn),
        units=units or prompts,
    )
    return {"per_prompt": made}


def test_a_report_beside_itself_differs_in_nothing(tmp_path: Path) -> None:
    one = written(tmp_path / "a", details=figures(PROMPTS, 1))
    found = compare(one, one / "report.json")
    assert (found.method, found.prompts, found.differs) == (PAIRED, 20, ())
    assert [x.name for x in found.lines] == list(LINES)
    for x in found.lines:
        assert x.rate_a == x.rate_b
        assert x.overlap
        if x.kind != "bound":
            assert x.gain is not None
            assert (x.gain.value, x.gain.low, x.gain.high) == (1.0, 1.0, 1.0)
            assert x.gain == x.gain_over_best
    assert found.line("oracle bound").gain is None
    assert (found.profiles, found.caveats) == (SAME, ())


def test_groups_that_a_report_resampled_are_resampled_here(tmp_path: Path) -> None:
    groups = [f"g{at // 5}" for at in range(len(PROMPTS))]
    gains = []
    for name, units in (("p", None), ("g", groups)):
        sides = [
            written(tmp_path / f"{name}{seed}", details=figures(PROMPTS, seed, units=units if seed == 2 else None))
            for seed in (1, 2)
        ]
        gains.append(compare(*sides).line("best fixed").gain)
    assert gains[0].value == gains[1].value and gains[0] != gains[1]


def test_paired_over_common_prompts_is_the_ratio_of_rates_there(tmp_path: Path) -> None:
    mine, other = figures(PROMPTS[:15], 1), figures(PROMPTS[5:][::-1], 2, speed=1.1)
    found = compare(written(tmp_path / "a", details=mine), written(tmp_path / "b", details=other))
    assert (found.method, found.prompts) == (PAIRED, 10)
    gain = found.line("mine").gain
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
    blind = compare(written(tmp_path / "c"), written(tmp_path / "d", 1.1)).line("mine").gain_over_best
    assert blind is not None
    assert blind.high - blind.low > 3 * (gain.high - gain.low)


def test_unpaired_says_why_and_combines_both_intervals(tmp_path: Path) -> None:
    one, two = written(tmp_path / "a"), written(tmp_path / "b", 1.5, details=figures(PROMPTS, 1))
    found = compare(one, two)
    assert (found.method, found.prompts) == (UNPAIRED, 0)
    assert found.why == f"{one / 'report.json'} holds no figures by prompt"
    mine = found.line("mine")
    assert mine.overlap is False
    assert mine.gain is None and mine.gain_over_best is not None
    assert (found.profiles, found.caveats) == (UNKNOWN, ())
    low, high = np.hypot(np.log(0.9), np.log(1.1)), np.hypot(np.log(1.1), np.log(0.9))
    expected = (1.5, 1.5 * np.exp(-low), 1.5 * np.exp(high))
    combined = mine.gain_over_best
    assert (combined.value, combined.low, combined.high) == pytest.approx(expected)
    apart = (
        written(tmp_path / "c", details=figures(PROMPTS[:10], 1)),
        written(tmp_path / "d", details=figures(PROMPTS[11:], 1)),
    )
    assert compare(*apart).method == UNPAIRED
    assert "0 prompts in common" in compare(*apart).why


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
    assert [x.name for x in found.lines] == [*LINES, "other"]
    assert (found.line("mine").rate_b, found.line("other").rate_a) == (None, None)
    assert found.line("mine").gain is None
    json.dumps(found.to_dict(), allow_nan=False)


def spoiled(raw: dict[str, Any], change: str) -> Any:
    if change == "list":
        return []
    if change == "kind":
        raw["kind"] = "profile"
    if change == "schema":
        raw["schema"] = 9
    if change == "lines":
        del raw["lines"]
    if change == "number":
        raw["lines"][1]["tokens_per_s"] = "fast"
    if change == "ratio":
        del raw["lines"][1]["to_best_fixed"]["low"]
    if change == "by prompt":
        raw["details"] = {"per_prompt": {**figures(PROMPTS, 1)["per_prompt"], "tokens": [1.0]}}
    if change == "profile":
        made = figures(PROMPTS, 1)["per_prompt"]
        del made["profile"]
        raw["details"] = {"per_prompt": made}
    if change == "draws":
        made = figures(PROMPTS, 1)["per_prompt"]
        made["profile"]["factors"]["mine"] = [1.0]
        raw["details"] = {"per_prompt": made}
    if change == "seconds":
        made = figures(PROMPTS, 1)["per_prompt"]
        made["seconds"]["mine"][3] = 0.0
        raw["details"] = {"per_prompt": made}
    return raw


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("list", "expected a report of `specstop evaluate`"),
        ("kind", "expected a report of `specstop evaluate`"),
        ("schema", "has schema 9, but this specstop reads schema 2"),
        ("lines", r"is mangled \(entry 'lines'\)"),
        ("number", "is mangled .'fast' in the line 'best fixed' is no number"),
        ("ratio", r"is mangled \(entry 'low'\)"),
        ("by prompt", "is mangled .figures by prompt of other lengths"),
        ("seconds", "not above 0"),
        ("profile", r"is mangled \(entry 'profile'\)"),
        ("draws", "is mangled .lines with other numbers of draws"),
    ],
)
def test_a_mangled_report_is_one_clear_line(tmp_path: Path, change: str, message: str) -> None:
    good, bad = written(tmp_path / "a"), written(tmp_path / "b")
    raw = json.loads((bad / "report.json").read_text())
    (bad / "report.json").write_text(json.dumps(spoiled(raw, change)))
    with pytest.raises(InputError, match=message) as caught:
        compare(good, bad)
    assert "\n" not in str(caught.value)
    assert "b/report.json" in str(caught.value)


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
        found = compare(one, written(tmp_path / name / "b", details=details)).line("mine").gain
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
    mine = compare(one, two).line("mine")
    assert mine.gain is not None and mine.gain.value == pytest.approx(1.04)
    assert mine.gain.low is not None and mine.gain.low < 1.0
    over = mine.gain_over_best
    assert over is not None
    assert (over.value, over.low, over.high) == pytest.approx((1.0, 1.0, 1.0))


def test_the_mean_paces_of_two_profiles_have_errors_of_their_own(tmp_path: Path) -> None:
    one = written(tmp_path / "a", details=figures(PROMPTS, 1, pace_error=0.03))
    for name, profile, expected in (("b", "another", 0.03 * 2**0.5), ("c", "one", 0.0)):
        details = figures(PROMPTS, 1, 1.01, profile=profile, pace_error=0.03)
        gain = compare(one, written(tmp_path / name, details=details)).line("mine").gain
        assert gain is not None and gain.low is not None and gain.high is not None
        assert np.log(gain.high / gain.low) == pytest.approx(2 * 2.15 * expected, rel=0.1, abs=1e-9)


@pytest.mark.parametrize(("paired", "profile"), [(True, "one"), (True, "another"), (False, "one")])
def test_a_profile_without_timings_is_named(tmp_path: Path, paired: bool, profile: str) -> None:
    one, two = figures(PROMPTS, 1), figures(PROMPTS, 2, profile=profile, is_timed=False)
    if profile == "one":
        one["per_prompt"]["profile"] = two["per_prompt"]["profile"]
    names = PROMPTS if paired else [f"{p}, elsewhere" for p in PROMPTS]
    two["per_prompt"]["clusters"] = names
    found = compare(written(tmp_path / "a", details=one), written(tmp_path / "b", details=two))
    assert found.method == (PAIRED if paired else UNPAIRED)
    expected = "profile of A and B kept no" if profile == "one" else "profile of B kept no"
    assert expected in found.caveats[0]
    assert found.profiles == (SAME if profile == "one" else DIFFERENT)


def test_prompts_are_paired_by_their_text(tmp_path: Path) -> None:
    one, two = figures(PROMPTS, 1), figures(PROMPTS, 2)
    two["per_prompt"]["prompts"] = PROMPTS[::-1]
    found = compare(written(tmp_path / "a", details=one), written(tmp_path / "b", details=two))
    again = compare(tmp_path / "a", written(tmp_path / "c", details=figures(PROMPTS, 2)))
    assert found.lines == again.lines and found.prompts == len(PROMPTS)


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
    assert (found.method, found.profiles) == (PAIRED, DIFFERENT)
    assert len(found.caveats) == 1 and "not changes of the machine" in found.caveats[0]
    plain = found.line("plain decoding").gain
    assert plain is not None and abs(plain.value - 1.0) > 0.02
    for line in found.lines:
        for ratio in (line.gain, line.gain_over_best):
            assert ratio is not None and ratio.low is not None and ratio.high is not None
            assert ratio.low <= 1.0 <= ratio.high, line.name


def test_one_profile_has_the_same_draws_in_every_report(reports: Path) -> None:
    """Whatever the seed: lines that are the same differ in nothing."""
    found = compare(reports / "one", reports / "again")
    assert (found.profiles, found.caveats) == (SAME, ())
    for line in found.lines:
        assert line.gain is not None
        assert (line.gain.value, line.gain.low, line.gain.high) == pytest.approx((1.0, 1.0, 1.0), abs=1e-8)


def test_a_report_holds_what_each_draw_of_the_timings_changes(reports: Path, sides: tuple[Trace, Trace]) -> None:
    """The seconds of the texts, round by round, under the draw over those under the profile as measured."""
    profile, arrays = Profile.load(reports / "one.json"), trace_arrays(sides[1])
    factors, drawn = read_report(reports / "one").factors, ProfileBootstrap(profile).profiles
    assert set(factors) == {line["name"] for line in read_report(reports / "one").lines.values()}
    for name, policy in (("plain decoding", FixedLength(0)), ("confidence:0.6", Confidence(0.6, DEPTH))):
        rounds = play(arrays, policy, profile).rounds
        measured, *under = (float(rounds.of_texts(costs, arrays.prompt_tokens).sum()) for costs in (profile, *drawn))
        assert factors[name] == pytest.approx([seconds / measured for seconds in under], abs=1e-8)


def test_costs_that_nobody_timed_are_no_certain_ones(reports: Path) -> None:
    found = compare(reports / "one", reports / "none")
    assert found.profiles == DIFFERENT
    assert "profile of B kept no" in found.caveats[0]


def test_the_fingerprint_of_a_profile_is_that_of_its_model_calls(machine: Profile) -> None:
    timed = timed_profile(machine, ["confidence"], jitter=0.1)
    assert timed.fingerprint == timed.with_decisions({"mine": 1e-4}).fingerprint
    others = [timed_profile(machine, jitter=0.1, seed=1), scaled(timed, draft=2.0), machine]
    assert len({timed.fingerprint, *(other.fingerprint for other in others)}) == 4
