"""Damaged and hostile traces: whatever a header or a column holds, a command ends with one line or does its work."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import cli
from specstop.collect import load_trace
from specstop.collect.schema import HEADER_KEY
from specstop.collect.store import ROWS_KEY, Trace
from specstop.policies.errors import SpecstopError, TraceError
from specstop.policies.profile import Profile
from specstop.train.evaluate.evaluate import evaluate
from specstop.train.fit.run import train

pytestmark = pytest.mark.usefixtures("few_draws")

VALUES = (
    None, True, -1, 0, 1, 7, 10**9, 10**12, 10**30, -(2**70), 0.5, -0.25, 1e300, 5e-324, "", "../x", "\x1b[31mred\x1b[0m",
    "<script>", "x" * 10_000, [], [-1], [1e9], ["\x1b"], {}, {"top_p": 5}, {"top1": "\x1b"}, {"device": "\x1b[31m"}, [[]],
    [None],
)  # fmt: skip
HEADER_CASES = 200
SECONDS = 20.0


def forged(
    trace: Trace,
    out: Path,
    header: Callable[[dict[str, Any]], dict[str, Any]] = lambda raw: raw,
    table: Callable[[pa.Table], pa.Table] = lambda rows: rows,
) -> Path:
    """Return a copy of a trace of which header and rows are changed, with metadata of shards that agrees with them."""
    shutil.rmtree(out, ignore_errors=True)
    folder = shutil.copytree(trace.folder, out)
    text = json.dumps(header(json.loads((folder / "header.json").read_text())))
    (folder / "header.json").write_text(text)
    for shard in (folder / "data").glob("*.parquet"):
        rows = table(pq.read_table(shard))
        pq.write_table(rows.replace_schema_metadata({HEADER_KEY: text, ROWS_KEY: str(len(rows))}), shard)
    return folder


def outcome(folder: Path, profile: Profile, out: Path) -> str:
    """Return "refused" or "read"; anything but a `SpecstopError` is raised, as is a command that takes too long."""
    begun = time.monotonic()
    answer = cli("info", folder)
    assert answer.code in (0, 2) and "\x1b" not in answer.out + answer.err and "Traceback" not in answer.err
    if answer.code == 2:
        assert answer.err.count("\n") == 1 and answer.out == ""
    refused = 0
    for run in (
        lambda: evaluate(load_trace(folder), profile, []),
        lambda: train([load_trace(folder)], profile, head="logistic", out=out, overwrite=True),
    ):
        try:
            run()
        except SpecstopError as error:
            assert "\n" not in str(error)
            refused += 1
    assert time.monotonic() - begun < SECONDS
    return "refused" if answer.code == 2 or refused == 2 else "read"


def test_a_header_with_any_value_in_any_field_is_refused_or_read(
    sides: tuple[Trace, Trace], full_profile: Profile, tmp_path: Path
) -> None:
    generator = random.Random(0)
    fields = list(json.loads(sides[1].header.to_json()))
    cases = [(name, value) for name in fields for value in VALUES]
    read = 0
    for name, value in generator.sample(cases, HEADER_CASES):
        folder = forged(sides[1], tmp_path / "trace", lambda raw, name=name, value=value: {**raw, name: value})
        try:
            load_trace(folder)
        except TraceError as error:
            assert "\n" not in str(error)
            continue
        read += 1
        if read % 4 == 0:  # those that pass as valid are read like any other
            outcome(folder, full_profile, tmp_path / "policy")
    assert 0 < read < HEADER_CASES / 3


Change = Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]
CHANGES: dict[str, Change] = {
    "zero": np.zeros_like,
    "negative": lambda values: -1 - np.abs(values),
    "shifted": lambda values: values + 1,
    "far": lambda values: np.full_like(values, 2**31 - 1),
    "reversed": lambda values: values[::-1].copy(),
    "one": lambda values: np.ones_like(values),
}
FLOATS = {"nan": np.nan, "inf": np.inf, "huge": 3e38}
SCALARS = ("sequence", "prompt_tokens", "text_tokens", "anchor", "accepted_length")


def changed(rows: pa.Table, name: str, change: Change) -> pa.Table:
    """Return rows with other numbers in a column of the same type."""
    field = rows.schema.field(name)
    column = rows[name].combine_chunks()
    listed = pa.types.is_fixed_size_list(field.type)
    flat = column.flatten() if listed else column
    values = change(flat.to_numpy(zero_copy_only=False))
    made = pa.array(values, flat.type)
    made = pa.FixedSizeListArray.from_arrays(made, type=field.type) if listed else made
    return rows.set_column(rows.schema.get_field_index(name), field, made)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", SCALARS)
def test_numbers_that_make_no_texts_are_refused_or_read(
    sides: tuple[Trace, Trace], full_profile: Profile, tmp_path: Path, name: str, change: str
) -> None:
    folder = forged(sides[1], tmp_path / "trace", table=lambda rows: changed(rows, name, CHANGES[change]))
    found = outcome(folder, full_profile, tmp_path / "policy")
    if (
        change == "negative"
        or (change == "far" and name != "prompt_tokens")
        or (name in ("anchor", "text_tokens") and change != "reversed")
    ):
        assert found == "refused"


@pytest.mark.parametrize("kind", FLOATS)
def test_features_and_probabilities_that_are_no_numbers_are_refused(
    sides: tuple[Trace, Trace], tmp_path: Path, kind: str
) -> None:
    header = sides[1].header
    for name in (*header.anchor_features[:2], *header.features[:2], "draft_prob", "target_prob", "overlap"):
        if kind == "huge" and name in (*header.anchor_features, *header.features):
            continue
        value = FLOATS[kind]

        def one(values: np.ndarray[Any, Any], value: float = value) -> np.ndarray[Any, Any]:
            return np.where(np.arange(len(values)) == len(values) // 2, np.float32(value), values)

        trace = load_trace(forged(sides[1], tmp_path / "trace", table=lambda rows, name=name: changed(rows, name, one)))
        with pytest.raises(TraceError, match=rf"expected .* in {name}"):
            trace.table([name])


@pytest.mark.parametrize("change", ["drop", "retype", "list length", "nulls", "accepted", "tokens"])
def test_columns_of_another_form_are_refused(
    sides: tuple[Trace, Trace], full_profile: Profile, tmp_path: Path, change: str
) -> None:
    def damage(rows: pa.Table) -> pa.Table:
        at = rows.schema.get_field_index
        if change == "drop":
            return rows.drop_columns(["draft_prob"])
        if change == "retype":
            return rows.set_column(at("anchor"), "anchor", rows["anchor"].cast(pa.int64()))
        if change == "list length":
            width = rows.schema.field("tokens").type.list_size
            flat = pa.array(np.zeros(len(rows) * (width + 1), dtype=np.int32))
            return rows.set_column(at("tokens"), "tokens", pa.FixedSizeListArray.from_arrays(flat, width + 1))
        if change == "nulls":
            return rows.set_column(at("anchor"), rows.schema.field("anchor"), pa.nulls(len(rows), pa.int32()))
        if change == "accepted":
            return changed(rows, "accepted", lambda values: ~values)
        return changed(rows, "tokens", lambda values: values + 10**6)

    folder = forged(sides[1], tmp_path / "trace", table=damage)
    if change == "tokens":
        with pytest.raises(TraceError, match="in tokens"):
            evaluate(load_trace(folder), full_profile, [])
        return
    assert outcome(folder, full_profile, tmp_path / "policy") == "refused"


def test_more_shards_than_files_are_not_looked_for_one_by_one(sides: tuple[Trace, Trace], tmp_path: Path) -> None:
    for shards in (10**9, 99_999):
        begun = time.monotonic()
        answer = cli("info", forged(sides[1], tmp_path / "trace", lambda raw, shards=shards: {**raw, "shards": shards}))
        assert (answer.code, answer.err.count("\n")) == (2, 1) and "shards" in answer.err
        assert time.monotonic() - begun < SECONDS


def test_ids_and_names_reach_no_terminal_as_they_are(
    sides: tuple[Trace, Trace], full_profile: Profile, tmp_path: Path
) -> None:
    name = "\x1b[31m<script>alert(1)</script>|`x`\x9b"

    def renamed(rows: pa.Table) -> pa.Table:
        for column in ("prompt_id", "group"):
            texts = pa.array([name + text for text in rows[column].to_pylist()])
            rows = rows.set_column(rows.schema.get_field_index(column), rows.schema.field(column), texts)
        return rows

    hostile = {"target": name, "draft": name, "facts": {"prompts from": name, "device": name}}
    folder = forged(sides[1], tmp_path / "trace", lambda raw: {**raw, **hostile}, renamed)
    full_profile.save(tmp_path / "profile.json")
    report = tmp_path / "report"
    for command in (
        ("info", folder), ("info", folder, "--json"), ("info", folder, "--check"),
        ("evaluate", "--traces", folder, "--profile", tmp_path / "profile.json", "--out", report),
    ):  # fmt: skip
        answer = cli(*command)
        assert answer.code == 0, answer.err
        assert not {"\x1b", "\x9b"} & set(answer.out + answer.err)
    for file in ("report.md", "report.html"):
        text = (report / file).read_text()
        assert "\x1b" not in text and "\x9b" not in text
        assert "<script>alert" not in text.replace("\\<script>", "")
