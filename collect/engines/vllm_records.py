"""vLLM's per-request acceptance records (`--per-request-spec-decode-metrics`) as a trace without features.

It serves policies that read the depth alone: which fixed length, which table of lengths. The records contain how many tokens
each step drafted and accepted, not which: single rounds can be evaluated (`train.evaluate.comparison`), whole texts not
replayed. Tokens beyond a step's draft were not observed. If all drafts are equally long, every depth was observed.

If lengths vary, longer drafts show what shorter ones would have accepted, provided that lengths do not depend on acceptance.
This assumption has two consequences that records can contradict:

- of the rounds that drafted at least j tokens and accepted the first j - 1, the share that accepts token j is the same at
  every length (strata: j);
- what a round accepted says nothing about the length of the next round of the request (strata: the round's length, and j).

Both are tested by a score test of general association over the strata (N. Mantel, Journal of the American Statistical
Association 58, 1963). Its scores are summed by request, because rounds of one request resemble each other and may share a
length, and their mean is compared with 0 by Hotelling's T^2. No test can detect a length that depends on the token after the
draft and on nothing before it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...policies.arguments import MAX_ROWS
from ...policies.contract import Array
from ...policies.errors import InputError, SpecstopWarning
from ...policies.files import SURROGATE, is_text, prepare_output_dir, staged_folder, strict_loads
from ..acceptance import DEPENDENT, FIXED, INDEPENDENT, LENGTHS
from ..prompt_files import lines
from ..prompts import SampleNames, warn_sample_ids
from ..schema import TIMES, UNKNOWN, UNKNOWN_TEMPERATURE, Header, PromptTask, chain
from ..store import Trace, load_trace, open_for_writing, write_shard
from .serving import import_parts

LEVEL = 0.01
"""If lengths are independent, one import in a hundred is refused longer policies. The other error costs more, because it
promises unreachable rates, and it is rare: lengths by confidence are detected in all of 40 simulated runs of 20 requests with
40 rounds each."""

FEWEST = 20
"""Requests below which rounds are resampled one by one."""

GROUPS = 8
"""The most lengths that are distinguished; where there are more, neighbours are grouped."""


def import_vllm(
    path: str | Path, out: str | Path, *, target: str = "", draft: str = "", overwrite: bool = False
) -> Trace:
    """Turn vLLM's records into a trace.

    Args:
        path: a folder that `serving.RecordingProposer` wrote, or JSON Lines: responses of the server, or their
            `metrics.speculative_decoding` objects alone. `detailed` records keep the order of the steps. The histogram of
            `summary` records becomes a list of steps in ascending order, all of which count.
        out: folder of the trace.
        target, draft: names for the header, which JSON lines do not contain; a folder does.
        overwrite: replace an older result in `out`.

    Raises:
        InputError: the file is missing, a line has no such record (the message gives its number), or as `prepare_output_dir`.

    Warns:
        SpecstopWarning: the draft lengths depend on acceptance.
    """
    file = Path(path)
    if file.is_dir():
        if target or draft:
            raise InputError(f"--target, --draft: {file} names the models that it was recorded with; leave them out")
        return import_parts(file, out, overwrite=overwrite)
    prepare_output_dir(out, overwrite=overwrite, inputs=[file])
    records = _records(file)
    steps = [count for record in records for count in record.drafted]
    depth = max(steps, default=0)
    if not depth:
        raise InputError(f"path: {file} has no step that drafted a token; there is nothing to learn from it")
    header = Header(
        target=target, draft=draft, pair={}, vocabulary=0, eos=(), temperature=0.0, topology=chain(depth), features=(),
        anchor_features=(), max_new_tokens=max(record.tokens for record in records), seed=0, shards=1, prompts=len(records),
        prompts_hash="", verification="rejection", label="outcome", collector="live", texts="vllm", policy="vllm",
        facts={"temperature": UNKNOWN_TEMPERATURE, "from": file.name, LENGTHS: _lengths(records)},
    )  # fmt: skip
    with staged_folder(out) as stage:
        open_for_writing(stage, header)
        chunks = [record.columns(at, depth) for at, record in enumerate(records) if record.drafted]
        write_shard(stage, header, 0, chunks)
    return load_trace(out)


@dataclass(frozen=True)
class _Record:
    """The steps of one request.

    Attributes:
        name, sample: prompt id and name of the sample (fields `prompt_id` and `sample` of the record, or its id).
        accepted, drafted: by step.
        ordered: the steps are in the order in which they were taken, unlike those of a histogram.
        prompt: number of tokens of the prompt.
        tokens: number of tokens of the completion; `known_end`: the record has it, otherwise it is that of the steps.
    """

    name: str
    sample: str
    accepted: list[int]
    drafted: list[int]
    ordered: bool
    prompt: int
    tokens: int
    known_end: bool

    @classmethod
    def parse(cls, line: str, where: str, names: SampleNames) -> _Record:
        """Parse a line of JSON. Raises `InputError` with its place if it has no valid record."""
        try:
            raw = metrics = strict_loads(line)
            for name in ("metrics", "speculative_decoding", "spec_decode_metrics"):
                if isinstance(metrics.get(name), dict):
                    metrics = metrics[name]
            if ordered := metrics.get("per_step_accepted") is not None:
                accepted = [int(n) for n in metrics["per_step_accepted"]]
            else:
                histogram = enumerate(metrics["acceptance_histogram"])
                accepted = [length for length, count in histogram for _ in range(int(count))]
            by_step = metrics.get("per_step_drafted") if ordered else None
            drafted = [int(n) for n in by_step or [metrics["num_spec_tokens"]] * len(accepted)]
            total = None if metrics.get("per_step_drafted") else metrics.get("num_draft_tokens")
            total = sum(drafted) if total is None else int(total)
            usage = raw.get("usage") or {}
            prompt, generated = (int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens"))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise InputError(
                f"path: {where}: expected a response with metrics.speculative_decoding "
                f"(`vllm serve --per-request-spec-decode-metrics detailed`): {type(error).__name__}: {error}"
            ) from None
        if len(accepted) != len(drafted) or any(not 0 <= a <= d for a, d in zip(accepted, drafted, strict=False)):
            raise InputError(f"path: {where}: steps accept more than they drafted, or their numbers differ")
        if total != sum(drafted):
            raise InputError(
                f"path: {where}: expected {len(drafted)} steps of {max(drafted, default=0)} drafted tokens, "
                f"but they drafted {total} in all, and not how many each; record with "
                "`--per-request-spec-decode-metrics detailed`, or leave the line out"
            )
        tokens = generated or 1 + sum(accepted) + len(accepted)
        if max(drafted, default=0) >= MAX_ROWS or not all(0 <= n < 2**31 for n in (prompt, tokens)):
            raise InputError(f"path: {where}: expected steps of less than {MAX_ROWS} tokens, and texts of 0 to 2^31")
        prompt_id, sample = names.assign(raw.get("id"), raw.get("prompt_id"), raw.get("sample"), where)
        if not is_text(prompt_id + sample):
            raise InputError(f"path: {where}: the id has {SURROGATE}")
        return cls(prompt_id, sample, accepted, drafted, ordered, prompt, tokens, generated > 0)

    @property
    def anchor(self) -> Array:
        """[steps] int64, tokens generated before each step: the prompt commits one, a step its accepted tokens and one."""
        committed = np.array(self.accepted, dtype=np.int64) + 1
        return 1 + committed.cumsum() - committed

    @property
    def cut(self) -> Array:
        """[steps] bool, the last step, and if the end of the text is known all drafts that reach beyond it.

        The step at the end accepts more than others, because a long step is more likely to reach the end. So all drafts that
        could reach it are excluded, whatever they accepted. The last step of a summary is unknown; all its steps together are
        an unbiased choice, and none is excluded.
        """
        out = np.zeros(len(self.accepted), dtype=bool)
        if self.ordered:
            out |= (self.anchor + np.array(self.drafted, dtype=np.int64) > self.tokens) & self.known_end
            out[-1:] = True
        return out

    def columns(self, sequence: int, depth: int) -> Mapping[str, Any]:
        """Return the rows of the request, one per step."""
        accepted, drafted, anchor = np.array(self.accepted), np.array(self.drafted), self.anchor
        node, count = np.arange(depth), len(accepted)
        drawn, zeros = node < drafted[:, None], np.zeros((count, depth), dtype=np.float32)
        work = PromptTask(sequence, self.name, "", [], sample=self.sample)
        return work.columns(count, max(self.tokens, int(anchor[-1]) + 1)) | {
            "prompt_tokens": np.full(count, self.prompt),
            "anchor": anchor,
            "tokens": np.full((count, depth), UNKNOWN, dtype=np.int32),
            **dict.fromkeys(("draft_prob", "target_prob", "overlap"), zeros),
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


def _records(file: Path) -> list[_Record]:
    if not file.is_file():
        raise InputError(f"path: expected a JSON Lines file, but {file} does not exist or is no file")
    names = SampleNames()
    records = [_Record.parse(line, where, names) for where, line in lines(file, "path")]
    if not records:
        raise InputError(f"path: {file} is empty")
    warn_sample_ids([record.name for record in records if not record.sample])
    return records


def _lengths(records: Sequence[_Record]) -> str:
    """Return how the draft lengths were chosen, for the header; warn if they depend on acceptance."""
    names = {name: at for at, name in enumerate(dict.fromkeys(record.name for record in records))}
    records = [record for record in records if record.drafted]
    drafted = np.concatenate([record.drafted for record in records])
    cut = np.concatenate([record.cut for record in records])
    kind, p_value = lengths_kind(
        np.concatenate([record.accepted for record in records]),
        drafted,
        np.repeat([names[record.name] for record in records], [len(record.drafted) for record in records]),
        cut,
        np.concatenate([[False] + [record.ordered] * (len(record.drafted) - 1) for record in records]),
    )
    if kind == DEPENDENT:
        limit = drafted[~cut].min(initial=drafted.max())
        warnings.warn(
            f"path: draft lengths depend on acceptance (p = {p_value:.1g}, level {LEVEL:g}), so that acceptance "
            f"beyond depth {limit}, which every step drafted, is not identified; record drafts of one length, or of random "
            "lengths",
            SpecstopWarning,
            stacklevel=3,
        )
    return kind


def lengths_kind(accepted: Array, drafted: Array, request: Array, cut: Array, follows: Array) -> tuple[str, float]:
    """Return (`FIXED`, `INDEPENDENT` or `DEPENDENT`, p-value) of draft lengths.

    Args:
        accepted, drafted: [N] int64, tokens of each round.
        request: [N] int64, the request of each round.
        cut: [N] bool, rounds that are excluded because the end of the text decided their outcome.
        follows: [N] bool, the round comes directly after that of the row before it, in the same request.
    """
    lengths = np.unique(drafted)
    if len(lengths) < 2:
        return FIXED, 1.0
    group = np.searchsorted(lengths, drafted)
    if len(lengths) > GROUPS:
        group = group * GROUPS // len(lengths)
    # Of few requests the scores' variance is not known: each round is a unit, which rejects too often where lengths are
    # constant over a request, and not too rarely.
    unit = request if len(np.unique(request)) >= FEWEST else np.arange(len(drafted))
    row, after = np.flatnonzero(~cut), np.flatnonzero(follows)
    after = after[~cut[after - 1]]
    same = _p_value(accepted[row], drafted[row], group[row], unit[row], np.zeros_like(row))
    following = _p_value(accepted[after - 1], drafted[after - 1], group[after], unit[after - 1], drafted[after - 1])
    chance = min(1.0, 2.0 * min(same, following))  # Bonferroni
    return DEPENDENT if chance < LEVEL else INDEPENDENT, chance


def _p_value(accepted: Array, drafted: Array, group: Array, unit: Array, stratum: Array) -> float:
    """Return the p-value of: given the stratum, acceptance at each depth does not depend on the group of the length.

    Args:
        accepted, drafted: [R] of the rounds that are compared.
        group: [R] int64, of the lengths that it is compared with.
        unit: [R] int64, rounds of one unit may depend on each other.
        stratum: [R] int64, that a round falls in besides the depth.
    """
    from scipy.stats import f as f_distribution  # slow to import, and only needed where lengths vary

    if not len(accepted):
        return 1.0
    depth = np.arange(1, max(int(drafted.max()), 1) + 1)
    row, at = np.nonzero((depth <= drafted[:, None]) & (depth <= accepted[:, None] + 1))  # depths with an outcome
    if not len(row):
        return 1.0
    success = (at < accepted[row]).astype(np.float64)
    _, stratum = np.unique(stratum[row] * len(depth) + at, return_inverse=True)
    _, column = np.unique(group[row], return_inverse=True)
    _, unit = np.unique(unit[row], return_inverse=True)
    strata, columns, units = (int(index.max()) + 1 for index in (stratum, column, unit))
    size = np.bincount(stratum, minlength=strata)
    error = success - (np.bincount(stratum, success, strata) / size)[stratum]
    cells = np.bincount(stratum * columns + column, minlength=strata * columns)
    share = cells.reshape(strata, columns) / size[:, None]
    # [units, columns]: the sum of (success - its mean) * (is of this length - its mean), means over the stratum.
    scores = np.bincount(unit * columns + column, error, units * columns).reshape(units, columns)
    for length in range(columns):
        scores[:, length] -= np.bincount(unit, error * share[stratum, length], units)
    if units < 2:
        return 1.0
    mean, covariance = scores.mean(0), np.atleast_2d(np.cov(scores, rowvar=False))
    rank = int(np.linalg.matrix_rank(covariance, hermitian=True))
    if rank == 0 or units <= rank + 1:
        return 1.0
    squared = units * float(mean @ np.linalg.pinv(covariance, rcond=1e-10, hermitian=True) @ mean)
    return float(f_distribution.sf(squared * (units - rank) / (rank * (units - 1)), rank, units - rank))
