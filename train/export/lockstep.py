"""A batch that drafts in step, as a serving engine runs it: one draft length for all requests, adapted by a rule.

It is what replay cannot do stream by stream, since the rule sees the mean over the batch. Counts are exact: each request is
a text of the trace, takes min(A, k) + 1 tokens at each step, and gives its place to the next one when it ends. Unlike
`replay_batch`, which asks one policy and prices each round, it plays dozens of rules at once and leaves the price for later:
they are compared on the same texts, under profiles without batches too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..replay.arrivals import deal
from ..replay.known_lengths import KnownLengths, ReplayedRuns
from ..replay.traces.arrays import TraceArrays


@dataclass(frozen=True)
class Steps:
    """SGLang's rule for the number of draft steps of one batch size (`AdaptiveStepSlot` of 0.5.23).

    A running mean of the accepted length, new = (1 - 0.2) old + 0.2 mean over the batch, starts at the current length less
    one. From the 15th step on, at every 5th, the length goes down one candidate after the other while the mean is at most
    the next lower one - 0.5 + `down`; if it did not, up while the mean is above the current one - 0.5 + `up`. From length 0
    it always tries the next one.

    Attributes:
        candidates: lengths, rising.
        up, down: `up_hysteresis` and `down_hysteresis`.
    """

    candidates: tuple[int, ...]
    up: float = 0.0
    down: float = -0.25

    ALPHA = 0.2
    EVERY = 5
    WARM_UP = 10

    def followed(self, mean: float, length: int, accepted: float) -> float:
        """Return the running mean after a step at `length`; one that drafted nothing says nothing."""
        return (1 - self.ALPHA) * mean + self.ALPHA * accepted if length > 0 else mean

    def is_time(self, count: int) -> bool:
        """Whether the length is looked at again after `count` steps."""
        return count > self.WARM_UP and (count - self.WARM_UP) % self.EVERY == 0

    def moved(self, at: int, mean: float) -> tuple[int, float]:
        """Return the place of the next length among the candidates, and the mean."""
        lengths, top = self.candidates, len(self.candidates) - 1
        if lengths[at] == 0:
            # A mean that began there is -1 (length less one), and steps without a draft leave it so.
            up = min(at + 1, top)
            return up, float(lengths[up] - 1) if lengths[up] > 0 and mean < 0 else mean
        down = at
        # For length 0 it is 0.5 + down, for no mean of accepted lengths comes down to -0.5 + down.
        while down > 0 and mean <= (lengths[down - 1] - 0.5 if lengths[down - 1] else 0.5) + self.down:
            down -= 1
        if down < at:
            return down, mean
        while at < top and mean > lengths[at] - 0.5 + self.up:
            at += 1
        return at, mean


def lockstep(arrays: TraceArrays, rules: Sequence[Steps], batch: int, start: int, seed: int = 0) -> ReplayedRuns:
    """Play a batch that is always full under each rule, a run for each, all on the same texts in the same order.

    Args:
        arrays: dense traces of chains.
        rules: to compare.
        batch: requests at a time; with 1, each text is decoded once, in full.
        start: the length to begin with; where a rule does not have it, the middle candidate, as the engine does.
        seed: of the order of the texts, which are dealt again where they are fewer than four batches.
    """
    order, runs = deal(arrays.sequences, batch, seed), range(len(rules))
    source = KnownLengths(arrays, np.repeat(runs, batch), np.tile(order[:batch], len(rules)))
    waiting = [deque(order[batch:].tolist()) for _ in runs]
    at = [rule.candidates.index(start) if start in rule.candidates else len(rule.candidates) // 2 for rule in rules]
    mean = [float(rule.candidates[a] - 1) for rule, a in zip(rules, at, strict=True)]
    counted = 0
    while source.active.any():
        length = np.array([rule.candidates[a] for rule, a in zip(rules, at, strict=True)])
        averages = (
            source.play(source.begin(), length[source.run], length[source.run]).reshape(len(rules), batch).mean(1)
        )
        _refill(source, waiting)
        counted += 1
        for i, rule in enumerate(rules):
            mean[i] = rule.followed(mean[i], int(length[i]), float(averages[i]))
            if rule.is_time(counted):
                at[i], mean[i] = rule.moved(at[i], mean[i])
    return source.replayed(len(rules))


def _refill(source: KnownLengths, waiting: Sequence[deque[int]]) -> None:
    """Give the places of texts that have ended to the next ones; a run ends when there are none."""
    for stream in np.flatnonzero(source.over()).tolist():
        run = source.run[stream]
        if waiting[run]:
            source.open(stream, waiting[run].popleft())
        else:
            # A batch that is not full any more is not what is asked for: the run ends for all its requests.
            source.active &= source.run != run
