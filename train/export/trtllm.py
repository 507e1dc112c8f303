"""TensorRT-LLM's draft lengths by batch size, computed from traces and a profile.

`draft_len_schedule` maps the last batch size of a range to its length: {4: 4, 8: 2} is 4 tokens up to 4 requests, 2 up to 8,
and none beyond (`tensorrt_llm/llmapi/llm_args.py`). Older versions read the keys as the first size of a range, and want one
for 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from ...collect.schema import draft_of
from .folder import Export, Written, caveats, drafter_caveat
from .page import alone_table, page_text, policy_loss
from .serving import assumptions, measured_rows
from .vllm import Range, lengths_by_size, sizes_table

CONFIG, OLDER = "speculative_config.yaml", "speculative_config-older.yaml"


def make_files(export: Export) -> Written:
    """Return TensorRT-LLM's speculative configs: the fastest fixed length by batch size.

    A batch larger than the largest one looked at decodes without drafts.
    """
    ranges, alone, batches = lengths_by_size(export)
    figures = {"alone": alone, **batches, "measured_rows": measured_rows(export.profile)}
    draft = draft_of(export.header)
    files: dict[str, str | bytes] = {
        CONFIG: yaml.safe_dump({"speculative_config": config(draft, ranges, schedule(ranges))}, sort_keys=False),
        OLDER: yaml.safe_dump({"speculative_config": config(draft, ranges, older_schedule(ranges))}, sort_keys=False),
    }
    return Written(files, page(export, ranges, alone, batches), figures)


def schedule(ranges: Sequence[Range]) -> dict[int, int]:
    """Return the lengths by the last batch size that each is good for."""
    return {last: length for _, last, length in ranges}


def older_schedule(ranges: Sequence[Range]) -> dict[int, int]:
    """Return the lengths by the first batch size that each is good for."""
    return {first: length for first, _, length in ranges}


def config(draft: str, ranges: Sequence[Range], lengths: Mapping[int, int]) -> dict[str, Any]:
    """Return what `speculative_config` takes, for a draft model."""
    return {
        "decoding_type": "Draft_Target",
        "speculative_model": draft,
        "max_draft_len": max(1, *(length for *_, length in ranges)),
        "draft_len_schedule": dict(lengths),
    }


def page(export: Export, ranges: Sequence[Range], alone: Mapping[str, Any], batches: Mapping[str, Any]) -> str:
    """Return the README."""
    use = (
        f"```console\ntrtllm-serve TARGET --backend pytorch --extra_llm_api_options {CONFIG}\n```\n\n"
        f"Keys of `draft_len_schedule` are the last batch size that a length is good for; beyond {ranges[-1][1]} requests "
        f"nothing is drafted. In older versions they are the first one: `{OLDER}` (it needs the length of one request to be "
        "the largest). For other drafters change `decoding_type`, and only if the traces are of that drafter. "
        "`max_concurrency` excludes the table, and `acceptance_length_threshold` switches speculation off for good: leave "
        "both out. Names were read in the published sources; TensorRT-LLM was not run here."
    )
    lost = [
        "The stop policy itself. TensorRT-LLM gives all requests of a step one length, by their number.",
        policy_loss(alone),
    ]
    what = (
        "Draft lengths by batch size for TensorRT-LLM: the fixed lengths with the highest replayed throughput under the "
        "latency profile, scaled to each batch."
    )
    tables = [alone_table(alone), sizes_table(export, batches)]
    assumed = [*drafter_caveat(export, "TensorRT-LLM"), *assumptions(export.profile), *caveats(export)]
    return page_text("Draft lengths for TensorRT-LLM", what, use, tables, lost, assumed, export.facts())
