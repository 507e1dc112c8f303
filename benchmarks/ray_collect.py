"""Kill the tasks of `specstop collect --ray` at random moments, and compare the rows with those of one undisturbed process.

    python benchmarks/ray_collect.py --check

Two tasks of a local Ray collect a small random pair's trace; SIGKILL falls on one of their processes at random moments until
there have been ten (`--kills`), over as many traces as it takes. Each trace must end by itself, whole, with the rows of an
undisturbed process and none twice. Where Ray is not installed a quick run says so, and a check fails. The last line is one
JSON object.
"""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bars import NO_PAIR, Bars, arguments
from kills import build_pair, same_rows
from specstop.collect import open_trace

SHARDS, TASKS, TITLE = 24, 2, "ray::collect_rank"
RUN = "from specstop.cli.main import run; run()"


def main() -> int:
    """Run the command line and return its exit code."""
    parser = arguments(__doc__, NO_PAIR)
    parser.add_argument("--kills", type=int, default=10, help="SIGKILLs in all (default: 10)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    options = parser.parse_args()
    bars, wanted = Bars(), 1 if options.quick else options.kills
    if importlib.util.find_spec("ray") is None:
        bars.missed.append("Ray is not installed; python -m pip install '.[ray]'")
        return bars.finish(options, "nothing", whole=False)
    chance, kills, traces, wrong = random.Random(options.seed), 0, 0, []
    with tempfile.TemporaryDirectory(prefix="specstop-ray-") as name:
        folder = Path(name)
        build_pair(folder)
        begun = time.monotonic()
        subprocess.run(command(folder, folder / "undisturbed"), check=True, capture_output=True, env=environment())
        alone_s, expected = time.monotonic() - begun, open_trace(folder / "undisturbed")
        while kills < wanted:
            out = folder / f"ray-{traces}"
            kills += disturb(folder, out, wanted - kills, chance, alone_s)
            traces += 1
            trace = open_trace(out)
            keys = trace.table(["sequence", "anchor"]).to_pydict().values()
            twice = trace.row_count - len(set(zip(*keys, strict=True)))
            if twice or not trace.complete or not same_rows(trace, expected):
                wrong.append(f"{out.name}: {trace.row_count} rows of {expected.row_count}, {twice} twice")
            print(f"{out.name}: {kills} kills so far, {trace.row_count} rows", flush=True)
    bars.add("traces after kills", wrong, not wrong, f"{traces} traces, {kills} kills; wrong: {wrong or 'none'}")
    return bars.finish(options, f"{kills} kills, {traces} traces", whole=kills >= 10)


def command(folder: Path, out: Path) -> list[str]:
    """Return the command that collects, in one process."""
    models = ["--target", folder / "target", "--draft", folder / "draft", "--prompts", folder / "prompts.jsonl"]
    sizes = ["--depth", 4, "--temperature", 0.7, "--max-new-tokens", 24, "--shards", SHARDS]
    return [sys.executable, "-c", RUN, "collect", *map(str, [*models, *sizes, "--quiet", "--out", out])]


def environment() -> dict[str, str]:
    """Return what processes are run with: one thread, as Ray gives a task, since the last bits of a row depend on that."""
    return os.environ | {"OMP_NUM_THREADS": "1"}


def disturb(folder: Path, out: Path, most: int, chance: random.Random, alone_s: float) -> int:
    """Collect by tasks, killing some; return how many."""
    call = [*command(folder, out), "--ray", "local", "--ray-tasks", str(TASKS)]
    process = subprocess.Popen(call, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment())
    kills = 0
    while process.poll() is None:
        time.sleep(0.05 if kills == most else chance.random() * alone_s / 2)
        running = tasks_of(process.pid) if kills < most else []
        if running:
            os.kill(chance.choice(running), signal.SIGKILL)
            kills += 1
    _, err = process.communicate()
    if process.returncode:
        raise RuntimeError(f"collect --ray ended with {process.returncode}: {err}")
    return kills


def tasks_of(driver: int) -> list[int]:
    """Return the processes that run a task now, of those that `driver` has started, directly or not."""
    parents, titled = {}, []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            title = (entry / "cmdline").read_bytes().decode(errors="replace")
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        if title.startswith(TITLE):
            titled.append(int(entry.name))
    return [pid for pid in titled if driver in ancestors(pid, parents)]


def ancestors(process: int, parents: dict[int, int]) -> set[int]:
    """Return the processes above one."""
    found: set[int] = set()
    while process in parents and parents[process] not in found:
        process = parents[process]
        found.add(process)
    return found


if __name__ == "__main__":
    sys.exit(main())
