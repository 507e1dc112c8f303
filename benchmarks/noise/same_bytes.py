"""`evaluate` twice: the same bytes but for the time, for policies that the profile knows and for those that it does not."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from pathlib import Path
from unittest import mock

import intervals as worlds
import numpy as np
from bars import Bars
from specstop.policies.measurements import DECISIONS, Measurements
from specstop.train.evaluate.evaluate import evaluate

from .machines import NOISY
from .worlds import timed_profile

PROMPTS, BUDGET_S = 20, 5.0


def check(bars: Bars, options: argparse.Namespace, folder: Path) -> str:
    """Add the bars of equal bytes and return what was compared."""
    chance = np.random.default_rng(0)
    world = worlds.draw_world(chance)
    trace = worlds.sample_dense(world, PROMPTS, chance)
    known = timed_profile(world, next(iter(NOISY.values())), 0, BUDGET_S)
    bare = {key: series for key, series in known.measurements.series.items() if key.what != DECISIONS}
    unknown = dataclasses.replace(known, decision_s={}, measurements=Measurements(bare))
    compared = 0
    with mock.patch.dict(os.environ, SPECSTOP_CACHE=str(folder / "cache")):
        for name, profile in (("known", known), ("unknown", unknown)):
            found = []
            for run in range(2):
                out = folder / f"{name}-{run}"
                evaluate(trace, profile, [worlds.LOGGING], out=out)
                created = json.loads((out / "report.json").read_text())["run"]["created"].encode()
                found.append({path.name: path.read_bytes().replace(created, b"") for path in sorted(out.iterdir())})
            differ = [file for file in found[0] if found[0][file] != found[1].get(file)]
            same = not differ and set(found[0]) == set(found[1])
            compared += len(found[0])
            said = f"{len(found[0])} files of two runs are {'the same' if same else f'not the same: {differ}'}"
            bars.add(f"evaluate twice, {name} policies", {"files": len(found[0]), "differ": differ}, same, said)
    return f"{compared} files of reports, byte by byte"
