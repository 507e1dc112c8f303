"""A batch that drafts in step, as a serving engine runs it: one draft length for all requests, adapted by a rule.

It is what replay cannot do stream by stream, since the rule sees the mean over the batch. Counts are exact: each request is
a text of the trace, takes min(A, k) + 1 tokens at each step, and gives its place to the next one when it ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..replay.traces.arrays import TraceArrays
from .lengths import Walked, draft_bound

Ints = np.ndarray[Any, np.dtype[np.int64]]


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
            up = min(at + 1, top)
            return up, float(lengths[up] - 1) if lengths[up] > 0 and mean < 0 else mean
        down = at
        while down > 0 and mean <= (lengths[down - 1] - 0.5 if lengths[down - 1] else 0.5) + self.down:
            down -= 1
        if down < at:
            return down, mean
        while at < top and mean > lengths[at] - 0.5 + self.up:
            at += 1
        return at, mean


def lockstep(arrays: TraceArrays, rules: Sequence[Steps], batch: int, start: int, seed: int = 0) -> Walked:
    """Play a batch that is always full under each rule, a run for each, all on the same texts in the same order.

    Args:
        arrays: dense traces of chains.
        rules: to compare.
        batch: requests at a time; with 1, each text is decoded once, in full.
        start: the length to begin with; where a rule does not have it, the middle candidate, as the engine does.
        seed: of the order of the texts, which are dealt again where they are fewer than four batches.
    """
    chance = np.random.default_rng(seed)
    repeats = 1 if batch == 1 else max(1, -(-4 * batch // arrays.sequences))
    order = np.concatenate([chance.permutation(arrays.sequences) for _ in range(repeats)])
    run = _Batch(arrays, order, len(rules), batch)
    at = [rule.candidates.index(start) if start in rule.candidates else len(rule.candidates) // 2 for rule in rules]
    mean = [float(rule.candidates[a] - 1) for rule, a in zip(rules, at, strict=True)]
    counted = 0
    while run.going.any():
        length = np.array([rule.candidates[a] for rule, a in zip(rules, at, strict=True)])
        averages = run.step(length).mean(1)
        counted += 1
        for i, rule in enumerate(rules):
            mean[i] = rule.followed(mean[i], int(length[i]), float(averages[i]))
            if rule.is_time(counted):
                at[i], mean[i] = rule.moved(at[i], mean[i])
    return run.walked()


class _Batch:
    """Requests of several runs side by side, [C, b]; a run ends when a place is free and no text is left.

    Attributes:
        going: [C] bool.
    """

    def __init__(self, arrays: TraceArrays, order: Ints, runs: int, batch: int) -> None:
        self._arrays, self._order = arrays, order
        self._accepted, self._bound = arrays.accepted.numpy(), draft_bound(arrays).numpy()
        self._prompt, self._offset = arrays.prompt_tokens.numpy(), arrays.offset.numpy()
        self._first, self._text = arrays.first_anchor.numpy(), arrays.text_tokens.numpy()
        self._sequence = np.tile(order[:batch], (runs, 1))
        self._anchor = self._first[self._sequence]
        self._backlog = self._prompt[self._sequence] + self._anchor
        self._next = np.full(runs, batch)
        self.going = np.ones(runs, dtype=bool)
        self._log: list[Ints] = []

    def step(self, length: Ints) -> Ints:
        """Play a step at `length` [C] and return [C, b] accepted tokens."""
        row = self._offset[self._sequence] + self._anchor - self._first[self._sequence]
        row = np.minimum(row, len(self._accepted) - 1)  # a run that has ended goes on without being counted
        drafted = np.minimum(length[:, None], self._bound[row])
        accepted: Ints = np.minimum(self._accepted[row], drafted)
        left = self._text[self._sequence] - self._anchor
        committed = np.minimum(accepted + 1, left)
        context = self._prompt[self._sequence] + self._anchor
        run = np.broadcast_to(np.arange(len(length))[:, None], row.shape)
        columns = (run, self._sequence, context, drafted, drafted, self._backlog, committed)
        self._log.append(np.stack([column[self.going].ravel() for column in columns]))
        read = np.minimum(accepted, drafted - 1)
        self._backlog = committed + np.where(drafted > 0, -read, self._backlog)
        self._anchor = self._anchor + committed
        for run_, place in zip(*np.nonzero((committed >= left) & self.going[:, None]), strict=True):
            self._deal(int(run_), int(place))
        return accepted

    def _deal(self, run: int, place: int) -> None:
        """Give a free place the next text; where none is left the run ends."""
        if self._next[run] >= len(self._order):
            self.going[run] = False
            return
        sequence = self._order[self._next[run]]
        self._next[run] += 1
        self._sequence[run, place] = sequence
        self._anchor[run, place] = self._first[sequence]
        self._backlog[run, place] = self._prompt[sequence] + self._first[sequence]

    def walked(self) -> Walked:
        """Return the rounds of all runs."""
        columns = torch.from_numpy(np.concatenate(self._log, 1)).unbind(0)
        return Walked(self._arrays, len(self._next), *columns)
