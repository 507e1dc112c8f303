"""`specstop collect --ray`: the processes of a collection as tasks of Ray, which finds each a place, and starts it again.

A task is what a process of torchrun is: `RANK` of `WORLD_SIZE`, which collects the shards dealt to it and those of them that
an earlier attempt has left. So the rows are those of one process, and a task may be repeated as often as it takes.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from ..collect.schema import Header
from ..collect.store.folder import Trace, finished, read_header
from ..policies.display import Progress
from ..policies.errors import InputError, SpecstopError, TraceError
from ..policies.files import prepare_output_dir
from .console.interrupt import Interrupted, finish_first
from .console.output import progress_bars
from .options.config import running_options

LOCAL = "local"
RETRIES = 100
"""Times that a task is started again after its process has died: machines that are taken back die often."""

POLL_S = 1.0


def collect_rank(options: dict[str, Any], folder: str, rank: int, world: int) -> None:
    """Run `specstop collect` as one process of several; what it refuses is raised.

    Args:
        options: of the command, as in `run.yaml`.
        folder: where its paths begin.
        rank, world: this process among the others.
    """
    from .app import app

    os.chdir(folder)
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": "0"})  # Ray shows a task its own GPUs
    with tempfile.TemporaryDirectory(prefix="specstop-ray-") as room:
        config = Path(room) / "collect.yaml"
        config.write_text(yaml.safe_dump(options))
        app(["collect", "--config", str(config), "--quiet"], standalone_mode=False)


def collect_by_tasks(
    options: dict[str, Any],
    out: Path,
    address: str,
    tasks: int | None,
    *,
    stop: Callable[[], bool],
    progress: Progress,
) -> Trace | None:
    """Collect by tasks of Ray into `out`, which all machines must see; None where it was asked to stop.

    Args:
        options: of the command, without its own for Ray.
        out: folder of the trace.
        address: `local`, or that of a cluster (`auto`, `HOST:PORT`, `ray://HOST:PORT`).
        tasks: how many; by default one for each GPU of the cluster under `--device cuda`, else for each core.
        stop: asked now and then.
        progress: counts the shards.

    Raises:
        InputError: Ray is not installed, or there is no cluster.
        SpecstopError: what a task has refused.
    """
    ray = _ray(address)
    gpu = str(options.get("device", "cpu")).startswith("cuda")
    count = tasks or max(int(ray.cluster_resources().get("GPU" if gpu else "CPU", 1)), 1)
    if count == 1 and not options.get("overwrite"):
        options = {**options, "resume": True}  # several processes go on with what is there, one only if it is told to
    run = ray.remote(num_gpus=int(gpu), num_cpus=1, max_retries=RETRIES)(collect_rank)
    try:
        waiting, known = [run.remote(options, os.getcwd(), rank, count) for rank in range(count)], -1
        while waiting:
            done, waiting = ray.wait(waiting, timeout=POLL_S)
            for task in done:
                _result(ray, task)
            known = _tell(out, known, progress)
            if waiting and stop():
                return None
    finally:
        ray.shutdown()  # ends the tasks that still run, too
    return Trace(out, read_header(out))


def _ray(address: str) -> Any:
    """Return the library, with a cluster to work on."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError:
        raise InputError("--ray: Ray is not installed; python -m pip install 'specstop[ray]'") from None
    options = {"logging_level": "ERROR", "log_to_driver": False}
    where = {"include_dashboard": False} if address == LOCAL else {"address": address}
    try:
        ray.init(**where, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise InputError(f"--ray: no cluster at {address!r}: {str(error).splitlines()[0]}") from None
    return ray


def _result(ray: Any, task: Any) -> None:
    """Raise what a task has raised, as this process would."""
    try:
        ray.get(task)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, SpecstopError):
            raise error.cause from None
        raise
    except ray.exceptions.WorkerCrashedError:
        raise TraceError(f"--ray: a task's process died {RETRIES + 1} times; look at Ray's log of it") from None


def _tell(out: Path, known: int, progress: Progress) -> int:
    """Say how many shards are there where it is not `known`, and return it; before a task has begun nobody knows of any."""
    try:
        header: Header = read_header(out)
    except SpecstopError:
        return known
    done = len(finished(out, header))
    if done != known:
        progress("collect by tasks", done, header.shards)
    return done


def by_tasks(out: Path, address: str, tasks: int | None, resume: bool, quiet: bool) -> Trace:
    """Collect by tasks of Ray; on a signal end them, and say how to go on."""
    prepare_output_dir(out, resume=resume)
    own = ("ray", "ray_tasks", "resume")
    options = {name: value for name, value in running_options().items() if name not in own}
    with progress_bars(quiet) as progress, finish_first("what can be kept") as stop:
        trace = collect_by_tasks(options, out, address, tasks, stop=stop, progress=progress)
        if trace is None:
            raise Interrupted(int(stop.number or 0), "interrupted; the same command with --resume goes on")
    return trace
