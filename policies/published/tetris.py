"""TETRIS: a budget of tokens for a batch, used for the likeliest ones."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from ..arguments import validate_int, validate_number
from ..batch_rules import Batches
from ..contract import Array, DraftStep, DraftTree, RoundOutcome, State, StopPolicy
from ..tree_rules import append_level, node_values


class Tetris(StopPolicy):
    """Draft a few tokens more than can be verified, and send the likeliest of the batch, by the probability of their paths.

    TETRIS (arXiv 2502.15197; its vLLM: a capacity of (K - extra) tokens a stream, K being drafted). It reads the drawn
    tokens and removes nodes, so it is for `match` and `point` verification, and for temperature 0. The state is
    (key [S], batch [S], levels of `append_level`).

    Args:
        each: tokens sent per stream, on average over the batch.
        extra: tokens drafted beyond that.
        capacity: tokens sent of the whole batch, independent of its size; 0 = `each` per stream.
    """

    reads_seconds: ClassVar[bool] = False
    features = ("path_logprob",)
    joint: ClassVar[bool] = True
    first = 0  # if `max_depth` is 1, only depth 0 shows which streams share a verification

    def __init__(self, each: float = 3, extra: int = 2, capacity: int = 0) -> None:
        self.each = validate_number("tetris", "each", each, 0.0, 1024.0)
        self.capacity = validate_int("tetris", "capacity", capacity, 0)
        self.max_depth = math.ceil(self.each) + validate_int("tetris", "extra", extra, 0)
        self.name = f"tetris:{each:g}"

    def start(self, streams: int, keys: Array) -> State:
        """Return the state without levels."""
        return keys.copy(), np.full(streams, -1, dtype=np.int64), None

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Keep all, and store the paths' probabilities."""
        levels = append_level(state[2], step, step.features[:, :, 0]) if step.depth else None
        return step.alive.copy(), (state[0], step.batch, levels)

    def select(self, tree: DraftTree, state: State) -> Array:
        """Return the likeliest tokens of each batch."""
        key, batch, levels = state
        batches = Batches.of(batch, key)
        capacity = np.full(len(batches.sizes), self.capacity) if self.capacity else self.each * batches.sizes
        return batches.best(node_values(levels, tree).astype(np.float64), tree.drawn, capacity.astype(np.int64))

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        """Drop the round's levels."""
        return *state[:2], None
