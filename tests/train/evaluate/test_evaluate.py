"""`evaluate`: ratios and intervals that mean what they say, and three files."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from contract_policies import DEPTH
from specstop.collect.store import Trace
from specstop.decode.benchmark import Ratio
from specstop.policies.errors import InputError, SpecstopWarning, TraceError
from specstop.policies.fixed import Confidence, FixedLength
from specstop.policies.learned import LearnedPolicy
from specstop.policies.profile import Profile
from specstop.policies.published.smartspec import SmartSpec
from specstop.policies.rules import Threshold
from specstop.policies.storage import load_policy_folder, save_policy
from specstop.train.evaluate.evaluate import evaluate
from specstop.train.evaluate.records import Report
from specstop.train.replay.arrays import trace_arrays
from specstop.train.replay.bounds import oracle_seconds
from specstop.train.replay.run import replay

EXACT = 1e-12  # the same sums, in another order


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("report") / "out"


@pytest.fixture(scope="module")
def report(sides: tuple[Trace, Trace], full_profile: Profile, learned: LearnedPolicy, written: Path) -> Report:
    policies = [learned, FixedLength(2), Confidence(0.7, DEPTH)]
    return evaluate(sides[1], full_profile, policies, train_traces=sides[0], out=written)


def other(profile: Profile) -> Profile:
    return dataclasses.replace(profile, step_s=5 * profile.step_s)


def test_the_rules_and_bounds_of_every_report(report: Report) -> None:
    assert [(line.name, line.kind) for line in report.lines] == [
        ("plain decoding", "fixed"),
        ("best fixed", "fixed"),
        ("Hugging Face default", "rule"),
        ("confidence, tuned", "rule"),
        ("logistic", "learned"),
        ("fixed:2", "rule"),
        ("confidence:0.7", "rule"),
        ("oracle bound", "bound"),
    ]


def test_paths_and_specs_are_accepted_and_the_result_is_readable(
    sides: tuple[Trace, Trace], full_profile: Profile, learned: LearnedPolicy, tmp_path: Path
) -> None:
    full_profile.save(tmp_path / "profile.json")
    save_policy(learned, tmp_path / "policy")
    policies = ["confidence:0.7", tmp_path / "policy"]
    report = evaluate(str(sides[1].folder), tmp_path / "profile.json", policies, train_traces=sides[0].folder)
    same = evaluate(sides[1], full_profile, [Confidence(0.7, DEPTH), learned], train_traces=sides[0])
    assert report["logistic"] == same["logistic"], "a policy is named by what it is, not by its folder"
    assert report["confidence:0.7"].speedup == report["confidence:0.7"].to_rival
    rows = {row["policy"]: row for row in report.table}
    assert list(rows) == [line.name for line in report.lines]
    assert rows["logistic"]["vs_best_fixed"] == report["logistic"].to_best_fixed.value
    shown = repr(report).splitlines()
    table, headline = shown[:-1], shown[-1]
    assert all(len(row) <= 80 for row in table) and report.answer is not None and headline == report.answer.headline
    assert all(any(row.startswith(name) for row in table) for name in rows)
    html = report._repr_html_()
    assert html.count("<tr>") == len(rows) + 1 and "logistic" in html
    assert report.plot().axes
    with pytest.raises(KeyError, match="'mlp' is not in the report; it has plain decoding"):
        report["mlp"]


def test_values_are_ratios_of_sums_and_lie_within_their_intervals(
    report: Report, sides: tuple[Trace, Trace], full_profile: Profile, learned: LearnedPolicy
) -> None:
    arrays = trace_arrays(sides[1])
    rate = replay(arrays, learned, full_profile).rate
    line = report["logistic"]
    assert line.tokens_per_s == pytest.approx(rate, rel=EXACT)
    assert line.to_plain.value == pytest.approx(rate / report.fixed[0], rel=EXACT)
    assert line.to_best_fixed.value == pytest.approx(rate / max(report.fixed), rel=EXACT)
    bound = float(arrays.text_tokens.sum() / oracle_seconds(arrays, full_profile).sum())
    best = max(report.fixed)
    assert line.oracle_share.value == pytest.approx((rate - best) / (bound - best), rel=1e-9)
    for line in report.lines:
        for ratio in (line.to_plain, line.oracle_share):
            assert ratio.low <= ratio.value <= ratio.high
        # The best length is chosen again in each replicate, so the ratio to it leans down.
        assert line.to_best_fixed.low <= line.to_best_fixed.high
        assert line.to_best_fixed.low <= line.to_best_fixed.value
    spread = report["logistic"].to_plain
    assert 0.001 < spread.high - spread.low < 1


def test_a_policy_that_is_the_best_fixed_length_has_ratio_1(sides: tuple[Trace, Trace], full_profile: Profile) -> None:
    """The replicates are paired: a fixed length that is best in all of them has no spread against itself."""
    table = dataclasses.replace(full_profile.low, draft_s=(1.0, 1.0))
    costly = dataclasses.replace(full_profile, low=table, high=table)
    report = evaluate(sides[1], costly, [FixedLength(0), FixedLength(1)])
    for line in report.lines:
        if line.name != "oracle bound":
            assert line.oracle_share == Ratio(0.0, 0.0, 0.0), "the oracle gains nothing, of which no line has a share"
    for ratio in (report["fixed:0"].to_plain, report["fixed:0"].to_best_fixed):
        assert ratio == Ratio(1.0, 1.0, 1.0)
    line, best = report["fixed:0"], report["best fixed"]
    assert (line.tokens_per_s, line.to_plain) == (best.tokens_per_s, best.to_plain)


def test_counts_and_acceptance_are_those_of_the_replay(
    report: Report, sides: tuple[Trace, Trace], full_profile: Profile
) -> None:
    played, line = replay(trace_arrays(sides[1]), FixedLength(2), full_profile), report["fixed:2"]
    counts = [float(played.log[:, column].sum()) / len(played.log) for column in (2, 3, 4)]
    assert [line.drafted, line.verified, line.accepted] == pytest.approx(counts)
    assert line.block_efficiency == pytest.approx(played.block_efficiency)
    rows = sides[1].rows.with_format("numpy")
    length, cut = np.asarray(rows["accepted_length"][:]), np.asarray(rows["cut"][:])
    assert report.acceptance == pytest.approx([float((length[~cut] >= k).mean()) for k in range(1, DEPTH + 1)])


def test_conflicting_arguments_are_refused(sides: tuple[Trace, Trace], full_profile: Profile, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"prompts are in `train_traces` too"):
        evaluate(sides[1], full_profile, train_traces=sides[1])
    with pytest.raises(InputError, match="two policies are called 'fixed:2'"):
        evaluate(sides[1], full_profile, [FixedLength(2), FixedLength(2)])
    shutil.copytree(sides[1].folder, tmp_path / "trace")
    next((tmp_path / "trace" / "data").iterdir()).unlink()
    with pytest.raises(TraceError, match="not complete"):
        evaluate(tmp_path / "trace", full_profile)


def test_other_conditions_of_training_traces_are_warned_of(sides: tuple[Trace, Trace], full_profile: Profile) -> None:
    header = dataclasses.replace(sides[0].header, temperature=0.9)
    hotter = Trace(sides[0].folder, header, sides[0].rows)
    with pytest.warns(SpecstopWarning, match="train_traces: .* differs from `traces` in temperature"):
        evaluate(sides[1], full_profile, train_traces=hotter)


def test_a_report_never_replaces_what_it_is_made_from(
    sides: tuple[Trace, Trace], full_profile: Profile, learned: LearnedPolicy, tmp_path: Path
) -> None:
    fit, held = (copy.copy(trace) for trace in sides)
    for trace, name in ((fit, "fit"), (held, "held")):
        trace.folder = shutil.copytree(trace.folder, tmp_path / name)
    policy = load_policy_folder(save_policy(learned, tmp_path / "deep" / "policy"))
    full_profile.save(tmp_path / "costs" / "p.json")
    costs = Profile.load(tmp_path / "costs" / "p.json")
    before = sorted((p, p.read_bytes()) for p in tmp_path.rglob("*") if p.is_file())
    for out in ("", "fit", "held", "held/new", "deep", "deep/policy", "costs"):
        with pytest.raises(InputError, match="which the command reads"):
            evaluate(held, costs, [policy], train_traces=fit, out=tmp_path / out, overwrite=True)
    assert sorted((p, p.read_bytes()) for p in tmp_path.rglob("*") if p.is_file()) == before


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"temperature": 0.3}, "another temperature"),
        ({"temperature": 0.0}, "another temperature"),
        ({"verification": "rejection"}, "another verification"),
        ({"pair": {"target": "0"}}, "another pair"),
    ],
)
def test_a_policy_trained_for_something_else_is_warned_of(
    sides: tuple[Trace, Trace],
    full_profile: Profile,
    learned: LearnedPolicy,
    changes: dict[str, object],
    what: str,
) -> None:
    policy = learned.with_rule(learned.rule)
    policy.metadata = dataclasses.replace(learned.metadata, **changes)
    with pytest.warns(SpecstopWarning, match=f"logistic was trained for {what}") as caught:
        evaluate(sides[1], full_profile, [policy])
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_the_rate_is_solved_again_for_another_profile_only(
    sides: tuple[Trace, Trace], full_profile: Profile, learned: LearnedPolicy
) -> None:
    arrays = trace_arrays(sides[1])
    costs = other(full_profile)
    saved = replay(arrays, learned, costs).rate
    here = evaluate(sides[1], full_profile, [learned], train_traces=sides[0])["logistic"]
    assert here.note == ""
    blind = evaluate(sides[1], costs, [learned])["logistic"]
    assert "as saved" in blind.note
    assert blind.tokens_per_s == pytest.approx(saved, rel=EXACT)
    solved = evaluate(sides[1], costs, [learned], train_traces=sides[0])["logistic"]
    assert "solved for this profile" in solved.note
    assert solved.tokens_per_s != pytest.approx(saved, rel=1e-6)
    threshold = learned.with_rule(Threshold("survival", 0.4))
    line = evaluate(sides[1], costs, [threshold], train_traces=sides[0])["logistic"]
    assert line.note == ""
    assert line.tokens_per_s == pytest.approx(replay(arrays, threshold, costs).rate, rel=EXACT)


def test_a_policy_that_decides_by_costs_takes_those_of_the_profile(
    sides: tuple[Trace, Trace], full_profile: Profile
) -> None:
    # Drafting is so expensive here that none pays, which the costs that are assumed without a profile do not tell.
    steep = dataclasses.replace(full_profile, step_s=10 * full_profile.low.verify_s[0])
    steep = steep.with_decisions({"smartspec": 1e-6, "confidence": 1e-6})
    bare = evaluate(sides[1], steep, [SmartSpec(max_depth=DEPTH)])["smartspec:0.7"]
    told = evaluate(sides[1], steep, [SmartSpec(profile=steep, max_depth=DEPTH)])["smartspec:0.7"]
    assert dataclasses.replace(bare, note="") == told and bare.note == "decides by the costs of this profile"
    own = SmartSpec(draft=0.11, max_depth=DEPTH)
    assert bare.tokens_per_s > 1.5 * evaluate(sides[1], steep, [own])["smartspec:0.7"].tokens_per_s


def test_texts_without_an_uncut_anchor_give_a_report_without_nan(
    sides: tuple[Trace, Trace], full_profile: Profile, tmp_path: Path
) -> None:
    trace = sides[1]
    rows = trace.rows.remove_columns("cut").add_column("cut", [True] * len(trace.rows))
    evaluate(Trace(trace.folder, trace.header, rows), full_profile, out=tmp_path / "out")
    json.loads((tmp_path / "out" / "report.json").read_text(), parse_constant=pytest.fail)


def test_the_primary_policy_has_an_interval_of_one_policy(sides: tuple[Trace, Trace], full_profile: Profile) -> None:
    rules = [Confidence(threshold, DEPTH) for threshold in (0.3, 0.5, 0.7)]
    alone = evaluate(sides[0], full_profile, rules[:1])["confidence:0.3"]
    among = evaluate(sides[0], full_profile, rules)["confidence:0.3"]
    report = evaluate(sides[0], full_profile, rules, primary="confidence:0.3")
    named = report["confidence:0.3"]
    widths = [line.to_best_fixed.high - line.to_best_fixed.low for line in (named, alone, among)]
    assert widths[0] < widths[1] <= widths[2], "one policy, two with Hugging Face's default rule, four"
    assert report.answer is not None and report.answer.candidate == "confidence:0.3"
    with pytest.raises(InputError, match="primary"):
        evaluate(sides[0], full_profile, rules, primary="confidence:0.4")
