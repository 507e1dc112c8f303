"""vLLM's per-request acceptance records (`--per-request-spec-decode-metrics`) as a trace without features.

It serves policies that read the depth alone: which fixed length, which table of lengths. The records contain how many tokens
each step drafted and accepted, not which: single rounds can be evaluated, whole texts not replayed. Tokens beyond a step's
draft were not observed. Where draft lengths vary they may depend on acceptance, as in an engine that drafts on while it is
confident. So only the depth that every step drafted is identified.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
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


def import_vllm(
    path: str | Path, out: str | Path, *, target: str = "", draft: str = "", overwrite: bool = False
) -> Trace:
    """Turn vLLM's records into a trace.

    Args:
        path: JSON Lines with `detailed` records: responses of the server, or their `metrics.speculative_decoding` objects
            alone.
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
    if not file.is_file():
        raise InputError(f"path: expected a JSON Lines file, but {file} does not exist or is no file")
    records = [_Record.parse(line, where) for where, line in read_lines(file, "path")]
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
    header = Header(
        target=target, draft=draft, pair={}, vocabulary=0, eos=(), temperature=0.0, topology=parents(chain(depth)),
        features=(), anchor_features=(), max_new_tokens=max(record.tokens for record in records), seed=0, shards=1,
        prompts=len(records), prompts_hash="", verification="rejection", label="outcome", collector="live", texts="vllm",
        policy="vllm",
        facts={"temperature": UNKNOWN_TEMPERATURE, "from": file.name, LENGTHS: FIXED if shortest == depth else VARIED},
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
        prompt: number of tokens of the prompt.
        tokens: number of tokens of the completion; `known_end`: the record has it, otherwise it is that of the steps.
    """

    name: str
    sample: str
    accepted: list[int]
    drafted: list[int]
    prompt: int
    tokens: int
    known_end: bool

    @classmethod
    def parse(cls, line: str, where: str) -> _Record:
        """Parse a line of JSON. Raises `InputError` with its place if it has no valid record."""
        try:
            raw = metrics = strict_loads(line)
            for name in ("metrics", "speculative_decoding", "spec_decode_metrics"):
                if isinstance(metrics.get(name), dict):
                    metrics = metrics[name]
            accepted = [int(n) for n in metrics["per_step_accepted"]]
            drafted = [int(n) for n in metrics.get("per_step_drafted") or [metrics["num_spec_tokens"]] * len(accepted)]
            usage = raw.get("usage") or {}
            prompt, generated = (int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens"))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise InputError(
                f"path: {where}: expected a response with metrics.speculative_decoding "
                f"(`vllm serve --per-request-spec-decode-metrics detailed`): {type(error).__name__}: {error}"
            ) from None
        if len(accepted) != len(drafted) or any(not 0 <= a <= d for a, d in zip(accepted, drafted, strict=False)):
            raise InputError(f"path: {where}: steps accept more than they drafted, or their numbers differ")
        tokens = generated or 1 + sum(accepted) + len(accepted)
        if max(drafted, default=0) >= MAX_ROWS or not all(0 <= n < 2**31 for n in (prompt, tokens)):
            raise InputError(f"path: {where}: expected steps of less than {MAX_ROWS} tokens, and texts of 0 to 2^31")
        prompt_id, sample = prompt_and_sample(raw.get("id"), raw.get("prompt_id"), raw.get("sample"), where)
        if not is_text(prompt_id + sample):
            raise InputError(f"path: {where}: the id has {SURROGATE}")
        return cls(prompt_id, sample, accepted, drafted, prompt, tokens, generated > 0)

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
        out: Array = (self.anchor + np.array(self.drafted, dtype=np.int64) > self.tokens) & self.known_end
        out[-1:] = True
        return out

    def columns(self, sequence: int, depth: int) -> Mapping[str, Any]:
        """Return the rows of the request, one per step."""
        accepted, drafted, anchor = np.array(self.accepted), np.array(self.drafted), self.anchor
        node, count = np.arange(depth), len(accepted)
        drawn, zeros = node < drafted[:, None], np.zeros((count, depth), dtype=np.float32)
        task = PromptTask(sequence, self.name, "", [], sample=self.sample)
        return task.columns(count, max(self.tokens, int(anchor[-1]) + 1)) | {
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
