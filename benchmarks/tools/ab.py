"""Figures of two states of the project, measured in alternation, as ratios with intervals.

    python benchmarks/tools/ab.py main . speed.py --rounds 10 --key '*warm*' -- --part decisions
    python benchmarks/tools/ab.py v0.1.0 HEAD speed.py --bar '*outside*<=0.5' -- --part loop

BEFORE and AFTER are folders of checkouts or git revisions, which are copied once. In each round a script runs once with
AFTER and twice with BEFORE, in separate processes and in an order that changes from round to round. The first run of
each state is a warm-up. For each number of the last lines (`--key` selects) the table has

- AFTER over BEFORE, a geometric mean over rounds with its 95% interval (Student's t on the logarithms of the ratios);
  BEFORE is the geometric mean of its two runs;
- BEFORE over BEFORE, from its two runs. If that interval excludes 1 or ends further than `--resolution` from 1, the
  machine is too noisy for this number, and no bar on it is met.

A bar is met if the whole interval meets it; with bars the exit code is 1 if one is missed. Each state runs its copy
of the script, or that of AFTER if BEFORE has none. Without arguments this checkout is compared with itself, as a test
of the machine.
"""

from __future__ import annotations

import argparse
import fnmatch
import io
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mutants import link_packages
from scipy import stats
from specstop.decode.benchmark import Ratio

ROOT = Path(__file__).resolve().parents[2]
BAR = re.compile(r"(?P<key>.+?)\s*(?P<sign><=|>=)\s*(?P<limit>[-+.\deE]+)$")
ORDERS = ((0, 1, 2), (2, 1, 0), (1, 2, 0), (0, 2, 1), (2, 0, 1), (1, 0, 2))
"""Order of BEFORE, AFTER and BEFORE by round: each order is followed by its reverse, and each state comes first as often."""

Figures = dict[str, float]


@dataclass(frozen=True)
class Checkout:
    """A copy of a state of the project, and the folder from which its packages are imported."""

    name: str
    folder: Path
    site: Path

    def run(self, script: Path, options: Sequence[str]) -> dict[str, Any]:
        """Run a script in a process and return the object of its last line."""
        command, environment = [sys.executable, str(script), *options], {**os.environ, "PYTHONPATH": str(self.site)}
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True)
        lines = done.stdout.splitlines()
        if done.returncode:
            last = "\n    ".join([*done.stderr.splitlines()[-20:], *lines[-20:]])
            raise SystemExit(f"{script.name} of {self.name} ended with exit code {done.returncode}:\n    {last}")
        try:
            return dict(json.loads(lines[-1]))
        except (IndexError, TypeError, ValueError) as error:
            raise SystemExit(f"expected a JSON object in the last line of {script.name} of {self.name}") from error


def prepare(name: str, folder: Path) -> Checkout:
    """Return a copy of a state, the folder of a checkout or a git revision, in an empty folder."""
    copy = folder / "checkout"
    if (Path(name) / "pyproject.toml").is_file():
        shutil.copytree(name, copy, ignore=shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "venv"))
    else:
        packed = subprocess.run(["git", "-C", str(ROOT), "archive", name], capture_output=True)
        if packed.returncode:
            raise SystemExit(f"expected the folder of a checkout or a git revision, got {name}")
        with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
            archive.extractall(copy, filter="data")
    link_packages(copy, folder / "site")
    return Checkout(name, copy, folder / "site")


def numbers(value: Any, key: str = "") -> Iterator[tuple[str, float]]:
    """Yield the finite numbers of a JSON value by dotted key, without booleans."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if math.isfinite(value):
            yield key, float(value)
        return
    for name, child in value.items() if isinstance(value, Mapping) else ():
        yield from numbers(child, f"{key}.{name}" if key else str(name))


def geometric_ratio(after: Sequence[float], before: Sequence[float]) -> Ratio | None:
    """Return the ratio of paired values; None with fewer than two pairs or with a value that is not positive.

    Values that are equal in all rounds have the ratio 1.
    """
    if len(after) < 2:
        return None
    if list(after) == list(before):
        return Ratio(1.0, 1.0, 1.0)
    if min(*after, *before) <= 0:
        return None
    logs = [math.log(a / b) for a, b in zip(after, before, strict=True)]
    mean, error = statistics.fmean(logs), statistics.stdev(logs) / len(logs) ** 0.5
    half = float(stats.t.ppf(0.975, len(logs) - 1)) * error
    return Ratio(math.exp(mean), math.exp(min(mean - half, 700.0)), math.exp(min(mean + half, 700.0)))


@dataclass(frozen=True)
class Row:
    """One number: its ratio, that of BEFORE over BEFORE, and its values by round."""

    key: str
    ratio: Ratio
    repeated: Ratio
    before: list[float]
    after: list[float]

    def is_reliable(self, resolution: float) -> bool:
        """Return whether BEFORE over BEFORE is 1, within `resolution`."""
        return max(self.repeated.low, 1 - resolution) <= 1 <= self.repeated.high <= 1 + resolution


def alternate(run: Callable[[int], Figures], rounds: int) -> list[list[Figures]]:
    """Return the figures of each round by state; `run` measures state 0 (BEFORE), 1 (AFTER) or 2 (BEFORE again)."""
    results = []
    for number in range(rounds):
        figures = {state: run(state) for state in ORDERS[number % len(ORDERS)]}
        results.append([figures[state] for state in range(3)])
        print(f"round {number + 1} of {rounds}", flush=True)
    return results


def compare(script: str, rounds: Sequence[Sequence[Figures]], patterns: Sequence[str] | None) -> list[Row]:
    """Return a row for each number of all runs that has a ratio and matches a pattern."""
    rows = []
    for name in rounds[0][0]:
        key = f"{script}.{name}"
        if not all(name in figures for states in rounds for figures in states):
            continue
        if patterns and not any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns):
            continue
        first, after, second = ([states[at][name] for states in rounds] for at in range(3))
        before = [(a * b) ** 0.5 if min(a, b) > 0 else (a + b) / 2 for a, b in zip(first, second, strict=True)]
        value, repeated = geometric_ratio(after, before), geometric_ratio(second, first)
        if value is not None and repeated is not None:
            rows.append(Row(key, value, repeated, before, after))
    return rows


def judge(rows: Sequence[Row], bars: Sequence[str], resolution: float) -> dict[str, bool]:
    """Return whether each bar, such as `KEY<=1.02`, is met by each number with that key."""
    met = {}
    for text in bars:
        bar = BAR.match(text)
        if bar is None:
            raise SystemExit(f"--bar: expected KEY<=NUMBER or KEY>=NUMBER, got {text}")
        limit = float(bar["limit"])
        named = [row for row in rows if fnmatch.fnmatchcase(row.key, bar["key"])]
        for row in named:
            holds = row.ratio.high <= limit if bar["sign"] == "<=" else row.ratio.low >= limit
            met[f"{row.key} {bar['sign']} {limit:g}"] = holds and row.is_reliable(resolution)
        if not named:
            met[f"{text}: no number has this key"] = False
    return met


def parse(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options, and what follows `--`, which the scripts receive."""
    cut = list(words).index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", nargs="?", default=str(ROOT), metavar="BEFORE", help="folder or git revision")
    parser.add_argument("after", nargs="?", default=str(ROOT), metavar="AFTER", help="folder or git revision")
    parser.add_argument("scripts", nargs="*", metavar="SCRIPT", help="scripts of benchmarks/ (default: speed.py)")
    parser.add_argument("--key", action="append", metavar="PATTERN", help="only these numbers; repeatable")
    parser.add_argument("--bar", action="append", default=[], metavar="KEY<=X", help="bar on a ratio; repeatable")
    parser.add_argument("--rounds", type=int, default=6, help="default: 6")
    parser.add_argument("--resolution", type=float, default=0.05, help="largest error of BEFORE over BEFORE (0.05)")
    options = parser.parse_args(list(words[:cut]))
    if options.rounds < 2:
        parser.error("--rounds: expected at least 2")
    return options, list(words[cut + 1 :])


def measure(script: str, before: Checkout, after: Checkout, arguments: Sequence[str]) -> Callable[[int], Figures]:
    """Return what runs a script with a state, after a warm-up of both."""
    states = (before, after, before)
    name = f"benchmarks/{Path(script).stem}.py"
    paths = [next((s.folder / name for s in (state, after) if (s.folder / name).is_file()), None) for state in states]

    def run(state: int) -> Figures:
        path = paths[state]
        if path is None:
            raise SystemExit(f"expected a script of benchmarks/, got {script}")
        started = time.perf_counter()
        figures = dict(numbers(states[state].run(path, arguments)))
        return {**figures, "process_s": time.perf_counter() - started}

    for state in (0, 1)[: 1 + (before != after)]:
        run(state)
    return run


def main() -> int:
    """Run the command line and return its exit code."""
    options, arguments = parse(sys.argv[1:])
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="specstop-ab-") as folder:
        before = prepare(options.before, Path(folder) / "before")
        after = before if options.before == options.after else prepare(options.after, Path(folder) / "after")
        for script in options.scripts or ["speed.py"]:
            run = measure(script, before, after, arguments)
            rows += compare(Path(script).stem, alternate(run, options.rounds), options.key)
    met = judge(rows, options.bar, options.resolution)
    print(f"{'after / before':<24}{'before / before':<24}{'before':>10}{'after':>10}  number (medians)")
    for row in rows:
        note = "" if row.is_reliable(options.resolution) else "   TOO NOISY"
        medians = "".join(f"{statistics.median(values):>10.4g}" for values in (row.before, row.after))
        print(f"{row.ratio.text():<24}{row.repeated.text():<24}{medians}  {row.key}{note}")
    for text, holds in met.items():
        print(f"{'met' if holds else 'MISSED':<8}{text}")
    line = {"before": options.before, "after": options.after, "rows": [asdict(row) for row in rows], "bars": met}
    print(json.dumps(line))
    return int(not all(met.values()) or not rows)


if __name__ == "__main__":
    sys.exit(main())
