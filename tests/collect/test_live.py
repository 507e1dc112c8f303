"""The live collector: its rows are the loop's rounds, agree with dense ones, and show what policies do not draft."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from conftest import EOS, NEW
from contract_policies import DEPTH, TEST_POLICIES, ReadsDraftStates
from specstop.collect.exploring import exploring
from specstop.collect.prompts import Prompt
from specstop.collect.run import collect, plan_run
from specstop.collect.schema import NO_TOKEN, TIMES
from specstop.collect.shards import record
from specstop.collect.store import Trace, finished
from specstop.decode.loop import Settings, Speculator
from specstop.decode.models.pair import Pair
from specstop.decode.verify.noise import stream_key
from specstop.decode.verify.sampling import SamplingParams
from specstop.policies.contract import Array, DraftStep, DraftTree, RoundOutcome, State, StopPolicy
from specstop.policies.errors import InputError, PolicyError, PolicyFailure, TraceError
from specstop.policies.features import ANCHOR_FEATURES, HIDDEN_STATES
from specstop.policies.fixed import Confidence, FixedLength
from specstop.policies.profile import Profile
from specstop.policies.published.smartspec import SmartSpec
from specstop.train.evaluate.importance import importance_estimate
from specstop.train.replay.arrays import trace_arrays
from specstop.train.replay.rounds import scaled
from specstop.train.replay.run import replay
from trace_rows import by_anchor, numpy_rows

FLOAT32, HALF = 2e-6, 2.0**-10
TREE = "3,2,1,1,1"
MANY = SamplingParams(min_p=0.3, repetition_penalty=1.4, no_repeat_ngram=2, min_new_tokens=9)


def run(pair: Pair, prompts: list[Prompt], out: Path, tree: str | None, temperature: float, **more: Any) -> Trace:
    options = {"depth": DEPTH, "tree": tree, "temperature": temperature, "max_new_tokens": NEW, "verification": "match"}
    return collect(pair, prompts, out, **{**options, **more})


@pytest.mark.parametrize(
    ("tree", "temperature", "sampling"),
    [
        (None, 0.7, SamplingParams()), (TREE, 0.0, SamplingParams()), (TREE, 0.7, SamplingParams()),
        (None, 0.0, SamplingParams(repetition_penalty=1.5, min_new_tokens=NEW)), (None, 0.7, SamplingParams(top_p=0.7)),
        (TREE, 0.7, SamplingParams(top_k=2)), (TREE, 1.0, MANY),
    ],
)  # fmt: skip
def test_dense_and_live_agree_at_the_anchors_that_both_have(
    pair: Pair, prompts: list[Prompt], tmp_path: Path, tree: str | None, temperature: float, sampling: SamplingParams
) -> None:
    options: dict[str, Any] = {"sampling": sampling, "hidden": tuple(HIDDEN_STATES)}
    dense = by_anchor(run(pair, prompts, tmp_path / "dense", tree, temperature, **options))
    policy = ReadsDraftStates() if tree is None else None
    live = by_anchor(
        run(pair, prompts, tmp_path / "live", tree, temperature, collector="live", policy=policy, **options)
    )
    candidates = accepted = 0
    for key, row in live.items():
        other, drawn, known = dense[key], row["drawn"], row["observed"]
        assert (row["tokens"] == other["tokens"])[drawn].all()
        assert (other["tokens"][row["tokens"] == NO_TOKEN] == NO_TOKEN).all()
        assert not (other["tokens"][drawn] == NO_TOKEN).any()
        assert row["text_tokens"] == other["text_tokens"]
        assert not row["draft_hidden"][~drawn].any()
        for name, near in {**dict.fromkeys(ANCHOR_FEATURES, FLOAT32), "target_hidden": HALF}.items():
            np.testing.assert_allclose(row[name], other[name], rtol=near, atol=near, err_msg=name)
        for name in set(other) - {*ANCHOR_FEATURES, "target_hidden", "target_prob", "overlap"}:
            if getattr(other[name], "dtype", None) in (np.float16, np.float32):
                near = HALF if name == "draft_hidden" else FLOAT32
                np.testing.assert_allclose(row[name][drawn], other[name][drawn], rtol=near, atol=near, err_msg=name)
        assert not (known & ~other["observed"]).any()
        assert (row["accepted"] == other["accepted"])[known].all()
        for name in ("target_prob", "overlap"):
            np.testing.assert_allclose(row[name][known], other[name][known], rtol=FLOAT32, atol=FLOAT32, err_msg=name)
        if not row["cut"] and policy is None:
            assert (known == other["observed"]).all(), "a round that is not cut labels all that dense labels"
        candidates, accepted = candidates + int(drawn.sum()), accepted + int(row["accepted"].sum())
    assert candidates > 150 and accepted > 40


class NoTime(type(TEST_POLICIES["adaptive"])):  # type: ignore[misc]
    """`adaptive` without the seconds of rounds."""

    name = "no-time"

    def observe(self, outcome: Any, state: Any) -> Any:
        return super().observe(outcome, state)[0], state[1]


@pytest.mark.parametrize(
    ("policy", "tree", "temperature"),
    [(policy, *setup) for at, policy in enumerate((TEST_POLICIES["trimming"], NoTime(), TEST_POLICIES["selecting"]))
     for setup in ((None, 0.7), (TREE, 0.7 * (at % 2)))],
)  # fmt: skip
def test_rows_are_the_rounds_of_the_loop_and_replay_as_the_run_that_they_record(
    pair: Pair, prompts: list[Prompt], prompt_ids: list[list[int]], profile: Profile, tmp_path: Path, policy: StopPolicy,
    tree: str | None, temperature: float,
) -> None:  # fmt: skip
    free = type(profile)(
        profile.low, profile.high, 0.0, 0.0, (0.0, 0.0)
    )  # without a profile the loop observes no seconds
    trace = run(pair, prompts, tmp_path, tree, temperature, collector="live", policy=policy)
    log, rows = replay(trace_arrays(trace), policy, free).log, by_anchor(trace)
    speculator = Speculator(pair, policy, Settings(temperature, NEW, DEPTH, tree=tree, verification="match"))
    for s, (prompt, ids) in enumerate(zip(prompts, prompt_ids, strict=True)):
        rounds = speculator.generate(ids, stream_key(0, prompt.id)).rounds
        lines = log[log[:, 0] == s, 1:].tolist()
        assert lines == [[r.anchor, r.drafted, r.verified, r.accepted] for r in rounds]
        for r in rounds:
            row = rows.pop((s, r.anchor))
            assert [int(row["drawn"].sum()), int(row["sent"].sum())] == [r.drafted, r.verified]
            assert int((row["accepted"] & row["sent"]).sum()) == r.accepted
            assert all(row[name] == getattr(r, name) for name in ("committed", "decisions", "backlog"))
    assert rows == {} and torch.is_inference_mode_enabled() is False


def test_a_live_trace_refuses_a_policy_that_goes_elsewhere(
    pair: Pair, prompts: list[Prompt], profile: Profile, tmp_path: Path
) -> None:
    arrays = trace_arrays(run(pair, prompts, tmp_path, TREE, 0.7, collector="live", policy=Confidence(0.6, DEPTH)))
    for policy, words in ((FixedLength(DEPTH), "confidence:0.6"), (Confidence(0.1, DEPTH), "no round|did not")):
        with pytest.raises(TraceError, match=words):
            replay(arrays, policy, profile)


@pytest.mark.parametrize(
    ("name", "tree"),
    [("confidence:0.4", None), ("trimming", TREE), ("selecting", TREE), ("fixed:1", None), ("fixed:1", TREE)],
)
def test_exploring_rounds_are_drafted_and_verified_to_full_depth(
    pair: Pair, prompts: list[Prompt], tmp_path: Path, name: str, tree: str | None
) -> None:
    policy: StopPolicy = TEST_POLICIES[name]
    trace = run(pair, prompts, tmp_path, tree, 0.7, collector="live", policy=policy, explore=0.3)
    rows = [row for row in numpy_rows(trace) if not row["cut"]]
    explored = [row for row in rows if row["explored"]]
    assert 0.15 < len(explored) / len(rows) < 0.45 and trace.header.explore == 0.3
    assert all((row["drawn"] == row["sent"]).all() for row in explored)
    assert all(row["drawn"].all() or EOS in row["tokens"] for row in explored), (
        "a branch ends with EOS, or at the bottom"
    )
    assert not all(row["sent"].all() for row in rows if not row["explored"])


def test_exploring_leaves_the_other_rounds_and_the_text_as_they_are(
    pair: Pair, prompts: list[Prompt], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"collector": "live", "policy": Confidence(0.4, DEPTH)}
    plain, mixed = (
        by_anchor(run(pair, prompts, tmp_path / str(explore), None, 0.7, explore=explore, **options))
        for explore in (0.0, 0.3)
    )
    shared = [key for key in set(plain) & set(mixed) if not mixed[key]["explored"]]
    assert len(shared) > 40
    for key in shared:
        for name in ("drawn", "sent", "tokens", "committed", "decisions"):
            assert np.array_equal(plain[key][name], mixed[key][name])
    assert {k[0]: r["text_tokens"] for k, r in plain.items()} == {k[0]: r["text_tokens"] for k, r in mixed.items()}


class AlwaysOn(StopPolicy):
    """Drafts on whenever it is called, which it is not in batches of two or three streams; selects only if it was called."""

    name, first, max_depth = "always-on", 3, DEPTH
    unasked: Mapping[int, int] = {2: 1, 3: 2}

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        return step.alive.copy(), np.ones(len(step.alive))

    def select(self, tree: DraftTree, state: State) -> Array | None:
        return tree.drawn & (np.zeros(len(tree.drawn)) if state is None else state > 0)[:, None].astype(bool)


@pytest.mark.parametrize(
    ("share", "batch", "lengths"),
    [(0.0, [0], [5]), (0.0, [0, 0], [1, 1]), (0.0, [0, 0, 0], [2, 2, 2]), (0.0, [0, -1, 0], [1, 0, 1]),
     (0.0, [0] * 4, [5] * 4), (1.0, [0, 0, 0], [DEPTH] * 3)],
)  # fmt: skip
def test_in_batches_in_which_a_policy_is_not_called_it_drafts_its_fixed_length_and_selects_all(
    share: float, batch: list[int], lengths: list[int]
) -> None:
    policy, streams = exploring(AlwaysOn(), share, DEPTH), len(batch)
    state = policy.start(streams, np.arange(streams))
    alive, length = np.array(batch)[:, None] >= 0, np.zeros(streams, dtype=np.int64)
    for depth in range(DEPTH):
        if depth >= policy.first:
            features = np.zeros((streams, 1, 0), dtype=np.float32)
            step = DraftStep(depth, alive, np.zeros((streams, 1), dtype=np.int64), features, {}, np.array(batch))
            alive, state = policy.keep(step, state)
        length += alive[:, 0]
    assert length.tolist() == lengths
    nodes = np.zeros((streams, 2), dtype=np.int64)
    mask = policy.select(DraftTree(nodes, nodes - 1, nodes + 1, np.ones((streams, 2), dtype=bool)), state)
    assert mask is None if streams in (2, 3) else mask is not None and mask.all()


def test_a_policy_without_costs_goes_by_the_profile_that_it_is_recorded_with(
    pair: Pair, prompts: list[Prompt], profile: Profile, tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "temperature": 0.7,
        "max_new_tokens": NEW,
        "depth": 3,
        "collector": "live",
        "explore": 0.3,
    }
    bare, known = (
        collect(pair, prompts, tmp_path / name, policy=policy, profile=profile, **options)
        for name, policy in (("bare", SmartSpec(max_depth=3)), ("known", SmartSpec(profile=profile, max_depth=3)))
    )
    rows = [trace_arrays(trace) for trace in (bare, known)]
    assert torch.equal(rows[0].tokens, rows[1].tokens) and torch.equal(rows[0].accepted, rows[1].accepted)
    assert bare.header.facts["profile"] == known.header.facts["profile"]
    for costs, is_replayable in ((profile, True), (scaled(profile, draft=100.0), False)):
        estimate = importance_estimate(bare, FixedLength(1), costs, recorded=SmartSpec(max_depth=3))
        assert any("stops elsewhere" in caveat for caveat in estimate.caveats) is not is_replayable


@pytest.mark.parametrize("verification", ["rejection", "rejection_replace", "block", "typical"])
def test_every_verification_can_be_recorded(
    pair: Pair, prompts: list[Prompt], tmp_path: Path, verification: str
) -> None:
    tree = None if verification == "block" else TREE
    trace = run(pair, prompts[:4], tmp_path, tree, 0.7, collector="live", verification=verification)
    assert trace.header.verification == verification
    assert not [name for name in trace.header.features if name.startswith("noisy_")]
    rows = numpy_rows(trace)
    assert sum(int(row["accepted"].sum()) for row in rows) > 10
    for row in rows:
        for inner, outer in (("accepted", "observed"), ("observed", "sent"), ("sent", "drawn")):
            assert not (row[inner] & ~row[outer]).any()
        assert all(row[name] >= 0 for name in TIMES)
        assert row["seconds"] >= row["verify_s"] > 0


def test_labels_of_rejection_end_at_the_accepted_sibling(pair: Pair, prompts: list[Prompt], tmp_path: Path) -> None:
    trace, counts = run(pair, prompts, tmp_path, "4", 0.7, collector="live", verification="rejection"), set()
    for row in numpy_rows(trace):
        if not row["drawn"].all():
            continue
        tried = int(row["observed"].sum())
        assert row["observed"][:tried].all()
        assert row["accepted"].tolist() == [at == tried - 1 and bool(row["accepted"].any()) for at in range(4)]
        assert (row["target_prob"][row["draft_prob"] > 0] > 0).all(), "p is known of every node that was verified"
        counts.add(tried)
    assert len(counts) > 2


class OfAnotherModel(FixedLength):
    """Reads hidden states of a size that this pair's draft does not have."""

    hidden = ("draft_hidden",)
    sizes: ClassVar[dict[str, int]] = {"draft_hidden": 7}


class Fails(Confidence):
    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        raise RuntimeError("now")


@pytest.mark.parametrize("explore", [0.0, 0.3])
def test_policies_of_another_model_and_policies_that_fail_end_the_collection(
    pair: Pair, prompts: list[Prompt], tmp_path: Path, explore: float
) -> None:
    with pytest.raises(PolicyError, match="draft_hidden of 7 numbers"):
        run(pair, prompts, tmp_path / "a", None, 0.0, collector="live", policy=OfAnotherModel(2), explore=explore)
    with pytest.warns(match="failed"), pytest.raises(PolicyFailure, match="now"):
        run(pair, prompts, tmp_path / "b", None, 0.0, collector="live", policy=Fails(0.4, DEPTH), explore=explore)


def test_a_place_below_a_file_is_refused(pair: Pair, prompts: list[Prompt], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="out"):
        run(pair, prompts, tmp_path / "file" / "out", None, 0.0)


class Carrying(StopPolicy):
    """Drafts one token more for every few rounds that it has observed, from text to text."""

    name, carries, max_depth = "carrying", True, DEPTH

    def start(self, streams: int, keys: Array) -> State:
        return np.zeros(streams, dtype=np.int64)

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        return step.alive & (step.depth <= state // 5 % DEPTH)[:, None], state

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        return state + outcome.active


@pytest.mark.parametrize("shards", [None, 4])
def test_a_carrying_policy_resumed_is_one_undisturbed(
    pair: Pair, prompts: list[Prompt], tmp_path: Path, shards: int | None
) -> None:
    """It starts anew with each shard; by default there is one, so that its state passes through all texts."""
    options: dict[str, Any] = {"depth": DEPTH, "max_new_tokens": NEW, "collector": "live", "shards": shards}
    whole = collect(pair, prompts, tmp_path / "whole", policy=Carrying(), **options)
    plan = plan_run(pair, prompts, policy=Carrying(), **options)
    assert whole.header.shards == (shards or 1)

    def interrupted(batch: Any) -> Any:
        if finished(tmp_path / "broken", plan.header):
            raise KeyboardInterrupt
        return plan.rows(batch)

    with contextlib.suppress(KeyboardInterrupt):
        record(dataclasses.replace(plan, rows=interrupted), tmp_path / "broken")
    resumed = record(plan_run(pair, prompts, policy=Carrying(), **options), tmp_path / "broken", resume=True)
    columns = ("sequence", "anchor", "tokens", "drawn", "sent", "committed", "decisions", "accepted")
    assert resumed.table(columns).equals(whole.table(columns))
    assert len({int(row["drawn"].sum()) for row in numpy_rows(whole)}) > 3
    many = [dataclasses.replace(p, id=f"{p.id}-{i}") for i in range(9) for p in prompts]
    by_policy = [plan_run(pair, many, policy=policy, **options) for policy in (FixedLength(2), Carrying())]
    assert [one.header.shards for one in by_policy] == [shards or 3, shards or 1]
