"""What a run would cost in time and on disk, from one batch of its prompts; nothing is written."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from .shards import BATCH, Plan
from .store.folder import shard_table, write_table
from .work import spread


@dataclass(frozen=True)
class Estimate:
    """What a run is expected to come to, scaled up from `sample` prompts.

    Attributes:
        prompts, shards: of the whole run.
        sample: prompts that were tried.
        rows, disk_bytes: of the whole trace.
        seconds: of one process for everything; as many processes at once share it.
        free_bytes: on the disk of the trace.
    """

    prompts: int
    shards: int
    sample: int
    rows: int
    disk_bytes: int
    seconds: float
    free_bytes: int

    @property
    def fits(self) -> bool:
        """Whether the trace fits on the disk."""
        return self.disk_bytes < self.free_bytes


def estimate(plan: Plan, out: Path) -> Estimate:
    """Collect one batch of prompts, spread over all of them, into memory, and scale up.

    A quarter of the batch is collected first and not counted: it warms up caches and kernels.
    """
    everything = [work for shard in plan.work for work in shard]
    # As many side by side as there will be: no batch of a run has prompts of two shards.
    sample = spread(everything, max(BATCH, min(plan.at_once, max(map(len, plan.work)))))
    plan.rows(spread(sample, max(1, len(sample) // 4)))
    begin = time.perf_counter()
    table = shard_table(plan.header, plan.rows(sample))
    seconds = time.perf_counter() - begin
    buffer = pa.BufferOutputStream()
    write_table(table, buffer)
    empty = pa.BufferOutputStream()
    write_table(table.slice(0, 0), empty)
    frame = empty.tell()  # what a shard takes however few rows it has
    scale = len(everything) / len(sample)
    there = next(place for place in (out.absolute(), *out.absolute().parents) if place.is_dir())
    return Estimate(
        prompts=len(everything),
        shards=plan.header.shards,
        sample=len(sample),
        rows=round(table.num_rows * scale),
        disk_bytes=round((buffer.tell() - frame) * scale) + frame * plan.header.shards,
        seconds=seconds * scale,
        free_bytes=shutil.disk_usage(there).free,
    )
