"""Every benchmark once: does it run? A table of seconds and outcomes, and the end of the output of each that fell over.

    python benchmarks/run_all.py --quick

Scripts are the files of this folder that have a `main` of their own, except `make_pair.py`, which trains language models. A
script fails if its exit code is not 0 or if its last line is not one JSON object; the exit code is 1 then. With `--quick` as
many run at once as there are cores, on one thread each; without it they run one after the other. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

from bars import NO_PAIR, Bars, arguments

HERE = Path(__file__).parent
TOOLS = ("make_pair", "run_all")
TAIL = 30
"""Lines of the output of a script that fell over."""


@dataclass(frozen=True)
class Outcome:
    """How one script ended; `fault` is empty where it ran well."""

    seconds: float
    fault: str


def scripts(folder: Path = HERE) -> list[Path]:
    """Return the benchmarks of a folder: the files with a main, this one left out."""
    mains = [path for path in sorted(folder.glob("*.py")) if '\nif __name__ == "__main__":' in path.read_text()]
    return [path for path in mains if path.stem not in TOOLS]


def main() -> int:
    """Run the command line and return its exit code."""
    parser = arguments(__doc__, NO_PAIR, out="folder for what the scripts write; default: a temporary one")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="names of scripts, as decode; default: all")
    parser.add_argument("--stop-after", type=float, default=24.0, help="hours; a safety net, by default a day")
    options = parser.parse_args()
    chosen = scripts()
    unknown = set(options.only or ()) - {path.stem for path in chosen}
    if unknown:
        parser.error(f"no such script: {', '.join(sorted(unknown))}; there are {', '.join(p.stem for p in chosen)}")
    chosen = [path for path in chosen if not options.only or path.stem in options.only]
    with output_folder(options.out) as out:
        outcomes = run_all(chosen, options, out, time.monotonic() + 3600 * options.stop_after)
    bars = Bars()
    bars.missed += [f"{name}: {outcome.fault}" for name, outcome in outcomes.items() if outcome.fault]
    bars.figures["scripts"] = {name: asdict(outcome) for name, outcome in outcomes.items()}
    print(f"\n{'script':<20}{'seconds':>8}  outcome")
    for name, outcome in sorted(outcomes.items()):
        print(f"{name:<20}{outcome.seconds:>8.0f}  {outcome.fault or 'runs'}")
    code = int(bool(bars.missed))
    return bars.finish(options, f"{len(outcomes)} scripts", whole=not options.only) or code


@contextlib.contextmanager
def output_folder(out: Path | None) -> Iterator[Path]:
    """Yield the folder that the scripts write to."""
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        yield out
        return
    with tempfile.TemporaryDirectory(prefix="specstop-benchmarks-") as folder:
        yield Path(folder)


def run_all(chosen: list[Path], options: argparse.Namespace, out: Path, until: float) -> dict[str, Outcome]:
    """Run all scripts and return how they ended, by name."""
    passed = [f"--{name}" for name in ("quick", "check") if getattr(options, name)]
    cores = len(os.sched_getaffinity(0)) if options.quick else 1
    environment = {**os.environ, "OMP_NUM_THREADS": "1"} if options.quick else dict(os.environ)
    if options.quick:
        from specstop.train.demo.pair import shipped_pair

        shipped_pair()  # expanded once, before the scripts that share it
    outcomes: dict[str, Outcome] = {}
    with ThreadPoolExecutor(cores) as pool:
        futures = {pool.submit(run_one, path, passed, out, environment, until): path.stem for path in chosen}
        try:
            for future in as_completed(futures):
                name = futures[future]
                outcome = outcomes[name] = future.result()
                print(f"{len(outcomes)} of {len(chosen)}  {name}: {outcome.seconds:.0f} s", flush=True)
                if outcome.fault:
                    print(f"FAULT {name}: {outcome.fault}; the end of its output:")
                    print(*tail(out / f"{name}.err"), *tail(out / f"{name}.out"), sep="\n    ", flush=True)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return outcomes


def run_one(path: Path, passed: list[str], out: Path, environment: dict[str, str], until: float) -> Outcome:
    """Run one script, its output in files."""
    begin = time.monotonic()
    command = [sys.executable, str(path), *passed, "--out", str(out / path.stem)]
    with (out / f"{path.stem}.out").open("wb") as lines, (out / f"{path.stem}.err").open("wb") as errors:
        try:
            left = max(0.0, until - begin)
            code = subprocess.run(
                command, stdout=lines, stderr=errors, env=environment, cwd=HERE.parent, timeout=left
            ).returncode
            fault = f"exit code {code}" if code else wrong_end(out / f"{path.stem}.out")
        except subprocess.TimeoutExpired:
            fault = "stopped by --stop-after"
    return Outcome(round(time.monotonic() - begin, 1), fault)


def tail(path: Path) -> list[str]:
    """Return the last lines of a file."""
    return path.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL:]


def wrong_end(path: Path) -> str:
    """Return what is wrong with the last line of a script's output, if anything."""
    try:
        found = json.loads(tail(path)[-1])
    except (IndexError, ValueError):
        return "its last line is no JSON"
    return "" if isinstance(found, dict) else "its last line is no JSON object"


if __name__ == "__main__":
    sys.exit(main())
