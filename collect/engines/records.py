"""Acceptance records of engines as a trace of single rounds: vLLM, SGLang, llama.cpp and inference-lab.

| engine | file | what a record has |
|---|---|---|
| vLLM | JSON Lines of responses, `--per-request-spec-decode-metrics detailed` | drafted and accepted tokens of each step |
| SGLang | JSON Lines of responses with `meta_info` | how many steps accepted 0, 1, ... tokens |
| llama.cpp | the server's log (since June 2026) | the share of steps that accepted each position |
| llama.cpp | JSON Lines of responses with `timings` | totals: enough for drafts of one token only |
| inference-lab | a run's folder, or `acceptance.parquet` | accepted positions of each round, and confidences |

The records contain how many tokens each step drafted and accepted, not which: single rounds can be evaluated, whole texts not
replayed. Tokens beyond a step's draft were not observed, so that lengths up to the recorded one are evaluated. Where draft
lengths vary they may depend on acceptance, as in an engine that drafts on while it is confident. So only the depth that every
step drafted is identified. SGLang and llama.cpp do not record the order of the steps. Their steps get an arbitrary order,
which only affects context lengths, and the last step of a text, which its end may have cut, is not known and not left out.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ...decode.topology import chain
from ...policies.arguments import MAX_ROWS
from ...policies.contract import Array
from ...policies.errors import InputError, SpecstopWarning
from ...policies.files import SURROGATE, is_text, prepare_output_dir, staged_folder, strict_loads
from ..acceptance import FIXED, LENGTHS, VARIED
from ..prompts import prompt_and_sample, read_lines
from ..schema import TIMES, UNKNOWN, UNKNOWN_TEMPERATURE, Header, PromptTask, parents
from ..store import Trace, load_trace, open_for_writing, write_shard

CONFIDENCES = ("top1", "drawn_prob")
"""Features that a draft's confidence in its likeliest token is."""

_LOG = re.compile(
    r"draft acceptance\b.*?\(\s*(\d+) accepted\s*/\s*(\d+) generated\).*?acceptance rate per position = \(([^()]*)\)"
)
_KEYS = ("model", "speculator", "config", "category", "prompt_idx", "turn")
"""Columns that name a text of inference-lab."""

_PROPOSED = ("spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num")
"""Names of the drafted tokens in versions of SGLang."""

_ROUNDING = 6e-4
"""Half a unit of the last digit of llama.cpp's shares, and rounding."""

_FAULTS = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, StopIteration)


def import_records(
    path: str | Path, out: str | Path, *, target: str = "", draft: str = "", overwrite: bool = False
) -> Trace:
    """Turn an engine's records into a trace.

    Args:
        path: a file or folder of the table above. The engine is known by its fields.
        out: folder of the trace.
        target, draft: names for the header, which the records do not contain.
        overwrite: replace an older result in `out`.

    Raises:
        InputError: the file is missing, a line has no such record (the message gives its number), or as `prepare_output_dir`.

    Warns:
        SpecstopWarning: draft lengths vary.
    """
    file = Path(path)
    prepare_output_dir(out, overwrite=overwrite, inputs=[file])
    if not file.exists():
        raise InputError(f"path: expected a file of records, but {file} does not exist")
    is_lab = file.is_dir() or file.suffix == ".parquet"
    records = list(_lab_records(file) if is_lab else _line_records(file))
    depth = max((count for record in records for count in record.drafted), default=0)
    if not depth:
        raise InputError(f"path: {file} has no step that drafted a token; there is nothing to learn from it")
    shortest = min((int(n) for record in records for n in np.array(record.drafted)[~record.cut]), default=depth)
    if shortest < depth:
        warnings.warn(
            f"path: draft lengths vary and may depend on acceptance, so that acceptance beyond depth {shortest}, which every "
            "step drafted, is not identified; record drafts of one length",
            SpecstopWarning,
            stacklevel=2,
        )
    engine, has_confidence = records[0].engine, all(record.confidence is not None for record in records)
    header = Header(
        target=target, draft=draft, pair={}, vocabulary=0, eos=(), temperature=0.0, topology=parents(chain(depth)),
        features=CONFIDENCES if has_confidence else (), anchor_features=(),
        max_new_tokens=max(record.tokens for record in records), seed=0, shards=1, prompts=len(records), prompts_hash="",
        verification="rejection", label="outcome", collector="live", texts="vllm", policy=engine,
        facts={"temperature": UNKNOWN_TEMPERATURE, "from": file.name, "records of": engine,
               LENGTHS: FIXED if shortest == depth else VARIED},
    )  # fmt: skip
    with staged_folder(out) as stage:
        open_for_writing(stage, header)
        chunks = [record.columns(at, depth, header.features) for at, record in enumerate(records) if record.drafted]
        write_shard(stage, header, 0, chunks)
    return load_trace(out)


@dataclass(frozen=True)
class _Record:
    """The steps of one request.

    Attributes:
        engine: that recorded it.
        name, sample, group: prompt id and name of the sample (fields `prompt_id` and `sample` of the record, or its id).
        accepted, drafted: by step.
        prompt: number of tokens of the prompt.
        tokens: number of tokens of the completion; `known_end`: the record has it, otherwise it is that of the steps.
        ordered: the steps have the order of the text.
        confidence: [steps, K] of the draft in its tokens; None if it was not recorded.
    """

    engine: str
    name: str
    sample: str
    accepted: Sequence[int]
    drafted: Sequence[int]
    prompt: int
    tokens: int
    known_end: bool = False
    ordered: bool = True
    group: str = ""
    confidence: Array | None = field(default=None, compare=False)

    def checked(self, where: str) -> _Record:
        """Return the record. Raises `InputError` if it contradicts itself."""
        pairs = zip(self.accepted, self.drafted, strict=False)
        if len(self.accepted) != len(self.drafted) or any(not 0 <= a <= d for a, d in pairs):
            raise InputError(f"path: {where}: steps accept more than they drafted, or their numbers differ")
        if max(self.drafted, default=0) >= MAX_ROWS or not all(0 <= n < 2**31 for n in (self.prompt, self.tokens)):
            raise InputError(f"path: {where}: expected steps of less than {MAX_ROWS} tokens, and texts of 0 to 2^31")
        if not is_text(self.name + self.sample + self.group):
            raise InputError(f"path: {where}: the id has {SURROGATE}")
        return self

    @property
    def anchor(self) -> Array:
        """[steps] int64, tokens generated before each step: the prompt commits one, a step its accepted tokens and one."""
        committed = np.array(self.accepted, dtype=np.int64) + 1
        return 1 + committed.cumsum() - committed

    @property
    def cut(self) -> Array:
        """[steps] bool, the last step, and if the end of the text is known all drafts that reach beyond it.

        The step at the end accepts more than others, because a long step is more likely to reach the end. So all drafts that
        could reach it are excluded, whatever they accepted.
        """
        out: Array = (
            (self.anchor + np.array(self.drafted, dtype=np.int64) > self.tokens) & self.known_end & self.ordered
        )
        out[-1:] |= self.ordered
        return out

    def columns(self, sequence: int, depth: int, features: Sequence[str]) -> Mapping[str, Any]:
        """Return the rows of the request, one per step."""
        accepted, drafted, anchor = np.array(self.accepted), np.array(self.drafted), self.anchor
        node, count = np.arange(depth), len(accepted)
        drawn, zeros = node < drafted[:, None], np.zeros((count, depth), dtype=np.float32)
        task = PromptTask(sequence, self.name, self.group, [], sample=self.sample)
        return task.columns(count, max(self.tokens, int(anchor[-1]) + 1)) | {
            "prompt_tokens": np.full(count, self.prompt),
            "anchor": anchor,
            "tokens": np.full((count, depth), UNKNOWN, dtype=np.int32),
            **dict.fromkeys(("draft_prob", "target_prob", "overlap"), zeros),
            **dict.fromkeys(features, zeros if self.confidence is None else self._confidences(depth)),
            "accepted": node < accepted[:, None],
            "observed": drawn & (node <= accepted[:, None]),
            "accepted_length": accepted,
            "cut": self.cut,
            "drawn": drawn,
            "sent": drawn,
            "explored": np.zeros(count, dtype=bool),  # lengths were not chosen at random
            "committed": accepted + 1,
            "decisions": np.zeros(count, dtype=np.int64),
            "backlog": np.ones(count, dtype=np.int64),
            **dict.fromkeys(TIMES, np.zeros(count)),
        }

    def _confidences(self, depth: int) -> Array:
        """Return [steps, depth] float32, 0 where nothing was drafted."""
        assert self.confidence is not None
        out = np.zeros((len(self.confidence), depth), dtype=np.float32)
        width = min(depth, self.confidence.shape[1])
        out[:, :width] = np.nan_to_num(self.confidence[:, :width])
        return out


def _shuffled(counts: Sequence[int]) -> list[int]:
    """Return the accepted tokens of steps in an arbitrary order; `counts[n]` of them accepted n tokens."""
    accepted = np.repeat(np.arange(len(counts)), counts)
    shuffled: list[int] = np.random.default_rng(0).permutation(accepted).tolist()
    return shuffled


def _line_records(file: Path) -> Iterator[_Record]:
    """Yield the records of JSON Lines, or of a log of llama.cpp."""
    if not file.is_file():
        raise InputError(f"path: expected a file of records, but {file} is none")
    is_json, requests = None, 0
    for where, line in read_lines(file, "path"):
        is_json = line.startswith(("{", "[")) if is_json is None else is_json
        if is_json:
            yield _json_record(line, where).checked(where)
        elif match := _LOG.search(line):
            yield _log_record(match, requests, where).checked(where)
            requests += 1
    if is_json is False and not requests:
        raise InputError(
            f"path: {file} has no line of JSON, and no line of llama.cpp's server with `acceptance rate per position`"
        )


def _json_record(line: str, where: str) -> _Record:
    """Parse a response of a server. Raises `InputError` with its place if it has no valid record."""
    try:
        raw = strict_loads(line)
        parse = _sglang if "meta_info" in raw else _llama_cpp if "timings" in raw else _vllm
        return parse(raw, where)
    except _FAULTS as error:
        raise InputError(
            f"path: {where}: expected a response with metrics.speculative_decoding of vLLM "
            "(`vllm serve --per-request-spec-decode-metrics detailed`), meta_info of SGLang with "
            f"spec_correct_drafts_histogram, or timings of llama.cpp: {type(error).__name__}: {error}"
        ) from None


def _names(raw: Mapping[str, Any], record_id: Any, where: str) -> tuple[str, str]:
    return prompt_and_sample(record_id, raw.get("prompt_id"), raw.get("sample"), where)


def _vllm(raw: Mapping[str, Any], where: str) -> _Record:
    """Return a response of vLLM, or its `metrics.speculative_decoding` alone."""
    metrics = raw
    for name in ("metrics", "speculative_decoding", "spec_decode_metrics"):
        if isinstance(metrics.get(name), dict):
            metrics = metrics[name]
    accepted = [int(n) for n in metrics["per_step_accepted"]]
    drafted = [int(n) for n in metrics.get("per_step_drafted") or [metrics["num_spec_tokens"]] * len(accepted)]
    usage = raw.get("usage") or {}
    prompt, generated = (int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens"))
    tokens = generated or 1 + sum(accepted) + len(accepted)
    return _Record("vllm", *_names(raw, raw.get("id"), where), accepted, drafted, prompt, tokens, generated > 0)


def _sglang(raw: Mapping[str, Any], where: str) -> _Record:
    """Return a response of SGLang (0.5.13 to 0.5.23): a histogram of the accepted tokens of its steps."""
    info = raw["meta_info"]
    histogram = info.get("spec_correct_drafts_histogram") or info["spec_accept_histogram"]
    counts, steps = [_count(n) for n in histogram], _count(info["spec_verify_ct"])
    proposed = _count(next(info[name] for name in _PROPOSED if name in info))
    if sum(counts) != steps or not steps or proposed % steps:
        raise ValueError(
            f"expected {steps} steps of one draft length, got a histogram of {sum(counts)} and {proposed} drafts"
        )
    accepted, prompt = _shuffled(counts), _count(info.get("prompt_tokens", 0))
    name = _names(raw, info.get("id"), where)
    tokens = max(_count(info.get("completion_tokens", 0)), 1)
    return _Record("sglang", *name, accepted, [proposed // steps] * steps, prompt, tokens, ordered=False)


def _llama_cpp(raw: Mapping[str, Any], where: str) -> _Record:
    """Return a response of llama.cpp's server: the totals of a request, which drafted one token in each step."""
    timings = raw["timings"]
    drafts, accepted, tokens = (_count(timings[name]) for name in ("draft_n", "draft_n_accepted", "predicted_n"))
    steps = tokens - 1 - accepted
    if not accepted <= drafts or not drafts - 1 <= steps <= drafts + 1:
        raise ValueError(
            f"{drafts} drafted tokens in {steps} steps: totals determine the lengths only for drafts of one token "
            "(--spec-draft-n-max 1); give the server's log instead, which has the acceptance rate per position"
        )
    name, prompt = _names(raw, raw.get("id"), where), _count(timings.get("prompt_n", 0))
    return _Record(
        "llama.cpp", *name, _shuffled([drafts - accepted, accepted]), [1] * drafts, prompt, tokens, ordered=False
    )


def _log_record(match: re.Match[str], number: int, where: str) -> _Record:
    """Return a request of llama.cpp's log: the steps are those of which shares and totals are whole numbers."""
    accepted, generated = int(match[1]), int(match[2])
    try:
        shares = np.array([float(text) for text in match[3].split(",")])
    except ValueError:
        shares = np.zeros(0)
    if not len(shares) or not ((shares >= 0) & (shares <= 1)).all() or (np.diff(shares) > 0).any():
        raise InputError(f"path: {where}: expected descending shares by position, got ({match[3]:.40})")
    near = accepted / shares.sum() if shares.any() else generated / len(shares)
    sizes = np.arange(max(int(0.99 * near) - 1, 1), int(1.01 * near) + 3)
    counts = np.rint(sizes[:, None] * shares)
    fits = (counts.sum(1) == accepted) & (np.abs(counts / sizes[:, None] - shares) <= _ROUNDING).all(1)
    if not fits.any():
        raise InputError(f"path: {where}: no number of steps fits {accepted} accepted tokens and these shares")
    at = int(np.flatnonzero(fits)[np.abs(sizes[fits] - near).argmin()])
    steps, reached = int(sizes[at]), counts[at].astype(int)
    if not steps * len(shares) - len(shares) < generated <= steps * len(shares):
        raise InputError(
            f"path: {where}: {generated} drafted tokens in {steps} steps of {len(shares)}: draft lengths vary and may "
            "depend on acceptance; record with --spec-draft-p-min 0"
        )
    histogram = [steps - reached[0], *(reached[:-1] - reached[1:]), reached[-1]]
    drafted, tokens = [len(shares)] * steps, 1 + accepted + steps
    return _Record("llama.cpp", f"request {number}", "", _shuffled(histogram), drafted, 0, tokens, ordered=False)


def _count(value: Any) -> int:
    """Return a whole number from 0 on; raises `ValueError` for anything else."""
    if type(value) is not int or value < 0:
        raise ValueError(f"expected a whole number, got {value!r:.40}")
    return value


def _lab_records(path: Path) -> Iterator[_Record]:
    """Yield the texts of a run of inference-lab (doublewordai, `calibration`): rounds of SGLang with masks, confidences."""
    rounds = [row for row in _lab_table(path) if row.get("accept") is not None]
    names = set(rounds[0]) if rounds else set()
    width = len([name for name in names if re.fullmatch(r"acc\d+", name)])
    if not width or not {"prompt_idx", "round_idx"} <= names:
        raise InputError(f"path: expected rows with accept, prompt_idx, round_idx and acc0, acc1, ... in {path}")
    masks, confidence = (
        _floats(rounds, [f"{name}{k}" for k in range(width)], path) if f"{name}0" in names else None
        for name in ("acc", "conf")
    )
    if masks is None:
        raise InputError(f"path: expected the column acc0 in {path}")
    drawn = ~np.isnan(masks)
    lengths = (masks == 1).cumprod(1).sum(1)
    for row, length, mask, is_drawn in zip(rounds, lengths, masks, drawn, strict=True):
        is_mask = bool(np.isin(mask[is_drawn], (0, 1)).all()) and not (is_drawn[1:] & ~is_drawn[:-1]).any()
        if row["accept"] != length or not is_mask or type(row["round_idx"]) is not int:
            raise InputError(
                f"path: {path}: expected in accept the number of leading 1 in acc0, acc1, ..., got {row!r:.200}"
            )
    if confidence is not None and not (((confidence >= 0) & (confidence <= 1)) | ~drawn).all():
        raise InputError(f"path: {path}: expected a confidence from 0 to 1 of every drafted token")
    texts: dict[tuple[Any, ...], list[int]] = {}
    for at, row in enumerate(rounds):
        texts.setdefault(tuple(row.get(name) for name in _KEYS), []).append(at)
    for (*_, config, category, prompt, turn), unsorted in texts.items():
        order = sorted(unsorted, key=lambda row: int(rounds[row]["round_idx"]))
        steps: list[int] = lengths[order].tolist()
        name = "/".join(str(part) for part in (config, category, prompt) if part is not None)
        yield _Record(
            "inference-lab", name, str(turn or ""), steps, drawn[order].sum(1).tolist(), 0, 1 + sum(steps) + len(steps),
            group=str(category or ""), confidence=None if confidence is None else confidence[order],
        ).checked(f"{path}, {name}")  # fmt: skip


def _floats(rows: Sequence[Mapping[str, Any]], names: Sequence[str], path: Path) -> Array:
    """Return columns as [rows, columns], NaN for null."""
    try:
        return np.array([[np.nan if row.get(n) is None else float(row[n]) for n in names] for row in rows])
    except (TypeError, ValueError):
        raise InputError(f"path: expected numbers in the columns {names[0]}, ... of {path}") from None


def _lab_table(path: Path) -> list[dict[str, Any]]:
    """Return the rows of `acceptance.parquet` with those of `speculator.parquet`, if there is one."""
    import pyarrow as pa
    from pyarrow import parquet

    file = path / "acceptance.parquet" if path.is_dir() else path
    try:
        rows: list[dict[str, Any]] = parquet.read_table(file).to_pylist()
        other = file.with_name("speculator.parquet")
        if file.name != "acceptance.parquet" or not other.is_file():
            return rows
        drafts: list[dict[str, Any]] = parquet.read_table(other).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"path: {file} cannot be read: {str(error).splitlines()[0]}") from None
    by_key = {tuple(row.get(name) for name in (*_KEYS, "round_idx")): row for row in drafts}
    keys = [tuple(row.get(name) for name in (*_KEYS, "round_idx")) for row in rows]
    if len(by_key) != len(drafts) or not set(keys) <= set(by_key):
        raise InputError(f"path: expected one row in {other} for each round of {file}")
    return [{**by_key[key], **row} for key, row in zip(keys, rows, strict=True)]
