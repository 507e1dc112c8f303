"""Intervals over prompts, coverage in simulated worlds, verdicts, and estimates from live traces."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import simulated_worlds as worlds
import torch
from conftest import NEW
from contract_policies import DEPTH, TEST_POLICIES
from scipy import stats
from specstop.collect import collect
from specstop.decode.benchmark import Ratio, expanded_tail
from specstop.policies import Array, Confidence, FixedLength, InputError, TraceError
from specstop.policies.measurements import Noise
from specstop.train import Line, TraceArrays, trace_arrays
from specstop.train.evaluate import importance
from specstop.train.evaluate.importance import importance_estimate, importance_weights, observed_rounds
from specstop.train.evaluate.records import DEPLOY, INCONCLUSIVE, NOISY, REFUSE, TOO_FEW, Answer
from specstop.train.evaluate.statistics import Clusters, Resamples, clusters_needed, form_clusters
from specstop.train.evaluate.verdict import find_doubts, find_warnings, make_answer, verdict
from specstop.train.replay.single_rounds import ROUND_COLUMNS, evaluate_rounds
from synthetic import synthetic_trace
from torch import Tensor

from specstop import StopPolicy, Trace, evaluate, replay


def test_totals_are_sums_over_resampled_prompts():
    boot = Resamples(["b", "a", "b", "c"], seed=3, replicates=50)
    assert boot.clusters == 3
    totals = boot.total([[1.0, 10.0], [2.0, 20.0], [4.0, 40.0], [8.0, 80.0]])
    assert totals.shape == (51, 2)
    assert totals[0].tolist() == [15.0, 150.0]
    assert np.allclose(totals[:, 1], 10 * totals[:, 0]), "columns share their resamples"
    # a = 2, b = 5, c = 8: three draws of these, with the two sequences of b together
    possible = {2 * i + 5 * j + 8 * (3 - i - j) for i in range(4) for j in range(4 - i)}
    assert set(totals[1:, 0]) <= {float(x) for x in possible}
    assert np.array_equal(Resamples(["b", "a", "b", "c"], 3, 50).total([1, 2, 4, 8]), totals[:, 0])
    assert not np.array_equal(Resamples(["b", "a", "b", "c"], 4, 50).total([1, 2, 4, 8]), totals[:, 0])
    boot = Resamples(["a", "b", "c"], replicates=500)  # resamples of c alone are undefined and are skipped
    with np.errstate(invalid="ignore"):
        result = boot.interval(boot.total([1.0, 3.0, 0.0]) / boot.total([1.0, 1.0, 0.0]))
    assert result == Ratio(2.0, 1.0, 3.0)
    alone = Resamples(["a", "a"], replicates=10)
    assert alone.interval(alone.total([1.0, 2.0])) == Ratio(3.0, None, None), "one prompt has no interval"


def test_the_tail_of_an_interval_is_that_of_students_t():
    for prompts in (2, 5, 20, 80):
        z = stats.norm.ppf(expanded_tail(prompts))
        assert -z == pytest.approx(stats.t.ppf(0.975, prompts - 1) * (prompts / (prompts - 1)) ** 0.5)


def noisy_seconds(clusters: int, noise: float = 0.1) -> Array:
    """Return [clusters, 2] seconds: 1 of the rival, and of mean 1 of a policy."""
    return np.stack([np.ones(clusters), 1.0 + np.random.default_rng(0).normal(0.0, noise, clusters)], 1)


def compared(boot: Resamples, seconds: Array, price: Array | None = None) -> Ratio:
    """Return the interval of the policy in the second column against the first column."""
    ((ratio,),) = boot.simultaneous([boot.log_ratios(np.ones(len(seconds)), seconds, [1], [0], price)])
    return ratio


def test_the_interval_of_one_policy_is_that_of_students_t():
    """Equal samples of a prompt do not narrow it, and errors of prices widen it."""
    seconds = noisy_seconds(40)
    ratio = compared(Resamples(range(40), replicates=20_000), seconds)
    error = seconds[:, 1].std(ddof=1) / 40**0.5 / seconds[:, 1].mean()
    assert ratio.value == pytest.approx(40 / seconds[:, 1].sum())
    assert np.log(ratio.high / ratio.low) == pytest.approx(2 * stats.t.ppf(0.975, 39) * error, rel=0.05)
    once, boot = compared(Resamples(range(40)), seconds), Resamples(np.repeat(range(40), 8).tolist())
    eight = compared(boot, np.repeat(seconds, 8, 0))
    assert dataclasses.astuple(once) == pytest.approx(dataclasses.astuple(eight))
    prices = np.random.default_rng(1).normal(0.0, 0.1, (1 + boot.replicates, 2)) * [0.0, 1.0]
    prices[0] = 0.0
    widths = [np.log(r.high / r.low) / 2 for r in (once, compared(Resamples(range(40)), seconds, prices))]
    assert widths[1] == pytest.approx(np.hypot(widths[0], 1.96 * 0.1), rel=0.1)


def test_the_rival_is_chosen_again_and_a_policy_that_is_its_rival_has_no_error():
    rng = np.random.default_rng(0)
    fixed = 1.0 + rng.normal(0.0, 0.1, (40, 3))
    seconds = np.concatenate([fixed, fixed[:, [int(fixed.sum(0).argmin())]], 1.0 + rng.normal(0.0, 0.1, (40, 1))], 1)
    boot = Resamples(range(40))
    logs = boot.log_ratios(np.ones(40), seconds, [3, 4], [0, 1, 2])
    drawn = boot.total(seconds)
    ratios = drawn[:, :3].min(1) / drawn[:, 4]
    assert np.exp(logs.values[0, 1]) == pytest.approx(ratios[0])
    assert np.exp(logs.values[:, 1]) == pytest.approx(ratios, rel=0.01), "linear in the deviations"
    assert logs.values[0, 0] == 0.0 and (logs.values[1:, 0] <= 1e-12).all()
    alone, pair = boot.simultaneous([logs])[0]
    assert alone.low == pytest.approx(1.0, abs=0.1) and pair.low < pair.value < pair.high  # type: ignore[operator]
    ((same,),) = boot.simultaneous([boot.log_ratios(np.ones(40), seconds, [3], [int(fixed.sum(0).argmin())])])
    assert (same.value, same.low, same.high) == (1.0, 1.0, 1.0)


def line(name: str, kind: str, rate: float) -> Line:
    one = Ratio(rate, rate, rate)
    return Line(name, kind, 100.0 * rate, one, one, one)


def policy(name: str, kind: str, rate: float, ratio: Ratio, count: int = 40, **parts: Ratio) -> Line:
    return replace(line(name, kind, rate), to_rival=ratio, verdict=verdict(ratio, count, parts), parts=parts)


def answered(policies: Sequence[Line], count: int = 40, **options: Any) -> Answer:
    """Return the answer of a report with these policies and two fixed lengths, of which `fixed:3` is the best."""
    lines = [line("plain decoding", "fixed", 1.0), line("best fixed", "fixed", 1.5), *policies]
    result = make_answer(lines, "fixed:3", Clusters(tuple(map(str, range(count)))), **options)
    assert result is not None
    return result


def test_the_fastest_policy_with_an_interval_above_1_is_deployed():
    quick = policy("quick", "learned", 1.62, Ratio(1.08, 0.95, 1.21))
    certain = policy("certain", "rule", 1.6, Ratio(1.07, 1.02, 1.11))
    result = answered([quick, certain])
    assert (result.verdict, result.deploy, result.use, result.candidate) == (DEPLOY, True, "certain", "certain")
    assert "1.60 times" in result.headline and "1.020 to 1.110" in result.headline
    alone = answered([quick])
    assert (alone.verdict, alone.use, alone.candidate) == (INCONCLUSIVE, "fixed:3", "quick")
    needed = int(np.ceil(40 * (np.log(0.95 / 1.08) / np.log(1.08)) ** 2))  # an interval as wide excludes 1
    assert clusters_needed(quick.speedup, 40) == needed and f"About {needed} prompts" in alone.headline
    other = answered([quick, certain], primary="quick")
    assert (other.verdict, other.candidate) == (INCONCLUSIVE, "quick")


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
def test_every_interval_has_a_verdict(ratio, count, parts, expected):
    result = answered([policy("x", "learned", 1.4, ratio, count, **parts)], count)
    assert result.verdict == expected
    assert (result.use, result.deploy) == (("x", True) if expected == DEPLOY else ("fixed:3", False))


def test_a_report_that_contradicts_itself_deploys_nothing():
    top = policy("x", "learned", 1.7, Ratio(1.1, 1.05, 1.2))
    quiet = Noise(10, 0.1, 0.0, 0.0, 0.0, 1)
    busy = replace(quiet, phases=12.0)
    for below, share, noise, word in (
        (["x"], 0.5, quiet, "faster than the oracle bound"),
        ([], 1.2, quiet, "at most 1 is possible"),
        ([], 0.5, busy, "13.0 times"),
        ([], 0.5, quiet, ""),
    ):
        lines = [replace(top, oracle_share=Ratio(share, share, share))]
        reasons = find_doubts(lines, below, SimpleNamespace(noise=noise))  # type: ignore[arg-type]
        result = answered(lines, doubts=reasons)
        assert (result.verdict == NOISY) == bool(word) and word in result.headline
        assert result.deploy != bool(word)


def test_clusters_are_prompts_or_groups():
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


@pytest.mark.parametrize(("longest", "share"), [(9, 0), (60, 23), (200, 50)])
def test_a_prompt_with_most_of_the_tokens_is_reported(longest, share):
    """Above a third of the tokens there is no verdict."""
    arrays = synthetic_trace([[0] * longest, *[[1] * 9] * 20], 3)
    chosen = form_clusters(arrays.clusters, arrays.groups, arrays.text_tokens.tolist())
    warnings = find_warnings(SimpleNamespace(noise=None), chosen, arrays.prompt_ids)  # type: ignore[arg-type]
    assert len(warnings) == bool(share) and all(f"'0' has {share}% of all tokens" in text for text in warnings)
    assert verdict(Ratio(1.1, 1.05, 1.2), 21, None, chosen.largest) == (TOO_FEW if share == 50 else DEPLOY)


STANDARD_ERRORS = 5.0  # of a simulated mean around its truth: a false alarm in two million


def test_the_mean_seconds_of_a_text_in_replay_are_their_closed_form():
    rng = np.random.default_rng(3)
    world = worlds.draw_world(rng)
    arrays = trace_arrays(worlds.sample_dense(world, 1500, rng))
    for policy in (FixedLength(0), FixedLength(3), worlds.DEEPER, worlds.LOGGING):
        seconds = replay(arrays, policy, world.profile).seconds.numpy()
        error = seconds.std() / len(seconds) ** 0.5
        assert abs(seconds.mean() - worlds.true_seconds(world, policy)) < STANDARD_ERRORS * error, policy.name


def test_intervals_cover_the_truth_of_simulated_worlds(monkeypatch):
    """At a coverage of 95%, 6 or fewer hits of 10 have a probability of 1 in 900."""
    monkeypatch.setattr(worlds, "LENGTHS", np.array([12, 18, 28]))
    estimates = [one for seed in range(10) for one in worlds.dense_world(seed)]
    hits = {what: [f.covered for f in estimates if f.what == what] for what in {f.what for f in estimates}}
    assert set(map(len, hits.values())) == {10}
    assert len(hits) == 4
    assert min(map(sum, hits.values())) >= 7, hits


def test_estimates_from_live_worlds_cover_the_truth_without_bias(monkeypatch):
    monkeypatch.setattr(worlds, "LIVE_SIZES", (40,))
    estimates = [one for seed in range(20) for one in worlds.live_world(seed)]
    for what in ("tokens", "seconds", "rate", "to recorded"):
        subset = [f for f in estimates if (f.method, f.what) == ("importance", what)]
        errors = np.array([f.error for f in subset])
        assert len(subset) == 20
        assert sum(f.covered for f in subset) >= 14, what
        assert abs(errors.mean()) < STANDARD_ERRORS * errors.std() / 20**0.5, what


EXACT = 1e-9
LOGGING = Confidence(0.6, DEPTH)


@pytest.fixture(scope="module")
def live(pair, prompts, tmp_path_factory):
    """Collect live traces, each combination of options once."""
    done: dict[str, Trace] = {}

    def run(policy: StopPolicy | None = None, **more: Any) -> Trace:
        key = f"{policy.name if policy else ''} {more}"
        if key not in done:
            options = {"depth": DEPTH, "temperature": 0.7, "max_new_tokens": NEW, "collector": "live", **more}
            done[key] = collect(pair, prompts, tmp_path_factory.mktemp("live"), policy=policy, **options)
        return done[key]

    return run


def read(trace: Trace) -> TraceArrays:
    return trace_arrays(trace, extra=importance.COLUMNS)


def single_rounds(trace: Trace) -> TraceArrays:
    return trace_arrays(trace, extra=ROUND_COLUMNS)


@pytest.mark.parametrize("name", ["trimming", "from-anchor", "reads-history", "randomised"])
def test_rounds_of_the_recorded_policy_are_those_of_the_trace(live, profile, name):
    policy = TEST_POLICIES[name]
    arrays = read(live(policy, explore=0.3))
    shown = observed_rounds(arrays, policy, profile, is_recorded=True)
    alone = ~arrays.extra["explored"].numpy()
    assert 20 < alone.sum() < len(alone)
    assert shown.observed.all()
    assert (shown.drafted == arrays.drawn.sum(1).numpy())[alone].all()
    assert (shown.verified == arrays.extra["sent"].sum(1).numpy())[alone].all()
    assert (shown.drafted <= arrays.drawn.sum(1).numpy()).all()
    tokens, seconds = importance._recorded_totals(arrays, None, profile)
    assert shown.tokens[alone] == pytest.approx(tokens[alone], rel=EXACT)
    assert shown.seconds[alone] == pytest.approx(seconds[alone], rel=EXACT)


def test_an_accepted_end_of_text_has_no_token_after_it(live, profile):
    """As if the second token of each draft ended the text."""
    trace = read(live())
    arrays, uncut = dataclasses.replace(trace, ends=(torch.arange(DEPTH) == 1).repeat(len(trace.ends), 1)), ~trace.cut
    for k in (0, 1, 3):
        rounds = observed_rounds(arrays, FixedLength(k), profile)
        accepted = np.minimum(arrays.accepted[uncut].numpy(), min(k, 2))
        assert (rounds.drafted[uncut] == min(k, 2)).all()
        assert rounds.tokens[uncut].tolist() == (accepted + 1 - (accepted == 2)).tolist()


@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_tokens_are_expectations_over_the_stored_probabilities(live, profile, verification):
    trace = live(verification=verification)
    arrays = read(trace)
    uncut = ~arrays.cut
    ratio = arrays.extra["target_prob"][uncut].double() / arrays.extra["draft_prob"][uncut].double()
    survival, expected = torch.ones(len(ratio)).double(), torch.ones(len(ratio)).double()
    assert len(ratio) > 20
    for k in range(DEPTH + 1):
        rounds = observed_rounds(arrays, FixedLength(k), profile)
        assert rounds.observed.all() and rounds.tokens[uncut] == pytest.approx(expected.numpy(), rel=1e-5)
        if verification == "rejection":
            single = evaluate_rounds(single_rounds(trace), FixedLength(k), profile)
            assert (single.drafted == k).all()
            assert single.committed == pytest.approx(expected, rel=1e-5)  # in the order of the rows
            assert single.price(profile) == pytest.approx(rounds.seconds[uncut], rel=EXACT)
        if k < DEPTH:
            is_block = verification == "block"
            survival = (survival * ratio[:, k]).clamp(max=1.0) if is_block else survival * ratio[:, k].clamp(max=1.0)
            expected = expected + survival


def censored(full: TraceArrays, recorded: Tensor, explored: Tensor, share: float) -> TraceArrays:
    """Return a trace of full depth as recorded under a policy that stops at `recorded` unless a round explored."""
    depth = torch.arange(full.depth)
    shown = depth < torch.where(explored, full.drawn.sum(1), recorded)[:, None]
    columns = {n: v * shown if v.dim() == 2 else v for n, v in full.columns.items()}
    extra = {**full.extra, "sent": shown, "explored": explored}
    extra |= {name: full.extra[name] * shown for name in ("draft_prob", "target_prob")}
    path = full.path & shown
    header = dataclasses.replace(full.header, explore=share, policy=LOGGING.name)
    return dataclasses.replace(
        full, header=header, drawn=shown, path=path, accepted=path.long().sum(1), columns=columns, extra=extra,
        ends=full.ends & shown,
    )  # fmt: skip


@pytest.mark.parametrize(("policy", "knows_logging"), [(Confidence(0.2, DEPTH), True), (FixedLength(2), False)])
def test_weighted_sums_are_unbiased_over_all_outcomes_of_exploration(live, profile, policy, knows_logging):
    """Numerators and denominator of the self-normalised estimate are unbiased, exactly."""
    full, share = read(live(verification="rejection", max_new_tokens=9)).subset([0, 1, 2]), 0.3
    assert 4 < len(full.cut) < 9
    truth = observed_rounds(full, policy, profile)
    base = observed_rounds(full, LOGGING, profile, is_recorded=True)
    length = torch.from_numpy(base.drafted)
    reaches = (base.drafted >= truth.drafted) & (base.verified >= truth.verified)
    assert not reaches.all(), "some rounds must need exploration"
    assert reaches.any()
    sums, ratio = np.zeros(3), 0.0
    for outcome in itertools.product((False, True), repeat=len(length)):
        explored = torch.tensor(outcome)
        arrays = censored(full, length, explored, share)
        rounds = observed_rounds(arrays, policy, profile)
        again = observed_rounds(arrays, LOGGING, profile, is_recorded=True) if knows_logging else None
        weight, _ = importance_weights(arrays, rounds, again)
        chance = share ** sum(outcome) * (1 - share) ** (len(outcome) - sum(outcome))
        sums += chance * np.array([weight.sum(), (weight * rounds.tokens).sum(), (weight * rounds.seconds).sum()])
        ratio += chance * (weight * rounds.tokens).sum() / max(weight.sum(), 1e-300)
    assert sums == pytest.approx([len(length), truth.tokens.sum(), truth.seconds.sum()], rel=EXACT)
    assert ratio != pytest.approx(truth.tokens.mean(), rel=1e-4), "the ratio is not unbiased in few rounds"


@pytest.mark.parametrize("name", ["", "fixed:x", "fixed:-1", "mine", "hub:a/b", "bandit?arms=fixed:1,mine"])
def test_a_policy_name_in_a_trace_opens_no_folder_and_no_plugin(live, profile, name, monkeypatch):
    monkeypatch.setattr("specstop.policies.registry.Registry.names", lambda self: pytest.fail("a plugin was searched"))
    trace = live(TEST_POLICIES["from-anchor"], explore=0.25)
    unnamed = Trace(trace.folder, dataclasses.replace(trace.header, policy=name), trace.rows)
    estimate = importance_estimate(unnamed, FixedLength(4), profile)
    assert any("is not built-in" in caveat for caveat in estimate.caveats)


def test_estimates_that_a_trace_does_not_allow_are_refused(live, traces, profile):
    fixed = FixedLength(2)
    for run, noun in (
        (lambda: importance_estimate(live(LOGGING), FixedLength(4), profile), "only if they explored"),
        (lambda: importance_estimate(live(), TEST_POLICIES["selecting"], profile), "selects among drawn tokens"),
        (lambda: replay(live(verification="rejection"), fixed, profile), "depends on the policy"),
        (lambda: evaluate_rounds(trace_arrays(traces[0.7]), fixed, profile), "live traces"),
    ):
        with pytest.raises(TraceError, match=noun):
            run()


def test_a_report_has_estimates_on_a_trace_with_exploration(live, profile):
    trace, recorded = live(TEST_POLICIES["from-anchor"], explore=0.25), TEST_POLICIES["from-anchor"]
    policies = [FixedLength(2), recorded, FixedLength(4)]
    section = evaluate(trace, profile, policies).details["importance"]
    for policy, row in zip(policies, section["rows"], strict=True):
        expected = importance_estimate(trace, policy, profile, recorded=recorded)
        assert row[:2] == (policy.name, dataclasses.asdict(expected.to_recorded))
    assert section["rows"][1][1]["value"] == pytest.approx(1.0, rel=EXACT), "the recorded policy itself"
    assert "importance" not in evaluate(live(), profile, [FixedLength(2)]).details, "every round has full depth"


@pytest.mark.parametrize("verification", ["match", "rejection"])
def test_tokens_that_were_drafted_and_not_sent_are_not_rejected(live, profile, verification):
    sent, whole = 2, single_rounds(live(verification=verification))
    assert int(whole.accepted.max()) > sent
    # As if the policy had trimmed each draft to two tokens.
    extra = {name: values.clone() for name, values in whole.extra.items()}
    for name in ("sent", "observed", "target_prob"):
        extra[name][:, sent:] = 0
    path = whole.accepted_nodes() & (torch.arange(DEPTH) < sent)
    trimmed = dataclasses.replace(whole, extra=extra, path=path, accepted=path.sum(1))
    for k in range(sent + 1):
        values = [evaluate_rounds(arrays, FixedLength(k), profile) for arrays in (whole, trimmed)]
        assert values[0].committed.tolist() == values[1].committed.tolist()
    with pytest.raises(TraceError, match="did not send"):
        evaluate_rounds(trimmed, FixedLength(sent + 1), profile)
