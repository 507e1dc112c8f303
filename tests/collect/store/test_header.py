"""The header: what is written is what is read, and nothing else is taken for one."""

from __future__ import annotations

import dataclasses
import json

import pytest
from random_trace import HEADER
from specstop.collect.schema import SCHEMA_VERSION, Header, chain
from specstop.policies.errors import TraceError


def test_a_header_comes_back_from_json_as_it_was() -> None:
    assert Header.from_json(HEADER.to_json(), "x") == HEADER


def test_the_depth_of_a_topology_is_that_of_its_deepest_node() -> None:
    assert chain(4) == (-1, 0, 1, 2)
    for topology, depth in ((chain(4), 4), ((-1, -1, 0, 1, 3), 3), ((), 0)):
        assert dataclasses.replace(HEADER, topology=topology).depth == depth


@pytest.mark.parametrize("version", [SCHEMA_VERSION - 1, SCHEMA_VERSION + 1])
def test_another_schema_version_is_refused(version: int) -> None:
    text = json.dumps({**json.loads(HEADER.to_json()), "schema": version})
    with pytest.raises(TraceError, match=f"here: the trace has schema {version}, but this specstop reads"):
        Header.from_json(text, "here")


@pytest.mark.parametrize("name", ["target", "eos", "seed", "features", "pair"])
def test_a_header_without_one_of_its_fields_is_refused(name: str) -> None:
    raw = json.loads(HEADER.to_json())
    del raw[name]
    with pytest.raises(TraceError, match=f"here: .*{name}"):
        Header.from_json(json.dumps(raw), "here")


@pytest.mark.parametrize(
    "text", ["{", "[" * 100_000, "[]", "7", b"\xff\xfe", json.dumps({**json.loads(HEADER.to_json()), "colour": 1}),
             json.dumps({**json.loads(HEADER.to_json()), "eos": 5})],
    ids=["broken", "deep", "list", "number", "bytes", "unknown field", "mangled field"],
)  # fmt: skip
def test_what_is_no_header_is_refused(text: str | bytes) -> None:
    with pytest.raises(TraceError, match="here"):
        Header.from_json(text, "here")


@pytest.mark.parametrize("changes", [{"draws": 0}, {"batch": 0}, {"eos": [1 << 40]}, {"eos": [-1]}])
def test_numbers_that_cannot_be_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(TraceError, match=r"here: the header has \d+ draws, a batch of \d+ and the end tokens"):
        Header.from_json(json.dumps({**json.loads(HEADER.to_json()), **changes}), "here")
