"""Traces as arrays: what is read, joined and removed, and what is refused."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from conftest import NEW, make_prompts
from contract_policies import DEPTH, ReadsDraftStates, ReadsStates
from hypothesis import HealthCheck, given, settings, strategies as st
from specstop.collect.prompts import Prompt
from specstop.collect.run import collect
from specstop.collect.store import Trace, load_trace
from specstop.decode.loop import Settings, Speculator
from specstop.decode.models.pair import Pair
from specstop.decode.verify.noise import stream_key
from specstop.policies.errors import PolicyError, SpecstopWarning, TraceError
from specstop.policies.features import HIDDEN_STATES
from specstop.policies.fixed import Confidence, FixedLength
from specstop.policies.profile import Profile
from specstop.policies.storage import load_policy_folder
from specstop.train.fit.run import train
from specstop.train.heads.crossfit import prompt_folds
from specstop.train.replay.arrays import TraceArrays, joined_arrays, policy_features, temperatures, trace_arrays
from specstop.train.replay.checks import check_fit, require_disjoint, require_disjoint_prompts
from specstop.train.replay.run import replay
from synthetic import synthetic_trace

TREE = "parents:-1,-1,-1,0,0,1,3,3,4,6,9"
TEMPERATURES = (0.0, 0.7)


@pytest.fixture(scope="module")
def arrays(traces: dict[float, Trace]) -> TraceArrays:
    return trace_arrays(traces[0.7])


@pytest.fixture(scope="module")
def states(pair: Pair, prompts: list[Prompt], tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, Trace]:
    """Traces with hidden states, of a chain and of a tree."""
    options = {"depth": DEPTH, "temperature": 0.7, "max_new_tokens": NEW, "shards": 2, "hidden": tuple(HIDDEN_STATES)}
    folder = tmp_path_factory.mktemp("states")
    return {
        tree: collect(pair, prompts, folder / str(at), tree=tree, **options) for at, tree in enumerate((None, TREE))
    }


@pytest.fixture(scope="module")
def both(pair: Pair, sides: tuple[Trace, Trace], tmp_path_factory: pytest.TempPathFactory) -> list[Trace]:
    """Traces of the training prompts at temperatures 0.7 and 0."""
    folder = tmp_path_factory.mktemp("cold")
    return [sides[0], collect(pair, make_prompts(24, "fit", 21), folder, depth=DEPTH, max_new_tokens=NEW, shards=2)]


class ReadsClock(FixedLength):
    reads_clock = True


class OtherSize(ReadsDraftStates):
    sizes = MappingProxyType({"draft_hidden": 8})


def test_policies_that_a_trace_cannot_replay_are_refused(
    arrays: TraceArrays, traces: dict[float, Trace], states: dict[str | None, Trace], profile: Profile
) -> None:
    few = trace_arrays(traces[0.7], ["entropy"])
    assert set(few.columns) == {"entropy"}
    whole = synthetic_trace([[1, 0, 1], [0, 1]], depth=1)
    mixed = dataclasses.replace(whole, header=dataclasses.replace(whole.header, mix=0.5))
    incomplete = dataclasses.replace(whole, text_tokens=whole.text_tokens + 1)
    assert mixed.only_positions and incomplete.only_positions and not whole.only_positions
    some_states = trace_arrays(states[None], hidden=["target_hidden"])
    for trace, policy, error, noun in (
        (arrays, FixedLength(DEPTH + 1), TraceError, "depth"),
        (arrays, ReadsClock(2), TraceError, "clock"),
        (few, Confidence(0.4, DEPTH), TraceError, "'drawn_prob'"),
        (mixed, FixedLength(1), TraceError, "mix"),
        (arrays, ReadsStates(), TraceError, "draft_hidden, target_hidden"),
        (some_states, ReadsDraftStates(), TraceError, "draft_hidden"),
        (trace_arrays(states[None]), OtherSize(), PolicyError, r"draft_hidden of 8 .*16"),
    ):
        with pytest.raises(error, match=noun):
            replay(trace, policy, profile)
    with pytest.raises(TraceError, match="'top1'"):
        policy_features(few, ["top1"], torch.zeros(1, dtype=torch.int64), torch.zeros(1, 4))
    with pytest.raises(TraceError, match="no draft_hidden"):
        trace_arrays(traces[0.7], hidden=["draft_hidden"])


@pytest.mark.parametrize(
    ("column", "value", "noun"),
    [
        ("anchor", None, "misses anchors"),
        ("accepted_length", -1, "accepted lengths"),  # would commit nothing, forever
        ("accepted_length", DEPTH + 1, "accepted lengths"),
        ("tokens", None, "without tokens"),
        ("top1", None, "without top1"),
    ],
)
def test_an_impossible_trace_is_refused(traces: dict[float, Trace], column: str, value: int | None, noun: str) -> None:
    trace = traces[0.0]
    if column == "anchor":
        rows = trace.rows.select([i for i in range(len(trace.rows)) if i != 3])
    else:
        rows = trace.rows.map(lambda row, at: {column: value if at == 3 else row[column]}, with_indices=True)
    with pytest.raises(TraceError, match=f"traces.*{noun}"):
        trace_arrays(Trace(trace.folder, trace.header, rows))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_subset_has_the_rows_of_its_texts(arrays: TraceArrays, data: st.DataObject) -> None:
    keep = data.draw(st.lists(st.integers(0, arrays.sequences - 1), max_size=6))
    part = arrays.subset(keep)
    none = torch.zeros(0, dtype=torch.int64)
    rows = torch.cat([none, *(torch.arange(int(arrays.rows[s])) + arrays.offset[s] for s in keep)])
    assert part.prompt_ids == [arrays.prompt_ids[s] for s in keep]
    assert torch.equal(part.text_tokens, arrays.text_tokens[keep])
    for name in ("accepted", "tokens", "ends", "cut", "anchor_by_row", "draft_bound"):
        assert torch.equal(getattr(part, name), getattr(arrays, name)[rows]), name
    anchors = dataclasses.replace(part, anchors=part.anchor_by_row)
    for one in () if not keep else (part, anchors) if len(set(keep)) == len(keep) else (part,):
        at = one.find(one.owner.numpy(), one.anchor_by_row.numpy())
        assert at.tolist() == list(range(len(rows)))
        assert one.find(np.array([0]), np.array([10_000])).tolist() == [-1]
        assert one.find(np.array([0]), np.array([0])).tolist() == [-1], "the first anchor is 1"


def test_shared_prompts_are_refused_or_warned_of(arrays: TraceArrays) -> None:
    part, other = arrays.subset([0, 1]), arrays.subset([2, 3])
    same_text = dataclasses.replace(part, prompt_ids=["x", "y"])
    require_disjoint("--traces", part, "--train-traces", other.clusters)
    for trace in (part, same_text):
        with pytest.raises(TraceError, match="2 of 2 prompts"):
            require_disjoint_prompts(trace, part, [])
        with pytest.warns(SpecstopWarning, match="not held-out"):
            require_disjoint_prompts(trace, part, [], allow=True)


@pytest.mark.parametrize("tree", [None, TREE])
def test_hidden_states_are_those_of_the_rows(states: dict[str | None, Trace], tree: str | None) -> None:
    trace = states[tree]
    rows = trace.rows.with_format("numpy")
    order = np.lexsort((rows["anchor"], rows["sequence"]))
    from_file, in_memory = trace_arrays(load_trace(trace.folder)), trace_arrays(trace)
    every, nodes = torch.arange(len(order)), from_file.tree.nodes
    subset = torch.cat([torch.arange(int(from_file.rows[s])) + from_file.offset[s] for s in (3, 1)])
    for name, shape in (("draft_hidden", (-1, nodes, 16)), ("target_hidden", (-1, 16))):
        expected = torch.from_numpy(np.stack(list(rows[name]))[order].reshape(shape))
        for arrays, at in ((from_file, every), (in_memory, every), (from_file.subset([3, 1]), subset)):
            row, states_of = torch.arange(len(at)), arrays.hidden_state(name)
            for node in range(nodes) if name == "draft_hidden" else (None,):
                state = states_of.at(row, None if node is None else torch.full_like(row, node))
                assert state.dtype == torch.float16
                assert torch.equal(state, expected[at] if node is None else expected[at, node])


def test_joined_traces_are_replayed_as_each_alone(both: list[Trace], profile: Profile) -> None:
    joined, alone = joined_arrays(both), [trace_arrays(trace) for trace in both]
    assert joined.sequences == sum(part.sequences for part in alone) > 40
    together, parts = replay(joined, FixedLength(3), profile), [replay(part, FixedLength(3), profile) for part in alone]
    for name in ("tokens", "seconds", "anchor", "accepted", "committed", "backlog"):
        assert torch.equal(getattr(together, name), torch.cat([getattr(part, name) for part in parts])), name
    first, temperature = len(alone[0].accepted), joined.column("temperature")
    assert set(temperature[:first].tolist()) == {float(torch.tensor(0.7))} and not temperature[first:].any()
    assert temperatures(both) == TEMPERATURES
    folds = prompt_folds(joined, 4, 0)
    owner: dict[str, int] = {}
    assert all(owner.setdefault(n, f) == f for n, f in zip(joined.prompt_ids, folds.of.tolist(), strict=True))
    assert joined.sequences > len(owner) > 20, "a prompt is in one fold at all temperatures"


def test_traces_that_differ_are_not_joined(both: list[Trace], full_profile: Profile) -> None:
    changes: list[dict[str, Any]] = [{"pair": {"target": "x"}}, {"max_new_tokens": 9}, {"verification": "rejection"}]
    for change in changes:
        other = Trace(both[1].folder, dataclasses.replace(both[1].header, **change), both[1].rows)
        with pytest.raises(TraceError, match=f"differ in {next(iter(change))}"):
            train([both[0], other], full_profile)
    with pytest.raises(TraceError, match="at least one trace"):
        joined_arrays([])


def test_a_policy_that_reads_the_temperature_decides_live_as_in_replay(
    pair: Pair, both: list[Trace], full_profile: Profile, tmp_path: Path
) -> None:
    options = {"features": ("temperature", "depth"), "rule": "step", "threshold": 0.55}
    train(both, full_profile, **options, out=tmp_path / "p")
    policy = load_policy_folder(tmp_path / "p")
    assert policy.metadata.temperature == TEMPERATURES
    cold, warm = (policy.probabilities(np.array([[t, 1.0]], dtype=np.float32), 1)[0].item() for t in TEMPERATURES)
    assert abs(cold - warm) > 1e-3
    for trace in both:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            check_fit(policy, trace)
        log, arrays = replay(trace, policy, full_profile).log.tolist(), trace_arrays(trace)
        speculator = Speculator(pair, policy, Settings(trace.header.temperature, NEW, verification="match"))
        for prompt in make_prompts(24, "fit", 21)[:4]:
            text = speculator.generate(pair.tokenizer(prompt.text)["input_ids"], stream_key(0, prompt.id))
            s = arrays.prompt_ids.index(prompt.id)
            live = [[s, r.anchor, r.drafted, r.verified, r.accepted] for r in text.rounds]
            assert live == [line for line in log if line[0] == s]
    other = Trace(both[0].folder, dataclasses.replace(both[0].header, temperature=1.3), both[0].rows)
    with pytest.warns(SpecstopWarning, match="temperature"):
        check_fit(policy, other)
