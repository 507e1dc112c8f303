"""Damaged input of every kind: each case is refused in one line, or changes nothing that it should not change.

    python benchmarks/fuzz.py --check

Each family (a module of `attacks`) makes its cases from a seed, runs them and returns how often what happened and the
faults found; the bar is no fault in any. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

FAMILIES = ("policy_folders", "profiles")


def main() -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", action="append", choices=FAMILIES, help="only this one; repeatable")
    parser.add_argument("--count", type=int, help="cases of each family, in the place of its own number")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pair", type=Path, help="not needed here")
    parser.add_argument("--out", type=Path, help="file for the figures as JSON")
    parser.add_argument("--quick", action="store_true", help="few cases of each: shows that it runs, checks nothing")
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 on any fault, or below a family's full number"
    )
    options = parser.parse_args()
    results: dict[str, Any] = {}
    checked, faults = not options.quick, 0
    for name in options.family or FAMILIES:
        family = importlib.import_module(f"attacks.{name}")
        count = options.count or (family.QUICK if options.quick else family.COUNT)
        checked = checked and count >= family.COUNT
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as room:
            seen, found = family.attack(count, options.seed, Path(room))
        for outcome, times in sorted(seen.items()):
            print(f"{name:<16}{outcome:<40}{times:>6}")
        for fault in found:
            print("FAULT", name, fault)
        faults += len(found)
        seconds = round(time.monotonic() - began, 1)
        results[name] = {"cases": count, "faults": len(found), "seconds": seconds, "seen": dict(sorted(seen.items()))}
    line = json.dumps({"checked": checked, "faults": faults, "families": results})
    if options.out:
        options.out.write_text(line + "\n")
    cases = sum(result["cases"] for result in results.values())
    print(f"compared: {cases} cases of {len(results)} families, {faults} faults (bar: 0)")
    print(line)
    return int(options.check and (faults > 0 or not checked))


if __name__ == "__main__":
    sys.exit(main())
