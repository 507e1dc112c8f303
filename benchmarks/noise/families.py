"""The verdict over many policies: false "deploy", simultaneous coverage and power, on simulated texts with known truth.

Every world has texts of random length, three fixed lengths and M candidate policies. Seconds of a text are its tokens times
the pace of the policy, which varies between prompts with a standard deviation of 10%; the expected seconds of every
candidate are those of the best fixed length, except where power is measured. Structures:

- `prompts`: a text for each prompt;
- `samples`: eight texts for each prompt;
- `duplicates`: every text under four ids, so that there are four times fewer different prompts;
- `groups 5`, `groups 10`: half of the variance is between groups of prompts;
- `heavy tails`: log-normal lengths (sigma 1) and paces of Student's t with 3 degrees of freedom;
- `giant`: one prompt with half of all tokens.

Clusters, intervals and the verdict are those of `evaluate`: `form_clusters` (groups if there are any), `Resamples` and
`verdict`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from bars import Bars
from specstop.train.evaluate.records import DEPLOY, TOO_FEW
from specstop.train.evaluate.statistics import Resamples, form_clusters
from specstop.train.evaluate.verdict import verdict

WORLDS, QUICK = 500, 10
REPLICATES = 1000
SIZES = (20, 40, 200)
CANDIDATES = ((1, 0.0), (5, 0.0), (5, 0.9), (20, 0.0), (20, 0.9), (100, 0.0), (100, 0.9))
"""Number of candidates, and correlation of their paces."""

STRUCTURES = ("prompts", "samples", "duplicates", "groups 5", "groups 10", "heavy tails", "giant")
SPREAD = 0.1
SLOWER = (1.02, 1.0, 1.03)
"""Mean pace of the fixed lengths; the second one is the best."""

FALSE_DEPLOY, LEAST, MOST = 0.025, 0.92, 0.98
GAIN, POWER = 1.05, 0.8

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Texts:
    """Texts of a world.

    Attributes:
        prompts, groups: [S] the prompt and the group of each text.
        tokens: [S].
        seconds: [S, 3 + M], of the fixed lengths and the candidates.
    """

    prompts: list[str]
    groups: list[str]
    tokens: Array
    seconds: Array


class Outcome(NamedTuple):
    """Of one world: whether a candidate is deployed, all intervals contain the truth, and a verdict was possible."""

    deployed: bool
    covered: bool
    is_judged: bool


def draw_texts(
    structure: str, prompts: int, candidates: int, correlation: float, chance: np.random.Generator, gain: float = 1.0
) -> Texts:
    """Return the texts of a world in which the first candidate is `gain` times as fast as the best fixed length."""
    texts = prompts // 4 if structure == "duplicates" else prompts  # different ones
    columns = len(SLOWER) + candidates
    heavy = structure == "heavy tails"

    def noise(rows: int, count: int) -> Array:
        values = chance.standard_t(3, (rows, count)) / 3**0.5 if heavy else chance.normal(size=(rows, count))
        return np.asarray(values)

    pace = noise(texts, columns)
    shared = noise(texts, 1)
    mine = slice(len(SLOWER), None)
    pace[:, mine] = correlation**0.5 * shared + (1.0 - correlation) ** 0.5 * pace[:, mine]
    group = np.zeros(texts, dtype=int)
    if structure.startswith("groups"):
        count = int(structure.split()[1])
        group = np.arange(texts) * count // texts
        pace = (pace + noise(count, columns)[group]) / 2**0.5
    tokens = 40.0 * np.exp(chance.normal(size=texts)) if heavy else chance.choice([24.0, 40.0, 64.0], texts)
    if structure == "giant":
        tokens[0] = tokens[1:].sum()
    mean = np.concatenate([SLOWER, [1.0 / gain], np.ones(candidates - 1)])
    seconds = tokens[:, None] * np.maximum(mean * (1.0 + SPREAD * pace), 0.05)
    repeats = {"samples": 8, "duplicates": 4}.get(structure, 1)
    at = np.repeat(np.arange(texts), repeats)
    sampled = seconds[at]
    if structure == "samples":  # texts of a prompt differ, less than prompts do
        sampled = sampled * (1.0 + 0.03 * chance.normal(size=sampled.shape))
    names = [f"g{g}" for g in group[at]] if structure.startswith("groups") else [""] * len(at)
    return Texts([f"p{number:04d}" for number in at], names, tokens[at], sampled)


def judge(texts: Texts, seed: int, truth: float = 1.0) -> Outcome:
    """Return the outcome of one world; the first candidate is `truth` times as fast as the best fixed length."""
    fixed, policies = range(len(SLOWER)), range(len(SLOWER), texts.seconds.shape[1])
    by = "group" if any(texts.groups) else "prompt"
    clusters = form_clusters(texts.prompts, texts.groups, texts.tokens.tolist(), by)
    boot = Resamples(clusters.of, seed, REPLICATES)
    (ratios,) = boot.simultaneous([boot.log_ratios(texts.tokens, texts.seconds, policies, fixed)])
    true = [truth, *[1.0] * (len(ratios) - 1)]
    covered = all(r.low is not None and r.low <= t <= r.high for r, t in zip(ratios, true, strict=True))  # type: ignore[operator]
    results = [verdict(ratio, clusters.count, None, clusters.largest) for ratio in ratios]
    deployed = results[0] == DEPLOY if truth != 1.0 else DEPLOY in results
    return Outcome(deployed, covered, TOO_FEW not in results)


def world(job: tuple[str, int, int, float, int]) -> Outcome:
    """Return the outcome of a world by structure, prompts, candidates, correlation and seed."""
    structure, prompts, candidates, correlation, seed = job
    kind = [STRUCTURES.index(structure), prompts, candidates, int(10 * correlation), seed]
    return judge(draw_texts(structure, prompts, candidates, correlation, np.random.default_rng(kind)), seed)


def powerful(seed: int) -> Outcome:
    """Return the outcome of a world in which the first of five candidates gains 5% on 200 prompts."""
    return judge(draw_texts("prompts", 200, 5, 0.0, np.random.default_rng([99, seed]), GAIN), seed, GAIN)


def check(bars: Bars, options: argparse.Namespace, folder: Path) -> str:
    """Add the bars of false deployments, coverage and power, and return what was compared."""
    worlds = QUICK if options.quick else WORLDS
    context = multiprocessing.get_context("spawn")
    rows = []
    slack = 2 * (FALSE_DEPLOY * (1 - FALSE_DEPLOY) / worlds) ** 0.5
    print(f"{'structure':<14}{'prompts':>8}{'policies':>9}{'correlated':>11}{'deploy':>8}{'covered':>9}{'judged':>8}")
    with ProcessPoolExecutor(os.cpu_count(), context) as pool:
        for structure in STRUCTURES:
            for prompts in SIZES[:1] if options.quick else SIZES:
                for candidates, correlation in CANDIDATES[:3] if options.quick else CANDIDATES:
                    jobs = [(structure, prompts, candidates, correlation, seed) for seed in range(worlds)]
                    outcomes = np.array(list(pool.map(world, jobs, chunksize=25)), dtype=float)
                    deployed, covered, judged = (float(share) for share in outcomes.mean(0))
                    rows.append((structure, prompts, candidates, correlation, deployed, covered, judged))
                    print(
                        f"{structure:<14}{prompts:>8}{candidates:>9}{correlation:>11}{deployed:>8.3f}{covered:>9.3f}"
                        f"{judged:>8.2f}",
                        flush=True,
                    )
        power = float(np.mean([one.deployed for one in pool.map(powerful, range(worlds), chunksize=25)]))
    for structure in STRUCTURES:
        mine = [row for row in rows if row[0] == structure]
        worst = max(mine, key=lambda row: row[4])
        said = f"{worst[4]:.3f} at most ({worst[1]} prompts, {worst[2]} policies); bar {FALSE_DEPLOY} + {slack:.3f}"
        bars.add(f"false deploy, {structure}", worst[4], worst[4] <= FALSE_DEPLOY + slack, said)
        judged = [row for row in mine if row[6] > 0.5]  # else the verdict is "too few prompts"
        if not judged:
            bars.add(f"coverage, {structure}", None, True, "the verdict is 'too few prompts' everywhere")
            continue
        low, high = min(row[5] for row in judged), max(row[5] for row in judged)
        said = f"{low:.3f} to {high:.3f}, bar {LEAST} to {MOST}, where there is a verdict"
        bars.add(f"coverage, {structure}", [low, high], low >= LEAST and high <= MOST, said)
    said = f"{power:.3f} of worlds with a gain of {GAIN - 1:.0%}, 200 prompts and 5 policies; bar {POWER}"
    bars.add("power", power, power >= POWER, said)
    bars.figures["families"] = rows
    return f"{worlds} worlds each of {len(rows)} families of policies"
