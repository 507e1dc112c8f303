"""Which streams share a verification, and in which order they are looked at."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from ..typing import Array


@dataclass(frozen=True, slots=True)
class Batches:
    """The batches of S streams.

    Attributes:
        members: [M] int64, streams with a round, batch after batch, in each by their keys: whatever rows they stand in.
        starts: [G + 1] int64, where each batch begins.
        largest: the most streams of a batch.
    """

    members: Array
    starts: Array
    largest: int

    @property
    def sizes(self) -> Array:
        """[G] int64, streams of each."""
        out: Array = self.starts[1:] - self.starts[:-1]
        return out

    def spread(self, values: Array, streams: int) -> Array:
        """Return [S, ...] what each batch has, to its streams; zeros to those without a round.

        Args:
            values: [G, ...].
            streams: S.
        """
        out = np.zeros((streams, *values.shape[1:]), dtype=values.dtype)
        out[self.members] = values.repeat(self.sizes, axis=0)
        return out

    def sums(self, values: Array) -> Array:
        """Return [G, ...] the sums over each batch of values [S, ...], in the order of its members."""
        if not len(self.members):
            return np.zeros((0, *values.shape[1:]), dtype=values.dtype)
        # Of an empty stretch `reduceat` would give the next element instead of 0; no batch is without a member.
        out: Array = np.add.reduceat(values[self.members], self.starts[:-1], axis=0)
        return out


def batches_of(batch: Array, keys: Array) -> Batches:
    """Return the batches.

    Args:
        batch: [S] int64, see `DraftStep`; -1 = no round.
        keys: [S] int64 by which the streams of a batch are put in order; of equal ones the first row comes first.
    """
    return _batches_of(batch.tobytes(), keys.tobytes())


# By their bytes, as arrays have no hash. What comes out is shared by all who ask: nobody may write into it.
@functools.lru_cache(maxsize=4)  # the same at every depth of a round, and mostly in the next one too
def _batches_of(of_batch: bytes, of_keys: bytes) -> Batches:
    batch, keys = np.frombuffer(of_batch, dtype=np.int64), np.frombuffer(of_keys, dtype=np.int64)
    order = np.lexsort((keys, batch))  # by the last of them first; stable: of equal keys the first row
    order = order[np.count_nonzero(batch < 0) :]  # they come first
    of = batch[order]
    bounds = np.flatnonzero(of[1:] != of[:-1]) + 1
    starts = np.concatenate([[0], bounds, [len(order)]]) if len(order) else np.zeros(1, dtype=np.int64)
    return Batches(order, starts, int(np.diff(starts).max(initial=0)))
