"""Steps of both models with each layout of their weights forced in turn, beside the layouts chosen by measurement.

    python benchmarks/layouts.py --check

Without `--pair` the embedded pair is used. Layouts take turns, and the least time of each counts: what else runs only adds.
The last line is one JSON object; with `--check` the exit code is 1 where the chosen layouts are not the best, or near it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterator
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
PREFIX, NEAR = 64, 1.05


def main() -> int:
    """Run the command line and return its exit code."""
    options = arguments(__doc__).parse_args()
    bars = Bars()
    folder = pair_folder(options)
    pairs = {layout: load(folder, layout) for layout in (*LAYOUTS, CHOSEN)}
    for role, rows in (("target", TARGET), ("draft", DRAFT)):
        print(f"      {role}: {layouts_of(getattr(pairs[CHOSEN], role))}")
        for count in rows[: 2 if options.quick else None]:
            compare(pairs, role, count, options, bars)
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
def compare(pairs: dict[str, Pair], role: str, count: int, options: argparse.Namespace, bars: Bars) -> None:
    """Time a step of so many tokens behind a text, the layouts in turn, and hold the chosen ones against the best."""
    caches = {layout: CachedModel(getattr(pair, role), 2 * PREFIX, pair.vocabulary) for layout, pair in pairs.items()}
    text, step = torch.arange(5, 5 + PREFIX)[None], torch.arange(9, 9 + count)[None]
    for cache in caches.values():
        cache.read(text, 1)
    turns, seconds = (6 if options.quick else 150), {layout: [] for layout in caches}
    order = list(caches)
    for turn in range(turns):
        for layout in order[turn % len(order) :] + order[: turn % len(order)]:
            cache = caches[layout]
            begin = time.perf_counter()
            cache.read(step)
            seconds[layout].append(time.perf_counter() - begin)
            cache.roll_back(PREFIX)
    least = {layout: min(values) for layout, values in seconds.items()}
    best = min((layout for layout in LAYOUTS), key=least.__getitem__)
    ratio = least[CHOSEN] / least[best]
    each = ", ".join(
        f"{layout} {1e3 * least[layout]:.2f} (median {1e3 * statistics.median(seconds[layout]):.2f})"
        for layout in caches
    )
    print(f"      {role}, {count} rows, ms: {each}")
    bars.add(
        f"{role} step of {count} over the best layout",
        ratio,
        ratio <= NEAR or options.quick,
        f"{ratio:.2f} of {best}; {NEAR}",
    )


if __name__ == "__main__":
    sys.exit(main())
