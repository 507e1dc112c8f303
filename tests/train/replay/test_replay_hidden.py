"""Replay of policies that read hidden states: round for round what the live loop does, from what a trace holds."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import NEW
from contract_policies import DEPTH, ReadsDraftStates, ReadsStates
from specstop.collect.prompts import Prompt
from specstop.collect.run import collect
from specstop.collect.store import Trace, load_trace
from specstop.decode.loop import Speculator
from specstop.decode.models.pair import Pair
from specstop.decode.records import Generation
from specstop.decode.settings import Settings
from specstop.decode.verify.noise import stream_key
from specstop.policies.contract import Array, StopPolicy
from specstop.policies.errors import PolicyError, TraceError
from specstop.policies.features import HIDDEN_STATES
from specstop.policies.fixed import FixedLength
from specstop.policies.heads.base import NO_HIDDEN, Head
from specstop.policies.learned import Calibrator, LearnedPolicy
from specstop.policies.profile import Profile
from specstop.policies.rules import Threshold
from specstop.train.heads.rows import fit_rows, visits
from specstop.train.replay.single_rounds import ROUND_COLUMNS, evaluate_rounds
from specstop.train.replay.run import Replayed, replay, replay_many
from specstop.train.replay.stacking import stacked
from specstop.train.replay.traces import hidden_states as hidden_module
from specstop.train.replay.arrays import TraceArrays, trace_arrays

TREES = {None: None, "odd": "parents:-1,-1,-1,0,0,1,3,3,4,6,9"}
CASES = [(tree, t) for tree in TREES for t in (0.0, 0.7)]
POLICIES: dict[str, StopPolicy] = {p.name: p for p in (ReadsStates(), ReadsDraftStates())}
Collected = Callable[..., Trace]


class OnStates(Head):
    """A head of one dot product."""

    kind = "on-states"
    sizes: Mapping[str, int] = {"draft_hidden": 16}

    def __init__(self) -> None:
        self._tensors = {}

    def scores(self, features: Array, depth: int, hidden: Mapping[str, Array] = NO_HIDDEN) -> Array:
        score = ReadsStates.score(hidden["draft_hidden"]) + 1.0
        return np.stack([score, score], -1)


@pytest.fixture(scope="module")
def collected(pair: Pair, prompts: list[Prompt], tmp_path_factory: pytest.TempPathFactory) -> Collected:
    """Collect once for each tree, temperature and policy."""
    folder, done = tmp_path_factory.mktemp("hidden"), {}

    def run(tree: str | None, temperature: float, policy: StopPolicy | None = None) -> Trace:
        key = (tree, temperature, policy and policy.name)
        if key not in done:
            live = {} if policy is None else {"collector": "live", "policy": policy}
            out = folder / "-".join(map(str, key))
            done[key] = collect(
                pair, prompts, out, depth=DEPTH, tree=TREES[tree], temperature=temperature, verification="match",
                max_new_tokens=NEW, shards=2, hidden=tuple(HIDDEN_STATES), **live,
            )  # fmt: skip
        return done[key]

    return run


def rounds(generations: list[Generation]) -> list[list[list[int]]]:
    return [[[r.anchor, r.drafted, r.verified, r.accepted] for r in g.rounds] for g in generations]


def rounds_of(replayed: Replayed) -> list[list[list[int]]]:
    return [replayed.log[replayed.log[:, 0] == s, 1:].tolist() for s in range(len(replayed.tokens))]


@pytest.mark.parametrize(("tree", "temperature"), CASES)
def test_rounds_are_those_of_the_live_loop(
    pair: Pair, prompts: list[Prompt], prompt_ids: list[list[int]], collected: Collected, profile: Profile,
    tree: str | None, temperature: float,
) -> None:  # fmt: skip
    arrays = trace_arrays(collected(tree, temperature))
    for policy in POLICIES.values():
        speculator = Speculator(
            pair, policy, Settings(temperature, NEW, tree=TREES[tree], verification="match"), profile
        )
        live = [speculator.generate(ids, stream_key(0, p.id)) for p, ids in zip(prompts, prompt_ids, strict=True)]
        assert speculator.policy is policy, "it did not fail"
        assert rounds_of(replay(arrays, policy, profile)) == rounds(live)
        assert len({tuple(r[1:]) for text in rounds(live) for r in text}) > 4


@pytest.mark.parametrize(("tree", "temperature"), [(None, 0.7), ("odd", 0.7)])
@pytest.mark.parametrize("name", POLICIES)
def test_a_live_trace_is_replayed_by_the_policy_that_made_it(
    collected: Collected, profile: Profile, tree: str | None, temperature: float, name: str
) -> None:
    policy = POLICIES[name]
    live, dense = trace_arrays(collected(tree, temperature, policy)), trace_arrays(collected(tree, temperature))
    assert rounds_of(replay(live, policy, profile)) == rounds_of(replay(dense, policy, profile))


def test_a_part_of_a_trace_has_its_own_states(collected: Collected, profile: Profile) -> None:
    arrays = trace_arrays(collected(None, 0.7))
    whole, part = (replay(a, POLICIES["reads-states"], profile) for a in (arrays, arrays.subset([5, 2]).subset([1, 0])))
    assert rounds_of(part) == [rounds_of(whole)[s] for s in (2, 5)]


def test_nothing_is_read_before_it_is_asked_for(collected: Collected, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = collected(None, 0.0)
    read: list[str] = []
    batches = Trace.batches
    monkeypatch.setattr(Trace, "batches", lambda self, names, rows: read.extend(names) or batches(self, names, rows))
    arrays = trace_arrays(trace)
    part = arrays.subset([1, 2])
    assert read and not set(read) & set(HIDDEN_STATES)
    read.clear()
    node = torch.zeros(2, dtype=torch.int64)
    one = arrays.hidden_state("draft_hidden").at(arrays.offset[1:3], node)
    assert torch.equal(part.hidden_state("draft_hidden").at(part.offset, node), one)
    assert read == ["draft_hidden"], "once, for the whole and its parts"


@pytest.mark.parametrize("most", [1 << 30, 0])
def test_what_is_too_large_for_memory_is_read_from_a_file(
    collected: Collected, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    trace = collected("odd", 0.7)
    monkeypatch.setattr(hidden_module, "MEMORY_BYTES", most)
    monkeypatch.setattr(hidden_module, "_BLOCK_BYTES", 2 * 16 * 11 * 7)
    for arrays in (trace_arrays(trace), trace_arrays(Trace(trace.folder, trace.header, trace.rows))):
        row = torch.arange(len(arrays.accepted))
        rows = trace.rows.with_format("numpy")
        order = np.lexsort((rows["anchor"], rows["sequence"]))
        for name, shape in (("draft_hidden", (-1, 11, 16)), ("target_hidden", (-1, 16))):
            expected = torch.from_numpy(np.stack(list(rows[name]))[order].reshape(shape))
            for node in range(11) if name == "draft_hidden" else (None,):
                at = None if node is None else torch.full_like(row, node)
                found = arrays.hidden_state(name).at(row, at)
                assert found.dtype == torch.float16
                assert torch.equal(found, expected if node is None else expected[:, node])


def test_a_full_disk_is_said_plainly(collected: Collected, monkeypatch: pytest.MonkeyPatch) -> None:
    import tempfile

    class Full:
        def __enter__(self) -> Full:
            return self

        def __exit__(self, *args: object) -> None:
            pass

        def write(self, data: bytes) -> None:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(hidden_module, "MEMORY_BYTES", 0)
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: Full())
    arrays = trace_arrays(collected(None, 0.0))
    with pytest.raises(TraceError, match=r"target_hidden of .* cannot hold .No space left on device.; set TMPDIR"):
        arrays.hidden_state("target_hidden").at(torch.zeros(1, dtype=torch.int64))


def test_a_sweep_goes_side_by_side_in_parts(
    collected: Collected, profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = trace_arrays(collected(None, 0.7))
    flat, head = Calibrator("temperature", 1.0), OnStates()
    many: list[StopPolicy] = [
        LearnedPolicy("learned", (), head, flat, flat, Threshold("survival", t), DEPTH) for t in (0.1, 0.3, 0.5)
    ]
    assert many[0].hidden == ("draft_hidden",)
    expected = [rounds_of(replay(arrays, policy, profile)) for policy in many]
    assert expected[0] != expected[1] != expected[2]
    assert stacked(many, arrays.sequences) is not None
    for most in (1 << 26, 16 * 4 * 2 * arrays.sequences, 1):
        monkeypatch.setattr(sys.modules["specstop.train.replay.run"], "MOST_HIDDEN_BYTES", most)
        assert [rounds_of(r) for r in replay_many(arrays, many, profile)] == expected


def test_fit_rows_have_the_states_that_a_policy_sees(collected: Collected, profile: Profile) -> None:
    arrays = trace_arrays(collected(None, 0.7))
    visited = visits(arrays, [replay(arrays, FixedLength(3), profile)])
    rows = fit_rows(arrays, ["top1"], visited, tuple(HIDDEN_STATES))
    plain = fit_rows(arrays, ["top1"], visited)
    assert plain.hidden == {} and torch.equal(plain.features, rows.features)
    draft, target = rows.hidden["draft_hidden"], rows.hidden["target_hidden"]
    assert draft.shape == target.shape == (len(rows), 16) and draft.dtype == torch.float16
    assert not draft[rows.depth == 0].any() and draft[rows.depth > 0].any(-1).all()
    first = (rows.depth == 0).nonzero()[:, 0]
    assert torch.equal(target[first], arrays.hidden_state("target_hidden").at(visited.row))
    second = (rows.depth == 1).nonzero()[:, 0]
    assert torch.equal(
        draft[second], arrays.hidden_state("draft_hidden").at(visited.row, torch.zeros_like(visited.row))
    )
    owner = (rows.depth == 0).cumsum(0) - 1  # the rows of a round follow one another
    deep = (rows.depth == 3).nonzero()[:, 0]
    expected = arrays.hidden_state("draft_hidden").at(visited.row[owner[deep]], rows.depth[deep] - 1)
    assert len(deep) > 5 and torch.equal(draft[deep], expected)
    assert torch.equal(target[deep], target[first][owner[deep]])


def test_what_a_trace_does_not_hold_is_refused(
    traces: dict[float, Trace], collected: Collected, profile: Profile
) -> None:
    arrays = trace_arrays(traces[0.7])
    with pytest.raises(TraceError, match=r"draft_hidden, target_hidden\), .* collect it with `hidden` draft,target"):
        replay(arrays, ReadsStates(), profile)
    with pytest.raises(TraceError, match="the trace has no draft_hidden; collect it again with `hidden` draft"):
        trace_arrays(traces[0.7], hidden=["draft_hidden"])
    with pytest.raises(TraceError, match="no target_hidden"):
        fit_rows(arrays, ["top1"], visits(arrays, [replay(arrays, FixedLength(2), profile)]), ["target_hidden"])
    few = trace_arrays(collected(None, 0.7), hidden=["target_hidden"])
    with pytest.raises(TraceError, match=r"reads hidden states \(draft_hidden\)"):
        replay(few, ReadsDraftStates(), profile)
    policy = ReadsDraftStates()
    policy.sizes = {"draft_hidden": 8}  # type: ignore[attr-defined]
    with pytest.raises(PolicyError, match=r"draft_hidden of 8 .*16"):
        replay(trace_arrays(collected(None, 0.7)), policy, profile)


def test_single_rounds_of_a_live_trace_can_be_asked(
    pair: Pair, prompts: list[Prompt], profile: Profile, tmp_path: Path
) -> None:
    options = {"depth": DEPTH, "temperature": 0.7, "max_new_tokens": NEW, "collector": "live"}
    trace = collect(pair, prompts, tmp_path / "x", **options, verification="rejection", hidden=tuple(HIDDEN_STATES))
    arrays = trace_arrays(load_trace(trace.folder), extra=ROUND_COLUMNS)
    values = evaluate_rounds(arrays, ReadsStates(), profile)
    assert len(values.committed) > 20 and 0 < float(values.taken.drafted.double().mean()) < DEPTH
    bare: TraceArrays = trace_arrays(trace, extra=ROUND_COLUMNS, hidden=())
    with pytest.raises(TraceError, match="what the trace does not hold"):
        evaluate_rounds(bare, ReadsStates(), profile)
