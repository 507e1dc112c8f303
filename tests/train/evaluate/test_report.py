"""Reports: policies in one place and in several, their files and sections, and the comparison with an earlier report."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
import shutil
from typing import Any
from unittest import mock

import pytest
from contract_policies import DEPTH, TEST_POLICIES
from specstop.decode.benchmark import Ratio
from specstop.policies import Confidence, FixedLength, InputError, TraceError
from specstop.policies.batch_rules import for_batches
from specstop.policies.rules import Threshold
from specstop.train import TraceArrays, compare_reports, oracle_seconds, read_report, trace_arrays
from specstop.train.evaluate import pricing as prices
from specstop.train.evaluate.analysis import Replays, by_group, by_prompt, reliability, stop_cost, time_share
from specstop.train.evaluate.pricing import TIMED, PricedReplays, ProfileBootstrap, ResampleSource, with_prices
from specstop.train.evaluate.records import TOO_FEW
from specstop.train.evaluate.report import prompt_texts
from specstop.train.evaluate.statistics import Resamples
from specstop.train.evaluate.verdict import verdict
from specstop.train.fit.rules import fixed_grid
from specstop.train.replay.bounds import oracle_plan, round_regret
from specstop.train.replay.rounds import scale_costs
from timed import timed_profile

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


def test_prompts_are_shown_without_their_common_template(tmp_path):
    template = "<|system|> You are a helpful assistant. <|user|> "
    lines = [json.dumps({"id": name, "text": f"{template}{name} one"}) for name in ("a", "b", "c")]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    data = {"facts": {"traces": str(tmp_path)}, "details": {"prompts": [{"prompt": "a"}, {"prompt": "b"}]}}
    assert prompt_texts(data) == {"a": "a one", "b": "b one"}
    assert prompt_texts({**data, "details": {"prompts": [{"prompt": "a"}]}}) == {"a": f"{template}a one"}


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


@pytest.fixture(scope="module")
def chains(traces):
    return trace_arrays(traces[0.7])


@pytest.fixture(scope="module")
def trees(forest):
    return trace_arrays(forest[0.7])


@pytest.fixture(scope="module", params=["chains", "trees"])
def arrays(request):
    result: TraceArrays = request.getfixturevalue(request.param)
    return result


def test_parts_of_the_time_and_losses_to_the_bound_add_up(arrays, profile):
    played = replay(arrays, Confidence(0.4, DEPTH), profile)
    share = time_share("x", arrays, played, profile)
    parts = [share[f"{part}_ms"] for part in ("draft", "verify", "decision", "outside", "prompt")]
    tokens = int(arrays.text_tokens.sum())
    assert min(parts) > 0 and sum(parts) == pytest.approx(share["total_ms"], rel=1e-9)
    assert share["total_ms"] == pytest.approx(1e3 * float(played.seconds.sum()) / tokens, rel=1e-9)
    assert share["decision_ms"] == pytest.approx(1e3 * 6.0e-5 * int(played.decisions.sum()) / tokens)
    plain = time_share("plain", arrays, replay(arrays, FixedLength(0), profile), profile)
    assert plain["draft_ms"] == pytest.approx(0.0, abs=1e-9) and plain["decision_ms"] == 0.0
    plan = oracle_plan(arrays, profile)
    lost = stop_cost("x", round_regret(arrays, played, plan, profile), tokens)
    assert lost["total_s"] == pytest.approx(float((played.seconds - plan.seconds).sum()), abs=1e-9)
    assert sum(lost["ms_per_token"]) == pytest.approx(1e3 * lost["total_s"] / tokens, abs=1e-6)


def test_groups_and_prompts_are_ratios_of_sums(chains, profile):
    fixed = [replay(chains, FixedLength(k), profile) for k in range(DEPTH + 1)]
    played, best = replay(chains, Confidence(0.4, DEPTH), profile), max(fixed, key=lambda one: one.rate)
    replays = Replays(chains, ProfileBootstrap(profile), {"mine": played}, fixed, best, oracle_plan(chains, profile))
    groups = by_group(replays, 0)
    assert sorted(group["name"] for group in groups) == ["g0", "g1"]
    for group in groups:
        at = [i for i, name in enumerate(chains.groups) if name == group["name"]]
        fastest = min(float(one.seconds[at].sum()) for one in fixed)
        expected = fastest / float(played.seconds[at].sum())
        assert group["ratios"]["best fixed"]["value"] == pytest.approx(fastest / float(best.seconds[at].sum()))
        assert group["ratios"]["oracle bound"]["value"] == pytest.approx(
            fastest / float(replays.plan.seconds[at].sum())
        )
        ratio = group["ratios"]["mine"]
        assert ratio["value"] == pytest.approx(expected)
        assert ratio["low"] <= expected <= ratio["high"]
        assert (group["prompts"], group["tokens"]) == (4, int(chains.text_tokens[at].sum()))
    points = by_prompt(replays, played, 0)
    assert [point["prompt"] for point in points] == chains.prompt_ids
    assert points[2]["policy"] == pytest.approx(float(fixed[0].seconds[2] / played.seconds[2]))


@pytest.mark.parametrize("rule", ["derived", "batch"])
def test_calibration_counts_accepted(sides, full_profile, learned, rule):
    arrays = trace_arrays(sides[1])
    policy = for_batches(learned, profile=full_profile) if rule == "batch" else learned
    played = replay(arrays, policy, full_profile)
    result = reliability("x", arrays, played, 0)
    row = arrays.find(played.sequence.numpy(), played.anchor.numpy())
    length = arrays.accepted[row][~arrays.cut[row]]
    assert result["rounds"] == len(length)
    for depth in result["depths"]:
        known = length >= max(policy.first, 1) - 1
        total, bins = depth["all"], depth["bins"]
        assert total["count"] == int(known.sum()) == sum(b["count"] for b in bins)
        assert total["observed"] == pytest.approx(float((length[known] >= depth["depth"]).double().mean()))
        assert sum(b["count"] * b["predicted"] for b in bins) == pytest.approx(total["count"] * total["predicted"])
        assert all(b["low"] <= b["observed"] <= b["high"] for b in bins)


def test_a_report_on_trees_has_their_best_static_tree(forest, profile, tmp_path):
    report = evaluate(forest[0.7], profile, [Confidence(0.4, DEPTH)], out=tmp_path / "out")
    static = report["best static tree"]
    assert static.kind == "static" and static.to_best_fixed.value >= 1.0
    assert report["oracle bound"].tokens_per_s >= max(line.tokens_per_s for line in report.lines)
    assert report.answer is not None and not report.answer.deploy
    fixed = f"fixed:{report.fixed.index(max(report.fixed))}"
    assert report.answer.use == ("best static tree" if static.tokens_per_s > max(report.fixed) else fixed)
    assert {stop["name"] for stop in report.details["stops"]} >= {"best static tree", "confidence:0.4", "best fixed"}


REPLICATES, DRAWS = 30, 7


def test_every_resample_is_priced_by_its_profile(arrays, full_profile):
    """The resamples share D draws of the profile in turn. Prompts and profile are also resampled alone."""
    noisy = timed_profile(full_profile, ["confidence", "trimming"], pace=0.1, jitter=0.2, seed=1)
    depth = min(arrays.depth, noisy.max_depth)
    policies = [FixedLength(0), FixedLength(2), Confidence(0.4, depth), TEST_POLICIES["trimming"].limited(depth)]
    replays = [replay(arrays, policy, noisy) for policy in policies]
    boot, draws = Resamples(arrays.prompt_ids, 0, REPLICATES), ProfileBootstrap(noisy, 3, DRAWS)
    priced = PricedReplays(boot, draws, replays)
    spent, prompts, profile = map(priced.seconds, ResampleSource)
    assert spent.shape == (1 + REPLICATES, len(policies)) and profile.shape == (1 + DRAWS, len(policies))
    for at, rounds in enumerate(replays):
        assert prompts[:, at] == pytest.approx(boot.total(rounds.seconds), rel=EXACT)
        seconds = [rounds.text_seconds(costs) for costs in (noisy, *draws.profiles)]
        assert profile[:, at] == pytest.approx([float(one.sum()) for one in seconds], rel=EXACT)
        assert spent[0, at] == pytest.approx(float(seconds[0].sum()), rel=EXACT)
        for row in (1, DRAWS, DRAWS + 1, REPLICATES):
            assert spent[row, at] == pytest.approx(boot.total(seconds[1 + (row - 1) % DRAWS])[row], rel=EXACT)


def test_noise_of_a_profile_widens_intervals_and_is_shown(sides, full_profile, tmp_path):
    reports, widths = [], []
    for noise in (0.001, 0.6):
        profile = timed_profile(full_profile, ["confidence"], pace=noise, jitter=noise, seed=2)
        reports.append(evaluate(sides[1], profile, [Confidence(0.7, DEPTH)], out=tmp_path / str(noise)))
        line = reports[-1]["confidence:0.7"]
        assert line.parts["all"] == line.to_best_fixed
        widths.append({part: ratio.high - ratio.low for part, ratio in line.parts.items()})
    assert widths[0]["profile"] < 0.1 * widths[0]["prompts"]
    assert widths[1]["all"] > widths[1]["profile"] > 10 * widths[0]["profile"]
    assert reports[0].findings == () and "this machine was busy" in reports[1].findings[0]
    assert "this machine was busy" in (tmp_path / "0.6" / "report.md").read_text()


def test_measured_decisions_are_cached_by_profile_and_policy(full_profile, sides, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECSTOP_CACHE", str(tmp_path))
    bare = timed_profile(dataclasses.replace(full_profile, decision_s={}), pace=0.1, jitter=0.1)
    header, policies = sides[1].header, [FixedLength(2), Confidence(0.4, DEPTH), TEST_POLICIES["trimming"]]
    first, unpriced = with_prices(bare, policies, header)
    assert unpriced == {"confidence": ("confidence:0.4", TIMED), "trimming": ("trimming", TIMED)}
    assert len(list((tmp_path / "decisions").iterdir())) == 2 and "fixed" not in first.decision_s
    assert first.decision("confidence") > 0
    monkeypatch.setattr(prices, "measure_decision", mock.Mock(side_effect=AssertionError("measured")))
    assert with_prices(bare, policies, header) == (first, unpriced)
    assert with_prices(first, policies, header) == (first, {})
    other_costs = dataclasses.replace(bare, step_s=2 * bare.step_s)
    other_device = dataclasses.replace(bare, facts={"device": "another"})
    for profile, policy in ((other_costs, policies[1]), (other_device, policies[1]), (bare, Confidence(0.5, DEPTH))):
        with pytest.raises(AssertionError, match="measured"):
            with_prices(profile, [policy], header)


def test_reports_are_compared_over_their_common_prompts(sides, full_profile, tmp_path, few_draws):
    """Reports on one profile share its draws: equal lines differ in nothing. Errors of two profiles do not cancel."""
    held, policy = sides[1], Confidence(0.6, DEPTH)
    machine = full_profile.with_decisions({"confidence": 5e-5})
    profiles = [timed_profile(machine, ["confidence"], pace=0.06, jitter=0.1, seed=seed) for seed in (1, 2)]
    names = sorted(set(held.rows["prompt_id"]))

    def part(kept: list[str], **changes: Any) -> Trace:
        rows = held.rows.filter(lambda name: name in kept, input_columns="prompt_id")
        return Trace(held.folder, dataclasses.replace(held.header, **changes), rows)

    few, others = part(names[:8]), part(names[8:], temperature=0.9)
    runs = ((held, profiles[0]), (held, profiles[0]), (few, profiles[1]), (others, profiles[0]))
    for seed, (trace, profile) in enumerate(runs):
        evaluate(trace, profile, [policy], out=tmp_path / str(seed), seed=seed)
    one, again, other_profile, other_prompts = (read_report(tmp_path / str(seed)) for seed in range(4))
    for _, ratio, _ in compare_reports(one, again)["rows"]:
        assert tuple(ratio.values()) == pytest.approx((1.0, 1.0, 1.0), abs=1e-8)
    change = next(row[1] for row in compare_reports(one, other_profile)["rows"] if row[0] == policy.name)
    before, after = (replay(few, policy, profile).rate for profile in profiles)
    assert change["value"] == pytest.approx(after / before)
    assert change["low"] < change["value"] < change["high"] and change["high"] / change["low"] > 1.05
    section = compare_reports(other_profile, other_prompts)
    assert all(ratio == "-" for _, ratio, _ in section["rows"])
    assert "no common prompts" in section["text"] and "temperature (0.7" in section["text"]
