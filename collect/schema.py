"""What a trace is: the columns of a row, the header, and their version. The one module that knows.

A row is one anchor, or one round of a live run. Per-node columns are fixed-size lists over the topology's N nodes, by depth,
siblings in falling order of their scores (for a chain: depths 1..K); where a filter leaves fewer tokens than there are
siblings, `tokens` is `NO_TOKEN` and all else 0. Every drawn node carries its features, also after a
rejection, because a live policy does not know that a branch has failed. What depends on the target (`accepted`,
`target_prob`, `overlap`) is void where `labelled` is false: below the first rejection and after an EOS. (In live traces of
verifications other than `match`, `target_prob` is known wherever the target has read the node.)

Hidden states are columns of their own where they were asked for: float16, the nodes' one after the other.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, ClassVar, Literal

import pyarrow as pa
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from ..decode.topology import Topology
from ..policies.errors import TraceError
from ..policies.features import HIDDEN_STATES, Kind
from ..policies.files import SURROGATE, is_text, strict_loads
from ..policies.learned import Conditions
from .store.header_fields import (
    MOST,
    AnchorFeatures,
    Count,
    Facts,
    Label,
    ModeName,
    Name,
    NodeFeatures,
    Parents,
    Sampling,
    TokenId,
    Widths,
    limited,
)

SCHEMA_VERSION = 6

GIVEN_TEXT = ("rejection", "rejection_replace", "block")
"""Modes whose drafts and acceptances are sampled given the text (`given_text`)."""

UNKNOWN, NO_TOKEN = -1, -2
"""In `tokens`: what an engine does not tell; and where a filter has left fewer tokens than the tree has siblings, so that the
node cannot be drawn."""

UNKNOWN_TEMPERATURE = "unknown"
"""Temperature of texts if the engine did not record it."""

_HASHES = ("pair", "prompts_hash")
"""Fields that say nothing to people."""

_SHOWN = 40
"""Characters of a field in a message."""

_MOST_BYTES = 1 << 20
"""Of a header."""

HEADER_KEY = b"specstop"

READS = "reads"
"""Column of rounds whose drafter reads the text, where several drafters draft in turn."""

TIMES = ("first_draft_s", "draft_s", "verify_s", "policy_s", "seconds")
"""Seconds of a live round by phase, as `decode.records.Round` has them."""


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
        shaping: what else changed the distribution that was sampled from (`decode.SamplingParams.to_dict`); {} = nothing.
        topology: parent of each node, -1 = the anchor, in order of depth; a chain is -1, 0, 1, ...
        features, anchor_features: names recorded at each node, and once per anchor.
        max_new_tokens: limit of each text; rows stop there, labels look past it.
        seed: of the streams.
        shards: number of shards of a complete trace.
        prompts: number of prompts (each sample counts), and `prompts_hash` of ids, samples, groups and token ids.
        collector: "dense", or "live".
        texts: "target": the target's own; "sampled": completions that were sampled from it; "completions": ones of any
            origin, of which the anchors count after which the target says the same.
        policy: that a live run was under, "" for dense traces.
        explore: share of its rounds that were drafted to full depth whatever the policy said.
        batch: number of texts that a live run decodes in parallel; 1 where that is not known, as of a server's rounds.
        mix: share of the target's tokens in the text that the draft read; 0 = that text was the target's alone.
        draws: of drafts and acceptances given each text, sequences that follow one another; 1 where nothing is drawn so.
        off_text: how candidates off the text were drawn under block verification: "exact", or "approximate".
        hidden: width of each hidden state that is recorded (`features.hidden_states`).
        facts: device, dtype, threads, versions.
    """

    target: Name
    draft: Name
    pair: Mapping[Name, Name]
    vocabulary: Annotated[int, Field(ge=0, lt=MOST)]
    eos: tuple[TokenId, ...]
    temperature: Annotated[float, limited("temperature")]
    topology: Parents
    features: NodeFeatures
    anchor_features: AnchorFeatures
    max_new_tokens: Count
    seed: Annotated[int, limited("seed")]
    shards: Annotated[int, limited("shards")]
    prompts: Count
    prompts_hash: Name
    verification: ModeName = "match"
    label: Label = "match"
    collector: Literal["dense", "live"] = "dense"
    texts: Literal["target", "sampled", "completions", "vllm"] = "target"
    policy: Name = ""
    explore: Annotated[float, limited("explore")] = 0.0
    batch: Annotated[int, limited("batch")] = 1
    mix: Annotated[float, limited("mix")] = 0.0
    draws: Annotated[int, limited("draws")] = 1
    off_text: Literal["exact", "approximate"] = "exact"
    hidden: Widths = field(default_factory=dict)
    shaping: Sampling = field(default_factory=dict)
    schema: int = SCHEMA_VERSION
    facts: Facts = field(default_factory=dict)

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @property
    def tree(self) -> Topology:
        """The topology as the loop knows it: row 0 is the anchor, row i + 1 node i."""
        return Topology([-1, *(parent + 1 for parent in self.topology)])

    @property
    def depth(self) -> int:
        """K, the deepest node."""
        return self.tree.deepest

    @property
    def has_every_anchor(self) -> bool:
        """Whether each position of a text has its row, so that any policy can be replayed."""
        return self.collector == "dense" and self.texts in ("target", "sampled")

    @property
    def drafts_in_turn(self) -> bool:
        """Whether one or another of several drafters drafts a round."""
        return bool(self.facts.get("in turn", False))

    @property
    def given_text(self) -> bool:
        """Whether drafts and acceptances were drawn given the text (`given_text`)."""
        return self.collector == "dense" and self.verification in GIVEN_TEXT

    @property
    def exactness(self) -> str:
        """How replay is that of the live loop: by "path", in "law", "nearly" in law; "" where there is none."""
        if not self.has_every_anchor or self.mix:
            return ""
        if not self.given_text:
            return "path"
        return "law" if self.off_text == "exact" else "nearly"

    @property
    def conditions(self) -> Conditions:
        """What acceptance rests on in this trace, for policies to be checked against."""
        known = None if self.shown_temperature == UNKNOWN_TEMPERATURE else self.temperature
        return Conditions(known, self.shaping, self.verification, self.pair)

    @property
    def shown_temperature(self) -> float | str:
        """The temperature to display: "unknown" for engine records without one, which have `temperature` 0."""
        return UNKNOWN_TEMPERATURE if self.facts.get("temperature") == UNKNOWN_TEMPERATURE else self.temperature

    def hidden_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a recorded hidden state in a row: [N, H], or [H] for one of the anchor."""
        width = self.hidden[name]
        return (width,) if HIDDEN_STATES[name] is Kind.ANCHOR else (len(self.topology), width)

    def to_json(self) -> str:
        """Return the header as JSON."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    def differing(self, other: Header, names: Iterable[str]) -> list[str]:
        """Return in which of some fields two traces differ, with what either has: `temperature (0.0, 0.7)`."""
        apart = [name for name in names if getattr(self, name) != getattr(other, name)]
        return [name if name in _HASHES else f"{name} ({self._shown(name)}, {other._shown(name)})" for name in apart]

    def _shown(self, name: str) -> str:
        text = self.tree.name if name == "topology" else str(getattr(self, name))
        return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."

    def differences(self, other: Header) -> list[str]:
        """Return the names of the settings in which two runs differ, so that their rows do not belong into one trace.

        Of the `facts` only the precision and the digests of the inputs are compared.
        """
        mine, theirs = (vars(one) | {"facts": None, "dtype": one.facts.get("dtype")} for one in (self, other))
        names = [key for key in mine if mine[key] != theirs[key]]
        inputs = [found if isinstance(found := one.facts.get("digests"), dict) else {} for one in (self, other)]
        names += [key for key in inputs[0] | inputs[1] if inputs[0].get(key) != inputs[1].get(key)]
        return list(dict.fromkeys(names))  # `policy` is a field and a digest

    @staticmethod
    def from_json(text: str | bytes, where: str) -> Header:
        """Parse and validate a header.

        Args:
            text: JSON.
            where: name of the file, for messages.

        Raises:
            TraceError: not JSON, of another schema version, or a field is missing, unknown, out of range or does not agree
                with another one.
        """
        try:
            if len(text) > _MOST_BYTES:
                raise ValueError(f"expected at most {_MOST_BYTES} bytes, got {len(text)}")
            raw = strict_loads(text)
            text = json.dumps(raw, ensure_ascii=False, allow_nan=False)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{where}: the header is not JSON: {error}") from None
        if not is_text(text):
            raise TraceError(f"{where}: the header has {SURROGATE}")
        version = raw.get("schema") if isinstance(raw, dict) else None
        if version != SCHEMA_VERSION or isinstance(version, bool):
            raise TraceError(
                f"{where}: the trace has schema {repr(version)[:_SHOWN]}, but this specstop reads schema {SCHEMA_VERSION}; "
                "collect it again"
            )
        if odd := set(raw) ^ {one.name for one in dataclasses.fields(Header)}:
            names = ", ".join(sorted(odd))
            raise TraceError(
                f"{where}: the header lacks or has unknown fields: {names[: 10 * _SHOWN]}; collect it again"
            )
        try:
            header: Header = _adapter().validate_json(text)
            header._check_together()
        except ValidationError as error:
            raise TraceError(f"{where}: {_reason(error)}; collect the trace again") from None
        except ValueError as error:
            raise TraceError(f"{where}: the header has {error}; collect the trace again") from None
        return header

    def _check_together(self) -> None:
        """Raise `ValueError` if fields contradict each other."""
        from ..decode.verify.modes import MODES

        mode = MODES[self.verification]
        live, chain_of_nodes = self.collector == "live", self.tree.is_chain
        for wrong, text in (
            (not live and not mode.lossless, f"dense rounds of {mode.name}, expected a lossless verification"),
            (mode.chains_only and not chain_of_nodes, f"a tree under {mode.name}, expected a chain"),
            (self.draws > 1 and not self.given_text, f"{self.draws} draws under {mode.name}, expected 1"),
            (
                self.mix > 0 and (live or len(self.topology) != 1),
                "a mixed text of several nodes, expected dense rounds of 1",
            ),
            (not live and self.explore > 0, "dense rounds that explore, expected live ones"),
            (
                set(self.features) & set(self.anchor_features),
                "a feature of nodes among those of anchors, expected it once",
            ),
        ):
            if wrong:
                raise ValueError(text)


@cache
def _adapter() -> TypeAdapter[Header]:
    return TypeAdapter(Header)


def _reason(error: ValidationError) -> str:
    """Return the first problem in words."""
    first = error.errors(include_url=False, include_context=False)[0]
    name = ".".join(map(str, first["loc"]))
    expected = first["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
    return f"the header has {repr(first['input'])[:_SHOWN]} as {name[:_SHOWN]!r}: {expected}"


def chain(depth: int) -> tuple[int, ...]:
    """Return the topology of a chain: the parents -1, 0, ..., depth - 2."""
    return tuple(range(-1, depth - 1))


def parents(tree: Topology) -> tuple[int, ...]:
    """Return a tree of one root as a header keeps it."""
    return tuple(parent - 1 for parent in tree.parent[1:])


def arrow_schema(header: Header) -> pa.Schema:
    """Return the Parquet schema of a trace with this header, the header in its metadata."""
    nodes = len(header.topology)

    def per_node(kind: pa.DataType) -> pa.DataType:
        return pa.list_(kind, nodes)

    columns = [
        ("prompt_id", pa.string()),
        ("sample", pa.string()),  # name of the sample where a prompt has several texts, else ""
        ("text_hash", pa.string()),  # of the prompt's token ids; "" where they are not known
        ("group", pa.string()),
        ("sequence", pa.int32()),  # index of the prompt in its file
        ("prompt_tokens", pa.int32()),
        ("text_tokens", pa.int32()),  # generated until EOS or the limit
        ("anchor", pa.int32()),  # tokens generated before the round
        ("tokens", per_node(pa.int32())),
        *((name, pa.float32()) for name in header.anchor_features),
        *((name, per_node(pa.float32())) for name in header.features),
        *((name, pa.list_(pa.float16(), math.prod(header.hidden_shape(name)))) for name in header.hidden),
        ("draft_prob", per_node(pa.float32())),
        ("target_prob", per_node(pa.float32())),
        ("overlap", per_node(pa.float32())),  # sum over tokens of min(p, q)
        ("accepted", per_node(pa.bool_())),
        ("labelled", per_node(pa.bool_())),
        ("accepted_length", pa.int32()),
        ("cut", pa.bool_()),  # the text ends within the tree
    ]
    if header.given_text:
        columns += [
            ("accept_chance", per_node(pa.float32())),  # P(accepted) given the prefix and this token
            ("next_chance", per_node(pa.float32())),  # the same before it was drawn
        ]
    if header.collector == "live":
        columns += [
            ("drawn", per_node(pa.bool_())),
            ("sent", per_node(pa.bool_())),  # verified
            ("explored", pa.bool_()),
            ("committed", pa.int32()),
            ("decisions", pa.int32()),
            ("backlog", pa.int32()),  # committed tokens that the draft had not read
            *((name, pa.float64()) for name in TIMES),
        ]
    if header.drafts_in_turn:
        columns.append((READS, pa.bool_()))  # the drafter of the round reads the text, as the first one of two does not
    if header.mix:
        columns.append(("mixed", pa.bool_()))  # the draft read its own sample in this place
    return pa.schema(columns, metadata={HEADER_KEY: header.to_json().encode()})
