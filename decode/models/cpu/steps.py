"""Timed steps of a whole model in layouts of choice: products as a decoding loop meets them, and all that is around them.

Products alone mislead. Passes over 46 MB of weights that took turns with those of other layouts took 1.5 times as long as by
themselves, and in forwards a layout was 15% slower at two rows that was 3% faster in passes.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from .passes import Choice, shape_of
from .products import Product

Step = Callable[[int], float]
"""Reads so many tokens after a text with the model, forgets them again, and returns the seconds."""

ORDER = (5, 1, 3, 9, 2, 1, 5, 2, 9, 3, 1, 2)
"""Tokens of the steps of a turn: another size each time, as in a decoding loop."""

SETTLING = (1, 5, 2, 3)
"""Tokens of the steps before these: caches still hold what the layout before has read."""

WAITED = 3.0
"""Where the median of some steps is so many times the least of them, the machine had no time."""

_LEAST_TURNS, _MOST_TURNS, _BUDGET_S = 3, 12, 0.6


def fastest_choice(products: Sequence[Product], choices: Sequence[Choice], step: Step) -> Choice | None:
    """Return the choice whose steps take the least time, all sizes alike; None where the machine had no time for it.

    Choices take turns. The products are left in the last one timed.
    """
    timed: list[dict[int, list[float]]] = [defaultdict(list) for _ in choices]
    begin = time.perf_counter()
    for turn in range(_MOST_TURNS):
        if turn >= _LEAST_TURNS and time.perf_counter() - begin > _BUDGET_S:
            break
        for choice, found in zip(choices, timed, strict=True):
            for product in products:
                product.use(choice[shape_of(product)])
            for rows in SETTLING:
                step(rows)
            for rows in ORDER:
                found[rows].append(step(rows))
    sizes = sorted({*ORDER})
    typical = np.array([[statistics.median(found[rows]) for rows in sizes] for found in timed])  # [choices, sizes]
    if any(median > WAITED * min(found[rows]) for row, found in zip(typical, timed, strict=True)
           for median, rows in zip(row.tolist(), sizes, strict=True)):  # fmt: skip
        return None
    # By its share of the fastest at that size, so that many rows do not outweigh one.
    return choices[int((typical / typical.min(0)).mean(1).argmin())]
