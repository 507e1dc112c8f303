"""Reports: the comparison of policies in one place and in several, as object, page, CSV and JSON."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
import shutil
from typing import Any

import pytest
from contract_policies import DEPTH
from specstop.decode.benchmark import Ratio
from specstop.policies import Confidence, FixedLength, InputError, TraceError
from specstop.policies.published.smartspec import SmartSpec
from specstop.policies.rules import Threshold
from specstop.train import oracle_seconds, read_report, trace_arrays
from specstop.train.evaluate.records import TOO_FEW
from specstop.train.evaluate.verdict import verdict
from specstop.train.fit.achievable import achievable_estimate
from specstop.train.fit.rules import fixed_grid
from specstop.train.replay.rounds import scale_costs

from specstop import Trace, evaluate, replay, save_policy

EXACT = 1e-12  # the same sums, in another order


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return tmp_path_factory.mktemp("report") / "out"


@pytest.fixture(scope="module")
def report(sides, full_profile, learned, written):
    policies = [learned, FixedLength(2), Confidence(0.7, DEPTH)]
    return evaluate(sides[1], full_profile, policies, train_traces=sides[0], out=written)


def test_paths_and_specs_are_accepted_and_the_report_is_displayed(sides, full_profile, learned, report, tmp_path):
    full_profile.save(tmp_path / "profile.json")
    policies = [save_policy(learned, tmp_path / "policy"), "fixed:2", "confidence:0.7"]
    fit, held = sides[0].folder, str(sides[1].folder)
    assert evaluate(held, tmp_path / "profile.json", policies, train_traces=fit).lines == report.lines
    names = [line.name for line in report.lines]
    baselines = ["plain decoding", "best fixed", "Hugging Face default", "confidence, tuned"]
    assert names == [*baselines, "logistic", "fixed:2", "confidence:0.7", "oracle bound"]
    rows = {row["policy"]: row for row in report.table}
    assert list(rows) == names and rows["logistic"]["vs_best_fixed"] == report["logistic"].to_best_fixed.value
    assert all(name in repr(report) and name in report._repr_html_() for name in names) and report.plot().axes
    with pytest.raises(KeyError, match="'mlp' is not in the report"):
        report["mlp"]


def test_values_are_ratios_of_sums_and_lie_within_their_intervals(report, sides, full_profile, learned):
    arrays, line = trace_arrays(sides[1]), report["logistic"]
    rate, best = replay(arrays, learned, full_profile).rate, max(report.fixed)
    assert line.tokens_per_s == pytest.approx(rate, rel=EXACT)
    assert line.to_plain.value == pytest.approx(rate / report.fixed[0], rel=EXACT)
    assert line.to_best_fixed.value == pytest.approx(rate / best, rel=EXACT)
    bound = float(arrays.text_tokens.sum() / oracle_seconds(arrays, full_profile).sum())
    assert line.oracle_share.value == pytest.approx((rate - best) / (bound - best), rel=1e-9)
    for line in report.lines:
        for ratio in (line.to_plain, line.oracle_share):
            assert ratio.low <= ratio.value <= ratio.high
        # The best length is chosen again in each replicate, which biases the ratio to it downwards.
        assert line.to_best_fixed.low <= line.to_best_fixed.value
    played, line = replay(arrays, FixedLength(2), full_profile), report["fixed:2"]
    counts = [float(played.log[:, column].sum()) / len(played.log) for column in (2, 3, 4)]
    assert [line.drafted, line.verified, line.accepted] == pytest.approx(counts)
    assert line.block_efficiency == pytest.approx(played.block_efficiency)


def test_a_policy_that_is_the_best_fixed_length_has_ratio_1(sides, full_profile):
    """With expensive drafts, plain decoding is the best in all replicates, and the oracle gains nothing."""
    table = dataclasses.replace(full_profile.low, draft_s=(1.0, 1.0))
    report = evaluate(sides[1], dataclasses.replace(full_profile, low=table, high=table), [FixedLength(0)])
    assert all(line.oracle_share == Ratio(0.0, 0.0, 0.0) for line in report.lines if line.kind != "bound")
    assert report["fixed:0"].to_plain == report["fixed:0"].to_best_fixed == Ratio(1.0, 1.0, 1.0)


def test_the_rate_of_a_policy_is_solved_again_for_another_profile_only(sides, full_profile, learned, report):
    costs = dataclasses.replace(full_profile, step_s=5 * full_profile.step_s)
    saved = replay(sides[1], learned, costs).rate
    assert report["logistic"].note == ""
    as_saved = evaluate(sides[1], costs, [learned])["logistic"]
    assert "as saved" in as_saved.note and as_saved.tokens_per_s == pytest.approx(saved, rel=EXACT)
    solved = evaluate(sides[1], costs, [learned], train_traces=sides[0])["logistic"]
    assert "solved for this profile" in solved.note and solved.tokens_per_s != pytest.approx(saved, rel=1e-6)
    threshold = learned.with_rule(Threshold("survival", 0.4))
    line = evaluate(sides[1], costs, [threshold], train_traces=sides[0])["logistic"]
    assert line.note == "" and line.tokens_per_s == pytest.approx(replay(sides[1], threshold, costs).rate, rel=EXACT)


def test_a_policy_that_decides_by_costs_uses_those_of_the_profile(sides, full_profile):
    """With expensive drafts it drafts nothing."""
    steep = dataclasses.replace(full_profile, step_s=10 * full_profile.low.verify_s[0])
    steep = steep.with_decisions({"smartspec": 1e-6, "confidence": 1e-6})
    bare = evaluate(sides[1], steep, [SmartSpec(max_depth=DEPTH)])["smartspec:0.7"]
    priced = evaluate(sides[1], steep, [SmartSpec(profile=steep, max_depth=DEPTH)])["smartspec:0.7"]
    assert dataclasses.replace(bare, note="") == priced and bare.note == "decides by the costs of this profile"
    cheap = evaluate(sides[1], steep, [SmartSpec(draft=0.11, max_depth=DEPTH)])["smartspec:0.7"]
    assert bare.drafted == 0.0 < cheap.drafted


def test_texts_of_cut_anchors_give_a_report_without_nan(sides, full_profile, tmp_path):
    trace = sides[1]
    rows = trace.rows.remove_columns("cut").add_column("cut", [True] * len(trace.rows))
    evaluate(Trace(trace.folder, trace.header, rows), full_profile, out=tmp_path / "out")
    json.loads((tmp_path / "out" / "report.json").read_text(), parse_constant=pytest.fail)


def test_the_primary_policy_has_an_interval_of_one_policy(sides, full_profile):
    rules, name = [Confidence(threshold, DEPTH) for threshold in (0.3, 0.5, 0.7)], "confidence:0.3"
    reports = [
        evaluate(sides[0], full_profile, policies, **options)
        for policies, options in ((rules, {"primary": name}), (rules[:1], {}), (rules, {}))
    ]
    widths = [report[name].to_best_fixed.high - report[name].to_best_fixed.low for report in reports]
    assert widths[0] < widths[1] <= widths[2], "one policy, two with Hugging Face's default rule, four"
    assert reports[0].answer is not None and reports[0].answer.candidate == name


@pytest.fixture(scope="module")
def data(report, written):
    data: dict[str, Any] = json.loads((written / "report.json").read_text(), parse_constant=pytest.fail)
    values = {key: value for key, value in data.items() if key not in ("run", "prompt_texts")}
    assert values == json.loads(json.dumps(report.to_dict()))
    return data


def test_the_figures_of_page_csv_and_json_are_the_same(data, written):
    rows = list(csv.DictReader((written / "report.csv").read_text().splitlines()))
    page = (written / "report.html").read_text()
    sorted_by = set(re.findall(r'data-value="([^"]*)"', page))
    for row, line in zip(rows, data["lines"], strict=True):
        assert [row[name] for name in ("policy", "kind", "note")] == [line[name] for name in ("name", "kind", "note")]
        assert float(row["tokens_per_s"]) == line["tokens_per_s"] and str(line["tokens_per_s"]) in sorted_by
        for name in ("to_plain", "to_best_fixed", "oracle_share"):
            value, low, high = (line[name][key] for key in ("value", "low", "high"))
            assert [float(row[f"{name}{part}"]) for part in ("", "_low", "_high")] == [value, low, high]
            if name != "oracle_share":
                assert str(value) in sorted_by and f"{value:.3f} [{low:.3f}, {high:.3f}]" in page


@pytest.mark.usefixtures("report")
def test_the_page_loads_nothing_and_its_links_have_targets(written):
    """No code but the script of the page runs."""
    page = (written / "report.html").read_text()
    loads = r"<(iframe|object|embed|img|base|form)\b|\son\w+=|@import|url\((?!#)|https?://|javascript:"
    assert not re.search(loads, page) and re.findall(r"<script[^>]*>", page) == ["<script>"]
    assert "default-src 'none'" in page and "connect-src" not in page
    links = re.findall(r'(?:\s|:)(?:src|href|action|data|srcset|poster)="([^"]*)"', page)
    assert {link for link in links if link[0] != "#"} <= {"data:,", "report.json", "report.csv", "report.md"}
    ids = re.findall(r'\sid="([^"]*)"', page)
    assert len(ids) == len(set(ids)) and {link[1:] for link in links if link[0] == "#"} <= set(ids)


@pytest.fixture
def one_prompt(sides):
    trace = sides[1]
    name = trace.rows["prompt_id"][0]
    rows = trace.rows.filter(lambda prompt: prompt == name, input_columns="prompt_id")
    return Trace(trace.folder, trace.header, rows)


def test_one_prompt_gives_no_verdict_and_no_interval(one_prompt, full_profile, tmp_path):
    policy = Confidence(0.7, DEPTH)
    report = evaluate(one_prompt, full_profile, [policy], out=tmp_path / "a")
    for line in report.lines:
        assert {ratio.low for ratio in (line.to_plain, line.to_best_fixed, line.oracle_share)} == {None}
        assert line.verdict in ("", TOO_FEW)
    assert report.answer is not None and report.answer.verdict == TOO_FEW
    text = (tmp_path / "a" / "report.md").read_text()
    assert report.answer.headline in text
    assert not re.search(r"\d \[[\d.]+, [\d.]+\]", text + (tmp_path / "a" / "report.html").read_text())
    again = evaluate(one_prompt, full_profile, [policy], compare=tmp_path / "a")
    assert again.details["comparison"]["rows"][1] == ("best fixed", "-", {"value": 1.0, "low": None, "high": None})


def test_an_achievable_estimate_is_a_line_of_the_report(sides, full_profile):
    report = evaluate(sides[1], full_profile, [FixedLength(2)], achievable=True, batch=[1])
    names = [line["name"] for line in report.details["batch"]["lines"]]
    assert names[-2:] == ["achievable estimate", "oracle bound of the batch"]
    expected = achievable_estimate(trace_arrays(sides[1]), full_profile).rate
    assert report["achievable estimate"].tokens_per_s == pytest.approx(expected)
    assert expected <= report["oracle bound"].tokens_per_s


@pytest.mark.filterwarnings("ignore:logistic was trained for another temperature")
def test_each_place_is_compared_with_its_best_fixed_length(sides, traces, full_profile, learned, tmp_path):
    policies, profiles = (
        [learned, Confidence(0.4, DEPTH), FixedLength(0)],
        [full_profile, scale_costs(full_profile, 3.0)],
    )
    held_out = [sides[1], traces[0.0]]
    report = evaluate(held_out, profiles, policies, out=tmp_path / "out")
    assert list(report.places) == [f"{trace.folder}, profile {at}" for trace in held_out for at in (1, 2)]
    places = [(trace, profile) for trace in held_out for profile in profiles]
    for place, (trace, profile) in zip(report.places.values(), places, strict=True):
        arrays = trace_arrays(trace)
        rates = [r.rate for r in fixed_grid(arrays, profile)]
        assert place.facts["prompts"] == len(set(arrays.clusters)) and place.fixed == pytest.approx(rates)
        for policy in policies:
            line, rate = place[policy.name], replay(arrays, policy, profile).rate
            assert line.tokens_per_s == pytest.approx(rate, rel=EXACT)
            assert line.to_best_fixed.value == pytest.approx(rate / max(rates), rel=EXACT)
            assert line.verdict == verdict(line.speedup, place.facts["clusters"], line.parts)
    assert {row["place"] for row in report.table} == set(report.places) and report.plot().axes
    with pytest.raises(InputError, match="several"):
        read_report(tmp_path / "out")


def test_intervals_hold_for_all_places_at_once(sides, full_profile):
    """With more places intervals are wider in each of them; with copies of a place they are the same."""
    policies = [Confidence(0.4, DEPTH), FixedLength(1)]
    profiles = [full_profile, scale_costs(full_profile, 2.0)]
    both, most = evaluate(sides[1], profiles, policies), evaluate(list(sides[::-1]), profiles, policies)
    for policy in policies:
        few, many = (next(iter(report.places.values()))[policy.name].speedup for report in (both, most))
        assert few.value == many.value and many.low < few.low < few.high < many.high  # type: ignore[operator]
    alone = evaluate(sides[1], full_profile, policies[1:], primary="fixed:1")["fixed:1"]
    copies = [full_profile, dataclasses.replace(full_profile, facts={"device": "another"})]
    for place in evaluate(sides[1], copies, policies[1:]).places.values():
        assert dataclasses.astuple(place["fixed:1"].speedup) == pytest.approx(dataclasses.astuple(alone.speedup))


def test_conflicting_arguments_are_refused(sides, one_prompt, full_profile, learned, tmp_path):
    held, one, two = sides[1], full_profile, [full_profile, scale_costs(full_profile, 2.0)]
    shutil.copytree(held.folder, tmp_path / "trace")
    next((tmp_path / "trace" / "data").iterdir()).unlink()
    for traces, profiles, policies, options, error, noun in (
        (held, one, [], {"train_traces": held}, TraceError, "prompts are in `train_traces` too"),
        (tmp_path / "trace", one, [], {}, TraceError, "not complete"),
        (held, two, [], {}, InputError, "policy"),
        (held, two, [learned], {"primary": "logistic"}, InputError, "primary"),
        (held, two, [learned], {"train_traces": sides[0]}, InputError, "train_traces"),
        (sides[0], two, [learned], {}, TraceError, "training prompts of logistic"),
        (one_prompt, two, [FixedLength(1)], {}, InputError, "two prompts or more"),
    ):
        with pytest.raises(error, match=noun):
            evaluate(traces, profiles, policies, **options)  # type: ignore[arg-type]
