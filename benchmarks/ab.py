"""Before and after: the figures of two states of the project, measured in alternation, as ratios with intervals.

    python benchmarks/ab.py main . decision.py --rounds 10 --key '*.3072.warm'
    python benchmarks/ab.py v0.1.0 HEAD decode.py --bar '*.outside*<=0.5' -- --prompts 12 --only-pairs --pair pairs/a

BEFORE and AFTER are folders of checkouts or git revisions; each is installed once, without dependencies, into an environment
of its own that shares what is installed here. A round runs a script once with AFTER and twice with BEFORE, in processes of
their own and in an order that turns round by round; the first run of each state is not counted. Each state runs its own
copy of the script, or where BEFORE has none that of AFTER; `--copy` gives both the same. Of each number in the last lines
(`--key` chooses) it gives

- AFTER over BEFORE with a 95% interval: Student's t on the logarithms of the rounds' ratios, BEFORE being the geometric mean
  of its two runs; and median and quartiles of each state;
- BEFORE over BEFORE likewise, from its two runs. Where that interval leaves out 1 or reaches further than `--resolution` to
  either side, the machine cannot tell, and no bar on that number is met.

A bar is met where the whole interval is on its good side; with bars the exit code is 1 where one is not met. Without
arguments this checkout is compared with itself: can this machine tell? The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import fnmatch
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bars import Bars, arguments
from checkouts import ROOT, Checkout, CheckoutError, prepare
from paired import Ratio, numbers, order, ratio, spread, together

BAR = re.compile(r"(?P<key>.+?)\s*(?P<sign><=|>=)\s*(?P<limit>[-+.\deE]+)$")
OWN = "decision.py"
"""The script of a run without arguments: microseconds are what a busy machine changes first."""

COPIES = ("own", "before", "after")
Figures = dict[str, float]


@dataclass(frozen=True)
class Row:
    """One number of a script: its ratio, that of BEFORE over BEFORE where it was measured, and [rounds] of each state."""

    key: str
    ratio: Ratio
    again: Ratio | None
    before: list[float]
    after: list[float]

    def tells(self, resolution: float) -> bool:
        """Whether the machine can tell: BEFORE over BEFORE is 1, as near as `resolution`."""
        known = self.again
        return known is None or max(known.low, 1 - resolution) <= 1 <= known.high <= 1 + resolution

    def facts(self, resolution: float) -> dict[str, Any]:
        """Return everything as JSON has it."""
        sides = {"before": spread(self.before), "after": spread(self.after)}
        again = None if self.again is None else asdict(self.again)
        return {**asdict(self.ratio), "before_over_before": again, "tells": self.tells(resolution), **sides}


def main() -> int:
    """Run the command line and return its exit code."""
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    parser = command_line()
    options = parser.parse_args(words[:cut])
    if options.rounds < 2 or (options.before and not options.scripts):
        parser.error("expected BEFORE, AFTER and a script of benchmarks/, and at least 2 rounds")
    limits = [BAR.match(text) for text in options.bar]
    if not all(limits):
        parser.error(f"--bar: expected KEY<=NUMBER or KEY>=NUMBER, got {', '.join(options.bar)}")
    passed = words[cut + 1 :] + (["--quick"] if options.quick else [])
    passed += ["--pair", str(options.pair.resolve())] if options.pair else []
    names = (options.before or str(ROOT), options.after or str(ROOT))
    rounds, sides = (2 if options.quick else options.rounds), (2 if options.no_self_check else 3)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="specstop-ab-") as room:
        try:
            before = prepare(names[0], Path(room) / "before")
            after = before if names[0] == names[1] else prepare(names[1], Path(room) / "after")
            for script in options.scripts or [OWN]:
                found = alternate(measure(script, before, after, passed, options.copy), rounds, sides)
                rows += compare(Path(script).stem, found, options.key)
        except CheckoutError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    if not rows:
        print(f"error: no figure of {', '.join(options.scripts)} has such a name and a ratio", file=sys.stderr)
        return 2
    return report(rows, options, [limit for limit in limits if limit], names)


def command_line() -> argparse.ArgumentParser:
    """Return the parser of what comes before `--`."""
    parser = arguments(__doc__, "passed on to the scripts")
    parser.add_argument("before", nargs="?", metavar="BEFORE", help="folder of a checkout, or a git revision")
    parser.add_argument("after", nargs="?", metavar="AFTER", help="likewise")
    parser.add_argument(
        "scripts", nargs="*", metavar="SCRIPT", help="of benchmarks/; what follows -- is passed to them"
    )
    parser.add_argument("--key", action="append", metavar="PATTERN", help="only these figures, as '*.warm'; repeatable")
    parser.add_argument(
        "--bar", action="append", default=[], metavar="KEY<=X", help="what a ratio shall be; repeatable"
    )
    parser.add_argument("--copy", choices=COPIES, default="own", help="whose copy of the script the states run: own")
    parser.add_argument("--rounds", type=int, default=6, help="default: 6; with --quick 2")
    parser.add_argument("--resolution", type=float, default=0.05, help="how far BEFORE may be from itself: 0.05")
    parser.add_argument("--no-self-check", action="store_true", help="run BEFORE once a round, and trust the machine")
    return parser


def measure(
    script: str, before: Checkout, after: Checkout, options: Sequence[str], copy: str = "own"
) -> Callable[[int], Figures]:
    """Return what runs side 0 (BEFORE), 1 (AFTER) or 2 (BEFORE again) and returns its figures, after a run of each."""
    sides = (before, after, before)
    owners = {"own": sides, "before": (before,) * 3, "after": (after,) * 3}[copy]
    paths = [owner.script(script, after) for owner in owners]

    def run(side: int) -> Figures:
        begin = time.perf_counter()
        found = sides[side].run(paths[side], options)
        return {**dict(numbers(found)), "process_s": time.perf_counter() - begin}

    for side in (0, 1)[: 1 + (before != after)]:
        print(f"{script}: {sides[side].name}, not counted: {run(side)['process_s']:.1f} s", flush=True)
    return run


def alternate(run: Callable[[int], Figures], rounds: int, sides: int) -> list[list[Figures]]:
    """Return the figures of each round by side."""
    found = []
    for number in range(rounds):
        made: dict[int, Figures] = {}
        for side in order(number, sides):
            made[side] = run(side)
        found.append([made[side] for side in range(sides)])
        seconds = ", ".join(f"{made[side].get('process_s', 0.0):.1f}" for side in range(sides))
        print(f"round {number + 1} of {rounds}: {seconds} s", flush=True)
    return found


def compare(script: str, rounds: Sequence[Sequence[Figures]], patterns: Sequence[str] | None) -> list[Row]:
    """Return a row for each number that all runs gave and of which there is a ratio."""
    rows = []
    for name in rounds[0][0]:
        key = f"{script}.{name}"
        if not all(name in figures for made in rounds for figures in made):
            continue
        if patterns and not any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns):
            continue
        columns = [[made[side][name] for made in rounds] for side in range(len(rounds[0]))]
        before = together(columns[0], columns[2]) if len(columns) == 3 else columns[0]
        again = ratio(columns[2], columns[0]) if len(columns) == 3 else None
        value = ratio(columns[1], before)
        if value is not None and (again is not None or len(columns) == 2):
            rows.append(Row(key, value, again, before, columns[1]))
    return rows


def report(
    rows: Sequence[Row], options: argparse.Namespace, limits: Sequence[re.Match[str]], names: tuple[str, str]
) -> int:
    """Print the table, judge the bars, and return the exit code."""
    bars, near = Bars(), options.resolution
    print(f"\n{'after / before':<24}{'before / before':<24}{'before':>10}{'after':>10}  figure (medians)")
    for row in rows:
        note = "" if row.tells(near) else "   THE MACHINE CANNOT TELL"
        medians = "".join(f"{spread(values)[0]:>10.4g}" for values in (row.before, row.after))
        print(f"{row.ratio!s:<24}{row.again or 'not measured'!s:<24}{medians}  {row.key}{note}")
    unsure = [row.key for row in rows if not row.tells(near)]
    judge(rows, limits, near, bars)
    if options.check and unsure:
        bars.missed.append(f"the machine cannot tell {len(unsure)} of {len(rows)} figures, as {unsure[0]}")
    bars.figures |= {"before": names[0], "after": names[1], "resolution": near, "unsure": unsure,
                     "interval": "95%, Student's t on the logarithms of the ratios of rounds",
                     "ratios": {row.key: row.facts(near) for row in rows}}  # fmt: skip
    options.check = options.check or bool(limits)
    print(f"{len(unsure)} of {len(rows)} figures the machine cannot tell within {near:g}")
    return bars.finish(options, f"{names[1]} with {names[0]}, {len(rows[0].before)} rounds, {len(rows)} figures")


def judge(rows: Sequence[Row], limits: Sequence[re.Match[str]], near: float, bars: Bars) -> None:
    """Judge each bar on the intervals of the figures that it names."""
    for limit in limits:
        most, bound = limit["sign"] == "<=", float(limit["limit"])
        named = [row for row in rows if fnmatch.fnmatchcase(row.key, limit["key"])]
        for row in named:
            met = row.tells(near) and (row.ratio.high <= bound if most else row.ratio.low >= bound)
            held = row.ratio.low <= bound <= row.ratio.high
            why = "" if met or not held else ", which the interval holds"
            why = why if row.tells(near) else ", and the machine cannot tell"
            text = f"{row.ratio}; at {'most' if most else 'least'} {bound:g}{why}"
            bars.add(f"{row.key} {limit['sign']} {bound:g}", asdict(row.ratio), met, text)
        if not named:
            bars.missed.append(f"{limit[0]}: no figure has such a name")


if __name__ == "__main__":
    sys.exit(main())
