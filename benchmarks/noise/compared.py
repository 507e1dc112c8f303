"""`evaluate --compare` on two profiles of one machine, each timed by itself: its intervals contain 1 as often as they say."""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import intervals as worlds
import numpy as np
import torch
from bars import Bars
from specstop.decode.benchmark import Ratio
from specstop.policies.profile import Profile
from specstop.train.evaluate.evaluate import evaluate
from specstop.train.evaluate.report_comparison import compare_reports, read_report

from .machines import NOISY, QUIET, Disturbance
from .worlds import timed_profile

LEAST, MOST = 0.92, 0.985
WORLDS, QUICK = 500, 6
BUDGET_S = 15.0
"""Of a run, by its own clock."""

LONGEST_S = 20.0
"""Longest period of a disturbance that recurs within a run."""

LINES = ("plain decoding", "best fixed", worlds.LOGGING.name)


class Compared(NamedTuple):
    """Whether the interval of one line of one world contains 1: of B / A, and of B / A over the best fixed length."""

    line: str
    is_noisy: bool
    gain: bool
    over_best: bool


def check(bars: Bars, options: argparse.Namespace, folder: Path) -> str:
    """Add the bars of coverage and return what was compared."""
    count = QUICK if options.quick else WORLDS
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), context, torch.set_num_threads, (1,)) as pool:
        worlds_of = pool.map(_world, range(count), [folder] * count, chunksize=2)
        found = [one for lines in worlds_of for one in lines]
    for line in LINES:
        mine = [one for one in found if one.line == line]
        share, over_best = (float(np.mean([getattr(one, name) for one in mine])) for name in ("gain", "over_best"))
        figures: dict[str, float] = {"covered": share, "over_best": over_best}
        for name, is_noisy in (("noisy machines", True), ("quiet machines", False)):
            if some := [one.gain for one in mine if one.is_noisy is is_noisy]:
                figures[name] = float(np.mean(some))
        parts = ", ".join(f"{name} {value:.3f}" for name, value in figures.items() if name != "covered")
        text = f"{share:.3f} of {len(mine)} worlds contain 1 (bar: {LEAST} to {MOST}); {parts}"
        bars.add(f"B / A, {line}", figures, LEAST <= share <= MOST, text)
    return f"{count} worlds, each with two reports on profiles of one machine"


def recurring() -> list[tuple[bool, Disturbance]]:
    """Return (is it noisy, the disturbance) of machines that stay as they are: what happens within a run happens again.

    A machine that drifts, or changes once, is another one at the next run: two of its profiles need not agree.
    """
    kinds = [(is_noisy, kind) for is_noisy, of in ((True, NOISY), (False, QUIET)) for kind in of.values()]
    return [
        (is_noisy, kind) for is_noisy, kind in kinds if not kind.drift and kind.jitter and kind.period_s < LONGEST_S
    ]


def _world(seed: int, folder: Path) -> list[Compared]:
    """Return whether two timings of one machine differ in one world."""
    chance = np.random.default_rng([seed, 0])
    world, prompts = worlds.draw_world(chance), worlds.SIZES[seed % len(worlds.SIZES)]
    trace = worlds.sample_dense(world, prompts, chance)
    kinds = recurring()
    is_noisy, disturbance = kinds[seed % len(kinds)]
    paths = []
    for side in (0, 1):
        # The two runs begin at other moments of a phase.
        begin_s = -float(chance.uniform(0.0, disturbance.period_s))
        profile = timed_profile(world, dataclasses.replace(disturbance, begin_s=begin_s), 2 * seed + side, BUDGET_S)
        paths.append(_reported(trace, profile, seed, folder / f"compared-{seed}-{side}.json"))
    changes = compare_reports(*map(read_report, paths)).changes
    lines = [change for change in changes if change.name in LINES]
    return [Compared(line.name, is_noisy, _has_one(line.speed), _has_one(line.over_best)) for line in lines]


def _reported(trace: worlds.Trace, profile: Profile, seed: int, path: Path) -> Path:
    """Return the file of a report on a profile."""
    report = evaluate(trace, profile, [worlds.LOGGING], seed=seed, detailed=True)
    path.write_text(json.dumps(report.to_dict()), encoding="utf-8")
    return path


def _has_one(ratio: Ratio | None) -> bool:
    assert ratio is not None and ratio.low is not None and ratio.high is not None
    return ratio.low <= 1.0 + worlds.EXACT and ratio.high >= 1.0 - worlds.EXACT
