"""Intervals that draw the timings of a noisy profile with the prompts cover the truth as often as they say."""

from __future__ import annotations

import argparse
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import intervals as worlds
import numpy as np
import torch
from bars import Bars
from specstop.policies.fixed import FixedLength
from specstop.train.evaluate.evaluate import evaluate

from .machines import NOISY
from .worlds import timed_profile

LEAST, MOST = 0.92, 0.98
WORLDS, QUICK = 500, 6
BUDGET_S = 15.0
"""Of a run, by its own clock."""


class Covered(NamedTuple):
    """Of one figure of one world: what it was, and whether the truth lies in its interval; and with prompts alone."""

    what: str
    held: bool
    by_prompts: bool


def check(bars: Bars, options: argparse.Namespace, folder: Path) -> str:
    """Add the bars of coverage and return what was compared."""
    count = QUICK if options.quick else WORLDS
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), context, torch.set_num_threads, (1,)) as pool:
        found = [one for some in pool.map(_world, range(count), chunksize=2) for one in some]
    for what in dict.fromkeys(one.what for one in found):
        mine = [one for one in found if one.what == what]
        share, alone = (float(np.mean([getattr(one, name) for one in mine])) for name in ("held", "by_prompts"))
        said = f"{share:.3f} of {len(mine)} worlds (bar: {LEAST} to {MOST}); over prompts alone {alone:.3f}"
        bars.add(f"coverage, {what}", {"covered": share, "by_prompts": alone}, LEAST <= share <= MOST, said)
    return f"{count} worlds, each with the profile of a noisy run of its own"


def _world(seed: int) -> list[Covered]:
    """Return, of one world, whether the intervals of `evaluate` cover the truth."""
    chance = np.random.default_rng([seed, 0])
    world, prompts = worlds.draw_world(chance), worlds.SIZES[seed % len(worlds.SIZES)]
    disturbance = list(NOISY.values())[seed % len(NOISY)]
    profile = timed_profile(world, disturbance, seed, BUDGET_S)
    report = evaluate(worlds.sample_dense(world, prompts, chance), profile, [worlds.LOGGING], seed=seed)
    best = min(worlds.true_seconds(world, FixedLength(k)) for k in range(worlds.DEPTH + 1))
    found = []
    for name, rule in (("Hugging Face default", worlds.DEEPER), (worlds.LOGGING.name, worlds.LOGGING)):
        truth, parts = best / worlds.true_seconds(world, rule), report[name].parts
        held, by_prompts = (worlds.compared(parts[part], truth)[0] for part in ("all", "prompts"))
        found.append(Covered(f"{rule.name} to best fixed", held, by_prompts))
    return found
