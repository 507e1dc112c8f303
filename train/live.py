"""Policies live, side by side: the same prompts in alternation, predicted beside measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..decode.loop import Speculator
from ..decode.noise import stream_key
from ..decode.pair import Pair
from ..decode.profile import Gauge
from ..decode.records import Generation, Tally
from ..decode.settings import Settings
from ..policies.contract import StopPolicy
from ..policies.costs import Profile
from ..policies.progress import Progress, silent
from .data import TraceArrays
from .replay import replay

GAUGE_EVERY = 3
"""Prompts between two texts of the gauge."""


@dataclass(frozen=True)
class LiveLine:
    """One policy, live.

    Attributes:
        name: of the policy.
        tally: its sums.
        generations: by prompt.
        measured, predicted: tokens/s as ratio to the first policy, in this run and by replay.
        spread: quartiles over prompts of the measured ratio.
        same_text: prompts whose text equals the first policy's.
    """

    name: str
    tally: Tally
    generations: tuple[Generation, ...]
    measured: float
    predicted: float
    spread: tuple[float, float]
    same_text: int

    @property
    def miss(self) -> float:
        """Measured over predicted, less 1."""
        return self.measured / self.predicted - 1.0


def run_alternating(
    pair: Pair,
    prompts: Sequence[tuple[str, Sequence[int]]],
    policies: Sequence[StopPolicy],
    settings: Settings,
    *,
    profile: Profile | None = None,
    gauge: Gauge | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> list[list[Generation]]:
    """Decode every prompt with every policy, the order of policies turning from prompt to prompt.

    Args:
        pair: target and draft.
        prompts: (id, token ids); the first one is decoded once more at the start, to warm up.
        policies: P of them.
        settings: shared.
        profile: for policies that observe modelled seconds.
        gauge: plays its texts in between, so that a profile of these very minutes comes out.
        seed: of the streams.
        progress: see `Progress`.

    Returns:
        By policy, by prompt.
    """
    runs = [Speculator(pair, policy, settings, profile) for policy in policies]
    out: list[list[Generation]] = [[] for _ in runs]
    for run in runs:
        run.generate(prompts[0][1], stream_key(seed, prompts[0][0]))
    for number, (name, tokens) in enumerate(prompts):
        for turn in range(len(runs)):
            which = (turn + number) % len(runs)
            out[which].append(runs[which].generate(tokens, stream_key(seed, name)))
        if gauge is not None and number % GAUGE_EVERY == 0:
            gauge.play(number // GAUGE_EVERY)
        progress("live", number + 1, len(prompts))
    return out


def compare_live(
    generations: Sequence[Sequence[Generation]],
    policies: Sequence[StopPolicy],
    arrays: TraceArrays,
    profile: Profile,
) -> list[LiveLine]:
    """Set measured beside predicted, both as ratios to the first policy.

    Args:
        generations: of `run_alternating`.
        policies: the same.
        arrays: the traces of exactly those prompts.
        profile: of this machine.
    """
    predicted = [replay(arrays, policy, profile).rate for policy in policies]
    seconds = np.array([[g.seconds for g in row] for row in generations])
    tokens = np.array([[len(g.tokens) for g in row] for row in generations])
    rate, each = tokens.sum(1) / seconds.sum(1), tokens / seconds
    lines = []
    for index, (policy, row) in enumerate(zip(policies, generations, strict=True)):
        low, high = np.quantile(each[index] / each[0], [0.25, 0.75])
        same = sum(a.tokens == b.tokens for a, b in zip(row, generations[0], strict=True))
        lines.append(
            LiveLine(
                policy.name,
                Tally.of(row),
                tuple(row),
                float(rate[index] / rate[0]),
                predicted[index] / predicted[0],
                (float(low), float(high)),
                same,
            )
        )
    return lines
