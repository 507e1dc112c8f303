"""vLLM's table of draft lengths by batch size, computed from traces and a profile.

vLLM takes one draft length for all requests of a step and lets it depend on their number alone: ranges (first, last, K),
both ends included, the first from 1 on, none overlapping; sizes after the last range keep its K, and no K is above
`num_speculative_tokens` (`vllm/v1/spec_decode/dynamic/utils.py` and `vllm/config/speculative.py` of 0.33.0).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...collect.pair_options import draft_of, drafter_of
from ...collect.schema import Header
from ...decode.drafters.lookup import LONGEST
from ...policies.display import markdown_table
from .acceptance import fit_acceptance
from .by_batch import FixedBatches, choose_lengths
from .folder import Export, Written, caveats, find_sizes
from .page import alone_table, page_text, policy_loss
from .proposer import proposer_files, proposer_use
from .serving import assumptions, is_extrapolated, measured_rows, measured_text

CONFIG, ACCEPTANCE = "speculative_config.json", "acceptance.json"
VERSION = "0.33.0"
"""Whose parser the file was held against."""

MAX_BATCH = 256

_LOOKUP = re.compile(r"lookup(?:(?::|\?longest=)(\d+))?")

Range = tuple[int, int, int]


def make_files(export: Export) -> Written:
    """Return vLLM's speculative configs: the policy itself where vLLM can run it, the fastest fixed length by batch size.

    A batch larger than the largest one looked at keeps its length.
    """
    ranges, alone, batches = lengths_by_size(export)
    config = {**table_drafter(export.header), **length_table(ranges)}
    figures = {"alone": alone, **batches, "measured_rows": measured_rows(export.profile)}
    files: dict[str, str | bytes] = {CONFIG: json.dumps(config, indent=2) + "\n"}
    if (found := fit_acceptance(export.sides.fit, export.depth)) is not None:
        files[ACCEPTANCE] = json.dumps(found, indent=2) + "\n"
    own = {} if export.policy is None else proposer_files(export.policy, export.header, export.depth, export.out)
    use = proposer_use(export.policy, drafter_of(export.header), own)
    return Written({**files, **own}, page_of(export, config, alone, batches, use), figures)


def lengths_by_size(export: Export) -> tuple[list[Range], dict[str, Any], dict[str, Any]]:
    """Return the fastest length of each range of batch sizes, its figures at one request, and those by batch size."""
    batches = FixedBatches(export, find_sizes(export.max_batch or MAX_BATCH))
    ranges = choose_ranges(batches)
    return ranges, export.alone(export.held_fixed.rounds(ranges[0][2])), by_batch(batches, ranges)


def choose_ranges(batches: FixedBatches) -> list[Range]:
    """Return (first, last, K) by rising batch size."""
    ranges: list[Range] = []
    sizes = batches.sizes
    for at, (size, length) in enumerate(choose_lengths(batches).items()):
        # Sizes that were not looked at have the length of the next smaller one.
        last = sizes[at + 1] - 1 if at + 1 < len(sizes) else size
        if ranges and ranges[-1][2] == length:
            ranges[-1] = (ranges[-1][0], last, length)
        else:
            ranges.append((size, last, length))
    return ranges


def table_drafter(header: Header) -> dict[str, Any]:
    """Return what names, in `--speculative-config`, the drafter of vLLM's own that a table of lengths is for.

    Lookup is its ngram. Its suffix drafter takes no table, and others it has none like: a draft model stands for them.
    """
    if found := _LOOKUP.fullmatch(drafter_of(header)):
        return {"method": "ngram", "prompt_lookup_max": int(found[1] or LONGEST), "prompt_lookup_min": 1}
    return {"method": "draft_model", "model": draft_of(header)}


def length_table(ranges: Sequence[Range]) -> dict[str, Any]:
    """Return the lengths in `--speculative-config`. Where none pays, 1 stands for the least that it accepts."""
    return {
        "num_speculative_tokens": max(1, *(length for *_, length in ranges)),
        "num_speculative_tokens_per_batch_size": [list(entry) for entry in ranges],
    }


def length_at(ranges: Sequence[Range], size: int) -> int:
    """Return K for a batch size, as the engine looks it up."""
    return [length for first, _, length in ranges if first <= size][-1]


def by_batch(batches: FixedBatches, ranges: Sequence[Range]) -> dict[str, Any]:
    """Return the held-out figures by batch size, and those of all sizes together, each with as many tokens.

    Where the profile has batches those of the policy are among them.
    """
    export, sizes = batches.export, batches.sizes
    common = int(sum((batches.fit[size].sum(1) for size in sizes), torch.zeros(export.depth + 1)).argmin())
    policy = export.policy if export.profile.batch is not None else None
    alone = export.played(policy) if policy is not None else None
    lines = []
    for size in sizes:
        length = length_at(ranges, size)
        spent = batches.held[size].sum(1)
        plain, mine, same = (float(spent[k]) for k in (0, length, common))
        rows = size * (length + 1)
        line: dict[str, Any] = {
            "batch": size,
            "length": length,
            "rows": rows,
            "extrapolated": is_extrapolated(export.profile, size, rows),
            "to_plain": plain / mine,
            "to_common": same / mine,
            "to_best_here": float(spent.min()) / mine,
        }
        if alone is not None:
            line["policy_to_this"] = batches.policy_to(length, size, alone)
        lines.append(line)
    mixed = sum(batches.held_spent(size, (length_at(ranges, size), 0, common)) for size in sizes)
    table, plain, same = np.asarray(mixed).T
    return {
        "batches": lines,
        "common_length": common,
        "mix_to_plain": export.held_boot.interval(plain / table),
        "mix_to_common": export.held_boot.interval(same / table),
    }


def sizes_table(export: Export, batches: Mapping[str, Any]) -> str:
    """Return what lengths by batch size bring, as a table with a sentence before it."""
    common, lines = batches["common_length"], batches["batches"]
    columns = ["batch", "length", "to plain", f"to length {common}", measured_text(export.profile)]
    rows = [
        [
            f"{line['batch']}",
            f"{line['length']}",
            f"{line['to_plain']:.3f}",
            f"{line['to_common']:.3f}",
            "extrapolated" if line["extrapolated"] else "",
        ]
        for line in lines
    ]
    if "policy_to_this" in lines[0]:
        columns.insert(-1, "the policy, to this")
        for row, line in zip(rows, lines, strict=True):
            row.insert(-1, line["policy_to_this"].text())
    plain, same = batches["mix_to_plain"], batches["mix_to_common"]
    return (
        "By batch size, all requests of a batch under one length, on the same prompts. Over all these sizes together, as "
        f"many tokens at each, {plain.text()} times plain decoding and {same.text()} times one length for "
        f"all sizes ({common}, the fastest):\n\n" + markdown_table(columns, rows)
    )


def _drafter_use(config: Mapping[str, Any], drafter: str) -> str:
    """Return what is to be known of the drafter that a configuration names."""
    if config["method"] == "ngram":
        return (
            "`ngram` is vLLM's own lookup. It drafts what followed one earlier occurrence, not what followed most often, "
            "so that it may be accepted less often than on the traces."
        )
    if drafter == "model":
        return (
            f"`model` is the draft of the traces (`{config['model']}`): change it to where vLLM finds it. For an EAGLE, MTP "
            "or other drafter change `method` as well, and only if the traces are of that drafter."
        )
    return (
        f"The traces are of the drafter `{drafter}`, and vLLM itself has none of that kind that takes a table: change "
        "`method` and `model` to one that does. The lengths hold as far as it is accepted as often and as fast."
    )


def page_of(
    export: Export, config: Mapping[str, Any], alone: Mapping[str, Any], batches: Mapping[str, Any], own: str
) -> str:
    """Return the README; `own` says how the policy itself runs there."""
    use = (
        f"{own}\n\nThe table of lengths, for setups that cannot take a class:\n\n"
        '```console\nvllm serve TARGET --speculative-config "$(cat speculative_config.json)"\n```\n\n'
        f"{_drafter_use(config, drafter_of(export.header))} vLLM drops the "
        f"table under data parallelism. The parser of vLLM {VERSION} accepts the file; versions without "
        "`num_speculative_tokens_per_batch_size` do not. Under Model Runner V2 a draft model drafts the full length and the "
        "surplus is blanked: there the table saves verification, not drafting; eagle and mtp draft what it says.\n\n"
        f"For `adaptive_verification` (Model Runner V2, CUDA): `SPECSTOP_VLLM_ACCEPTANCE={ACCEPTANCE} vllm serve ...` begins "
        "with acceptance as it was on the traces instead of vLLM's one cold start for all models."
    )
    lost = [
        "With the table, the stop policy itself. vLLM gives all requests of a step one length, by their number: it looks "
        "neither at the text nor at the draft's probabilities, and no head, calibration or rule is carried over.",
        policy_loss(alone),
    ]
    if export.policy is not None and export.profile.batch is None:
        lost.append(
            "Nothing is known here about larger batches under the policy: with lengths of its own for each request it could "
            "gain more there or less. A profile with batches (`specstop profile --batch 1,2,4,8`) says it."
        )
    assumed = [*assumptions(export.profile), *caveats(export)]
    what = (
        "Draft lengths by batch size for vLLM: the fixed lengths with the highest replayed throughput under the latency "
        "profile, scaled to each batch. A larger batch drafts no longer than a smaller one unless that is clearly faster."
    )
    return page_text(
        "Draft lengths for vLLM",
        what,
        use,
        [alone_table(alone), sizes_table(export, batches)],
        lost,
        assumed,
        export.facts(),
    )
