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
    for topology, depth in ((chain(4), 4), ((-1, -1, 0, 1, 3), 3)):
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


RAW = json.loads(HEADER.to_json())


@pytest.mark.parametrize(
    "changes",
    [
        {"draws": 0}, {"batch": 0}, {"eos": [1 << 40]}, {"eos": [-1]}, {"eos": [True]}, {"eos": [1.5]}, {"shards": 10**9},
        {"shards": 0}, {"prompts": 10**12}, {"prompts": -1}, {"temperature": 1e300}, {"temperature": -1},
        {"temperature": "0.7"}, {"sampling": {"top_p": 5}}, {"sampling": {"top_k": "many"}}, {"sampling": {"min_p": -0.5}},
        {"verification": "../x"}, {"label": "none"}, {"collector": "sparse"}, {"texts": ""}, {"off_text": "never"},
        {"topology": []}, {"topology": [-1, 5]}, {"topology": [-2]}, {"topology": [-1] * 5000},
        {"features": ["top1", "top1"]},
        {"features": ["no such"]}, {"anchor_features": ["top1"]}, {"hidden": {"draft_hidden": 1 << 40}}, {"hidden": {"x": 1}},
        {"seed": 1 << 70}, {"max_new_tokens": 0}, {"vocabulary": -5}, {"explore": 2}, {"mix": 0.5}, {"draws": 4},
        {"pair": {"target": 7}}, {"target": "x" * 100_000}, {"facts": {"device": 7}}, {"facts": {"completions": {}}},
    ],
    ids=str,
)  # fmt: skip
def test_a_field_out_of_range_is_refused_by_its_name(changes: dict[str, object]) -> None:
    with pytest.raises(TraceError, match=rf"here: .*({next(iter(changes))}|mixed)"):
        Header.from_json(json.dumps({**RAW, **changes}), "here")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", "-1e999"])
def test_a_number_that_is_not_finite_is_refused(number: str) -> None:
    for name in ("temperature", "explore", "seed"):
        text = json.dumps({**RAW, name: "here"}).replace('"here"', number)
        with pytest.raises(TraceError, match=r"finite|valid integer|range"):
            Header.from_json(text, "here")


def test_a_key_that_occurs_twice_is_refused_by_name() -> None:
    with pytest.raises(TraceError, match=r"here: .*'seed' occurs twice"):
        Header.from_json(json.dumps(RAW)[:-1] + ', "seed": 5}', "here")
