"""What every stop rule says of itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..costs import MAX_STREAMS
from ..errors import PolicyError

Array = np.ndarray[Any, Any]

SURVIVAL, ACCEPT, NEXT, GAIN = range(4)
"""What a rule compares with its threshold; see `kernels.decisions.decide`."""

Lengths = Sequence[tuple[int, int | None]]
"""(streams, tokens); see `Rule.lengths`."""

Times = Sequence[tuple[int, float]]
"""(streams, times) rising: what something is multiplied by in batches of so many streams."""


class Rule:
    """Says which branches to draft further: those that pass a threshold.

    Attributes:
        kind: its name.
        first: depth of the first decision.
        by: what is compared.
        strict: only what is above the threshold passes, not what equals it.
        together: all branches of a stream pass if one of them does.
        levels: by depth, the threshold of all streams [1], or of each [S]; beyond the last depth the last one holds
            (`threshold_at`).
        lengths: (streams, tokens) rising, of the batch sizes that were settled: where decisions cost more than they gain, so
            many tokens are drafted and nothing is decided; None = the rule decides.
        scales: what the thresholds are multiplied by, by batch size.
    """

    kind: str
    first: int = 1
    by: int = SURVIVAL
    strict: bool = False
    together: bool = False
    levels: tuple[Array, ...] = (np.zeros(1),)  # void where the policy itself compares, or another kernel
    lengths: tuple[tuple[int, int | None], ...] = ()
    scales: tuple[tuple[int, float], ...] = ()

    def threshold_at(self, depth: int, batch: Array) -> Array:
        """Return what is to be passed at a depth, [1] for all streams or [S].

        Args:
            depth: of the decision.
            batch: [S] int64, see `DraftStep`.
        """
        levels = self.levels
        return levels[depth] if depth < len(levels) else levels[-1]

    def settled(self) -> dict[int, int | None]:
        """Return `lengths` by size, rising."""
        return dict(self.lengths)

    def unasked(self) -> dict[int, int]:
        """Return the tokens drafted without a decision, by number of streams: as at the next larger settled size.

        Unless that is more than twice as large: of a batch that costs other than those that were settled it decides.
        """
        out, below = dict[int, int](), 0
        for size, tokens in self.settled().items():
            if tokens is not None:
                out |= dict.fromkeys(range(max(below + 1, -(-size // 2)), size + 1), tokens)
            below = size
        return out

    @property
    def undecided(self) -> str:
        """The batch sizes at which nothing is decided, with what is drafted there, as text; empty where there are none."""
        return ", ".join(f"{size} (drafts {tokens})" for size, tokens in self.lengths if tokens is not None)

    def to_dict(self) -> dict[str, Any]:
        """Return the rule as it is saved."""
        raise NotImplementedError


def times_at(times: Times, streams: Array) -> Array:
    """Return [n], `times` in batches of so many streams [n]: between two of them linear, beyond them the outermost one."""
    sizes, factors = zip(*times, strict=True) if times else ((1,), (1.0,))
    out: Array = np.interp(streams, sizes, factors)
    return out


def checked_times(kind: str, name: str, times: Times) -> tuple[tuple[int, float], ...]:
    """Return the `times` of a rule of this kind, called `name`; a `PolicyError` says what is wrong with them."""
    found = tuple((int(streams), float(factor)) for streams, factor in times)
    sizes = [streams for streams, _ in found]
    if sizes != sorted({n for n in sizes if n > 0}) or not all(0.0 < factor < math.inf for _, factor in found):
        raise PolicyError(f"rule {kind}: expected {name} as [streams, times] with streams rising, not {times!r:.80}")
    return found


def checked_lengths(kind: str, lengths: Lengths) -> tuple[tuple[int, int | None], ...]:
    """Return `Rule.lengths` of a rule of this kind; a `PolicyError` says what is wrong with them."""
    found = tuple((int(streams), None if tokens is None else int(tokens)) for streams, tokens in lengths)
    sizes = [streams for streams, _ in found]
    rising = sizes == sorted({n for n in sizes if 0 < n <= MAX_STREAMS})
    if not rising or any(tokens is not None and tokens < 0 for _, tokens in found):
        raise PolicyError(
            f"rule {kind}: expected lengths as [streams up to {MAX_STREAMS}, tokens] with streams rising, not "
            f"{lengths!r:.80}"
        )
    return found
