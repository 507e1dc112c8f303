"""The contents of a trace: the header, the columns of a row, and their version.

A row is one anchor of a dense trace, or one round of a live one. Columns of nodes are fixed-size lists over the N nodes
of the topology in breadth-first order; siblings are sorted by descending score (a chain has depths 1 to K). Where a
filter leaves fewer tokens than there are siblings, `tokens` is `NO_TOKEN` and the other columns are 0. All drawn nodes
have features, also after a rejection, because a live policy does not know that a branch has failed.

A node was accepted (`observed` and `accepted`), rejected (`observed` and not `accepted`), or not observed, as below the
first rejection and after an EOS. `target_prob` and `overlap` are undefined where nothing was observed. (In live traces
of other verification modes than `match`, `target_prob` is known wherever the target has read the node.)
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pydantic
from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from ..decode.topology import READINGS, Topology
from ..policies.arguments import LIMITS, MAX_ROWS, as_list
from ..policies.errors import TraceError
from ..policies.features import FEATURES, HIDDEN_STATES, Kind
from ..policies.files import strict_loads
from ..policies.learned import Conditions

SCHEMA_VERSION: Final = 7
HEADER_KEY = b"specstop"
"""Key of the header in the metadata of a Parquet file."""

UNKNOWN, NO_TOKEN = -1, -2
"""Values in `tokens`: the engine does not report the token; the node has no token, because a filter left fewer
tokens."""

UNKNOWN_TEMPERATURE = "unknown"
"""Entry `temperature` of `facts` if an engine did not record it."""

TIMES = ("first_draft_s", "draft_s", "verify_s", "policy_s", "seconds")
"""Columns of a live round: seconds by phase, as in `decode.records.Round`."""

GIVEN_TEXT = ("rejection", "rejection_replace", "block")
"""Modes in which drafts and acceptances are sampled given the text (`given_text`)."""

MAX_COUNT = 1 << 31
"""Exclusive upper bound of token ids and counts, because columns are int32."""

RUN_FACTS = ("dtype", "policy digest", "profile digest", "completions digest")
"""Entries of `facts` that must be equal in all rows of a trace."""

_SHOWN = 40
"""Characters of a value in a message."""


def _limited(name: str) -> AfterValidator:
    """Return a validator for the bounds of the option `name` (`policies.arguments`)."""

    def check(value: Any) -> Any:
        if requirement := LIMITS[name].requirement(value):
            raise ValueError(f"expected {requirement}")
        return value

    return AfterValidator(check)


def _features_of(*kinds: Kind) -> AfterValidator:
    def check(names: tuple[str, ...]) -> tuple[str, ...]:
        valid = [name for name, feature in FEATURES.items() if feature.kind in kinds]
        if len(set(names)) < len(names) or not set(names) <= set(valid):
            raise ValueError(f"expected distinct features among {', '.join(valid)}")
        return names

    return AfterValidator(check)


def _check_topology(parents: tuple[int, ...]) -> tuple[int, ...]:
    if min(parents, default=-1) < -1:
        raise ValueError("expected parents of -1 or more")
    Topology([-1, *(parent + 1 for parent in parents)])
    return parents


def _check_sampling(options: Mapping[str, Any]) -> Mapping[str, Any]:
    for option, value in options.items():
        limit = LIMITS.get(option.replace("_", "-"))
        if limit and (requirement := limit.requirement(value)):
            raise ValueError(f"expected {requirement} as {option}")
    return options


Count: TypeAlias = Annotated[int, Field(ge=1, lt=MAX_COUNT)]
HiddenName: TypeAlias = Annotated[str, Field(pattern=f"^({'|'.join(HIDDEN_STATES)})$")]


@pydantic.dataclasses.dataclass(frozen=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class Header:
    """What holds for all rows of a trace. Fields are validated at construction."""

    # Names that the models were loaded by, and hashes of target, draft and tokenizer.
    target: str
    draft: str
    pair: Mapping[str, str]
    vocabulary: Annotated[int, Field(ge=0, lt=MAX_COUNT)]  # width of the logits
    eos: tuple[Annotated[int, Field(ge=0, lt=MAX_COUNT)], ...]  # token ids that end a text
    temperature: Annotated[float, _limited("temperature")]  # of the sampling
    # Parent of each node in breadth-first order, -1 = the anchor; a chain is -1, 0, 1, ...
    topology: Annotated[tuple[int, ...], Field(max_length=MAX_ROWS - 1), AfterValidator(_check_topology)]
    features: Annotated[tuple[str, ...], _features_of(Kind.PRE, Kind.POST)]  # recorded at each node
    anchor_features: Annotated[tuple[str, ...], _features_of(Kind.ANCHOR)]  # recorded once per anchor
    max_new_tokens: Count  # limit of each text: rows end there, labels may lie beyond
    seed: Annotated[int, _limited("seed")]  # of the streams
    shards: Annotated[int, _limited("shards")]  # number of shards of the complete trace
    prompts: Count  # number of texts to collect: prompts, or samples of prompts
    prompts_hash: str  # of ids, samples, groups and token ids of the prompts
    verification: Annotated[str, Field(pattern="^(match|point|rejection|rejection_replace|block|typical)$")] = "match"
    # Kind of the labels of the verification mode; "outcome" for records of an engine.
    label: Annotated[str, Field(pattern="^(match|point|ratio|block|typical|outcome)$")] = "match"
    collector: Literal["dense", "live"] = "dense"
    # "target": texts of the target. "sampled": completions sampled from it. "completions": any completions; anchors are
    # recorded where the target continues in the same way. "vllm": texts of a server.
    texts: Literal["target", "sampled", "completions", "vllm"] = "target"
    policy: str = ""  # of a live run; "" for dense traces
    explore: Annotated[float, _limited("explore")] = (
        0.0  # share of live rounds drafted to full depth whatever the policy
    )
    batch: Annotated[int, _limited("batch")] = 1  # texts that a live run decodes in parallel; 1 if unknown
    mix: Annotated[float, _limited("mix")] = (
        0.0  # share of the target's tokens in the text that the draft read; 0 = all
    )
    draws: Annotated[int, _limited("draws")] = 1  # drafts and acceptances drawn per text, as consecutive sequences
    drafters: tuple[Annotated[int, Field(ge=0)], ...] = ()  # drafter of each node of depth 1; () = one drafter
    signals: Annotated[tuple[str, ...], _features_of(Kind.ROUTE)] = ()  # recorded of each drafter once per anchor
    hidden: Mapping[HiddenName, Annotated[int, Field(ge=1, le=1 << 20)]] = Field(default_factory=dict)  # width of each
    # Other options that changed the sampled distribution (`decode.SamplingParams.to_dict`).
    sampling: Annotated[Mapping[str, Any], AfterValidator(_check_sampling)] = Field(default_factory=dict)
    schema: Literal[7] = SCHEMA_VERSION
    facts: Mapping[str, Any] = Field(default_factory=dict)  # device, dtype, threads, versions and other provenance

    @model_validator(mode="after")
    def _check_consistent(self) -> Header:
        _ = self.tree  # raises an error if `drafters` does not fit the topology
        live, mode = self.collector == "live", self.verification
        for contradictory, text in (
            (not live and mode == "typical", "dense rounds of typical, expected a lossless verification"),
            (mode == "block" and not self.tree.is_chain, "a tree under block, expected a chain"),
            (self.draws > 1 and not self.given_text, f"{self.draws} draws under {mode}, expected 1"),
            (len(self.drafters) > 1 and self.given_text, f"several drafters under {mode}, expected match"),
            (self.mix > 0 and (live or len(self.topology) != 1), "mixed texts, expected dense rounds of one node"),
            (not live and self.explore > 0, "dense rounds that explore, expected live ones"),
            (
                len(self.readings) != self.tree.drafters or not {*self.readings} <= {*READINGS},
                f"the reading {self.facts.get('reading')!r:.40}, expected one of {', '.join(READINGS)} by drafter",
            ),
        ):
            if contradictory:
                raise ValueError(text)
        return self

    @property
    def tree(self) -> Topology:
        """The topology as the decoding loop uses it: row 0 is the anchor, row i + 1 node i."""
        return Topology([-1, *(parent + 1 for parent in self.topology)], self.drafters or None)

    @property
    def depth(self) -> int:
        """K, the largest depth."""
        return self.tree.deepest

    @property
    def has_every_anchor(self) -> bool:
        """Whether every position of a text has a row, so that any policy can be replayed."""
        return self.collector == "dense" and self.texts in ("target", "sampled")

    @property
    def readings(self) -> tuple[str, ...]:
        """What each drafter reads before a round (`Drafter.reading`)."""
        return tuple(map(str, as_list(self.facts.get("reading", ["path"] * self.tree.drafters))))

    @property
    def given_text(self) -> bool:
        """Whether drafts and acceptances were drawn given the text (`given_text`)."""
        return self.collector == "dense" and self.verification in GIVEN_TEXT

    @property
    def exactness(self) -> str:
        """Exactness of replay: by "path" or in "law"; "" if texts cannot be replayed."""
        if not self.has_every_anchor or self.mix:
            return ""
        return "law" if self.given_text else "path"

    @property
    def conditions(self) -> Conditions:
        """Conditions that policies are checked against."""
        temperature = None if self.shown_temperature == UNKNOWN_TEMPERATURE else self.temperature
        return Conditions(temperature, self.sampling, self.verification, self.pair)

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
        return str(_adapter().dump_json(self).decode())

    @staticmethod
    def from_json(text: str | bytes, where: str) -> Header:
        """Parse and validate a header.

        Args:
            text: JSON.
            where: name of the file, for messages.

        Raises:
            TraceError: the text is not JSON or has another schema version; or a field is missing, unknown, out of range
                or contradicts another.
        """
        try:
            raw = strict_loads(text)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{where}: the header is not JSON: {error}") from None
        version = raw.get("schema") if isinstance(raw, dict) else None
        if version != SCHEMA_VERSION or isinstance(version, bool):
            raise TraceError(
                f"{where}: the trace has schema {repr(version)[:_SHOWN]}, but this specstop reads schema "
                f"{SCHEMA_VERSION}; collect it again"
            )
        try:
            return _adapter().validate_json(text, strict=True)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            name = ".".join(map(str, first["loc"]))[:_SHOWN]
            reason = first["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
            value = f", got {repr(first['input'])[:_SHOWN]}" if name else ""
            raise TraceError(
                f"{where}: the header is invalid: {name} {reason}{value}; collect the trace again"
            ) from None

    def differing(self, other: Header, names: Iterable[str]) -> list[str]:
        """Return which of these fields differ, with both values: `temperature (0.0, 0.7)`; hashes without values."""

        def shown(header: Header, name: str) -> str:
            text = header.tree.name if name == "topology" else str(getattr(header, name))
            return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."

        differ = [name for name in names if getattr(self, name) != getattr(other, name)]
        hashes = ("pair", "prompts_hash")
        return [name if name in hashes else f"{name} ({shown(self, name)}, {shown(other, name)})" for name in differ]

    def differences(self, other: Header) -> list[str]:
        """Return which fields and `RUN_FACTS` differ, as `differing`; rows of such runs must not be in one trace."""
        fields = (name for name in Header.__dataclass_fields__ if name != "facts")
        return self.differing(other, fields) + [
            name for name in RUN_FACTS if self.facts.get(name) != other.facts.get(name)
        ]


@cache
def _adapter() -> TypeAdapter[Header]:
    return TypeAdapter(Header)


def drafter_of(header: Header) -> str:
    """Return the drafter of a trace, as `drafter` is specified."""
    return str(header.facts.get("drafter", "model"))


def draft_of(header: Header) -> str:
    """Return the draft model of a trace, or `DRAFT` if it has none."""
    return str((header.draft if drafter_of(header) == "model" else header.facts.get("draft model")) or "DRAFT")


def pair_options(header: Header) -> list[str]:
    """Return the command-line options that load a trace's pair; unknown values are in capitals."""
    from ..decode.drafters.spec import needs_draft

    drafter, dtype = drafter_of(header), str(header.facts.get("dtype", "float32"))
    kind = str(header.facts.get("device", "cpu")).partition(":")[0]
    return [
        *("--target", header.target or "TARGET"),
        *(("--draft", draft_of(header)) if needs_draft(drafter) else ()),
        *(() if drafter == "model" else ("--drafter", drafter)),
        # The device of CUDA is recorded by its product name.
        *(() if kind == "cpu" else ("--device", kind if kind in ("mps", "xpu") else "cuda")),
        *(() if dtype == "float32" else ("--dtype", dtype)),
    ]


def parents(tree: Topology) -> tuple[int, ...]:
    """Return a tree as the field `topology` of a header."""
    return tuple(parent - 1 for parent in tree.parent[1:])


def first_drafters(tree: Topology) -> tuple[int, ...]:
    """Return the drafters of a tree as the field `drafters` of a header."""
    return tuple(tree.drafter[row] for row in tree.children[0]) if tree.drafters > 1 else ()


def stream_name(prompt_id: str, sample: str) -> str:
    """Return the name that random numbers of a text are keyed by: samples of one prompt draw different numbers."""
    return f"{prompt_id}\0{sample}" if sample else prompt_id


class PromptTask(NamedTuple):
    """One text to collect.

    Attributes:
        sequence: index of the text in the run.
        prompt_id, group: of the prompt.
        tokens: token ids of the prompt.
        key: of the stream of random numbers.
        sample: name of the sample; "" if the prompt has a single text.
    """

    sequence: int
    prompt_id: str
    group: str
    tokens: list[int]
    key: int = 0
    sample: str = ""

    @property
    def text_hash(self) -> str:
        """Hash of the prompt's token ids: equal texts have equal hashes, whatever their ids. "" without tokens."""
        data = np.array(self.tokens, dtype="<i8").tobytes()
        return hashlib.blake2b(data, digest_size=8).hexdigest() if data else ""

    def columns(self, rows: int, text_tokens: int) -> dict[str, Any]:
        """Return the columns that are constant over the `rows` rows of the text, which has `text_tokens` new tokens."""
        names = {"prompt_id": self.prompt_id, "sample": self.sample, "text_hash": self.text_hash, "group": self.group}
        counts = {"sequence": self.sequence, "prompt_tokens": len(self.tokens), "text_tokens": text_tokens}
        return {name: [value] * rows for name, value in names.items()} | {
            name: np.full(rows, value) for name, value in counts.items()
        }


def arrow_schema(header: Header) -> pa.Schema:
    """Return the Parquet schema of a trace with this header, the header in its metadata."""
    nodes = len(header.topology)

    def per_node(kind: pa.DataType) -> pa.DataType:
        return pa.list_(kind, nodes)

    columns = [
        ("prompt_id", pa.string()),
        ("sample", pa.string()),  # name of the sample if a prompt has several texts, else ""
        ("text_hash", pa.string()),  # of the prompt's token ids; "" if they are not known
        ("group", pa.string()),
        ("sequence", pa.int32()),  # index of the text in the run
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
        ("observed", per_node(pa.bool_())),
        ("accepted_length", pa.int32()),
        ("cut", pa.bool_()),  # the text ends within the tree
    ]
    if header.given_text:
        columns += [
            ("accept_chance", per_node(pa.float32())),  # P(accepted) given the prefix and this token
            ("next_chance", per_node(pa.float32())),  # the same before the token was drawn
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
    columns += [(name, pa.list_(pa.float32(), header.tree.drafters)) for name in header.signals]
    if header.mix:
        columns.append(("mixed", pa.bool_()))  # the draft read its sample, not the target's token, at this position
    return pa.schema(columns, metadata={HEADER_KEY: header.to_json().encode()})
