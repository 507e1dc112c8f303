"""Live traces: the value of single rounds, and importance weighting of rounds that another policy drafted."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from conftest import NEW
from contract_policies import DEPTH, TEST_POLICIES
from specstop.collect.prompts import Prompt
from specstop.collect.run import collect
from specstop.collect.store import Trace
from specstop.decode.models.pair import Pair
from specstop.policies.contract import StopPolicy
from specstop.policies.errors import TraceError
from specstop.policies.fixed import Confidence, FixedLength
from specstop.policies.profile import Profile
from specstop.train.evaluate.evaluate import evaluate
from specstop.train.evaluate.importance import (
    COLUMNS,
    _builtin_policy,
    _recorded_totals,
    importance_estimate,
    importance_weights,
    observed_rounds,
)
from specstop.train.replay.arrays import TraceArrays, trace_arrays
from specstop.train.replay.run import replay
from specstop.train.replay.single_rounds import ROUND_COLUMNS, evaluate_rounds
from synthetic import synthetic_trace
from torch import Tensor

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


def test_rounds_at_full_depth_agree_with_single_round_values(live: Any, profile: Profile) -> None:
    trace = live(verification="rejection")
    arrays, rounds = read(trace), single_rounds(trace)
    for policy in (FixedLength(2), Confidence(0.5, DEPTH)):
        observed, values = observed_rounds(arrays, policy, profile), evaluate_rounds(rounds, policy, profile)
        assert observed.observed.all()
        for one, other in ((observed.tokens, values.committed), (observed.seconds, values.price(profile))):
            assert np.sort(one[~rounds.cut]) == pytest.approx(np.sort(other.numpy()), rel=EXACT)


def three_tokens(accepted: list[list[bool]], tokens: list[list[int]], verification: str = "match") -> Any:
    """Return arrays of one text whose rounds drafted 3 tokens."""
    arrays = synthetic_trace([[0] * len(accepted)], 3)
    path = torch.tensor(accepted)
    drawn = torch.ones_like(path)
    extra = {
        "sent": drawn,
        "explored": torch.ones(len(path), dtype=torch.bool),
        "backlog": torch.ones(len(path), dtype=torch.int64),
        "decisions": torch.zeros(len(path), dtype=torch.int64),
        "draft_prob": torch.full(path.shape, 0.5),
        "target_prob": torch.tensor([[0.4, 0.9, 0.2]] * len(path)),
    }
    header = dataclasses.replace(arrays.header, collector="live", explore=1.0, verification=verification, eos=(9,))
    ids = torch.tensor(tokens)
    return dataclasses.replace(
        arrays, header=header, path=path, drawn=drawn, accepted=path.long().cumprod(1).sum(1), ends=ids == 9,
        tokens=ids, extra=extra, cut=torch.zeros(len(path), dtype=torch.bool),
    )  # fmt: skip


def test_an_accepted_end_of_text_has_no_token_after_it(profile: Profile) -> None:
    arrays = three_tokens([[True, True, False], [True, False, False]], [[1, 9, 2], [1, 9, 2]])
    for k, tokens, drafted in ((0, 1.0, 0), (1, 2.0, 1), (3, 2.0, 2)):
        rounds = observed_rounds(arrays, FixedLength(k), profile)
        assert rounds.tokens.tolist() == [tokens] * 2 and rounds.drafted.tolist() == [drafted] * 2


@pytest.mark.parametrize(
    ("verification", "survival"),
    [("rejection", (0.8, 0.8 * 1.0, 0.8 * 0.4)), ("block", (0.8, min(0.8 * 1.8, 1.0), 0.4))],
)
def test_expected_tokens_of_rejection_and_block(profile: Profile, verification: str, survival: Any) -> None:
    arrays = three_tokens([[True, True, False]], [[1, 2, 3]], verification)
    for k in range(4):
        result = observed_rounds(arrays, FixedLength(k), profile)
        assert result.tokens.tolist() == pytest.approx([1 + sum(survival[:k])], rel=1e-6)


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


def few_rounds(full: TraceArrays, texts: int, rounds: int) -> TraceArrays:
    """Return the first rounds of the first texts."""
    part = full.subset(range(texts))
    keep = torch.cat([torch.arange(int(o), int(o) + rounds) for o in part.offset])
    counts = torch.full((texts,), rounds)
    return dataclasses.replace(
        part, rows=counts, offset=counts.cumsum(0) - counts, accepted=part.accepted[keep], tokens=part.tokens[keep],
        ends=part.ends[keep], cut=part.cut[keep], columns={n: v[keep] for n, v in part.columns.items()},
        path=part.path[keep], drawn=part.drawn[keep], extra={n: v[keep] for n, v in part.extra.items()},
        anchors=part.anchors[keep],
    )  # fmt: skip


@pytest.mark.parametrize("knows_logging", [True, False])
@pytest.mark.parametrize("policy", [Confidence(0.2, DEPTH), FixedLength(2)], ids=lambda p: p.name)
def test_weighted_sums_are_unbiased_over_all_outcomes_of_exploration(
    live: Any, profile: Profile, policy: StopPolicy, knows_logging: bool
) -> None:
    """Numerators and denominator of the self-normalised estimate are unbiased, exactly."""
    full, share = few_rounds(read(live(verification="rejection")), 2, 3), 0.3
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


@pytest.mark.parametrize("name", ["fixed:4", "confidence:0.6", "", "fixed:x", "fixed:-1", "mine", "hub:a/b", "bandit"])
def test_a_name_in_a_trace_creates_only_built_in_policies(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specstop.policies.registry.Registry.names", lambda self: pytest.fail("a plugin was searched"))
    policy = _builtin_policy(name)
    assert (policy.name if policy else None) == (name if name in ("fixed:4", "confidence:0.6") else None)


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


def test_a_report_has_estimates_on_a_trace_with_exploration(live: Any, profile: Profile) -> None:
    trace, recorded = live(TEST_POLICIES["from-anchor"], explore=0.25), TEST_POLICIES["from-anchor"]
    policies = [FixedLength(2), recorded, FixedLength(4)]
    section = evaluate(trace, profile, policies).details["importance"]
    for policy, row in zip(policies, section["rows"], strict=True):
        expected = importance_estimate(trace, policy, profile, recorded=recorded)
        assert row[:2] == (policy.name, dataclasses.asdict(expected.to_recorded))
    assert section["rows"][1][1]["value"] == pytest.approx(1.0, rel=EXACT), "the recorded policy itself"
    assert "importance" not in evaluate(live(), profile, [FixedLength(2)]).details, "every round has full depth"


def test_single_rounds_are_expectations_over_the_stored_probabilities(live: Any, profile: Profile) -> None:
    arrays = single_rounds(live(verification="rejection"))
    p, q = (arrays.extra[name][~arrays.cut].double() for name in ("target_prob", "draft_prob"))
    survival = (p / q).clamp(max=1.0).cumprod(1)
    assert len(survival) > 30
    for k in (0, 1, 3):
        rounds = evaluate_rounds(arrays, FixedLength(k), profile)
        expected = 1.0 + survival[:, :k].sum(1)
        assert np.sort(rounds.committed) == pytest.approx(np.sort(expected), rel=1e-5)
        assert (rounds.drafted == k).all()
    drawn = (arrays.accepted[~arrays.cut].double() + 1).mean()
    whole = evaluate_rounds(arrays, FixedLength(DEPTH), profile)
    assert float(whole.committed.mean()) == pytest.approx(float(drawn), rel=0.15)


def test_single_rounds_of_trees_are_as_drawn(live: Any, profile: Profile) -> None:
    arrays = single_rounds(live(verification="rejection", tree="2,2,1"))
    rounds = evaluate_rounds(arrays, FixedLength(3), profile)
    assert float(rounds.committed.sum()) == float((arrays.accepted[~arrays.cut] + 1).sum())
    early = evaluate_rounds(arrays, Confidence(0.5, 3), profile)
    assert early.committed.sum() < rounds.committed.sum()
    assert early.seconds.sum() < rounds.seconds.sum()


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
