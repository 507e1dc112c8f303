"""`specstop profile` on this machine: beside two busy loops it warns, without them it does not and is done within 20 s."""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from bars import Bars
from pairs import pair_folder

RUNS, LOOPS, MOST_S, PACE_S = 3, 2, 20.0, 30.0
QUICK_BUDGET_S = 5.0


LOOP = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"
"""Ends with whoever started it, however that ends."""


@contextlib.contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Keep so many cores busy meanwhile."""
    loops = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def machine_pace(seconds: float) -> float:
    """Return the median time of a product of matrices in the slowest second over that in the fastest: 1 = a quiet machine.

    It knows nothing of profiles, and so tells the machine's noise from ours. 60 MB of weights stay in no cache.
    """
    weights, row = [torch.ones(1024, 1024) for _ in range(15)], torch.ones(4, 1024)
    ended, by_second = time.monotonic() + seconds, defaultdict(list)
    while (began := time.monotonic()) < ended:
        for weight in weights:
            row @ weight
        by_second[int(began)].append(time.monotonic() - began)
    medians = [statistics.median(times) for times in by_second.values()][1:-1]  # whole seconds, after the first
    return max(medians) / min(medians)


def profiled(pair: Path, out: Path, budget_s: float | None) -> tuple[dict[str, Any], float]:
    """Return what `specstop profile` says of a pair (`specstop info`), and the seconds of the whole command."""
    command = "from specstop.cli.main import run; run()"
    call = [
        "profile",
        "--target",
        pair / "target",
        "--draft",
        pair / "draft",
        "--prompts",
        pair / "prompts-train.jsonl",
    ]
    call += ["--out", out, "--overwrite", *(["--budget", budget_s] if budget_s else [])]
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", command, *map(str, call)], capture_output=True)
    seconds = time.monotonic() - began
    if done.returncode:
        raise SystemExit(f"specstop profile ended with {done.returncode}: {done.stderr.decode()[-500:]}")
    told = subprocess.run([sys.executable, "-c", command, "info", str(out), "--json"], capture_output=True, check=True)
    said: dict[str, Any] = json.loads(told.stdout)
    return said, seconds


def check(bars: Bars, options: argparse.Namespace, folder: Path) -> str:
    """Add the bars of real runs, quiet and beside busy loops in turns, and return what was compared."""
    pair, runs = pair_folder(options), 1 if options.quick else RUNS
    budget_s = QUICK_BUDGET_S if options.quick else None
    found: dict[str, list[bool]] = {"quiet": [], "busy": []}
    spent = []
    pace = machine_pace(4.0 if options.quick else PACE_S)
    quiet = f"a plain product takes {pace:.2f} times as long in the slowest second as in the fastest"
    print(f"this machine without a profile: {quiet}", flush=True)
    bars.figures["machine's own pace"] = pace
    for number in range(runs):
        for name, loops in (("quiet", 0), ("busy", LOOPS)):
            with busy_loops(loops):
                said, seconds = profiled(pair, folder / f"{name}-{number}.json", budget_s)
            found[name].append("was quiet" not in said["verdict"])
            print(f"{name} run {number + 1}: {seconds:.1f} s; {said['verdict']}", flush=True)
            if not loops:
                spent.append(seconds)
    for name, wanted in (("quiet", False), ("busy", True)):
        right = sum(warned == wanted for warned in found[name])
        why = "" if wanted or right == runs else f"; {quiet}"
        bars.add(f"{name} runs", right, right == runs, f"{right} of {runs} {'' if wanted else 'not '}warned of{why}")
    bars.add("seconds of a quiet profile", max(spent), max(spent) <= MOST_S, f"{max(spent):.1f} (at most {MOST_S:.0f})")
    return f"{runs} profiles of {pair.name} beside {LOOPS} busy loops and {runs} without"
