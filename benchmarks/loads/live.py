"""Batches decoded live: ours beside plain decoding and its rivals, and what replay predicts beside what the clock says."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
from bars import Bars
from specstop.decode import Pair, Settings, Speculator
from specstop.decode.benchmark import run_alternating, texts_per_turn
from specstop.decode.profile import CalibrationRun
from specstop.policies.contract import StopPolicy
from specstop.policies.fixed import FixedLength
from specstop.policies.profile import Profile
from specstop.train.evaluate.statistics import Resamples
from specstop.train.replay.arrivals import at_once
from specstop.train.replay.batch import replay_batch
from specstop.train.replay.traces.arrays import TraceArrays

from .replayed import CLEAR

NEAR = 0.07
"""How far off the seconds of replay may be."""

TURNS, TEXTS, LEAST = 15, 240, 4
"""Turns that a batch size is decoded in, and in how many texts; of large batches the least turns. What each turn brings is
drawn anew, as the machine is faster in some of them."""

CLOSE = 2
"""So many times as many turns where policies that differ by a few hundredths are compared; between two of them costs are
timed."""


def live(
    where: str,
    pair: Pair,
    prompts: Sequence[tuple[str, list[int]]],
    other: Sequence[list[int]],
    held: TraceArrays,
    named: Sequence[tuple[str, StopPolicy]],
    known: Profile,
    size: int,
    options: argparse.Namespace,
    bars: Bars,
) -> None:
    """Decode the prompts under each policy in turns, and hold what replay predicts to what the clock says.

    The first policy is what the others are compared with. The profile is measured between the turns.
    """
    header = held.header
    at = {name: number for number, name in enumerate(held.prompt_ids)}
    prompts, turn = _in_turns(prompts, held, size, options, CLOSE), texts_per_turn(size)
    sizes = sorted({1, size // 2, size})
    calibration = CalibrationRun(
        pair, other, depth=known.max_depth, temperature=header.temperature, new_tokens=header.max_new_tokens,
        batch=sizes, verification=header.verification,
    )  # fmt: skip
    found = run_alternating(
        _runs(pair, named, held, known, size),
        prompts,
        calibration=calibration,
        calibrate_every=1 if options.quick else CLOSE,
        batch=size,
    )
    profile = calibration.profile().with_decisions(known.decision_s)
    boot = _by_turn(prompts, size)
    first = boot.total([text.seconds for text in found[0]])
    for (name, policy), texts in zip(named, found, strict=True):
        spent = boot.total([text.seconds for text in texts])
        chunks = [prompts[n : n + turn] for n in range(0, len(prompts), turn)]
        orders = [np.array([at[name] for name, _ in chunk]) for chunk in chunks]
        played = [replay_batch(held, policy, profile, size, at_once(len(order)), order) for order in orders]
        predicted = sum(float(one.seconds.sum()) for one in played) / spent[0]
        tokens = sum(len(text.tokens) for text in texts)
        same = tokens == sum(int(one.tokens.sum()) for one in played)
        ratio = boot.interval(first / spent)
        print(
            f"      live, {where}, batch {size}, {name}: {tokens / spent[0]:.0f} tokens/s, {ratio.text()} of {named[0][0]}"
        )
        bars.add(
            f"replay's seconds over those live, {where}, batch {size}, {name}", round(predicted, 3),
            (abs(predicted - 1.0) <= NEAR and same) or options.quick, f"{predicted:.3f}; within {NEAR:.0%}",
        )  # fmt: skip
        if name == "ours" and size == max(CLEAR):
            bars.add(
                f"ours over {named[0][0]} live, {where}, batch {size}", ratio.value, ratio.is_above or options.quick,
                f"{ratio.text()}; clear of 1",
            )  # fmt: skip


def beside_plain(
    where: str,
    pair: Pair,
    prompts: Sequence[tuple[str, list[int]]],
    held: TraceArrays,
    ours: StopPolicy,
    known: Profile,
    size: int,
    options: argparse.Namespace,
    bars: Bars,
) -> None:
    """Decode the prompts plainly and under ours in turns: ours is nowhere to be below by an interval clear of 1."""
    prompts = _in_turns(prompts, held, size, options)
    named = [("plain", FixedLength(0)), ("ours", ours)]
    made = run_alternating(_runs(pair, named, held, known, size), prompts, batch=size)
    boot = _by_turn(prompts, size)
    plain, spent = (boot.total([text.seconds for text in texts]) for texts in made)
    ratio = boot.interval(plain / spent)
    bars.add(
        f"ours over plain decoding live, {where}, batch {size}", ratio.value, not ratio.is_below or options.quick,
        f"{ratio.text()}, {_played(ours, size)}; not below 1",
    )  # fmt: skip


def _played(policy: StopPolicy, size: int) -> str:
    """Return what a policy does in batches of a size, as text."""
    length = policy.unasked.get(size)
    return "it decides" if length is None else f"it drafts {length} and decides nothing"


def _in_turns(
    prompts: Sequence[tuple[str, list[int]]], held: TraceArrays, size: int, options: argparse.Namespace, times: int = 1
) -> list[tuple[str, list[int]]]:
    """Return the prompts of the trace, over and over, until there are enough for all turns, or so many times as many."""
    known, turn = [(name, ids) for name, ids in prompts if name in held.prompt_ids], texts_per_turn(size)
    most = times * turn * max(LEAST, min(TURNS, TEXTS // turn))
    return known if options.quick else (known * -(-most // len(known)))[:most]


def _runs(
    pair: Pair, named: Sequence[tuple[str, StopPolicy]], held: TraceArrays, known: Profile, size: int
) -> list[Speculator]:
    header = held.header
    settings = Settings(header.temperature, header.max_new_tokens, verification=header.verification)
    return [Speculator(pair, policy, settings, known, batch=size) for _, policy in named]


def _by_turn(prompts: Sequence[Any], size: int) -> Resamples:
    """Return resamples of turns: texts of one are decoded side by side, and share what the machine is like meanwhile."""
    return Resamples([number // texts_per_turn(size) for number in range(len(prompts))])
