"""Several ways to decode the same prompts, in alternation: what a shared machine does to one, it does to all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ...policies.progress import Progress, silent
from ..loop import Speculator
from ..profile import CalibrationRun
from ..records import Generation
from ..verify.noise import stream_key

CALIBRATE_EVERY = 3
"""Prompts between two calibration runs, where there are dozens of prompts."""


class Runner(Protocol):
    """Whatever decodes a prompt: a `Speculator`, or another library."""

    def generate(self, prompt: Sequence[int], key: int = 0) -> Generation:
        """Return the text of one stream."""


def run_alternating(
    runs: Sequence[Runner],
    prompts: Sequence[tuple[str, Sequence[int]]],
    *,
    calibration: CalibrationRun | None = None,
    calibrate_every: int = CALIBRATE_EVERY,
    seed: int = 0,
    progress: Progress = silent,
) -> list[list[Generation]]:
    """Decode every prompt in every way, the order of the ways turning from prompt to prompt.

    Args:
        runs: the ways.
        prompts: (id, token ids); the first one is decoded once more at the start, to warm up.
        calibration: run in between, so that a profile of these very minutes comes out.
        calibrate_every: prompts between two calibration runs.
        seed: of the streams.
        progress: see `Progress`.

    Returns:
        By way, by prompt.
    """
    out: list[list[Generation]] = [[] for _ in runs]
    for run in runs:
        run.generate(prompts[0][1], stream_key(seed, prompts[0][0]))
        if isinstance(run, Speculator):
            run.renew()  # a policy that carries its state has not seen this text yet
    for number, (name, tokens) in enumerate(prompts):
        for turn in range(len(runs)):
            which = (turn + number) % len(runs)
            out[which].append(runs[which].generate(tokens, stream_key(seed, name)))
        if calibration is not None and number % calibrate_every == 0:
            calibration.play(number // calibrate_every)
        progress("live", number + 1, len(prompts))
    return out
