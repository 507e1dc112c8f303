"""Record what the present code does, or compare it with what was recorded.

    python tests/oracle/record.py OUT_DIR
    python tests/oracle/record.py OUT_DIR --check BASELINE_DIR
    python tests/oracle/record.py OUT_DIR --only decisions --only costs

Each section writes `SECTION.json`, and `SECTION.npz` with its arrays. Models, policy folders, drafters and profiles are
written to `OUT_DIR/inputs`; a check runs on those of the baseline. Differences are listed, and the exit code is 1 if there is
one. Counts, tokens, masks and texts must be equal; floating point numbers within the tolerance of their section.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("SPECSTOP_PLUGINS", "0")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if str(Path(__file__).parent) not in sys.path:
    sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from oracle_decisions import decisions
from oracle_inputs import Inputs, build_inputs
from oracle_models import models
from oracle_offline import costs, export, hf, replay
from oracle_texts import more_texts, seen, texts, trees
from transformers.utils import logging


class Section(NamedTuple):
    """A section: what yields its cases, and how far numbers may differ (relative, absolute)."""

    cases: Callable[..., Iterator[tuple[str, Any]]]
    relative: float = 0.0
    absolute: float = 0.0


SECTIONS = {
    "trees": Section(trees),
    "decisions": Section(decisions, 1e-9, 1e-12),
    "texts": Section(texts),
    "more_texts": Section(more_texts),
    "models": Section(models),
    "seen": Section(seen, 1e-5, 5e-6),
    "replay": Section(replay, 1e-5, 5e-6),
    "costs": Section(costs, 1e-9, 1e-15),
    "export": Section(export, 1e-9, 1e-15),
    "hf": Section(hf),
}

MOST_SHOWN = 20
"""Differences of a section that are listed in full."""


def plain(value: Any) -> Any:
    """Return a value as JSON has it."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    if isinstance(value, (np.bool_, np.integer, np.floating)):
        return value.item()
    return value


def split(value: Any) -> tuple[Any, dict[str, np.ndarray]]:
    """Return the JSON part of a case, and its arrays by name."""
    if isinstance(value, np.ndarray):
        return None, {"": value}
    if isinstance(value, dict):
        arrays = {name: inner for name, inner in value.items() if isinstance(inner, np.ndarray)}
        return plain({name: inner for name, inner in value.items() if name not in arrays}), arrays
    return plain(value), {}


def record_section(name: str, inputs: Inputs, out: Path, small: bool = False) -> int:
    """Run a section and write its files; return the number of its cases."""
    told: dict[str, Any] = {}
    arrays: dict[str, np.ndarray] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case, value in SECTIONS[name].cases(inputs, small):
            if case in told:
                raise ValueError(f"{name}: two cases are called {case!r}")
            told[case], own = split(value)
            arrays |= {f"{case}|{key}": array for key, array in own.items()}
    lines = [f"{json.dumps(case)}: {json.dumps(value)}" for case, value in told.items()]
    (out / f"{name}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    with (out / f"{name}.npz").open("wb") as file:
        np.savez(file, **arrays)
    return len(told)


def differences(one: Any, other: Any, section: Section, where: str = "") -> Iterator[str]:
    """Yield where two JSON values differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in [*one, *(key for key in other if key not in one)]:
            if key not in one or key not in other:
                yield f"{where}/{key}: only in the {'new' if key in other else 'baseline'}"
            else:
                yield from differences(one[key], other[key], section, f"{where}/{key}")
    elif isinstance(one, list) and isinstance(other, list):
        if len(one) != len(other):
            yield f"{where}: {len(one)} entries in the baseline, {len(other)} now"
        for at, (mine, theirs) in enumerate(zip(one, other, strict=False)):
            yield from differences(mine, theirs, section, f"{where}[{at}]")
    elif isinstance(one, float) or (isinstance(other, float) and isinstance(one, int)):
        numbers = isinstance(other, (int, float)) and not isinstance(other, bool)
        if not numbers or not _close(one, float(other), section):
            yield f"{where}: {one!r} in the baseline, {other!r} now"
    elif one != other or type(one) is not type(other):
        yield f"{where}: {str(one)[:160]!r} in the baseline, {str(other)[:160]!r} now"


def _close(one: float, other: float, section: Section) -> bool:
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and math.isnan(other)
    return one == other or math.isclose(one, other, rel_tol=section.relative, abs_tol=section.absolute)


def array_differences(one: np.ndarray, other: np.ndarray, section: Section, where: str) -> Iterator[str]:
    """Yield where two arrays differ, a line for both."""
    if one.shape != other.shape or one.dtype != other.dtype:
        yield f"{where}: {one.dtype}{list(one.shape)} in the baseline, {other.dtype}{list(other.shape)} now"
        return
    if one.dtype.kind == "f":
        same = np.isclose(other, one, rtol=section.relative, atol=section.absolute, equal_nan=True)
    else:
        same = one == other
    if not same.all():
        at = tuple(int(i) for i in np.argwhere(~same)[0])
        share = f"{int((~same).sum())} of {same.size} numbers"
        yield f"{where}: {share}, first at {at}: {one[at]} in the baseline, {other[at]} now"


def compare_section(name: str, baseline: Path, out: Path) -> list[str]:
    """Return the differences of a section that was recorded twice."""
    section, found = SECTIONS[name], []
    one, other = (json.loads((folder / f"{name}.json").read_text(encoding="utf-8")) for folder in (baseline, out))
    found += differences(one, other, section, name)
    with np.load(baseline / f"{name}.npz") as mine, np.load(out / f"{name}.npz") as theirs:
        for key in sorted({*mine.files, *theirs.files}):
            if key not in mine.files or key not in theirs.files:
                found.append(f"{name}/{key}: only in the {'new' if key in theirs.files else 'baseline'}")
            else:
                found += array_differences(mine[key], theirs[key], section, f"{name}/{key}")
    return found


def prepare(out: Path, baseline: Path | None, small: bool) -> Inputs:
    """Return the inputs: those of the baseline, or new ones."""
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    folder = out / "inputs"
    if baseline is not None and (baseline / "inputs").is_dir():
        if baseline.resolve() != out.resolve():
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(baseline / "inputs", folder)
    else:
        shutil.rmtree(folder, ignore_errors=True)
        build_inputs(folder, small)
    return Inputs(folder)


def record(out: Path, baseline: Path | None = None, only: Sequence[str] = (), small: bool = False) -> list[str]:
    """Record sections into a folder; return the differences from a baseline, if there is one."""
    out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("SPECSTOP_CACHE", tempfile.mkdtemp(prefix="oracle-cache-"))
    begin = time.perf_counter()
    inputs = prepare(out, baseline, small)
    say(f"inputs: {time.perf_counter() - begin:.1f} s")
    found: list[str] = []
    if baseline is not None and not only:
        only = [name for name in SECTIONS if (baseline / f"{name}.json").exists()]
    for name in only or SECTIONS:
        begin = time.perf_counter()
        try:
            count = record_section(name, inputs, out, small)
        except Exception:
            if baseline is None:
                raise
            say(traceback.format_exc())
            found.append(f"{name}: it cannot be recorded any more")
            say(found[-1])
            continue
        line = f"{name}: {count} cases, {time.perf_counter() - begin:.1f} s"
        if baseline is not None:
            own = compare_section(name, baseline, out)
            found += own
            line += f", {len(own)} differences"
            for text in own[:MOST_SHOWN]:
                say(f"  {text}")
            if len(own) > MOST_SHOWN:
                say(f"  and {len(own) - MOST_SHOWN} more")
        say(line)
    return found


def say(text: str) -> None:
    """Write a line."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Record what the present code does, or compare it with a baseline.")
    parser.add_argument("out", type=Path, help="folder for the recorded sections")
    parser.add_argument("--check", type=Path, metavar="BASELINE_DIR", help="compare with the sections recorded there")
    parser.add_argument(
        "--only", action="append", default=[], choices=list(SECTIONS), help="a section; may be repeated"
    )
    parser.add_argument("--small", action="store_true", help="a few cases of each section")
    told = parser.parse_args()
    if told.check is not None and not told.check.is_dir():
        parser.error(f"--check: there is no folder {told.check}")
    begin = time.perf_counter()
    found = record(told.out, told.check, told.only, told.small)
    say(f"{time.perf_counter() - begin:.0f} s" + ("" if told.check is None else f", {len(found)} differences"))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
