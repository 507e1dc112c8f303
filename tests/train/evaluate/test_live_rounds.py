"""Rounds of live traces: single rounds, and importance weighting of rounds of another policy."""

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


@pytest.mark.parametrize(
    "name", ["confidence:0.4", "trimming", "from-anchor", "reads-history", "randomised", "fixed:4"]
)
def test_the_recorded_policy_stops_where_it_did(live: Any, profile: Profile, name: str) -> None:
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
    arrays, cut = read(trace), trace_arrays(trace, extra=ROUND_COLUMNS).cut.numpy()
    for policy in (FixedLength(2), Confidence(0.5, DEPTH)):
        shown, values = observed_rounds(arrays, policy, profile), evaluate_rounds(arrays, policy, profile)
        assert shown.observed.all()
        assert np.sort(shown.tokens[~cut]) == pytest.approx(np.sort(values.committed.numpy()), rel=EXACT)
        assert np.sort(shown.seconds[~cut]) == pytest.approx(np.sort(values.price(profile).numpy()), rel=EXACT)


def three_tokens(accepted: list[list[bool]], tokens: list[list[int]], verification: str = "match") -> Any:
    """Return arrays of one text whose rounds drafted 3 tokens."""
    from synthetic import synthetic_trace

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
    assert observed_rounds(arrays, FixedLength(3), profile).tokens.tolist() == [2.0, 2.0]
    assert observed_rounds(arrays, FixedLength(1), profile).tokens.tolist() == [2.0, 2.0]
    assert observed_rounds(arrays, FixedLength(3), profile).drafted.tolist() == [2, 2]
    assert observed_rounds(arrays, FixedLength(0), profile).tokens.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("verification", "survival"),
    [("rejection", (0.8, 0.8 * 1.0, 0.8 * 0.4)), ("block", (0.8, min(0.8 * 1.8, 1.0), 0.4))],
)
def test_expected_tokens_of_rejection_and_block(profile: Profile, verification: str, survival: Any) -> None:
    arrays = three_tokens([[True, True, False]], [[1, 2, 3]], verification)
    for k in range(4):
        result = observed_rounds(arrays, FixedLength(k), profile)
        assert result.tokens.tolist() == pytest.approx([1 + sum(survival[:k])], rel=1e-6)


def censored(full: TraceArrays, own: Tensor, explored: Tensor, share: float) -> TraceArrays:
    """Return a trace of full depth as it would have been recorded under a policy that stops at `own`."""
    depth = torch.arange(full.depth)
    shown = depth < torch.where(explored, full.drawn.sum(1), own)[:, None]
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
    """Numerators and denominator of the self-normalised estimate are unbiased: no tolerance but that of sums."""
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


def test_a_trace_at_full_depth_needs_no_weights(live: Any, profile: Profile) -> None:
    trace = live()
    result = importance_estimate(trace, Confidence(0.4, DEPTH), profile)
    rounds = observed_rounds(read(trace), Confidence(0.4, DEPTH), profile)
    assert (result.observed, result.by_exploration) == (1.0, 0)
    assert result.effective_rounds == pytest.approx(len(rounds.tokens))
    assert result.tokens.value == pytest.approx(rounds.tokens.mean(), rel=EXACT)
    assert result.tokens_per_s.value == pytest.approx(rounds.tokens.sum() / rounds.seconds.sum(), rel=EXACT)


def test_with_an_unknown_recorded_policy_only_explored_rounds_count(live: Any, profile: Profile) -> None:
    trace = live(TEST_POLICIES["from-anchor"], explore=0.25)
    without = importance_estimate(trace, FixedLength(4), profile)
    known = importance_estimate(trace, FixedLength(4), profile, recorded=TEST_POLICIES["from-anchor"])
    assert any("only rounds that explored" in text for text in without.caveats)
    assert not any("only rounds that explored" in text for text in known.caveats)
    assert without.observed < known.observed
    explored_only = read(trace).extra["explored"].numpy()
    assert without.by_exploration == explored_only.sum()
    rounds = observed_rounds(read(trace), FixedLength(4), profile)
    assert without.tokens.value == pytest.approx(rounds.tokens[explored_only].mean())


@pytest.mark.parametrize(
    "name",
    ["fixed:4", "confidence:0.6", "", "confidence", "fixed:x", "fixed:-1", "mine", "hub:a/b", "./folder", "bandit"],
)
def test_only_built_in_policies_come_from_a_name_in_a_trace(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specstop.policies.registry.Registry.names", lambda self: pytest.fail("a name was looked for"))
    result = _builtin_policy(name)
    assert (result.name if result else None) == (name if name in ("fixed:4", "confidence:0.6") else None)


def test_the_wrong_recorded_policy_is_not_used(live: Any, profile: Profile) -> None:
    trace = live(LOGGING, explore=0.25)
    wrong = importance_estimate(trace, FixedLength(4), profile, recorded=FixedLength(1))
    assert any("fixed:1 stops elsewhere than" in text for text in wrong.caveats)
    assert wrong.by_exploration == read(trace).extra["explored"].sum(), "as if it were unknown"


def test_what_cannot_be_estimated_is_refused(
    live: Any, traces: dict[float, Trace], pair: Pair, prompts: list[Prompt], profile: Profile, tmp_path: Path
) -> None:
    with pytest.raises(TraceError, match=r"only if they explored, and none of those did \(`explore` 0\)"):
        importance_estimate(live(LOGGING), FixedLength(4), profile)
    with pytest.raises(TraceError, match="for live traces"):
        importance_estimate(traces[0.7], FixedLength(2), profile)
    with pytest.raises(TraceError, match="selects among drawn tokens"):
        importance_estimate(live(LOGGING, explore=0.25), TEST_POLICIES["selecting"], profile)
    tree = collect(pair, prompts[:2], tmp_path / "t", tree="2,1", max_new_tokens=6, collector="live", explore=0.5)
    with pytest.raises(TraceError, match="for chains"):
        importance_estimate(tree, FixedLength(1), profile)


def test_evaluate_estimates_on_a_trace_with_exploration(live: Any, profile: Profile) -> None:
    trace = live(TEST_POLICIES["from-anchor"], explore=0.25)
    policies = [FixedLength(2), TEST_POLICIES["from-anchor"], FixedLength(4)]
    section = evaluate(trace, profile, policies).details["importance"]
    assert [row[0] for row in section["rows"]] == [policy.name for policy in policies]
    for policy, row in zip(policies, section["rows"], strict=True):
        expected = importance_estimate(trace, policy, profile, recorded=TEST_POLICIES["from-anchor"])
        assert row[1] == dataclasses.asdict(expected.to_recorded)
    assert section["rows"][1][1]["value"] == pytest.approx(1.0, rel=EXACT), "the recorded policy itself"
    assert "from-anchor" in section["text"] and "25%" in section["text"]
    assert "importance" not in evaluate(live(), profile, [FixedLength(2)]).details, "every round has full depth"


SENT = 2


@pytest.fixture(scope="module")
def rejected(
    pair: Pair, prompts: list[Prompt], tmp_path_factory: pytest.TempPathFactory
) -> dict[str | None, TraceArrays]:
    options = {"temperature": 0.7, "max_new_tokens": NEW, "collector": "live", "verification": "rejection"}
    output: dict[str | None, TraceArrays] = {}
    for tree in (None, "2,2,1"):
        folder: Path = tmp_path_factory.mktemp("rejected")
        output[tree] = trace_arrays(collect(pair, prompts, folder, depth=4, tree=tree, **options), extra=ROUND_COLUMNS)
    return output


def test_single_rounds_are_expectations_over_the_stored_probabilities(
    rejected: dict[str | None, TraceArrays], profile: Profile
) -> None:
    arrays = rejected[None]
    rows = [i for i in range(len(arrays.cut)) if not arrays.cut[i]]
    for k in (0, 1, 3):
        result = evaluate_rounds(arrays, FixedLength(k), profile)
        expected = []
        for i in rows:
            p, q = arrays.extra["target_prob"][i], arrays.extra["draft_prob"][i]
            chances = (p / q).clamp(max=1.0).tolist()
            expected.append(
                1 + sum(float(torch.tensor(chances[:j], dtype=torch.float64).prod()) for j in range(1, k + 1))
            )
        assert sorted(result.committed.tolist()) == pytest.approx(sorted(expected), rel=1e-5)
        assert (result.drafted == k).all()
        assert len(result.committed) == len(rows) > 30
    whole = evaluate_rounds(arrays, FixedLength(4), profile)
    drawn = (arrays.accepted[~arrays.cut].double() + 1).mean()
    assert float(whole.committed.mean()) == pytest.approx(float(drawn), rel=0.15)
    assert any("other anchors" in text for text in whole.caveats)
    assert any("expectation" in text for text in whole.caveats)


def test_single_rounds_of_trees_are_as_they_were_drawn(
    rejected: dict[str | None, TraceArrays], profile: Profile
) -> None:
    arrays = rejected["2,2,1"]
    result = evaluate_rounds(arrays, FixedLength(3), profile)
    assert float(result.committed.sum()) == float((arrays.accepted[~arrays.cut] + 1).sum())
    assert any("as it was drawn" in text for text in result.caveats)
    early = evaluate_rounds(arrays, Confidence(0.5, 3), profile)
    assert early.committed.sum() < result.committed.sum()
    assert early.seconds.sum() < result.seconds.sum()


def test_a_rejection_trace_is_not_replayed_and_a_dense_one_has_no_single_rounds(
    traces: dict[float, Trace], rejected: dict[str | None, TraceArrays], profile: Profile
) -> None:
    with pytest.raises(TraceError, match="depends on the policy"):
        replay(rejected[None], FixedLength(2), profile)
    with pytest.raises(TraceError, match="live traces"):
        evaluate_rounds(trace_arrays(traces[0.7]), FixedLength(2), profile)


@pytest.mark.parametrize("verification", ["match", "rejection"])
def test_tokens_that_were_drafted_and_not_sent_are_no_rejections(
    pair: Pair, prompts: list[Prompt], profile: Profile, tmp_path: Path, verification: str
) -> None:
    settings = {"depth": DEPTH, "temperature": 0.7, "max_new_tokens": NEW, "verification": verification}
    trace = collect(pair, prompts, tmp_path / "live", collector="live", policy=FixedLength(DEPTH), **settings)
    whole = trace_arrays(trace, extra=ROUND_COLUMNS)
    assert whole.drawn is not None and int(whole.accepted.max()) > SENT
    # As if the policy had trimmed every draft to two tokens before it was sent.
    extra = {name: values.clone() for name, values in whole.extra.items()}
    for name in ("sent", "observed", "target_prob"):
        extra[name][:, SENT:] = 0
    path = whole.accepted_nodes().clone()
    path[:, SENT:] = False
    trimmed = dataclasses.replace(whole, extra=extra, path=path, accepted=path.sum(1))
    for k in range(SENT + 1):
        values = [evaluate_rounds(arrays, FixedLength(k), profile) for arrays in (whole, trimmed)]
        assert values[0].committed.tolist() == values[1].committed.tolist()
    with pytest.raises(
        TraceError, match=f"fixed:{SENT + 1} verifies tokens that fixed:{DEPTH} drafted and did not send"
    ):
        evaluate_rounds(trimmed, FixedLength(SENT + 1), profile)
