"""One draft length for all streams of a batch: by its size, or by what it has accepted so far."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

from ..baselines.scores import check_number, check_whole
from ..builtins import builtin
from ..contract import Array, DraftStep, RoundOutcome, State, StopPolicy
from ..errors import PolicyError
from ..profile import Profile
from .grid import ByCosts, priced
from .groups import batches_of

LARGEST = 1024
"""Streams in a batch; for more than these `LoadLength` is asked."""


@builtin("load", "table", "load?table=1:4,8:2,32:0 drafts a length by the size of the batch")
class LoadLength(StopPolicy):
    """Draft the length that a table has for the number of streams that share the verification.

    What engines take as a schedule: `num_speculative_tokens_per_batch_size` of vLLM, `draft_len_schedule` of TensorRT-LLM.

    Args:
        table: `size:length` with commas between; each length holds from its batch size on, the first from 1 on.

    The size alone settles the length, so nothing is asked (`unasked`) in a batch of up to `LARGEST`.
    """

    joint: ClassVar[bool] = True
    first = 0

    def __init__(self, table: str = "1:4,4:3,8:2,16:1,32:0") -> None:
        try:
            pairs = [tuple(int(number) for number in entry.split(":")) for entry in str(table).split(",")]
            sizes, lengths = zip(*pairs, strict=True)
        except ValueError:
            raise PolicyError(f"load: expected a table such as 1:6,4:4,16:0, not {table!r}") from None
        if sizes[0] != 1 or list(sizes) != sorted(set(sizes)) or min(lengths) < 0:
            raise PolicyError(
                f"load: expected batch sizes that rise from 1 on, and lengths of 0 or more, not {table!r}"
            )
        self._sizes, self._lengths = np.array(sizes), np.array(lengths)
        self.max_depth = max(lengths)
        self.unasked = {size: int(self._length(size)) for size in range(1, LARGEST + 1)}
        self.name = f"load:{table}"

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Keep the branches above the length of their batch."""
        # Streams without a round, -1, count as a batch too; none of their branches is alive.
        _, which, counts = np.unique(step.batch, return_inverse=True, return_counts=True)
        return step.alive & (step.depth < self._length(counts[which]))[:, None], state

    def _length(self, size: ArrayLike) -> Array:
        """Return the length for batches of a size, or of each of some sizes."""
        found: Array = self._lengths[np.searchsorted(self._sizes, size, side="right") - 1]
        return found


@dataclass(frozen=True, slots=True)
class GoodputState:
    """Of `SmartSpec`.

    Attributes:
        key: [S] int64.
        seen: [S, 2] float64, tokens accepted and tokens whose fate is known, older rounds counting less.
        length: [S] int64, of the round.
    """

    key: Array
    seen: Array
    length: Array


@builtin("smartspec", "start", "smartspec:0.7 drafts the length of the most goodput of a batch")
class SmartSpec(ByCosts):
    """Draft for all streams of a batch the one length of the largest goodput: expected tokens over predicted seconds.

    SmartSpec (arXiv 2406.14066): with a the acceptance rate of the batch, a moving average over its rounds, a stream that
    drafts k tokens is expected to commit 1 + a + ... + a^k. The length may be 0. Window and prior were not found: ours are
    `decay` a round and `prior` tokens accepted at `start`. What was learned passes from text to text.

    Args:
        start, prior, decay: see above.
        draft, token: costs where there is no profile (`grid.LinearCosts`).
        profile: a latency profile with the costs, or its path; where none is given and `draft` and `token` are left as they
            are, `evaluate` and runs with a profile give theirs.
        max_depth: the longest length.
    """

    reads_seconds: ClassVar[bool] = False
    joint: ClassVar[bool] = True
    carries: ClassVar[bool] = True
    first = 0

    def __init__(
        self,
        start: float = 0.7,
        prior: float = 10.0,
        decay: float = 0.95,
        draft: float = 0.1,
        token: float = 0.01,
        profile: str | Path | Profile = "",
        max_depth: int = 8,
    ) -> None:
        self.begin, self.decay = (
            check_number("smartspec", name, value, 0.0, 1.0) for name, value in (("start", start), ("decay", decay))
        )
        self.prior = check_number("smartspec", "prior", prior, 1e-3)
        self.max_depth = check_whole("smartspec", "max_depth", max_depth)
        self._grids = priced("smartspec", profile, draft, token)
        self.name = f"smartspec:{start:g}"

    def start(self, streams: int, keys: Array) -> State:
        """Return the state of streams that have seen nothing but the prior."""
        seen = np.tile((self.prior * self.begin, self.prior), (streams, 1))
        return GoodputState(keys.copy(), seen, np.zeros(streams, dtype=np.int64))

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Settle the length before drafting, and keep the branches above it."""
        if step.depth == 0:
            state = GoodputState(state.key, state.seen, self._lengths(step.batch, state))
        return step.alive & (step.depth < state.length)[:, None], state

    def _lengths(self, batch: Array, state: GoodputState) -> Array:
        """Return [S] int64."""
        groups, lengths = batches_of(batch, state.key), np.arange(self.max_depth + 1)
        grid, n = self._grids.of(groups.largest, self.max_depth), groups.sizes[:, None]
        accepted, known = groups.sums(state.seen).T  # [G]
        tokens = n * np.cumsum((accepted / known)[:, None] ** lengths, 1)  # [G, K + 1]
        rate = tokens / (grid.drafting_s(n, lengths) + grid.verify[n, n * (lengths + 1)])
        return groups.spread(rate.argmax(1), len(batch))  # of equal rates the shortest length

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        """Return the state with what the round has shown."""
        told = outcome.active & ~outcome.cut & (outcome.verified > 0)
        known = np.minimum(outcome.accepted + 1, outcome.verified)  # those accepted and the first one refused
        now = np.stack([outcome.accepted, known], 1).astype(np.float64)
        seen = np.where(told[:, None], self.decay * state.seen + now, state.seen)
        return GoodputState(state.key, seen, state.length)
