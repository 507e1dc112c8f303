"""Traces for tests: random ones, their rows by anchor, and the comparison of replay with the live loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from contract_policies import DEPTH
from specstop.collect.prompts import Prompt
from specstop.collect.run import collect
from specstop.collect.schema import Header, PromptTask, arrow_schema, parents
from specstop.collect.store import Trace, open_for_writing, write_shard
from specstop.decode.loop import Settings, Speculator
from specstop.decode.models.pair import Pair
from specstop.decode.records import Round
from specstop.decode.topology import chain
from specstop.decode.verify.noise import stream_key
from specstop.policies.contract import Array, DraftStep, RoundOutcome, State, StopPolicy
from specstop.policies.profile import Profile
from specstop.train.replay.arrays import trace_arrays
from specstop.train.replay.run import replay

HEADER = Header(
    target="t", draft="d", pair={"target": "ab", "draft": "cd"}, vocabulary=48, eos=(16, 2), temperature=0.7,
    topology=parents(chain(3)), features=("top1", "entropy"), anchor_features=("anchor_top1",), max_new_tokens=9, seed=4,
    shards=2, prompts=5, prompts_hash="ef", hidden={"draft_hidden": 2}, facts={"device": "cpu"},
)  # fmt: skip


def random_rows(rows: int, seed: int, header: Header = HEADER) -> dict[str, Any]:
    """Return the rows of one text, number `seed` of the run: random columns of the types of the schema."""
    generator = np.random.default_rng(seed)

    def column(kind: pa.DataType, shape: tuple[int, ...]) -> Any:
        if pa.types.is_fixed_size_list(kind):
            return column(kind.value_type, (*shape, kind.list_size))
        if pa.types.is_string(kind):
            return [f"row {i} of {seed}" for i in range(shape[0])]
        if pa.types.is_boolean(kind):
            return generator.random(shape) < 0.5
        if pa.types.is_integer(kind):
            return generator.integers(0, 48, shape).astype(np.int32)
        return generator.random(shape).astype(np.float16 if pa.types.is_float16(kind) else np.float32)

    length = generator.integers(0, header.depth + 1, rows).astype(np.int32)
    return {field.name: column(field.type, (rows,)) for field in arrow_schema(header)} | {
        "sequence": np.full(rows, seed, dtype=np.int32),
        "anchor": np.arange(1, rows + 1, dtype=np.int32),
        "text_tokens": np.full(rows, rows + 1, dtype=np.int32),
        "prompt_tokens": np.full(rows, 7, dtype=np.int32),
        "accepted_length": length,
        "accepted": np.arange(header.depth) < length[:, None],
    }


def write_random_trace(folder: Path, header: Header = HEADER) -> list[dict[str, Any]]:
    """Write a trace of two shards with 3 + 4 and 2 rows, and return the rows of each text."""
    chunks = [random_rows(3, 0, header), random_rows(4, 1, header), random_rows(2, 2, header)]
    open_for_writing(folder, header)
    write_shard(folder, header, 0, chunks[:2])
    write_shard(folder, header, 1, chunks[2:])
    return chunks


def numpy_rows(trace: Trace) -> list[dict[str, Any]]:
    """Return rows as numpy values by column name. Whole columns are read, since reading a row takes a millisecond."""
    columns = trace.rows.with_format("numpy")[:]
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def by_anchor(trace: Trace) -> dict[tuple[int, int], dict[str, Any]]:
    """Return the rows by (sequence, anchor), with hidden states in their shapes."""
    rows = {}
    for row in numpy_rows(trace):
        for name in trace.header.hidden:
            row[name] = np.asarray(row[name], dtype=np.float16).reshape(trace.header.hidden_shape(name))
        rows[int(row["sequence"]), int(row["anchor"])] = row
    return rows


def same_rows(first: Trace, second: Trace) -> bool:
    return bool(first.table().equals(second.table()))


def tasks(prompts: Sequence[Prompt], ids: Sequence[list[int]]) -> list[PromptTask]:
    """Return the prompts as tasks of a collector."""
    return [PromptTask(i, p.id, p.group, ids[i], stream_key(0, p.id)) for i, p in enumerate(prompts)]


def assert_close(
    chunks: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]], near: float = 2e-6, half: float = 2e-3
) -> None:
    """Assert that chunks of columns are equal, floating point numbers up to `near`, half precision up to `half`."""
    assert len(chunks) == len(others) > 0
    for one, other in zip(chunks, others, strict=True):
        assert set(one) == set(other)
        for name, values in one.items():
            if getattr(values, "dtype", None) in (np.float16, np.float32, np.float64):
                tolerance = half if values.dtype == np.float16 else near
                np.testing.assert_allclose(values, other[name], rtol=tolerance, atol=tolerance, err_msg=name)
            else:
                np.testing.assert_array_equal(values, other[name], err_msg=name)


def assert_replay_is_live(
    pair: Pair, prompts: Sequence[Prompt], policies: Sequence[StopPolicy], settings: Settings, profile: Profile,
    folder: Path,
) -> list[Round]:  # fmt: skip
    """Assert that replay of a dense trace has the rounds of the live loop under each policy, and return the rounds."""
    assert pair.tokenizer is not None
    names = ("temperature", "max_new_tokens", "tree", "sampling", "verification")
    trace = collect(
        pair, prompts, folder, depth=settings.max_depth, **{name: getattr(settings, name) for name in names}
    )
    assert trace.header.has_every_anchor and trace.header.pair == pair.fingerprint
    arrays, rounds = trace_arrays(trace), []
    assert all(torch.isfinite(values).all() for values in arrays.columns.values())
    places = {name: at for at, name in enumerate(arrays.prompt_ids)}
    for policy in policies:
        policy = policy.limited(settings.max_depth)
        speculator, replayed = Speculator(pair, policy, settings, profile), replay(arrays, policy, profile)
        for prompt in prompts:
            live = speculator.generate(pair.tokenizer(prompt.text)["input_ids"], stream_key(0, prompt.id)).rounds
            rows = replayed.sequence == places.get(prompt.id, -1)
            expected = [[r.anchor, r.drafted, r.verified, r.accepted] for r in live]
            assert replayed.log[rows, 1:].tolist() == expected, policy.name
            assert replayed.backlog[rows].tolist() == [r.backlog for r in live], policy.name
            rounds += live
    return rounds


class Carrying(StopPolicy):
    """Drafts one token more for every few rounds that it has observed, from text to text."""

    name, carries, max_depth = "carrying", True, DEPTH

    def start(self, streams: int, keys: Array) -> State:
        return np.zeros(streams, dtype=np.int64)

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        return step.alive & (step.depth <= state // 5 % DEPTH)[:, None], state

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        return state + outcome.active
