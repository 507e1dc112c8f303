"""100 evaluations with profiles of noisy runs: none says 'deploy' where a quiet profile does not."""

from __future__ import annotations

import argparse
from pathlib import Path

import intervals as worlds
import numpy as np
from bars import Bars
from specstop.policies.fixed import FixedLength
from specstop.policies.profile import Profile
from specstop.train.evaluate.evaluate import evaluate
from specstop.train.evaluate.records import DEPLOY, Line

from .machines import NOISY, QUIET
from .worlds import timed_profile

WORLDS, NEAR, PROMPTS = 5, 0.03, 40
"""Worlds in which a threshold is truly that near to the best fixed length, where noise has the most to turn."""

BUDGET_S = 20.0
"""Of a run, by its own clock: less than a user gives it."""


def check(bars: Bars, options: argparse.Namespace, folder: Path) -> str:
    """Add the bar of wrong deployments and return what was compared."""
    chosen, kinds = near_worlds(1 if options.quick else WORLDS), list(NOISY.items())[: 2 if options.quick else None]
    wrong, prompts_alone, lost, deploys, evaluations = [], 0, 0, 0, 0
    for seed in chosen:
        chance = np.random.default_rng([seed, 0])
        world = worlds.draw_world(chance)
        trace = worlds.sample_dense(world, PROMPTS, chance)

        def judged(profile: Profile, trace: worlds.Trace = trace, seed: int = seed) -> dict[str, Line]:
            lines = evaluate(trace, profile, [worlds.LOGGING], seed=seed).lines
            return {line.name: line for line in lines if line.verdict}

        quiet = judged(timed_profile(world, QUIET["usual jitter"], seed, BUDGET_S))
        for kind, disturbance in kinds:
            evaluations += 1
            for name, line in judged(timed_profile(world, disturbance, seed, BUDGET_S)).items():
                before = quiet[name].verdict == DEPLOY
                deploys += line.verdict == DEPLOY
                lost += before and line.verdict != DEPLOY
                prompts_alone += not before and line.parts["prompts"].is_above
                if line.verdict == DEPLOY and not before:
                    wrong.append(f"world {seed}, {kind}, {name}: {line.parts['all'].text()}")
        print(
            f"world {seed}:",
            *(f"{n} {line.verdict} {line.parts['all'].text()};" for n, line in quiet.items()),
            flush=True,
        )
    said = f"{len(wrong)} that a quiet profile does not give (bar: 0), of {deploys}; intervals over prompts alone: "
    said += f"{prompts_alone}; {lost} deployments missed {wrong or ''}".rstrip()
    figures = {"evaluations": evaluations, "wrong": len(wrong), "prompts_alone": prompts_alone, "lost": lost}
    bars.add("deployments under noise", figures, not wrong, said)
    return f"{evaluations} evaluations with profiles of {len(kinds)} kinds of noisy machine"


def near_worlds(count: int) -> list[int]:
    """Return the seeds of the first worlds in which a threshold is truly within `NEAR` of the best fixed length."""
    found: list[int] = []
    seed = 0
    while len(found) < count:
        world = worlds.draw_world(np.random.default_rng([seed, 0]))
        best = min(worlds.true_seconds(world, FixedLength(k)) for k in range(worlds.DEPTH + 1))
        ratios = [best / worlds.true_seconds(world, rule) for rule in (worlds.LOGGING, worlds.DEEPER)]
        if abs(max(ratios) - 1.0) < NEAR:
            found.append(seed)
        seed += 1
    return found
