"""Run the benchmark scripts one after the other and print which bars are met.

    python benchmarks/tools/bars.py --smoke
    python benchmarks/tools/bars.py --scripts speed replay --out bars.json

Each script runs in a process with `--check`. A row has the script, its exit code, its seconds, and the numbers of
bars that are met, missed and not decided. The exit code is 1 if a script fails. Without `--smoke` all twelve take
many hours.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parents[1]
SCRIPTS = (
    "exactness", "architectures", "replay", "speed", "gpu", "batch", "policies", "trees", "drafters", "intervals", "collect",
    "vllm",
)  # fmt: skip


def run_script(name: str, smoke: bool) -> dict[str, Any]:
    """Run a script and return its exit code, its seconds and its JSON line (empty if it was skipped or failed)."""
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--check", *(["--smoke"] if smoke else [])]
    started = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    last = (done.stdout.splitlines() or [""])[-1]
    line = json.loads(last) if last.startswith("{") else {"skipped": last}
    return {"code": done.returncode, "seconds": round(time.perf_counter() - started, 1), **line}


def main() -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scripts", nargs="+", choices=SCRIPTS, default=SCRIPTS, help="default: all")
    parser.add_argument("--smoke", action="store_true", help="small sizes")
    parser.add_argument("--out", type=Path, help="JSON file for all results")
    options = parser.parse_args()
    print(f"{'script':<16}{'exit code':>10}{'seconds':>9}{'met':>6}{'missed':>8}{'not decided':>13}")
    results = {}
    for name in options.scripts:
        results[name] = result = run_script(name, options.smoke)
        decisions = [bar["met"] for bar in result.get("bars", {}).values()]
        counts = [sum(met is value for met in decisions) for value in (True, False, None)]
        note = "  ".join([result.get("skipped", ""), *result.get("missed", [])])
        print(
            f"{name:<16}{result['code']:>10}{result['seconds']:>9}{counts[0]:>6}{counts[1]:>8}{counts[2]:>13}  {note}",
            flush=True,
        )
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return int(any(result["code"] for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
