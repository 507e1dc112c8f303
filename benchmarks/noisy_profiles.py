"""A noisy machine must not decide: it is noticed, warned of, and its noise goes into every interval and verdict.

    python benchmarks/noisy_profiles.py --check

The parts are modules of `noise`, each with bars of its own:

- `clocks`: 20 kinds of disturbance on a simulated clock are all warned of, 20 kinds of quiet machine never;
- `real_runs`: `specstop profile` beside two busy loops is warned of; without them it is not, and takes at most 20 s. This
  part is for a machine that nobody else uses: it says first how much its pace changes by itself; `--part` leaves it out;
- `deployed`: 100 evaluations with profiles of noisy runs give no "deploy" that a quiet profile does not;
- `covering`: intervals that draw a noisy profile's timings with the prompts cover the truth 92 to 98% of the time, in the
  worlds of `intervals.py`;
- `compared`: two profiles of one machine, each timed by itself, make no difference: intervals of `compare` contain 1 in 92 to
  98.5% of worlds;
- `same_bytes`: `evaluate` twice writes the same bytes, for policies that the profile knows and for others.

The last line is one JSON object.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from pathlib import Path

from bars import Bars, arguments

PARTS = ("clocks", "real_runs", "deployed", "covering", "compared", "same_bytes")


def main() -> int:
    """Run the command line and return its exit code."""
    parser = arguments(__doc__)
    parser.add_argument("--part", action="append", choices=PARTS, help="only this one; repeatable")
    options = parser.parse_args()
    chosen = options.part or PARTS
    bars, compared = Bars(), []
    with tempfile.TemporaryDirectory(prefix="specstop-noise-") as folder:
        for name in chosen:
            compared.append(importlib.import_module(f"noise.{name}").check(bars, options, Path(folder)))
    return bars.finish(options, "; ".join(compared), whole=set(chosen) == set(PARTS))


if __name__ == "__main__":
    sys.exit(main())
