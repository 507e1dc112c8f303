"""The schedules of engines: a draft length by the size of the batch."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

from ..contract import Array, DraftStep, State, StopPolicy
from ..errors import PolicyError

MAX_STREAMS = 1024  # of a batch, for `LoadLength.unasked`


class LoadLength(StopPolicy):
    """Draft the length that a table has for the number of streams that share the verification.

    `num_speculative_tokens_per_batch_size` of vLLM, `draft_len_schedule` of TensorRT-LLM.

    Args:
        table: comma-separated `size:length`; each length holds from its batch size on, the first from 1 on.
    """

    joint: ClassVar[bool] = True
    first = 0

    def __init__(self, table: str = "1:4,4:3,8:2,16:1,32:0") -> None:
        try:
            pairs = [tuple(int(number) for number in entry.split(":")) for entry in str(table).split(",")]
            sizes, lengths = zip(*pairs, strict=True)
        except ValueError:
            sizes = lengths = (0,)
        if sizes[0] != 1 or list(sizes) != sorted(set(sizes)) or min(lengths) < 0:
            raise PolicyError(f"load: expected rising sizes from 1 on with lengths, as in 1:6,4:4,16:0, not {table!r}")
        self._sizes, self._lengths = np.array(sizes), np.array(lengths)
        self.max_depth = max(lengths)
        self.unasked = dict(enumerate(self._length(np.arange(1, MAX_STREAMS + 1)).tolist(), 1))
        self.name = f"load:{table}"

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Keep the branches above the length of their batch."""
        _, which, counts = np.unique(step.batch, return_inverse=True, return_counts=True)
        return step.alive & (step.depth < self._length(counts[which]))[:, None], state

    def _length(self, size: ArrayLike) -> Array:
        lengths: Array = self._lengths[np.searchsorted(self._sizes, size, side="right") - 1]
        return lengths
