"""Header, shards and folder: what is written is what is read, and damage is named and never read as other rows."""

from __future__ import annotations

import dataclasses
import json
import shutil
from typing import Any

import datasets
import numpy as np
import pytest
from hypothesis import given, settings, strategies
from specstop.collect.schema import SCHEMA_VERSION, Header, arrow_schema, parents
from specstop.collect.store import check_trace, load_trace, shard_path, write_shard
from specstop.decode.topology import chain
from specstop.policies.errors import TraceError
from trace_helpers import HEADER, random_rows, write_random_trace

RAW: dict[str, Any] = json.loads(HEADER.to_json())


@given(
    strategies.fixed_dictionaries(
        {},
        optional={
            "target": strategies.text(strategies.characters(exclude_categories=["Cs"])),
            "temperature": strategies.just(0.0) | strategies.floats(0.01, 100.0),
            "topology": strategies.sampled_from([parents(chain(4)), (-1, -1, 0, 1, 3), (-1,)]),
            "eos": strategies.lists(strategies.integers(0, 2**31 - 1)).map(tuple),
            "explore": strategies.just(0.0),
            "hidden": strategies.dictionaries(strategies.just("draft_hidden"), strategies.integers(1, 64)),
            "sampling": strategies.dictionaries(strategies.just("top_p"), strategies.floats(0.1, 1.0)),
            "facts": strategies.dictionaries(strategies.text("ab"), strategies.integers() | strategies.text("cd")),
        },
    )
)
@settings(max_examples=50, deadline=None)
def test_a_header_is_read_as_it_was_written(changes):
    header = dataclasses.replace(HEADER, **changes)
    assert Header.from_json(header.to_json(), "x") == header
    assert header.depth == {4: 4, 5: 3, 1: 1, 3: 3}[len(header.topology)]


@pytest.mark.parametrize(
    "text",
    ["{", "[" * 100_000, "[]", "7", b"\xff\xfe", json.dumps({**RAW, "schema": SCHEMA_VERSION - 1}),
     json.dumps({**RAW, "schema": True}), json.dumps(RAW)[:-1] + ', "seed": 5}'],
    ids=["broken", "deep", "list", "number", "bytes", "old schema", "no version", "key that occurs twice"],
)  # fmt: skip
def test_text_that_is_no_header_is_refused(text):
    with pytest.raises(TraceError, match="here: "):
        Header.from_json(text, "here")


@pytest.mark.parametrize(
    ("changes", "noun"),
    [
        *((changes, next(iter(changes))) for changes in (
            {"draws": 0}, {"batch": 0}, {"eos": [1 << 40]}, {"eos": [-1]}, {"eos": [True]}, {"eos": 5}, {"shards": 0},
            {"prompts": 10**12}, {"temperature": "0.7"}, {"temperature": float("nan")}, {"sampling": {"top_p": 5}},
            {"sampling": {"top_k": "many"}}, {"colour": 1}, {"hidden": ["draft_hidden"]}, {"verification": "../x"},
            {"label": "none"}, {"collector": "sparse"}, {"texts": ""}, {"topology": [-1, 5]}, {"topology": [-2]},
            {"topology": [-1] * 5000}, {"features": ["top1", "top1"]}, {"features": ["no such"]},
            {"anchor_features": ["top1"]}, {"hidden": {"draft_hidden": 1 << 40}}, {"hidden": {"x": 1}}, {"seed": 1 << 70},
            {"max_new_tokens": 0}, {"vocabulary": -5}, {"explore": 2}, {"pair": {"target": 7}}, {"facts": 7},
        )),
        *((changes, "expected") for changes in (
            {"verification": "typical"}, {"verification": "block", "topology": [-1, -1]}, {"draws": 4}, {"mix": 0.5},
            {"mix": 0.5, "collector": "live", "topology": [-1]}, {"explore": 0.5},
            *({"facts": {"reading": value}} for value in (5, None, "none", [1], [], ["path", "path"], {"a": 1})),
        )),
    ],
    ids=str,
)  # fmt: skip
def test_fields_out_of_range_or_in_contradiction_are_refused(changes, noun):
    with pytest.raises(TraceError, match=f"here: .*{noun}"):
        Header.from_json(json.dumps({**RAW, **changes}), "here")


@pytest.mark.parametrize("streaming", [None, False, True])
def test_rows_are_read_as_they_were_written(tmp_path, monkeypatch, streaming):
    """By specstop, and by `load_dataset` without its help."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    chunks = write_random_trace(tmp_path / "t")
    (tmp_path / "t" / "run.yaml").write_text("depth: 3\n")
    rows = (
        load_trace(tmp_path / "t").table().to_pylist()
        if streaming is None
        else list(datasets.load_dataset(str(tmp_path / "t"), streaming=streaming)["train"])
    )
    assert list(rows[0]) == arrow_schema(HEADER).names
    for name in rows[0]:
        np.testing.assert_array_equal(
            [row[name] for row in rows], np.concatenate([np.asarray(c[name]) for c in chunks])
        )


def test_one_bit_anywhere_is_noticed_or_changes_no_value(tmp_path):
    write_random_trace(tmp_path)
    path = shard_path(tmp_path, 0, 2)
    raw, rows = path.read_bytes(), load_trace(tmp_path).table()
    noticed, generator = 0, np.random.default_rng(5)
    # At 150 and 1459 pyarrow ends without an error and without rows.
    for at, bit in [(150, 1), (1459, 5), *generator.integers(0, [len(raw), 8], (100, 2)).tolist()]:
        path.write_bytes(raw[:at] + bytes([raw[at] ^ (1 << bit)]) + raw[at + 1 :])
        try:
            assert check_trace(tmp_path).table().equals(rows), "never other values"
        except TraceError:
            noticed += 1
    assert noticed > 40, "pages, the header and the schema"


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("sequence", lambda v: v + 5), ("tokens", lambda v: v + 48), ("tokens", lambda v: v - 60),
        ("top1", lambda v: v * np.nan), ("anchor_top1", lambda v: v + np.inf), ("draft_prob", lambda v: v + 1.1),
        ("accepted_length", lambda v: v + 4), ("anchor", lambda v: v[::-1] * 0 + 1), ("anchor", lambda v: v + 1),
        ("anchor", lambda v: v * 2 - 1), ("text_tokens", lambda v: v + np.arange(len(v))), ("text_tokens", lambda v: v + 1),
        ("text_tokens", lambda v: v - 1), ("prompt_tokens", lambda v: v + np.arange(len(v))), ("accepted", lambda v: ~v),
    ],
)  # fmt: skip
def test_columns_that_make_no_texts_are_refused(tmp_path, name, change):
    write_random_trace(tmp_path)
    rows = random_rows(4, 1)
    write_shard(tmp_path, HEADER, 0, [random_rows(3, 0), rows | {name: change(rows[name]).astype(rows[name].dtype)}])
    with pytest.raises(TraceError, match=name):
        check_trace(tmp_path)


def test_a_trace_without_all_its_shards_opens_and_is_not_complete(tmp_path):
    write_random_trace(tmp_path)
    shard_path(tmp_path, 0, 2).unlink()
    trace = load_trace(tmp_path)
    assert (trace.complete, trace.row_count, len(trace.rows)) == (False, 2, 2)
    with pytest.raises(TraceError, match=r"1 of its 2 shards are missing \(0\)"):
        check_trace(tmp_path)
    write_shard(tmp_path, HEADER, 0, [random_rows(2, 2)])
    with pytest.raises(TraceError, match="duplicate"):
        check_trace(tmp_path)
    for folder in (tmp_path / "data", tmp_path / "nowhere"):
        with pytest.raises(TraceError, match=r"header\.json"):
            load_trace(folder)


@pytest.mark.parametrize(
    "changes",
    [{"features": ("top1",)}, {"topology": parents(chain(5))}, {"seed": 99}, {"shards": 3}],
    ids=["columns", "depth", "seed", "number of shards"],
)
def test_a_shard_of_another_run_is_named(tmp_path, changes):
    write_random_trace(tmp_path / "here")
    other = dataclasses.replace(HEADER, **changes)
    write_random_trace(tmp_path / "there", other)
    path = shard_path(tmp_path / "there", 1, other.shards)
    shutil.copy(path, tmp_path / "here" / "data" / path.name)
    with pytest.raises(TraceError, match=path.name):
        load_trace(tmp_path / "here")
