"""Steps of both models with each layout of their weights forced in turn, beside the layouts chosen by measurement.

    python benchmarks/layouts.py --check

Without `--pair` the shipped pair is used. Layouts take turns of a stretch each, in which sizes change from step to step, as
in a decoding loop: a layout that is fastest for one size alone is not where another one has just gone through the caches.
The last line is one JSON object; with `--check` the exit code is 1 where the chosen layouts are not the best, or near it.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from bars import Bars, arguments
from pairs import pair_folder
from specstop.decode import Pair, load_pair
from specstop.decode.models.cache import CachedModel
from specstop.decode.models.cpu.layouts import FORCED
from specstop.decode.models.cpu.products import LAYOUTS
from specstop.decode.models.engine import layouts_of

CHOSEN = "chosen"
TARGET, DRAFT = (1, 2, 3, 5, 9, 17), (1, 2)
PREFIX, NEAR, EACH = 64, 1.05, 3
"""Tokens of the text after which steps are taken; what is near the best; steps of each size in a stretch."""


def main() -> int:
    """Run the command line and return its exit code."""
    options = arguments(__doc__).parse_args()
    bars = Bars()
    folder = pair_folder(options)
    pairs = {layout: load(folder, layout) for layout in (*LAYOUTS, CHOSEN)}
    for role, rows in (("target", TARGET), ("draft", DRAFT)):
        print(f"      {role}: {layouts_of(getattr(pairs[CHOSEN], role))}")
        compare(pairs, role, rows[: 2 if options.quick else None], options, bars)
    whole = torch.get_num_threads() > 1 or os.cpu_count() == 1
    return bars.finish(options, f"{len(TARGET) + len(DRAFT)} kinds of step, {len(pairs)} layouts", whole)


def load(folder: Path, layout: str) -> Pair:
    """Return the pair with one layout for all products, or with those chosen."""
    with forced(None if layout == CHOSEN else layout):
        return load_pair(folder / "target", folder / "draft")


@contextmanager
def forced(layout: str | None) -> Iterator[None]:
    """Have models load with a layout."""
    os.environ.pop(FORCED, None)
    if layout is not None:
        os.environ[FORCED] = layout
    try:
        yield
    finally:
        os.environ.pop(FORCED, None)


@torch.inference_mode()
def compare(pairs: dict[str, Pair], role: str, rows: Sequence[int], options: argparse.Namespace, bars: Bars) -> None:
    """Time steps of so many tokens after a text, the layouts in turn, and hold the chosen ones against the best."""
    caches = {layout: CachedModel(getattr(pair, role), 2 * PREFIX, pair.vocabulary) for layout, pair in pairs.items()}
    for cache in caches.values():
        cache.read(torch.arange(5, 5 + PREFIX)[None], 1)
    seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
    order, chance = list(caches), random.Random(0)
    for turn in range(3 if options.quick else 60):
        sizes = [*rows] * EACH
        chance.shuffle(sizes)
        for layout in order[turn % len(order) :] + order[: turn % len(order)]:
            for count in sizes[:1] + sizes:  # the first one finds the caches of another layout
                seconds[layout, count].append(step_seconds(caches[layout], count))
            del seconds[layout, sizes[0]][-1 - sizes.count(sizes[0])]
    typical = {key: statistics.median(values) for key, values in seconds.items()}
    shares = []
    for count in rows:
        best = min(LAYOUTS, key=lambda layout: typical[layout, count])
        ratio = typical[CHOSEN, count] / typical[best, count]
        shares.append([typical[layout, count] / typical[best, count] for layout in caches])
        each = ", ".join(f"{layout} {1e3 * typical[layout, count]:.2f}" for layout in caches)
        print(f"      {role}, {count} rows, ms: {each}")
        bars.add(
            f"{role} step of {count} over the best layout at that size",
            ratio,
            ratio <= NEAR or options.quick,
            f"{ratio:.2f} of {best}; {NEAR}",
        )
    means = dict(zip(caches, map(statistics.fmean, zip(*shares, strict=True)), strict=True))
    best = min(LAYOUTS, key=means.__getitem__)
    ratio = means[CHOSEN] / means[best]
    bars.add(
        f"{role} steps of all sizes over the best layout",
        ratio,
        ratio <= NEAR or options.quick,
        f"{ratio:.2f} of {best}; {NEAR}",
    )


def step_seconds(cache: CachedModel, count: int) -> float:
    """Return the seconds of reading so many tokens, which are forgotten again."""
    step = torch.arange(9, 9 + count)[None]
    begin = time.perf_counter()
    cache.read(step)
    seconds = time.perf_counter() - begin
    cache.roll_back(PREFIX)
    return seconds


if __name__ == "__main__":
    sys.exit(main())
