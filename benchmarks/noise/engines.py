"""What is imported of an engine's acceptance records is the truth, or is refused: engines simulated with known acceptance.

Requests differ in difficulty and rounds of a request resemble each other. Each round is drawn to full depth before the engine
ends its draft, so that it is known what a longer draft would have accepted. Engines draft a fixed length, a length by load,
a random length, or as long as they are confident. Records are imported in the form in which vLLM writes them.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from bars import Bars
from scipy.signal import lfilter
from scipy.special import expit
from specstop.collect.acceptance import DEPENDENT, LENGTHS
from specstop.collect.engines.vllm_records import import_vllm
from specstop.policies.costs import CostTable
from specstop.policies.errors import SpecstopWarning, TraceError
from specstop.policies.fixed import FixedLength
from specstop.policies.profile import Profile
from specstop.train.evaluate.analysis import trace_outcomes
from specstop.train.replay.rounds import ROUND_COLUMNS, evaluate_rounds
from specstop.train.replay.traces.arrays import trace_arrays

Array = np.ndarray[Any, Any]

DEPTH = 6
TOKENS = np.array([256, 512])
"""Of a text. Drafts that could reach its end are left out, which gives easy requests a little less weight: P(A >= 6) is lower
by 0.4% here, and by 4% in texts of 48 tokens."""

REQUESTS, QUICK_REQUESTS = 3000, 100
SEEDS, QUICK_SEEDS = 5, 1
TOLERANCE = 0.02
"""Relative error of a figure."""

MOST_REFUSED = 1
"""Of the seeds of an engine with independent lengths: the level of the test is 1 in 100."""


@dataclass(frozen=True)
class RoundView:
    """What an engine sees of a round: how busy it is, and how confident the draft is of each token."""

    load: Array  # [R]
    confidence: Array  # [R, DEPTH]
    chance: np.random.Generator


def _by_load(view: RoundView) -> Array:
    return np.array([6, 4, 2])[np.digitize(view.load, (-0.5, 0.5))]


def _by_confidence(view: RoundView) -> Array:
    """Draft on while the draft is confident of its last token, as a threshold rule does."""
    return np.minimum((view.confidence > 0.6).cumprod(1).sum(1) + 1, DEPTH)


ENGINES: dict[str, Callable[[RoundView], Array]] = {
    "fixed": lambda view: np.full(len(view.confidence), DEPTH),
    "by load": _by_load,
    "random": lambda view: view.chance.integers(1, DEPTH + 1, len(view.confidence)),
    "by confidence": _by_confidence,
}
"""Draft lengths [R] of R rounds."""

IDENTIFIED = ("fixed", "by load", "random")


@dataclass(frozen=True)
class Played:
    """Rounds of an engine; all [N].

    Attributes:
        request: of each round, rising.
        drafted: tokens.
        length: accepted length A at full depth.
        tokens: of the text.
    """

    request: Array
    drafted: Array
    length: Array
    tokens: Array


def play(engine: str, requests: int, seed: int) -> Played:
    """Return the rounds of an engine, in the order of its requests."""
    chance = np.random.default_rng([seed, list(ENGINES).index(engine)])
    base, state = chance.normal(1.3, 0.8, requests), chance.normal(0.0, 0.7, requests)
    tokens = chance.choice(TOKENS, requests)
    # Requests begin at random times; the load of a time is that of all requests which are served then.
    load = lfilter([0.4], [1.0, -0.9], chance.normal(0.0, 1.0, requests + int(TOKENS.max())))
    clock = chance.integers(0, requests, requests)
    left, rows = tokens - 1, []  # reading the prompt commits one token
    while (active := np.flatnonzero(left > 0)).size:
        state = 0.7 * state + chance.normal(0.0, 0.5, requests)
        odds = (base + state)[active, None] + chance.normal(0.0, 0.7, (len(active), DEPTH))
        length = (chance.random(odds.shape) < expit(odds)).cumprod(1).sum(1)
        drafted = ENGINES[engine](RoundView(load[clock[active]], expit(odds), chance))
        rows.append(np.stack([active, drafted, length, tokens[active]]))
        left[active] -= np.minimum(length, drafted) + 1
        clock += 1
    request, drafted, length, total = np.concatenate(rows, 1)
    order = np.argsort(request, kind="stable")
    return Played(request[order], drafted[order], length[order], total[order])


def write_records(played: Played, path: Path, detailed: bool) -> Path:
    """Write the responses of a server as JSON Lines."""
    starts = np.flatnonzero(np.diff(played.request, prepend=-1))
    lines = []
    for rows in np.split(np.arange(len(played.request)), starts[1:]):
        drafted = played.drafted[rows]
        accepted = np.minimum(played.length[rows], drafted)
        counts: dict[str, Any] = {
            "num_spec_tokens": DEPTH,
            "num_draft_tokens": int(drafted.sum()),
            "acceptance_histogram": np.bincount(accepted, minlength=DEPTH + 1).tolist(),
        }
        if detailed:
            counts |= {"per_step_accepted": accepted.tolist(), "per_step_drafted": drafted.tolist()}
        usage = {"prompt_tokens": 9, "completion_tokens": int(played.tokens[rows[0]])}
        record = {"id": f"r{played.request[rows[0]]}", "usage": usage, "metrics": {"speculative_decoding": counts}}
        lines.append(json.dumps(record))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@dataclass(frozen=True)
class Checked:
    """An import.

    Attributes:
        dependent: whether it says that lengths depend on acceptance.
        errors: relative error of each figure that it gives.
        refused: what it refuses to say.
    """

    dependent: bool
    errors: dict[str, float]
    refused: tuple[str, ...]


def checked(played: Played, records: Path, out: Path) -> Checked:
    """Import records and compare what the trace says with the truth."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SpecstopWarning)
        trace = import_vllm(records, out)
    arrays = trace_arrays(trace, extra=ROUND_COLUMNS)
    table = CostTable(10.0, (0.1, 0.1), 0.0, (1.0,) * (DEPTH + 1))
    profile = Profile(table, table, 0.0, 0.0, (1.0, 0.01), {"fixed": 0.0}, 0.0, {"device": "made up"})
    survival = trace_outcomes(arrays).survival
    figures = {f"P(A >= {k})": share for k, share in enumerate(survival.tolist(), 1)}
    figures["mean accepted"] = float(survival.sum())
    truth = {f"P(A >= {k})": float((played.length >= k).mean()) for k in range(1, DEPTH + 1)}
    truth["mean accepted"] = float(played.length.mean())
    for k in range(1, DEPTH + 1):
        name = f"tokens a round of fixed:{k}"
        truth[name] = 1.0 + float(np.minimum(played.length, k).mean())
        try:
            figures[name] = float(evaluate_rounds(arrays, FixedLength(k), profile).committed.mean())
        except TraceError:
            figures[name] = np.nan
    errors = {name: value / truth[name] - 1.0 for name, value in figures.items() if np.isfinite(value)}
    return Checked(trace.header.facts[LENGTHS] == DEPENDENT, errors, tuple(set(truth) - set(errors)))


def check(bars: Bars, options: argparse.Namespace, folder: Path) -> str:
    """Add the bars of every engine and return what was compared."""
    requests, seeds = (QUICK_REQUESTS, QUICK_SEEDS) if options.quick else (REQUESTS, SEEDS)
    rounds = 0
    for engine in ENGINES:
        for detailed in (True, False) if engine == "fixed" else (True,):
            name = f"{engine} length, {'detailed' if detailed else 'summary'} records"
            runs = []
            for seed in range(seeds):
                played = play(engine, requests, seed)
                rounds += len(played.length)
                stem = folder / f"{engine.replace(' ', '-')}-{detailed}-{seed}"
                records = write_records(played, stem.with_suffix(".jsonl"), detailed)
                runs.append(checked(played, records, stem))
            what, worst = max(
                ((what, error) for one in runs for what, error in one.errors.items()), key=lambda pair: abs(pair[1])
            )
            bars.add(
                f"{name}: error", worst, abs(worst) <= TOLERANCE,
                f"at most {worst:+.2%}, of {what} (bar: {TOLERANCE:.0%})",
            )  # fmt: skip
            flagged = sum(one.dependent for one in runs)
            if engine in IDENTIFIED:
                met = flagged <= (MOST_REFUSED if engine != "fixed" else 0)
                text = f"{flagged} of {seeds} seeds refused (bar: {MOST_REFUSED if engine != 'fixed' else 0})"
            else:
                met = flagged == seeds and all(f"tokens a round of fixed:{DEPTH}" in one.refused for one in runs)
                text = f"{flagged} of {seeds} seeds refused (bar: all)"
            bars.add(f"{name}: refused", flagged, met, text)
    return f"{len(ENGINES)} engines, {seeds} seeds, {rounds:,} rounds"
