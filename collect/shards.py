"""The shards of a run: what each one contains, which process collects it, and collecting the missing ones.

Processes do not communicate. Shards are assigned by number, a shard exists whole or not at all, and its rows do not
depend on who collects it. So a lost process is replaced by running the command again.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..policies.display import Progress, silent
from ..policies.errors import InputError, SpecstopWarning, TraceError
from ..policies.files import Input, delete_result, replace_folder
from .prompts import Prompt, prompts_json
from .schema import Header, PromptTask
from .store import (
    Trace,
    load_trace,
    open_for_writing,
    read_shard,
    remove_stale_files,
    shard_path,
    write_shard,
)

BATCH = 16
"""Minimum number of prompts that are collected together."""


@dataclass(frozen=True)
class DistributedRank:
    """One of several processes of a run: `rank` of `world`, and `local`, its number on this machine."""

    rank: int = 0
    world: int = 1
    local: int = 0

    def takes(self, index: int) -> bool:
        """Whether this process collects shard `index`."""
        return index % self.world == self.rank

    def device(self, name: str) -> str:
        """Return the device of this process: `cuda` becomes `cuda:<local>` if there are several processes."""
        return f"cuda:{self.local}" if name == "cuda" and self.world > 1 else name

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> DistributedRank:
        """Read RANK, WORLD_SIZE and LOCAL_RANK, as torchrun and accelerate set them; without the first two there is one
        process.

        Raises:
            InputError: only one of the two is set, or they are not valid numbers.
        """
        if "RANK" not in environment and "WORLD_SIZE" not in environment:
            return cls()
        texts = [environment.get("RANK", ""), environment.get("WORLD_SIZE", ""), environment.get("LOCAL_RANK", "0")]
        if not all(text.isdecimal() for text in texts) or int(texts[0]) >= int(texts[1]):
            raise InputError(
                f"RANK, WORLD_SIZE, LOCAL_RANK: expected numbers with RANK below WORLD_SIZE, as torchrun sets them, not "
                f"{', '.join(map(repr, texts))}; unset all of them to run one process"
            )
        return cls(*map(int, texts))


ALONE = DistributedRank()
"""The rank of the only process."""


@dataclass(frozen=True)
class Plan:
    """A validated run, before anything is written.

    Attributes:
        header: of the trace.
        tasks: texts of each shard.
        rows: returns the rows of a batch of tasks, as chunks of columns.
        begin: called before the first batch of each shard, so that its rows do not depend on other shards.
        inputs: files and folders that the run reads.
        batch: number of tasks that are passed to `rows` together.
        prompts: of the run, which are stored in its folder.
    """

    header: Header
    tasks: tuple[tuple[PromptTask, ...], ...]
    rows: Callable[[Sequence[PromptTask]], Sequence[Mapping[str, Any]]]
    begin: Callable[[], None] = lambda: None
    inputs: tuple[Input, ...] = ()
    batch: int = BATCH
    prompts: tuple[Prompt, ...] = ()


def record(
    plan: Plan,
    out: Path,
    *,
    rank: DistributedRank = ALONE,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress = silent,
) -> Trace:
    """Collect the missing and the damaged shards of this process into the trace folder `out`.

    The process that writes the last shard validates the trace. The others return an incomplete one.

    Args:
        plan: from `plan_run`.
        out: folder of the trace.
        rank: this process among others.
        resume, overwrite: what to do with a folder that is not empty. Several processes always resume. A folder that is
            overwritten is replaced when the new trace is complete.
        progress: counts the texts of this process.

    Raises:
        InputError: the folder is not empty, or see `prepare_output_dir`.
        TraceError: the folder holds another run, or there is no row.
    """
    header, prompts = plan.header, prompts_json(plan.prompts) if plan.prompts else None
    resume = resume or rank.world > 1
    folder = open_for_writing(out, header, resume=resume, overwrite=overwrite, inputs=plan.inputs, prompts=prompts)
    shards = [index for index in range(header.shards) if rank.takes(index)]
    trace = Trace(folder, header)
    missing = set(shards) - trace.finished
    for index in sorted(set(shards) - missing):
        try:
            for _ in read_shard(shard_path(folder, index, header.shards), header):
                pass
        except TraceError as error:
            warnings.warn(
                f"{error.command_line.rpartition('; ')[0]}; it is collected again", SpecstopWarning, stacklevel=2
            )
            missing.add(index)
    task = "collect" if rank.world == 1 else f"collect {rank.rank}/{rank.world}"
    total = sum(len(plan.tasks[index]) for index in shards)
    done = total - sum(len(plan.tasks[index]) for index in missing)
    progress(task, done, total)
    for index in sorted(missing):
        chunks: list[Mapping[str, Any]] = []
        plan.begin()
        for start in range(0, len(plan.tasks[index]), plan.batch):
            batch = plan.tasks[index][start : start + plan.batch]
            chunks += plan.rows(batch)
            done += len(batch)
            progress(task, done, total)
        write_shard(folder, header, index, chunks)
    if not trace.complete:
        return trace
    if not trace.row_count:
        delete_result(folder)
        raise TraceError(
            "--prompts: there is no row, so nothing is kept: every text ends at once, or no text of --completions continues "
            "as the target would"
        )
    load_trace(folder)
    remove_stale_files(folder)
    if folder != out:
        replace_folder(folder, out)
    return Trace(out, header)


def short_hash(value: Any) -> str:
    """Return a short hash of a JSON value."""
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=8).hexdigest()
