"""The same prompts decoded by several methods, in alternation: what a shared machine does to one, it does to all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from ...policies.progress import Progress, silent
from ..loop import Request, Speculator
from ..models.cuda.recorder import Recorded
from ..profile import CalibrationRun
from ..records import Generation
from ..verify.noise import stream_key

CALIBRATE_EVERY = 3
"""Prompts between two calibration runs, where there are dozens of prompts."""


MOST_REHEARSALS, MOST_TRIES = 4, 3
"""Times that all texts are decoded before anything is timed, and that a turn is timed, while calls are recorded: a call is
made as it is the first time that it comes, and recorded the second time."""

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
    recordings: Counter[int] | None = None,
    progress: Progress = silent,
) -> list[list[Generation]]:
    """Decode every prompt by every method, the order of the methods turning from prompt to prompt.

    Args:
        runs: the methods.
        prompts: (id, token ids); the first one is decoded once more at the start, to warm up. Where calls are recorded as
            CUDA graphs, all are, until no call is left to be recorded.
        calibration: run in between, so that a profile of these very minutes comes out.
        calibrate_every: prompts between two calibration runs.
        seed: of the streams.
        batch: texts that each decodes side by side.
        recordings: takes up, by number of the method, how many calls were recorded while it was timed.
        progress: see `Progress`.

    Returns:
        By method, by prompt.
    """
    out: list[list[Generation]] = [[] for _ in runs]
    requests = [Request(tokens, stream_key(seed, name)) for name, tokens in prompts]
    size = texts_a_turn(batch)
    turns = [requests[first : first + size] for first in range(0, len(requests), size)]
    for run in runs:
        run.run(requests[:batch])
        if isinstance(run, Speculator):
            if Recorded.fresh:
                _record_all(run, turns)
            run.renew()  # a policy that carries its state has not seen this text yet
    done = 0
    for number, some in enumerate(turns):
        for turn in range(len(runs)):
            which = (turn + number) % len(runs)
            texts, recorded = _timed(runs[which], some)
            out[which] += texts
            if recordings is not None:
                recordings[which] += recorded
        if calibration is not None and number % calibrate_every == 0:
            calibration.play(number // calibrate_every)  # 0 warms up
        done += len(some)
        progress("live", done, len(prompts))
    return out


def _record_all(run: Speculator, turns: Sequence[Sequence[Request]]) -> None:
    """Decode all texts until no call is left to be recorded as a CUDA graph."""
    lengths = [len(request.prompt) for turn in turns for request in turn]
    if run.batch == 1 and run.topology.is_chain:
        run.prepare(range(min(lengths) + 1, max(lengths) + run.settings.max_new_tokens + 1))
    for _ in range(MOST_REHEARSALS):
        before = Recorded.fresh
        run.renew()
        for turn in turns:
            run.run(turn)
        if Recorded.fresh == before:
            break


def _timed(run: Runner, turn: Sequence[Request]) -> tuple[list[Generation], int]:
    """Return the texts of a turn, and how many calls were recorded meanwhile; if any were, decode it again.

    What passes from text to text must not meet a text twice: such a turn is kept as it is.
    """
    carries = isinstance(run, Speculator) and run.carries
    texts: list[Generation] = []
    recorded = 0
    for _ in range(1 if carries else MOST_TRIES):
        before = Recorded.fresh
        texts = run.run(turn)
        recorded = Recorded.fresh - before
        if not recorded:
            break
    return texts, recorded
