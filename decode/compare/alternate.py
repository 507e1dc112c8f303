"""The same prompts decoded by several methods, in alternation: what a shared machine does to one, it does to all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ...policies.progress import Progress, silent
from ..loop import Request, Speculator
from ..profile import CalibrationRun
from ..records import Generation
from ..verify.noise import stream_key

CALIBRATE_EVERY = 3
"""Prompts between two calibration runs, where there are dozens of prompts."""


TEXTS_A_PLACE = 2
"""Prompts of a turn for each of a batch's places, so that texts that end give theirs to others."""


def texts_a_turn(batch: int) -> int:
    """Return how many prompts each method decodes before the next one does."""
    return batch * TEXTS_A_PLACE if batch > 1 else 1


class Runner(Protocol):
    """Whatever decodes prompts: a `Speculator`, or another library."""

    def run(self, requests: Sequence[Request]) -> list[Generation]:
        """Return their texts."""


def run_alternating(
    runs: Sequence[Runner],
    prompts: Sequence[tuple[str, Sequence[int]]],
    *,
    calibration: CalibrationRun | None = None,
    calibrate_every: int = CALIBRATE_EVERY,
    seed: int = 0,
    batch: int = 1,
    progress: Progress = silent,
) -> list[list[Generation]]:
    """Decode every prompt by every method, the order of the methods turning from prompt to prompt.

    Args:
        runs: the methods.
        prompts: (id, token ids); the first one is decoded once more at the start, to warm up.
        calibration: run in between, so that a profile of these very minutes comes out.
        calibrate_every: prompts between two calibration runs.
        seed: of the streams.
        batch: texts that each decodes side by side.
        progress: see `Progress`.

    Returns:
        By method, by prompt.
    """
    out: list[list[Generation]] = [[] for _ in runs]
    requests = [Request(tokens, stream_key(seed, name)) for name, tokens in prompts]
    for run in runs:
        run.run(requests[:batch])
        if isinstance(run, Speculator):
            run.renew()  # a policy that carries its state has not seen this text yet
    size = texts_a_turn(batch)
    for number, first in enumerate(range(0, len(requests), size)):
        some = requests[first : first + size]
        for turn in range(len(runs)):
            which = (turn + number) % len(runs)
            out[which] += runs[which].run(some)
        if calibration is not None and number % calibrate_every == 0:
            calibration.play(number // calibrate_every)  # 0 warms up
        progress("live", first + len(some), len(prompts))
    return out
