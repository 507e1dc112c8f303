"""Simulated machines: those that stall, slow down in phases or drift are warned of, quiet ones are not."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from bars import Bars
from specstop.decode.profile.measuring import Effort, measure
from specstop.policies.measurements import Noise, judge

from .machines import NOISY, QUIET, Disturbance, Machine

SEEDS, QUICK_BUDGET_S = 3, 15.0
"""Runs of each kind; and the seconds of a run, by its own clock, with `--quick`."""


def profiled(disturbance: Disturbance, seed: int, budget_s: float) -> tuple[Noise, float]:
    """Return what the timings of a simulated machine say of it, and how long they took by its clock."""
    machine = Machine(disturbance, seed)
    noise = judge(measure({"chains": machine.texts}, Effort(budget_s), clock=machine.clock))
    assert noise is not None
    return noise, machine.clock()


def check(bars: Bars, options: argparse.Namespace, folder: Path) -> str:
    """Add the bars of simulated machines and return what was compared."""
    seeds, budget_s = (1, QUICK_BUDGET_S) if options.quick else (SEEDS, 90.0)
    for name, kinds, wanted in (("noisy clocks", NOISY, True), ("quiet clocks", QUIET, False)):
        warned = _warned(kinds, seeds, budget_s)
        right = sum(all(found == wanted for found in row) for row in warned.values())
        wrong = [kind for kind, row in warned.items() if not all(found == wanted for found in row)]
        said = f"{right} of {len(kinds)} kinds {'' if wanted else 'not '}warned of in each of {seeds} runs"
        bars.add(
            name, {"kinds": len(kinds), "right": right, "wrong": wrong}, not wrong, f"{said} {wrong or ''}".rstrip()
        )
    return f"{len(NOISY)} kinds of disturbance and {len(QUIET)} quiet ones, {seeds} simulated runs each"


def _warned(kinds: Mapping[str, Disturbance], seeds: int, budget_s: float) -> dict[str, list[bool]]:
    """Return by kind whether each run was warned of; a line of figures each."""
    warned = {}
    for kind, disturbance in kinds.items():
        runs = [profiled(disturbance, seed, budget_s) for seed in range(seeds)]
        warned[kind] = [noise.is_noisy for noise, _ in runs]
        noise, seconds = runs[0]
        figures = f"spread {noise.spread:5.2f}  stalls {noise.stalls:6.1%}  phases {noise.phases:5.2f}  "
        figures += f"drift {noise.drift:+.2f}  {noise.repetitions:3} in {seconds:3.0f} s"
        print(f"{kind:<44}{sum(warned[kind])}/{seeds}  {figures}", flush=True)
    return warned
