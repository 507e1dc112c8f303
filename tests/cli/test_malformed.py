"""Malformed configurations and artefacts: a command succeeds or fails with one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from commands import cli
from hypothesis import HealthCheck, given, settings, strategies as st
from specstop.collect.engines.vllm_records import import_vllm
from specstop.collect.schema import HEADER_KEY, Header
from specstop.collect.store import ROWS_KEY, Trace
from specstop.decode.drafters.folder import load_drafter
from specstop.decode.engines.vllm_plugin import read_coefficients
from specstop.decode.models.pair import load_pair
from specstop.policies.errors import SpecstopError
from specstop.policies.profile import Profile
from specstop.policies.storage import load_policy_folder
from specstop.train.evaluate.report_comparison import read_report

pytestmark = pytest.mark.usefixtures("few_draws")
several = settings(
    max_examples=60, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.sampled_from([10**9, 10**30, -(2**70)]), st.floats(),
    st.text(max_size=20), st.sampled_from(["", "../x", "\x1b[31mred\x1b[0m", "<script>", "x" * 10_000]),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3), max_leaves=5
)  # fmt: skip


def one_line_or_success(*words: object) -> None:
    """Run a command that succeeds or fails with one line; its output has no control sequence."""
    answer = cli(*words)
    assert answer.code in (0, 2) and "\x1b" not in answer.out + answer.err and "Traceback" not in answer.err
    if answer.code == 2:
        assert answer.err.count("\n") == 1 and answer.out == ""


@several
@given(
    raw=st.one_of(
        VALUES, st.dictionaries(st.sampled_from(["depth", "seed", "policy", "quiet", "limit", "out"]), VALUES)
    )
)
def test_any_configuration_is_refused_in_one_line(raw: Any, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(raw))
    one_line_or_success("train", "--config", tmp_path / "run.yaml")
    assert list(tmp_path.iterdir()) == [tmp_path / "run.yaml"]


def forged(
    trace: Trace,
    out: Path,
    header: Callable[[dict[str, Any]], dict[str, Any]] = lambda raw: raw,
    table: Callable[[pa.Table], pa.Table] = lambda rows: rows,
) -> Path:
    """Return a copy of a trace with changed header and rows, and consistent metadata of shards."""
    shutil.rmtree(out, ignore_errors=True)
    folder = shutil.copytree(trace.folder, out)
    text = json.dumps(header(json.loads((folder / "header.json").read_text())))
    (folder / "header.json").write_text(text)
    for shard in (folder / "data").glob("*.parquet"):
        rows = table(pq.read_table(shard))
        count = str(len(rows))
        pq.write_table(rows.replace_schema_metadata({HEADER_KEY: text, ROWS_KEY: count}), shard)
    return folder


@settings(several, max_examples=150)
@given(data=st.data())
def test_any_value_in_a_field_of_a_profile_or_header(
    full_profile: Profile, sides: tuple[Trace, Trace], tmp_path: Path, data: st.DataObject
) -> None:
    profile, header = full_profile.to_dict(), json.loads(sides[1].header.to_json())
    name, value = data.draw(st.sampled_from(sorted({*profile, *header}))), data.draw(VALUES)
    if name in header:
        one_line_or_success("info", forged(sides[1], tmp_path / "trace", lambda raw: {**raw, name: value}))
    if name in profile:
        (tmp_path / "profile.json").write_text(json.dumps({**profile, name: value}))
        one_line_or_success("info", tmp_path / "profile.json")


def test_control_characters_of_ids_and_names_are_escaped(
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
        assert not {"\x1b", "\x9b"} & set(text)
        assert "<script>alert" not in text.replace("\\<script>", "")


TWICE = '{"kind": "any", "slope": 1, "slope": 2}'
READERS: dict[str, Callable[[Path], object]] = {
    "profile.json": Profile.load,
    "header.json": lambda path: Header.from_json(TWICE, "header.json"),
    "policy.json": lambda path: load_policy_folder(path.parent),
    "drafter.json": lambda path: load_drafter(path.parent),
    "report.json": lambda path: read_report(path.parent),
    "acceptance.json": read_coefficients,
    "records.jsonl": lambda path: import_vllm(path, path.parent / "out"),
    **{
        name: lambda path: load_pair(path.parent)
        for name in ("config.json", "generation_config.json", "tokenizer_config.json")
    },
}


@pytest.mark.parametrize("name", READERS)
def test_a_key_that_occurs_twice_is_refused(pair_folder: Path, tmp_path: Path, name: str) -> None:
    """Parsers disagree about which of the two counts."""
    folder = Path(shutil.copytree(pair_folder / "target", tmp_path / "folder"))
    (folder / name).write_text(TWICE)
    with pytest.raises(SpecstopError, match="'slope' occurs twice"):
        READERS[name](folder / name)
