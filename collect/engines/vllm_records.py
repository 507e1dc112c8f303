"""vLLM's per-request acceptance records (`--per-request-spec-decode-metrics`) as a trace without features.

It serves policies that look at the depth alone: which fixed length, which table of lengths. The records say how many tokens
each step drafted and accepted, not which: single rounds can be evaluated (`train.report.single_rounds`), whole texts not
replayed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...policies.errors import InputError
from ...policies.files.outputs import claim_folder, staged_folder
from ...policies.files.text import HALF, is_text
from ...policies.limits import MOST_ROWS
from ..prompts.files import lines
from ..schema import TIMES, UNKNOWN, Header, chain
from ..store.folder import Trace, open_for_writing, open_trace, write_shard
from ..work import Work
from .serving import import_parts


def import_vllm(
    path: str | Path, out: str | Path, *, target: str = "", draft: str = "", overwrite: bool = False
) -> Trace:
    """Turn vLLM's records into a trace.

    Args:
        path: a folder that `serving.RecordingProposer` wrote; else JSON Lines: responses of the server, or their
            `metrics.speculative_decoding` objects alone. `detailed` records keep the order of the steps; of `summary` ones
            the histogram is laid out, shortest first.
        out: folder of the trace.
        target, draft: names for the header, which lines of JSON lack; a folder has its own.
        overwrite: replace an older result in `out`.

    Raises:
        InputError: the file is missing, a line has no such record (the message gives its number), or as `claim_folder`.
    """
    file = Path(path)
    if file.is_dir():
        if target or draft:
            raise InputError(f"--target, --draft: {file} names the models that it was recorded with; leave them out")
        return import_parts(file, out, overwrite=overwrite)
    claim_folder(out, overwrite=overwrite, inputs=[file])
    records = _records(file)
    steps = [count for record in records for count in record.drafted]
    depth = max(steps, default=0)
    if not depth:
        raise InputError(f"--from-vllm: {file} has no step that drafted a token; there is nothing to learn from it")
    full = sum(count == depth for count in steps) / len(steps)
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
        explore=0.0 if full == 1.0 else full,  # steps to K show what any length would have met
        facts={"temperature": "unknown", "from": file.name},
    )
    with staged_folder(out) as stage:
        open_for_writing(stage, header)
        write_shard(
            stage, header, 0, [record.columns(at, depth) for at, record in enumerate(records) if record.drafted]
        )
    return open_trace(out)


def _records(file: Path) -> list[_Record]:
    if not file.is_file():
        raise InputError(f"--from-vllm: expected a JSON Lines file, but {file} does not exist or is no file")
    records = [_Record(line, where) for where, line in lines(file, "--from-vllm")]
    if not records:
        raise InputError(f"--from-vllm: {file} is empty")
    return records


class _Record:
    """The steps of one request.

    Attributes:
        accepted, drafted: by step.
        tokens: of the completion.
    """

    def __init__(self, line: str, where: str) -> None:
        try:
            raw = json.loads(line)
            self.accepted, self.drafted = _steps(_metrics(raw))
            usage = raw.get("usage") or {}
            self.prompt = int(usage.get("prompt_tokens") or 0)
            self.tokens = int(usage.get("completion_tokens") or 1 + sum(self.accepted) + len(self.accepted))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise InputError(
                f"--from-vllm: {where}: expected a response with metrics.speculative_decoding "
                f"(vllm serve --per-request-spec-decode-metrics detailed): {type(error).__name__}: {error}"
            ) from None
        if len(self.accepted) != len(self.drafted) or any(
            not 0 <= a <= d for a, d in zip(self.accepted, self.drafted, strict=False)
        ):
            raise InputError(f"--from-vllm: {where}: steps accept more than they drafted, or their numbers differ")
        if max(self.drafted, default=0) >= MOST_ROWS or not all(0 <= n < 2**31 for n in (self.prompt, self.tokens)):
            raise InputError(
                f"--from-vllm: {where}: expected steps of less than {MOST_ROWS} tokens, and texts of 0 to 2^31"
            )
        self.name = str(raw.get("id") or where)
        if not is_text(self.name):
            raise InputError(f"--from-vllm: {where}: the id has {HALF}")

    def columns(self, sequence: int, depth: int) -> Mapping[str, Any]:
        """Return the rows of the request, one a step; the last one counts as cut, for vLLM does not say whether it was."""
        accepted, drafted = np.array(self.accepted), np.array(self.drafted)
        # Reading the prompt commits one token, a step those it accepts and one more.
        anchor = 1 + np.concatenate([[0], (accepted + 1).cumsum()[:-1]])
        node, count = np.arange(depth), len(accepted)
        drawn, path = node < drafted[:, None], node < accepted[:, None]
        zeros = np.zeros((count, depth), dtype=np.float32)
        return Work(sequence, self.name, "", []).columns(count, max(self.tokens, int(anchor[-1]) + 1)) | {
            "prompt_tokens": np.full(count, self.prompt),  # which the records only count
            "anchor": anchor,
            "tokens": np.full((count, depth), UNKNOWN, dtype=np.int32),
            **dict.fromkeys(("draft_prob", "target_prob", "overlap"), zeros),
            "accepted": path,
            "labelled": drawn & (node <= accepted[:, None]),
            "accepted_length": accepted,
            "cut": np.arange(count) == count - 1,
            "drawn": drawn,
            "sent": drawn,
            "explored": drafted == depth,
            "committed": accepted + 1,
            "decisions": np.zeros(count, dtype=np.int64),
            "backlog": np.ones(count, dtype=np.int64),
            **dict.fromkeys(TIMES, np.zeros(count)),
        }


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
