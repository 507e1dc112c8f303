"""Live traces: the value of single rounds, and importance weighting of rounds that another policy drafted."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import NEW
from contract_policies import DEPTH, TEST_POLICIES
from specstop.collect import collect
from specstop.policies import Confidence, FixedLength, TraceError
from specstop.train import TraceArrays, trace_arrays
from specstop.train.evaluate.importance import (
    COLUMNS,
    _recorded_totals,
    importance_estimate,
    importance_weights,
    observed_rounds,
)
from specstop.train.replay.single_rounds import ROUND_COLUMNS, evaluate_rounds
from torch import Tensor

from specstop import Pair, Profile, Prompt, StopPolicy, Trace, evaluate, replay

EXACT = 1e-9
LOGGING = Confidence(0.6, DEPTH)


@pytest.fixture(scope="module")
def live(pair: Pair, prompts: list[Prompt], tmp_path_factory: pytest.TempPathFactory) -> Any:
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
    return trace_arrays(trace, extra=COLUMNS)


def single_rounds(trace: Trace) -> TraceArrays:
    return trace_arrays(trace, extra=ROUND_COLUMNS)


@pytest.mark.parametrize("name", ["trimming", "from-anchor", "reads-history", "randomised"])
def test_rounds_of_the_recorded_policy_are_those_of_the_trace(live: Any, profile: Profile, name: str) -> None:
    policy = TEST_POLICIES[name]
    arrays = read(live(policy, explore=0.3))
    shown = observed_rounds(arrays, policy, profile, is_recorded=True)
    alone = ~arrays.extra["explored"].numpy()
    assert 20 < alone.sum() < len(alone)
    assert shown.observed.all()
    assert (shown.drafted == arrays.drawn.sum(1).numpy())[alone].all()
    assert (shown.verified == arrays.extra["sent"].sum(1).numpy())[alone].all()
    assert (shown.drafted <= arrays.drawn.sum(1).numpy()).all()
    tokens, seconds = _recorded_totals(arrays, None, profile)
    assert shown.tokens[alone] == pytest.approx(tokens[alone], rel=EXACT)
    assert shown.seconds[alone] == pytest.approx(seconds[alone], rel=EXACT)


def test_an_accepted_end_of_text_has_no_token_after_it(live: Any, profile: Profile) -> None:
    """As if the second token of each draft ended the text."""
    trace = read(live())
    arrays, uncut = dataclasses.replace(trace, ends=(torch.arange(DEPTH) == 1).repeat(len(trace.ends), 1)), ~trace.cut
    for k in (0, 1, 3):
        rounds = observed_rounds(arrays, FixedLength(k), profile)
        accepted = np.minimum(arrays.accepted[uncut].numpy(), min(k, 2))
        assert (rounds.drafted[uncut] == min(k, 2)).all()
        assert rounds.tokens[uncut].tolist() == (accepted + 1 - (accepted == 2)).tolist()


@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_tokens_are_expectations_over_the_stored_probabilities(live: Any, profile: Profile, verification: str) -> None:
    trace = live(verification=verification)
    arrays = read(trace)
    uncut = ~arrays.cut
    ratio = arrays.extra["target_prob"][uncut].double() / arrays.extra["draft_prob"][uncut].double()
    survival, expected = torch.ones(len(ratio)).double(), torch.ones(len(ratio)).double()
    assert len(ratio) > 30
    for k in range(DEPTH + 1):
        rounds = observed_rounds(arrays, FixedLength(k), profile)
        assert rounds.observed.all() and rounds.tokens[uncut] == pytest.approx(expected.numpy(), rel=1e-5)
        if verification == "rejection":
            single = evaluate_rounds(single_rounds(trace), FixedLength(k), profile)
            assert (single.drafted == k).all()
            assert np.sort(single.committed) == pytest.approx(np.sort(expected), rel=1e-5)
            assert np.sort(single.price(profile)) == pytest.approx(np.sort(rounds.seconds[uncut]), rel=EXACT)
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


@pytest.mark.parametrize("knows_logging", [True, False])
@pytest.mark.parametrize("policy", [Confidence(0.2, DEPTH), FixedLength(2)], ids=lambda p: p.name)
def test_weighted_sums_are_unbiased_over_all_outcomes_of_exploration(
    live: Any, profile: Profile, policy: StopPolicy, knows_logging: bool
) -> None:
    """Numerators and denominator of the self-normalised estimate are unbiased, exactly."""
    full, share = read(live(verification="rejection", max_new_tokens=12)).subset([0, 1, 2]), 0.3
    assert 5 < len(full.cut) < 12
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


@pytest.mark.parametrize("recorded", [None, FixedLength(1)], ids=["unknown", "wrong"])
def test_without_the_recorded_policy_only_explored_rounds_count(
    live: Any, profile: Profile, recorded: StopPolicy | None
) -> None:
    trace = live(TEST_POLICIES["from-anchor"], explore=0.25)
    without = importance_estimate(trace, FixedLength(4), profile, recorded=recorded)
    known = importance_estimate(trace, FixedLength(4), profile, recorded=TEST_POLICIES["from-anchor"])
    assert len(without.caveats) > len(known.caveats) and without.observed < known.observed
    explored = read(trace).extra["explored"].numpy()
    assert without.by_exploration == explored.sum()
    rounds = observed_rounds(read(trace), FixedLength(4), profile)
    assert without.tokens.value == pytest.approx(rounds.tokens[explored].mean())


@pytest.mark.parametrize("name", ["", "fixed:x", "fixed:-1", "mine", "hub:a/b", "bandit?arms=fixed:1,mine"])
def test_a_policy_name_in_a_trace_opens_no_folder_and_no_plugin(
    live: Any, profile: Profile, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specstop.policies.registry.Registry.names", lambda self: pytest.fail("a plugin was searched"))
    trace = live(TEST_POLICIES["from-anchor"], explore=0.25)
    unnamed = Trace(trace.folder, dataclasses.replace(trace.header, policy=name), trace.rows)
    estimate = importance_estimate(unnamed, FixedLength(4), profile)
    assert any("is not built-in" in caveat for caveat in estimate.caveats)


def test_estimates_and_replays_that_a_trace_does_not_allow_are_refused(
    live: Any, traces: dict[float, Trace], profile: Profile
) -> None:
    fixed, tree = FixedLength(2), live(tree="2,1", explore=0.5)
    for run, noun in (
        (lambda: importance_estimate(live(LOGGING), FixedLength(4), profile), "only if they explored"),
        (lambda: importance_estimate(traces[0.7], fixed, profile), "for live traces"),
        (lambda: importance_estimate(live(), TEST_POLICIES["selecting"], profile), "selects among drawn tokens"),
        (lambda: importance_estimate(tree, FixedLength(1), profile), "for chains"),
        (lambda: replay(live(verification="rejection"), fixed, profile), "depends on the policy"),
        (lambda: evaluate_rounds(trace_arrays(traces[0.7]), fixed, profile), "live traces"),
    ):
        with pytest.raises(TraceError, match=noun):
            run()


def test_a_report_on_a_live_trace_values_single_rounds_and_states_its_caveats(
    live: Any, profile: Profile, tmp_path: Path
) -> None:
    trace, policy = live(FixedLength(DEPTH), verification="rejection"), Confidence(0.7, DEPTH)
    report = evaluate(trace, profile, [policy], out=tmp_path / "out")
    line, rounds = report[policy.name], evaluate_rounds(single_rounds(trace), policy, profile)
    assert line.tokens_per_s == pytest.approx(rounds.rate) and report.facts["rounds"] == len(rounds.committed)
    assert line.block_efficiency == pytest.approx(float(rounds.committed.mean()))
    assert report["oracle bound"].tokens_per_s >= max(one.tokens_per_s for one in report.lines)
    text = (tmp_path / "out" / "report.md").read_text()
    assert report.caveats == rounds.caveats and all(caveat in text for caveat in rounds.caveats)


def test_a_report_has_estimates_on_a_trace_with_exploration(live: Any, profile: Profile) -> None:
    trace, recorded = live(TEST_POLICIES["from-anchor"], explore=0.25), TEST_POLICIES["from-anchor"]
    policies = [FixedLength(2), recorded, FixedLength(4)]
    section = evaluate(trace, profile, policies).details["importance"]
    for policy, row in zip(policies, section["rows"], strict=True):
        expected = importance_estimate(trace, policy, profile, recorded=recorded)
        assert row[:2] == (policy.name, dataclasses.asdict(expected.to_recorded))
    assert section["rows"][1][1]["value"] == pytest.approx(1.0, rel=EXACT), "the recorded policy itself"
    assert "importance" not in evaluate(live(), profile, [FixedLength(2)]).details, "every round has full depth"


def test_single_rounds_of_trees_are_as_drawn(live: Any, profile: Profile) -> None:
    arrays = single_rounds(live(verification="rejection", tree="2,2,1"))
    whole, early = (evaluate_rounds(arrays, policy, profile) for policy in (FixedLength(3), Confidence(0.5, 3)))
    assert float(whole.committed.sum()) == float((arrays.accepted[~arrays.cut] + 1).sum())
    assert early.committed.sum() < whole.committed.sum() and early.seconds.sum() < whole.seconds.sum()


@pytest.mark.parametrize("verification", ["match", "rejection"])
def test_tokens_that_were_drafted_and_not_sent_are_not_rejected(live: Any, profile: Profile, verification: str) -> None:
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
