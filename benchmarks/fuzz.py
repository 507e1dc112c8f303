"""Damaged input of every kind: each case is refused in one line, or changes nothing that it should not change.

    python benchmarks/fuzz.py --check

Each family (a module of `attacks`) makes its cases from a seed, runs them and returns how often what happened and the
faults found; the bar is no fault in any. The last line is one JSON object.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bars import NO_PAIR, Bars, arguments

FAMILIES = ("policy_folders", "drafter_folders", "profiles", "commands", "configs", "plugins", "signals")


def main() -> int:
    """Run the command line and return its exit code."""
    parser = arguments(__doc__, NO_PAIR)
    parser.add_argument("--family", action="append", choices=FAMILIES, help="only this one; repeatable")
    parser.add_argument("--count", type=int, help="cases of each family, in the place of its own number")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    bars, whole = Bars(), True
    results: dict[str, Any] = {}
    for name in options.family or FAMILIES:
        family = importlib.import_module(f"attacks.{name}")
        count = options.count or (family.QUICK if options.quick else family.COUNT)
        whole = whole and count >= family.COUNT
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as room:
            seen, found = family.attack(count, options.seed, Path(room))
        for outcome, times in sorted(seen.items()):
            print(f"{name:<16}{outcome:<40}{times:>6}")
        for fault in found:
            print("FAULT", name, fault)
        bars.missed += [f"{name}: {fault}" for fault in found]
        seconds = round(time.monotonic() - began, 1)
        results[name] = {"cases": count, "faults": len(found), "seconds": seconds, "seen": dict(sorted(seen.items()))}
    cases, faults = (sum(result[key] for result in results.values()) for key in ("cases", "faults"))
    bars.figures |= {"faults": faults, "families": results}
    return bars.finish(options, f"{cases} cases of {len(results)} families, {faults} faults (bar: 0)", whole)


if __name__ == "__main__":
    sys.exit(main())
