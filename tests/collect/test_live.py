"""The live collector: its rows are the loop's rounds, and agree with the dense ones where both are."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from conftest import EOS, NEW
from contract_policies import DEPTH, TEST_POLICIES
from specstop.collect.prompts import Prompt
from specstop.collect.run import collect
from specstop.collect.schema import NO_TOKEN, TIMES
from specstop.collect.store import Trace
from specstop.decode.loop import Settings, Speculator
from specstop.decode.models.pair import Pair
from specstop.decode.verify.noise import stream_key
from specstop.decode.verify.sampling import SamplingParams
from specstop.policies.contract import StopPolicy
from specstop.policies.errors import InputError, PolicyError, TraceError
from specstop.policies.features import ANCHOR_FEATURES
from specstop.policies.fixed import Confidence, FixedLength
from specstop.policies.profile import Profile
from specstop.policies.published.smartspec import SmartSpec
from specstop.train.evaluate.importance import importance_estimate
from specstop.train.replay.log import scaled
from specstop.train.replay.run import replay
from specstop.train.replay.traces.arrays import trace_arrays
from trace_rows import numpy_rows

FLOAT32 = 2e-6
TREE = "3,2,1,1,1"
SETUPS = [(tree, t) for tree in (None, TREE) for t in (0.0, 0.7)]
NAMES = ("trimming", "adaptive", "selecting")
MANY = SamplingParams(min_p=0.3, repetition_penalty=1.4, no_repeat_ngram=2, min_new_tokens=9)
FILTERED = [
    (None, 0.0, SamplingParams(repetition_penalty=1.5, min_new_tokens=NEW)),
    (None, 0.7, SamplingParams(top_p=0.7)),
    (TREE, 0.7, SamplingParams(top_k=2)),
    (TREE, 1.0, MANY),
]


def by_anchor(trace: Trace) -> dict[tuple[int, int], dict[str, Any]]:
    return {(int(row["sequence"]), int(row["anchor"])): row for row in numpy_rows(trace)}


def run(pair: Pair, prompts: list[Prompt], out: Path, tree: str | None, temperature: float, **more: Any) -> Trace:
    options = {"depth": DEPTH, "tree": tree, "temperature": temperature, "max_new_tokens": NEW, "verification": "match"}
    return collect(pair, prompts, out, **{**options, **more})


@pytest.mark.parametrize(
    ("tree", "temperature", "sampling"), [*((*setup, SamplingParams()) for setup in SETUPS[1:3]), *FILTERED]
)
def test_dense_and_live_agree_at_the_anchors_that_both_have(
    pair: Pair, prompts: list[Prompt], tmp_path: Path, tree: str | None, temperature: float, sampling: SamplingParams
) -> None:
    dense = by_anchor(run(pair, prompts, tmp_path / "dense", tree, temperature, sampling=sampling))
    live = by_anchor(run(pair, prompts, tmp_path / "live", tree, temperature, collector="live", sampling=sampling))
    seen = accepted = 0
    for key, row in live.items():
        other, drawn = dense[key], row["drawn"]
        assert (row["tokens"] == other["tokens"])[drawn].all()
        assert (other["tokens"][row["tokens"] == NO_TOKEN] == NO_TOKEN).all()
        assert not (other["tokens"][drawn] == NO_TOKEN).any()
        assert row["text_tokens"] == other["text_tokens"]
        for name in ANCHOR_FEATURES:
            assert row[name] == pytest.approx(other[name], abs=FLOAT32)
        for name in set(other) - set(ANCHOR_FEATURES):
            if getattr(other[name], "dtype", None) == np.float32 and name not in ("target_prob", "overlap"):
                np.testing.assert_allclose(
                    row[name][drawn], other[name][drawn], rtol=FLOAT32, atol=FLOAT32, err_msg=name
                )
        known = row["observed"]
        assert not (known & ~other["observed"]).any()
        assert (row["accepted"] == other["accepted"])[known].all()
        for name in ("target_prob", "overlap"):
            np.testing.assert_allclose(row[name][known], other[name][known], rtol=FLOAT32, atol=FLOAT32, err_msg=name)
        if not row["cut"]:
            assert (known == other["observed"]).all(), "a round that is not cut labels all that dense labels"
        seen, accepted = seen + int(drawn.sum()), accepted + int(row["accepted"].sum())
    assert seen > 200
    assert accepted > 40


@pytest.mark.parametrize(
    ("name", "tree", "temperature"),
    [(name, *setup) for at, name in enumerate(NAMES) for setup in (SETUPS[1], SETUPS[2 + at % 2])],
)
def test_a_live_trace_replays_as_the_run_it_is_of(
    pair: Pair, prompts: list[Prompt], prompt_ids: list[list[int]], profile: Any, tmp_path: Path,
    name: str, tree: str | None, temperature: float,
) -> None:  # fmt: skip
    policy = TEST_POLICIES[name]
    if name == "adaptive":  # without a profile the loop tells it of no time at all
        profile = type(profile)(profile.low, profile.high, 0.0, 0.0, (0.0, 0.0))
        policy = NoTime()
    trace = run(pair, prompts, tmp_path, tree, temperature, collector="live", policy=policy)
    replayed = replay(trace_arrays(trace), policy, profile)
    speculator = Speculator(pair, policy, Settings(temperature, NEW, DEPTH, tree=tree, verification="match"))
    for s, (prompt, ids) in enumerate(zip(prompts, prompt_ids, strict=True)):
        rounds = speculator.generate(ids, stream_key(0, prompt.id)).rounds
        lines = replayed.log[replayed.log[:, 0] == s, 1:].tolist()
        assert lines == [[r.anchor, r.drafted, r.verified, r.accepted] for r in rounds]


class NoTime(type(TEST_POLICIES["adaptive"])):  # type: ignore[misc]
    """`adaptive` without its ear for seconds."""

    name = "no-time"

    def observe(self, outcome: Any, state: Any) -> Any:
        return super().observe(outcome, state)[0], state[1]


def test_a_live_trace_refuses_a_policy_that_goes_elsewhere(
    pair: Pair, prompts: list[Prompt], profile: Any, tmp_path: Path
) -> None:
    policy = Confidence(0.6, DEPTH)
    arrays = trace_arrays(run(pair, prompts, tmp_path, TREE, 0.7, collector="live", policy=policy))
    with pytest.raises(TraceError, match=r"confidence:0.6"):
        replay(arrays, FixedLength(DEPTH), profile)
    with pytest.raises(TraceError, match=r"no round|did not"):
        replay(arrays, Confidence(0.1, DEPTH), profile)


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
    assert 0.15 < len(explored) / len(rows) < 0.45
    assert all((row["drawn"] == row["sent"]).all() for row in explored)
    assert all(row["drawn"].all() or EOS in row["tokens"] for row in explored), (
        "a branch ends with EOS, or at the bottom"
    )
    assert not all(row["sent"].all() for row in rows if not row["explored"])
    assert trace.header.explore == 0.3


def test_a_policy_without_costs_goes_by_the_profile_that_it_is_recorded_with(
    pair: Pair, prompts: list[Prompt], profile: Profile, tmp_path: Path
) -> None:
    told: dict[str, Any] = {"temperature": 0.7, "max_new_tokens": NEW, "depth": 3, "collector": "live", "explore": 0.3}
    bare, known = (
        collect(pair, prompts, tmp_path / policy.name.replace(":", name), policy=policy, profile=profile, **told)
        for name, policy in (("bare", SmartSpec(max_depth=3)), ("known", SmartSpec(profile=profile, max_depth=3)))
    )
    rows = [trace_arrays(trace) for trace in (bare, known)]
    assert torch.equal(rows[0].tokens, rows[1].tokens) and torch.equal(rows[0].accepted, rows[1].accepted)
    assert bare.header.facts["profile"] == known.header.facts["profile"]
    for costs, is_replayable in ((profile, True), (scaled(profile, draft=100.0), False)):
        found = importance_estimate(bare, FixedLength(1), costs, recorded=SmartSpec(max_depth=3))
        assert any("stops elsewhere" in caveat for caveat in found.caveats) is not is_replayable


def test_exploring_leaves_the_other_rounds_and_the_text_as_they_are(
    pair: Pair, prompts: list[Prompt], tmp_path: Path
) -> None:
    policy = Confidence(0.4, DEPTH)
    plain = by_anchor(run(pair, prompts, tmp_path / "plain", None, 0.7, collector="live", policy=policy))
    mixed = by_anchor(run(pair, prompts, tmp_path / "mixed", None, 0.7, collector="live", policy=policy, explore=0.3))
    shared = [key for key in set(plain) & set(mixed) if not mixed[key]["explored"]]
    assert len(shared) > 40
    for key in shared:
        for name in ("drawn", "sent", "tokens", "committed", "decisions"):
            assert np.array_equal(plain[key][name], mixed[key][name])
    assert {k[0]: r["text_tokens"] for k, r in plain.items()} == {k[0]: r["text_tokens"] for k, r in mixed.items()}


@pytest.mark.parametrize("verification", ["rejection", "rejection_replace", "block", "typical"])
def test_every_verification_can_be_recorded(
    pair: Pair, prompts: list[Prompt], tmp_path: Path, verification: str
) -> None:
    tree = None if verification == "block" else TREE
    trace = run(pair, prompts[:4], tmp_path, tree, 0.7, collector="live", verification=verification)
    header = trace.header
    assert header.verification == verification
    assert not [name for name in header.features if name.startswith("noisy_")]
    rows = numpy_rows(trace)
    assert sum(int(row["accepted"].sum()) for row in rows) > 10
    for row in rows:
        assert not (row["accepted"] & ~row["observed"]).any()
        assert not (row["observed"] & ~row["sent"]).any()
        assert not (row["sent"] & ~row["drawn"]).any()
        assert all(row[name] >= 0 for name in TIMES)
        assert row["seconds"] >= row["verify_s"] > 0


@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_greedy_rounds_are_of_match_whatever_was_asked_for(
    pair: Pair, prompts: list[Prompt], tmp_path: Path, verification: str
) -> None:
    trace = run(pair, prompts[:3], tmp_path, None, 0.0, collector="live", verification=verification)
    assert (trace.header.verification, trace.header.label) == ("match", "match")


def test_labels_of_rejection_end_at_the_accepted_sibling(pair: Pair, prompts: list[Prompt], tmp_path: Path) -> None:
    trace = run(pair, prompts, tmp_path, "4", 0.7, collector="live", verification="rejection")
    seen = set()
    for row in numpy_rows(trace):
        if not row["drawn"].all():
            continue
        tried = int(row["observed"].sum())
        assert row["observed"][:tried].all()
        assert row["accepted"].tolist() == [at == tried - 1 and bool(row["accepted"].any()) for at in range(4)]
        assert (row["target_prob"][row["draft_prob"] > 0] > 0).all(), "p is known of every node that was verified"
        seen.add(tried)
    assert len(seen) > 2


class OfAnotherModel(FixedLength):
    """Reads hidden states of a size that this pair's draft does not have."""

    hidden = ("draft_hidden",)
    sizes: ClassVar[dict[str, int]] = {"draft_hidden": 7}


@pytest.mark.parametrize("explore", [0.0, 0.3])
def test_a_policy_of_another_model_is_refused_whether_it_explores_or_not(
    pair: Pair, prompts: list[Prompt], tmp_path: Path, explore: float
) -> None:
    with pytest.raises(PolicyError, match="reads draft_hidden of 7 numbers"):
        run(pair, prompts, tmp_path, None, 0.0, collector="live", policy=OfAnotherModel(2), explore=explore)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"collector": "alive"}, "collector"),
        ({"policy": FixedLength(2)}, "`collector` live"),
        ({"explore": 0.5}, "`collector` live"),
        ({"collector": "live", "explore": 1.5}, "explore"),
        ({"collector": "live", "mix": 0.2}, "mix"),
        ({"mix": 0.2}, "`depth` 1"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    pair: Pair, prompts: list[Prompt], tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        run(pair, prompts, tmp_path / "out", None, 0.0, **options)
    assert not (tmp_path / "out").exists()


def test_a_place_below_a_file_is_refused(pair: Pair, prompts: list[Prompt], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="out"):
        run(pair, prompts, tmp_path / "file" / "out", None, 0.0)


def test_the_loop_is_not_disturbed_by_being_watched(
    pair: Pair, prompts: list[Prompt], prompt_ids: list[list[int]], tmp_path: Path
) -> None:
    rows = by_anchor(run(pair, prompts, tmp_path, TREE, 0.7, collector="live", policy=Confidence(0.4, DEPTH)))
    speculator = Speculator(pair, Confidence(0.4, DEPTH), Settings(0.7, NEW, DEPTH, tree=TREE, verification="match"))
    for s, ids in enumerate(prompt_ids):
        for r in speculator.generate(ids, stream_key(0, prompts[s].id)).rounds:
            row = rows.pop((s, r.anchor))
            assert [int(row["drawn"].sum()), int(row["sent"].sum())] == [r.drafted, r.verified]
            assert [row[name] for name in ("committed", "decisions", "backlog")] == [
                r.committed,
                r.decisions,
                r.backlog,
            ]
            assert int((row["accepted"] & row["sent"]).sum()) == r.accepted
    assert rows == {}
    assert torch.is_inference_mode_enabled() is False
