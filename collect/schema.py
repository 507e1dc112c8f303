"""What a trace is: the columns of a row, the header, and their version. The one module that knows.

A row is one anchor. Per-node columns are fixed-size lists over the topology's N nodes (for a chain: depths 1..K). Every node
carries its features, also behind a rejection, because a live policy does not know that a branch has failed. What depends
on the target (`accepted`, `target_prob`, `overlap`) is void where `labelled` is false: below the first rejection and behind
an EOS.
"""

from __future__ import annotations

import dataclasses
import json
from collections import abc
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin, get_type_hints

import pyarrow as pa

from ..policies.errors import TraceError

SCHEMA_VERSION = 1
HEADER_KEY = b"specstop"


@dataclass(frozen=True)
class Header:
    """What holds for every row of a trace.

    Attributes:
        target, draft: the names the models were loaded by.
        pair: hashes of target, draft and tokenizer.
        vocabulary: width of the logits.
        eos: ids that end a text.
        verification: whose acceptance the labels are; `label` says of what kind.
        temperature: of the sampling.
        topology: parent of each node, -1 = the anchor; a chain is -1, 0, 1, ...
        features, anchor_features: names recorded at each node, and once per anchor.
        max_new_tokens: limit of each text; rows stop there, labels look past it.
        seed: of the streams.
        shards: number of shards of a complete trace.
        prompts: number of prompts, and `prompts_hash` of their ids and token ids.
        collector: "dense".
        facts: device, dtype, threads, versions.
    """

    target: str
    draft: str
    pair: Mapping[str, str]
    vocabulary: int
    eos: tuple[int, ...]
    temperature: float
    topology: tuple[int, ...]
    features: tuple[str, ...]
    anchor_features: tuple[str, ...]
    max_new_tokens: int
    seed: int
    shards: int
    prompts: int
    prompts_hash: str
    verification: str = "match"
    label: str = "match"
    collector: str = "dense"
    schema: int = SCHEMA_VERSION
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def depth(self) -> int:
        """K, the deepest node."""
        depths: list[int] = []
        for parent in self.topology:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return max(depths, default=0)

    def to_json(self) -> str:
        """Return the header as JSON."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    def same_run(self, other: Header) -> bool:
        """Whether rows of both belong into one trace; `facts` may differ."""
        blank: dict[str, Any] = {}
        return dataclasses.replace(self, facts=blank) == dataclasses.replace(other, facts=blank)

    @staticmethod
    def from_json(text: str | bytes, where: str) -> Header:
        """Read a header.

        Raises:
            TraceError: it is of another schema version, or no header at all.
        """
        try:
            raw = json.loads(text)
        except ValueError as error:
            raise TraceError(f"{where}: the header is not JSON: {error}") from None
        version = raw.get("schema") if isinstance(raw, dict) else None
        if version != SCHEMA_VERSION:
            raise TraceError(
                f"{where}: the trace has schema {version!r}, but this specstop reads schema {SCHEMA_VERSION}; "
                "collect it again, or use the version that wrote it"
            )
        names = {f.name for f in dataclasses.fields(Header)}
        if set(raw) != names:
            raise TraceError(f"{where}: the header lacks or has unknown fields: {', '.join(sorted(set(raw) ^ names))}")
        kinds = get_type_hints(Header)
        for name, value in raw.items():
            if not _fits(value, kinds[name]):
                raise TraceError(f"{where}: the header has {value!r} as {name}")
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in raw.items()
        }
        return Header(**fields)


def _fits(value: Any, kind: Any) -> bool:
    """Whether a JSON value can stand for a header field of this type."""
    outer = get_origin(kind) or kind
    if outer is tuple:
        return isinstance(value, list) and all(_fits(item, get_args(kind)[0]) for item in value)
    if outer is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, dict if outer is abc.Mapping else outer) and not isinstance(value, bool)


def chain(depth: int) -> tuple[int, ...]:
    """Return the topology of a chain: the parents -1, 0, ..., depth - 2."""
    return tuple(range(-1, depth - 1))


def arrow_schema(header: Header) -> pa.Schema:
    """Return the Parquet schema of a trace with this header, the header in its metadata."""
    nodes = len(header.topology)

    def per_node(kind: pa.DataType) -> pa.DataType:
        return pa.list_(kind, nodes)

    columns = [
        ("prompt_id", pa.string()),
        ("group", pa.string()),
        ("sequence", pa.int32()),  # index of the prompt in its file
        ("prompt_tokens", pa.int32()),
        ("text_tokens", pa.int32()),  # generated until EOS or the limit
        ("anchor", pa.int32()),  # tokens generated before the round
        ("tokens", per_node(pa.int32())),
        *((name, pa.float32()) for name in header.anchor_features),
        *((name, per_node(pa.float32())) for name in header.features),
        ("draft_prob", per_node(pa.float32())),
        ("target_prob", per_node(pa.float32())),
        ("overlap", per_node(pa.float32())),  # sum over tokens of min(p, q)
        ("accepted", per_node(pa.bool_())),
        ("labelled", per_node(pa.bool_())),
        ("accepted_length", pa.int32()),
        ("cut", pa.bool_()),  # the text ends within the tree
    ]
    return pa.schema(columns, metadata={HEADER_KEY: header.to_json().encode()})
