"""vLLM's per-request acceptance records (`--per-request-spec-decode-metrics`) as a trace without features.

It serves policies that look at the depth alone: which fixed length, which table of lengths. The records say how many tokens
each step drafted and accepted, not which: single rounds can be evaluated (`train.evaluate.comparison`), whole texts not
replayed. Tokens beyond a step's draft were not observed. If all drafts are equally long, every depth was observed. If lengths
vary, longer drafts stand for shorter ones where lengths do not depend on acceptance, which is tested here (`draft_lengths`).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...policies.arguments import MAX_ROWS
from ...policies.contract import Array
from ...policies.errors import InputError, SpecstopWarning
from ...policies.files import SURROGATE, is_text, prepare_output_dir, staged_folder, strict_loads
from ..acceptance import DEPENDENT, LENGTHS
from ..prompts.files import lines
from ..prompts.samples import SampleNames, warn_sample_ids
from ..schema import TIMES, UNKNOWN, UNKNOWN_TEMPERATURE, Header, chain
from ..store.folder import Trace, open_for_writing, open_trace, write_shard
from ..work import Work
from .draft_lengths import LEVEL, lengths_kind
from .serving import import_parts


def import_vllm(
    path: str | Path, out: str | Path, *, target: str = "", draft: str = "", overwrite: bool = False
) -> Trace:
    """Turn vLLM's records into a trace.

    Args:
        path: a folder that `serving.RecordingProposer` wrote; else JSON Lines: responses of the server, or their
            `metrics.speculative_decoding` objects alone. `detailed` records keep the order of the steps; of `summary` ones
            the histogram is laid out, shortest first, and every step counts.
        out: folder of the trace.
        target, draft: names for the header, which lines of JSON lack; a folder has its own.
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
    lengths = _lengths(records)
    header = Header(
        target=target,
        draft=draft,
        pair={},
        vocabulary=0,
        eos=(),
        temperature=0.0,
        topology=chain(depth),
        features=(),
        anchor_features=(),
        max_new_tokens=max(record.tokens for record in records),
        seed=0,
        shards=1,
        prompts=len(records),
        prompts_hash="",
        verification="rejection",
        label="outcome",
        collector="live",
        texts="vllm",
        policy="vllm",
        facts={"temperature": UNKNOWN_TEMPERATURE, "from": file.name, LENGTHS: lengths},
    )
    with staged_folder(out) as stage:
        open_for_writing(stage, header)
        write_shard(
            stage, header, 0, [record.columns(at, depth) for at, record in enumerate(records) if record.drafted]
        )
    return open_trace(out)


def _records(file: Path) -> list[_Record]:
    if not file.is_file():
        raise InputError(f"path: expected a JSON Lines file, but {file} does not exist or is no file")
    names = SampleNames()
    records = [_Record(line, where, names) for where, line in lines(file, "path")]
    if not records:
        raise InputError(f"path: {file} is empty")
    warn_sample_ids([record.name for record in records if not record.sample])
    return records


class _Record:
    """The steps of one request.

    Attributes:
        accepted, drafted: by step.
        ordered: the steps are in the order in which they were taken; of a histogram they are not.
        tokens: of the completion; `ends`: the record says how many, else they are those of the steps.
        name, sample: id of the prompt, and name of the sample (fields `prompt_id` and `sample` of the record, or its id).
    """

    def __init__(self, line: str, where: str, names: SampleNames) -> None:
        try:
            raw = strict_loads(line)
            metrics = _metrics(raw)
            self.accepted, self.drafted = _steps(metrics)
            self.ordered = metrics.get("per_step_accepted") is not None
            total = sum(self.drafted) if metrics.get("per_step_drafted") else metrics.get("num_draft_tokens")
            total = sum(self.drafted) if total is None else int(total)
            usage = raw.get("usage") or {}
            self.prompt = int(usage.get("prompt_tokens") or 0)
            generated = int(usage.get("completion_tokens") or 0)
            self.tokens, self.ends = generated or 1 + sum(self.accepted) + len(self.accepted), generated > 0
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise InputError(
                f"path: {where}: expected a response with metrics.speculative_decoding "
                f"(`vllm serve --per-request-spec-decode-metrics detailed`): {type(error).__name__}: {error}"
            ) from None
        if len(self.accepted) != len(self.drafted) or any(
            not 0 <= a <= d for a, d in zip(self.accepted, self.drafted, strict=False)
        ):
            raise InputError(f"path: {where}: steps accept more than they drafted, or their numbers differ")
        if total != sum(self.drafted):
            raise InputError(
                f"path: {where}: expected {len(self.drafted)} steps of {max(self.drafted, default=0)} drafted tokens, "
                f"but they drafted {total} in all, and not how many each; record with "
                "`--per-request-spec-decode-metrics detailed`, or leave the line out"
            )
        if max(self.drafted, default=0) >= MAX_ROWS or not all(0 <= n < 2**31 for n in (self.prompt, self.tokens)):
            raise InputError(f"path: {where}: expected steps of less than {MAX_ROWS} tokens, and texts of 0 to 2^31")
        self.name, self.sample = names.assign(raw.get("id"), raw.get("prompt_id"), raw.get("sample"), where)
        if not is_text(self.name + self.sample):
            raise InputError(f"path: {where}: the id has {SURROGATE}")

    @property
    def anchor(self) -> Array:
        """[steps] int64, tokens generated before each step: reading the prompt commits one, a step those accepted and one."""
        accepted = np.array(self.accepted, dtype=np.int64)
        return 1 + np.concatenate([[0], (accepted + 1).cumsum()])[:-1]

    @property
    def cut(self) -> Array:
        """[steps] bool, the last step, and where the end of the text is known all drafts that reach beyond it.

        The step at the end accepts more than others, because a long step is more likely to reach the end.
        So all drafts that could reach it are left out, whatever they accepted. In a summary it is not known which step was
        last; all steps together are an unbiased choice, and none is left out.
        """
        out = np.zeros(len(self.accepted), dtype=bool)
        if self.ordered:
            out |= (self.anchor + np.array(self.drafted, dtype=np.int64) > self.tokens) & self.ends
            out[-1:] = True
        return out

    def columns(self, sequence: int, depth: int) -> Mapping[str, Any]:
        """Return the rows of the request, one a step."""
        accepted, drafted = np.array(self.accepted), np.array(self.drafted)
        anchor = self.anchor
        node, count = np.arange(depth), len(accepted)
        drawn, path = node < drafted[:, None], node < accepted[:, None]
        zeros = np.zeros((count, depth), dtype=np.float32)
        return Work(sequence, self.name, "", [], sample=self.sample).columns(
            count, max(self.tokens, int(anchor[-1]) + 1)
        ) | {
            "prompt_tokens": np.full(count, self.prompt),  # which the records only count
            "anchor": anchor,
            "tokens": np.full((count, depth), UNKNOWN, dtype=np.int32),
            **dict.fromkeys(("draft_prob", "target_prob", "overlap"), zeros),
            "accepted": path,
            "labelled": drawn & (node <= accepted[:, None]),
            "accepted_length": accepted,
            "cut": self.cut,
            "drawn": drawn,
            "sent": drawn,
            "explored": np.zeros(count, dtype=bool),  # no coin chose the lengths
            "committed": accepted + 1,
            "decisions": np.zeros(count, dtype=np.int64),
            "backlog": np.ones(count, dtype=np.int64),
            **dict.fromkeys(TIMES, np.zeros(count)),
        }


def _lengths(records: Sequence[_Record]) -> str:
    """Return how the draft lengths were chosen, for the header; warn where they depend on acceptance."""
    names = {name: at for at, name in enumerate(dict.fromkeys(record.name for record in records))}
    every = [record for record in records if record.drafted]
    drafted = np.concatenate([record.drafted for record in every])
    cut = np.concatenate([record.cut for record in every])
    kind, p_value = lengths_kind(
        np.concatenate([record.accepted for record in every]),
        drafted,
        np.repeat([names[record.name] for record in every], [len(record.drafted) for record in every]),
        cut,
        np.concatenate([[False] + [record.ordered] * (len(record.drafted) - 1) for record in every]),
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


def _metrics(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the object with the counts, from a response or what is left of it."""
    for name in ("metrics", "speculative_decoding", "spec_decode_metrics"):
        if isinstance(raw.get(name), dict):
            raw = raw[name]
    if "acceptance_histogram" not in raw and "per_step_accepted" not in raw:
        raise KeyError("acceptance_histogram")
    return raw


def _steps(found: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """Return accepted and drafted tokens by step."""
    if found.get("per_step_accepted") is not None:
        accepted = [int(n) for n in found["per_step_accepted"]]
        drafted: Sequence[Any] = found.get("per_step_drafted") or [found["num_spec_tokens"]] * len(accepted)
        return accepted, [int(n) for n in drafted]
    accepted = [length for length, count in enumerate(found["acceptance_histogram"]) for _ in range(int(count))]
    return accepted, [int(found["num_spec_tokens"])] * len(accepted)
