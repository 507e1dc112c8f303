"""What a run will do, shard by shard, and doing it: the shards dealt to this process, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..policies.display import Progress, silent
from ..policies.errors import TraceError
from ..policies.files import Input, delete_result, replace_folder, staging_path
from .processes import ALONE, Place
from .prompts.kept import kept_text
from .prompts.tokens import Prompt
from .schema import Header
from .store.folder import Trace, check_shards, finished, open_for_writing, open_trace, write_index, write_shard
from .work import Work

BATCH = 16
"""Prompts that are collected together, at least."""


def nothing() -> None:
    """Do nothing: what most collectors have to do before a shard."""


@dataclass(frozen=True)
class Plan:
    """A run, checked before anything is written.

    Attributes:
        header: of its trace.
        work: the prompts of each shard.
        rows: returns the rows of a batch of prompts, as column chunks.
        begin: called before the first batch of each shard, whose rows must not depend on other shards.
        inputs: files and folders that the run reads.
        at_once: prompts of a batch.
        prompts: of the run, which are kept in its folder; and the options that chose them.
    """

    header: Header
    work: tuple[tuple[Work, ...], ...]
    rows: Callable[[Sequence[Work]], Sequence[Mapping[str, Any]]]
    begin: Callable[[], None] = nothing
    inputs: tuple[Input, ...] = ()
    at_once: int = BATCH
    prompts: tuple[Prompt, ...] = ()
    prompt_options: Mapping[str, Any] = field(default_factory=dict)

    def batches(self, index: int) -> Iterator[Sequence[Work]]:
        """Yield the batches of a shard; they never cross it."""
        for start in range(0, len(self.work[index]), self.at_once):
            yield self.work[index][start : start + self.at_once]


def never() -> bool:
    """Go on: the default answer to whether a run shall stop after this shard."""
    return False


def record(
    plan: Plan,
    out: Path,
    *,
    place: Place = ALONE,
    resume: bool = False,
    overwrite: bool = False,
    repair: bool = False,
    stop: Callable[[], bool] = never,
    progress: Progress = silent,
) -> Trace:
    """Collect the missing shards that are dealt to this process into the trace folder `out`.

    Whoever finds all shards there writes the index. The trace is checked when it is complete; otherwise it is returned
    as far as it has come.

    Args:
        plan: from `plan_run`.
        out: folder of the trace.
        place: this process among others.
        resume, overwrite: what to do with a folder that is not empty; several processes always resume. One that is to be
            overwritten stays as it is until the new trace, which grows beside it, is complete.
        repair: move damaged shards aside and collect them again; otherwise the first one is an error.
        stop: asked after each shard.
        progress: counts the prompts dealt to this process.

    Raises:
        InputError: the folder is not empty, or as `prepare_output_dir`.
        TraceError: it holds another run or a damaged shard, the disk is full, or no row came of all prompts.
    """
    header = plan.header
    shared = place.world > 1
    kept = kept_text(plan.prompts, plan.prompt_options) if plan.prompts else None
    folder = open_for_writing(
        out, header, resume=resume or shared, overwrite=overwrite, inputs=plan.inputs, prompts=kept
    )
    mine = [index for index in range(header.shards) if place.takes(index)]
    check_shards(folder, header, repair=repair, among=mine)  # those of others are theirs to look after
    have = finished(folder, header)
    task = "collect" if place.world == 1 else f"collect {place.rank}/{place.world}"
    total = sum(len(plan.work[index]) for index in mine)
    done = sum(len(plan.work[index]) for index in mine if index in have)
    progress(task, done, total)
    for index in mine:
        if index in have:
            continue
        if stop():
            break
        chunks: list[Mapping[str, Any]] = []
        plan.begin()
        for batch in plan.batches(index):
            chunks += plan.rows(batch)
            done += len(batch)
            progress(task, done, total)
        write_shard(folder, header, index, chunks)
    replaces = folder == staging_path(out)
    if len(finished(folder, header)) < header.shards:
        return Trace(folder if replaces else out, header)
    if not Trace(folder, header).row_count:
        delete_result(folder)
        raise TraceError(
            "--prompts: no row came of them, so nothing is kept: every text ends at once, or none of the --completions "
            "goes on as the target itself would"
        )
    open_trace(folder)  # compares every checksum: the index vouches for all
    write_index(folder, header)
    if replaces:
        replace_folder(folder, out)
    return Trace(out, header)
