"""Intervals and verdicts on simulated data with known truth.

    python benchmarks/intervals.py --check
    python benchmarks/intervals.py --part worlds

- `worlds`: worlds with true costs in closed form. A world draws prompts of random difficulty and length. A token
  shows the policy one of three confidences and is accepted with a probability that depends on both. `evaluate`
  replays a sample: its 95% intervals of the ratio to plain decoding and to the best fixed length cover the truth in
  92% to 98% of the worlds. `importance_estimate` values a deeper policy on a censored live run with exploration: its
  intervals cover as well, and its error falls with the root of the number of prompts.
- `families`: false "deploy" (at most 2.5%), simultaneous coverage and power (at least 80% for a gain of 5%) for 1 to
  100 policies on prompts, samples, duplicates, groups, heavy tails and one giant prompt.
- `machines`: profiles on simulated machines. Those that stall, slow down in phases or drift are called noisy, quiet
  ones are not. Intervals with the profile of a noisy machine cover the truth as well, and at most 2.5% of the
  verdicts are a false "deploy".
"""

from __future__ import annotations

from itertools import chain

import numpy as np
import torch
from harness import Run
from simulated_machines import NOISY, QUIET, profiled
from simulated_worlds import (
    DEPTH,
    LIVE_SIZES,
    LOGGING,
    SIZES,
    Array,
    compared,
    dense_world,
    draw_world,
    live_world,
    sample_dense,
    timed_profile,
    true_seconds,
)
from specstop.policies import FixedLength
from specstop.train.evaluate.evaluate import evaluate
from specstop.train.evaluate.records import DEPLOY, TOO_FEW
from specstop.train.evaluate.statistics import Resamples, form_clusters
from specstop.train.evaluate.verdict import verdict

LEAST, MOST = 0.92, 0.98
"""Bounds of the coverage of 95% intervals."""

SHRINK_SLACK = 0.25
"""Relative tolerance of the factor by which errors fall: errors of 500 worlds scatter by a few per cent."""


def worlds(run: Run) -> None:
    """Count how often the intervals of `evaluate` and `importance_estimate` cover the truth."""
    count = run.choose(500, 2)
    estimates = list(chain(*run.map(dense_world, range(count)), *run.map(live_world, range(count))))
    rmse: dict[tuple[str, str], list[float]] = {}
    for method, what, prompts in dict.fromkeys(
        (e.method, e.what, e.prompts * (e.method != "evaluate")) for e in estimates
    ):
        subset = [e for e in estimates if (e.method, e.what) == (method, what) and prompts in (0, e.prompts)]
        error = np.array([e.error for e in subset])
        rmse.setdefault((method, what), []).append(float((error**2).mean() ** 0.5))
        note = f"bias {error.mean():+.4f}, root mean square error {rmse[method, what][-1]:.4f}"
        covered = float(np.mean([e.covered for e in subset]))
        run.bar(
            f"{method}, {what}, {prompts or 'all'} prompts: covered", covered, at_least=LEAST, at_most=MOST, note=note
        )
    theory = (LIVE_SIZES[1] / LIVE_SIZES[0]) ** 0.5
    for what in ("tokens", "seconds"):
        small, large = rmse["importance", what]
        shrinks = small / large / theory
        bounds = {"at_least": 1 - SHRINK_SLACK, "at_most": 1 + SHRINK_SLACK}
        run.bar(f"importance, {what}: the error falls, over the root of the factor of prompts", shrinks, **bounds)


STRUCTURES = ("prompts", "samples", "duplicates", "groups 5", "groups 10", "heavy tails", "giant")
CLUSTERS = (20, 40, 200)
CANDIDATES = ((1, 0.0), (5, 0.0), (5, 0.9), (20, 0.0), (20, 0.9), (100, 0.0), (100, 0.9))
"""Number of candidates, and correlation of their seconds per token."""

SLOWER = (1.02, 1.0, 1.03)
"""Mean seconds per token of the fixed lengths; the second one is the best."""

FALSE_DEPLOY, GAIN, POWER = 0.025, 1.05, 0.8


def family(job: tuple[str, int, int, float, float, int]) -> tuple[bool, bool, bool]:
    """Simulate one evaluation of many candidates.

    Texts have random lengths. Seconds of a text are its tokens times the seconds per token of the policy, which vary between
    prompts with a standard deviation of 10%. All candidates are as fast as the best fixed length, the first one `gain` times.

    Args:
        job: structure, prompts, candidates, correlation, gain, seed.

    Returns:
        Whether a candidate is deployed (with a gain: the first one), all intervals cover the truth, and there is a verdict.
    """
    structure, prompts, candidates, correlation, gain, seed = job
    chance = np.random.default_rng([STRUCTURES.index(structure), prompts, candidates, int(10 * correlation), seed])
    texts, columns = prompts // 4 if structure == "duplicates" else prompts, len(SLOWER) + candidates
    heavy = structure == "heavy tails"

    def noise(rows: int, count: int) -> Array:
        values: Array = chance.standard_t(3, (rows, count)) / 3**0.5 if heavy else chance.normal(size=(rows, count))
        return values

    pace, shared = noise(texts, columns), noise(texts, 1)
    policies = slice(len(SLOWER), None)
    pace[:, policies] = correlation**0.5 * shared + (1.0 - correlation) ** 0.5 * pace[:, policies]
    groups = np.zeros(texts, dtype=int)
    if structure.startswith("groups"):  # half of the variance is between groups
        number = int(structure.split()[1])
        groups = np.arange(texts) * number // texts
        pace = (pace + noise(number, columns)[groups]) / 2**0.5
    tokens = 40.0 * np.exp(chance.normal(size=texts)) if heavy else chance.choice([24.0, 40.0, 64.0], texts)
    if structure == "giant":
        tokens[0] = tokens[1:].sum()
    mean = np.concatenate([SLOWER, [1.0 / gain], np.ones(candidates - 1)])
    at = np.repeat(np.arange(texts), {"samples": 8, "duplicates": 4}.get(structure, 1))
    seconds = (tokens[:, None] * np.maximum(mean * (1.0 + 0.1 * pace), 0.05))[at]
    if structure == "samples":  # samples of a prompt differ less than prompts
        seconds = seconds * (1.0 + 0.03 * chance.normal(size=seconds.shape))
    has_groups = structure.startswith("groups")
    names = [f"g{group}" if has_groups else "" for group in groups[at]]
    clusters = form_clusters([f"p{n:04d}" for n in at], names, tokens[at].tolist(), "group" if has_groups else "prompt")
    boot = Resamples(clusters.of, seed, 1000)
    fixed = range(len(SLOWER))
    (ratios,) = boot.simultaneous([boot.log_ratios(tokens[at], seconds, range(len(SLOWER), columns), fixed)])
    truths = [gain, *[1.0] * (candidates - 1)]
    covered = all(ratio.low <= truth <= ratio.high for ratio, truth in zip(ratios, truths, strict=True))
    verdicts = [verdict(ratio, clusters.count, None, clusters.largest) for ratio in ratios]
    return (verdicts[0] == DEPLOY if gain != 1.0 else DEPLOY in verdicts), covered, TOO_FEW not in verdicts


def families(run: Run) -> None:
    """Count false deployments, simultaneous coverage and power over families of policies."""
    count = run.choose(500, 3)
    slack = 2 * (FALSE_DEPLOY * (1 - FALSE_DEPLOY) / count) ** 0.5
    for structure in run.choose(STRUCTURES, STRUCTURES[:2]):
        cells = []
        for prompts in run.choose(CLUSTERS, CLUSTERS[:1]):
            for candidates, correlation in run.choose(CANDIDATES, CANDIDATES[:2]):
                jobs = [(structure, prompts, candidates, correlation, 1.0, seed) for seed in range(count)]
                deployed, covered, judged = np.mean(run.map(family, jobs), 0)
                cells.append((float(deployed), float(covered), float(judged)))
                name = f"{structure}, {prompts} prompts, {candidates} policies, correlation {correlation:g}: deployed"
                run.row(name, float(deployed), f"covered {covered:.3f}, verdict in {judged:.2f}")
        run.bar(f"{structure}: false deploy", max(cell[0] for cell in cells), at_most=FALSE_DEPLOY + slack)
        covered_cells = [cell[1] for cell in cells if cell[2] > 0.5]  # else the verdict is "too few prompts"
        if covered_cells:
            run.bar(f"{structure}: least simultaneous coverage", min(covered_cells), at_least=LEAST)
            run.bar(f"{structure}: largest simultaneous coverage", max(covered_cells), at_most=MOST)
    jobs = [("prompts", 200, 5, 0.0, GAIN, seed) for seed in range(count)]
    power = float(np.mean(run.map(family, jobs), 0)[0])
    run.bar("power for a gain of 5%, 200 prompts, 5 policies", power, at_least=POWER)


def machines(run: Run) -> None:
    """Check which simulated machines are called noisy, and the intervals and verdicts with their profiles."""
    budget_s, seeds = run.choose((90.0, 3), (5.0, 1))
    for label, kinds, expected in (("noisy", NOISY, True), ("quiet", QUIET, False)):
        chosen = dict(list(kinds.items())[: run.choose(None, 1)])
        wrong = [
            kind
            for kind, disturbance in chosen.items()
            if any(profiled(disturbance, seed, budget_s)[0].is_noisy is not expected for seed in range(seeds))
        ]
        run.bar(f"{label} machines judged wrongly", len(wrong), at_most=0, note=f"of {len(chosen)} {', '.join(wrong)}")
    results = np.array(run.map(noisy_world, range(run.choose(500, 2))), dtype=float)
    run.bar("covered with noisy profiles", float(results[:, 0].mean()), at_least=LEAST, at_most=MOST)
    run.bar("false deploy with noisy profiles", float(results[:, 1].mean()), at_most=FALSE_DEPLOY + 0.014)


def noisy_world(seed: int) -> tuple[bool, bool]:
    """Return whether an interval covers the truth with the profile of a noisy machine, and whether "deploy" is false."""
    chance = np.random.default_rng([seed, 0])
    world, prompts = draw_world(chance), SIZES[seed % len(SIZES)]
    profile = timed_profile(world, list(NOISY.values())[seed % len(NOISY)], seed, 15.0)
    line = evaluate(sample_dense(world, prompts, chance), profile, [LOGGING], seed=seed)[LOGGING.name]
    truth = min(true_seconds(world, FixedLength(k)) for k in range(DEPTH + 1)) / true_seconds(world, LOGGING)
    return compared(line.to_best_fixed, truth)[0], line.verdict == DEPLOY and truth <= 1.0


if __name__ == "__main__":
    torch.set_num_threads(1)
    raise SystemExit(Run(__doc__, [worlds, families, machines]).execute())
