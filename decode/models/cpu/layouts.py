"""Which layout of its weights a model multiplies in on this machine: measured when it is loaded and kept for the next time.

Kept under processor, threads, torch and the shapes of the model, so that runs agree with themselves: another layout rounds
differently in the last bits. `SPECSTOP_LAYOUT=reordered` (`linear`, `transposed`) takes one for all and measures nothing.
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....policies.errors import InputError
from ....policies.files import cache_folder, write_json
from ....policies.text import strict_loads
from .passes import ROWS, SAMPLE, Choice, pass_seconds, sample, shape_of
from .products import BOUNDS, LAYOUTS, Product, can_pack, default_layouts
from .steps import Step, fastest_choice

FORCED = "SPECSTOP_LAYOUT"
SMALL = 64 << 10
"""Bytes of a weight below which nothing is measured: every layout takes a few microseconds, most of them the call itself."""

LEAST_GAIN = 0.03
"""A layout takes the place of the default, and a second one is kept beside it, where that saves at least this share."""

EXTRA = 1 << 30
"""Bytes that second layouts of a model may take in all."""

STALL_S, SLOWEST = 5e-4, 1e10
"""A call that takes longer than this and a row read at so many bytes a second has waited for something."""

Seconds = Mapping[str, Sequence[float]]
"""By layout, of all products of a shape, by class of rows."""


def choose_layouts(products: Sequence[Product], steps: Callable[[], Step] | None = None) -> None:
    """Have the products of a model multiply in the layouts that are fastest here; those of one shape alike.

    Args:
        products: of a model, in its order.
        steps: makes what takes a step of the whole model; None = products are timed alone.
    """
    if forced := os.environ.get(FORCED):
        if forced not in LAYOUTS:
            raise InputError(f"{FORCED}: expected one of {', '.join(LAYOUTS)}, not {forced!r}")
        for product in products:
            product.settle((forced,) * len(BOUNDS))
        return
    free = [product for product in products if is_measured(product)]
    if free:
        for product, layouts in zip(free, _known_or_measured(free, steps), strict=True):
            product.use(layouts)
    for product in products:
        product.settle(product.layouts)


def is_measured(product: Product) -> bool:
    """Whether there is a choice for a product, and one that matters."""
    if product.weight is None:  # it has been settled
        return False
    return product.weight.nbytes >= SMALL and not can_pack(product.weight.device, product.weight.dtype)


def _known_or_measured(products: Sequence[Product], steps: Callable[[], Step] | None) -> list[tuple[str, ...]]:
    """Return the layouts of each product: those that were kept for such a model, or those measured now."""
    shapes = [shape_of(product) for product in products]
    model = ", ".join(f"{count} of {shape}" for shape, count in sorted(Counter(shapes).items()))
    known = _entries().get(machine(), {}).get(model)
    if known is None:
        # A step of a large model takes too long, and its weights outweigh what is around the products.
        small = sum(product.weights.nbytes for product in products) <= SAMPLE
        known = best_by_steps(products, steps()) if small and steps is not None else best_choice(products)
        if known is None:  # until the machine is quieter
            return [default_layouts(product.weights) for product in products]
        _write(model, known)
    return [tuple(known[shape]) for shape in shapes]


@torch.inference_mode()
def best_choice(products: Sequence[Product]) -> Choice | None:
    """Return the layouts by shape; None where the machine had no time for the timings that they follow from.

    A second layout of the same weights saves nothing where both do not stay in the cache that one of them stays in: a pass
    over 46 MB of weights took 1.2 to 1.4 times as long with two layouts as with either of them, when sizes changed from pass
    to pass. So it is kept only where passes with both are measured to be faster than with one.
    """
    some = sample(products)
    weights = {shape_of(product): product.weights for product in some}
    timed = pass_seconds(some, [dict.fromkeys(weights, (layout,) * len(ROWS)) for layout in LAYOUTS])
    alone = {shape: {layout: found[shape] for layout, found in zip(LAYOUTS, timed, strict=True)} for shape in weights}
    counts = Counter(map(shape_of, some))
    for shape, weight in weights.items():
        # `alone` has sums over all products of a shape; one of them is judged.
        longest = max(max(values) for values in alone[shape].values())
        if not is_undisturbed(longest / counts[shape], weight):
            return None
    one, two = ({shape: best_layouts(alone[shape], most) for shape in weights} for most in (1, 2))
    doubled = sum(product.weights.nbytes for product in products if len(set(two[shape_of(product)])) > 1)
    if not 0 < doubled <= EXTRA:
        return one
    with_one, with_two = (np.sum([*found.values()], 0) for found in pass_seconds(some, [one, two]))
    return two if (with_two / with_one).mean() < 1.0 - LEAST_GAIN else one


@torch.inference_mode()
def best_by_steps(products: Sequence[Product], step: Step) -> Choice | None:
    """Return one layout for all products, that of the fastest steps of the model; None where the machine had no time."""
    shapes = dict.fromkeys(map(shape_of, products))
    return fastest_choice(products, [dict.fromkeys(shapes, (layout,) * len(BOUNDS)) for layout in LAYOUTS], step)


def best_layouts(seconds: Seconds, most: int) -> tuple[str, ...]:
    """Return the layout for each class of rows, of at most `most` different ones: the least time, all classes alike.

    Each class counts by its share of the default's time, so that many rows do not outweigh one.
    """
    usual = LAYOUTS[0]
    best, least = (usual,) * len(BOUNDS), 1.0
    # Single layouts first: two of them must be better than the best single one by `LEAST_GAIN`.
    for kept in sorted({*combinations_with_replacement(LAYOUTS, most)}, key=lambda kept: len(set(kept))):
        chosen = tuple(min(kept, key=lambda layout: seconds[layout][at]) for at in range(len(BOUNDS)))
        share = sum(seconds[layout][at] / seconds[usual][at] for at, layout in enumerate(chosen)) / len(BOUNDS)
        if share < least - LEAST_GAIN:
            best, least = chosen, share
    return best


def is_undisturbed(seconds: float, weight: Tensor) -> bool:
    """Whether the machine had time for a product that took so long.

    Where others take all cores, threads wait for each other, for milliseconds.
    """
    return seconds < STALL_S + max(ROWS) * weight.nbytes / SLOWEST


def machine() -> str:
    """Return what timings hold for: processor, threads, torch."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{name}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def _file() -> Path:
    return cache_folder() / "weight_layouts.json"


def _entries() -> dict[str, dict[str, Choice]]:
    """Return what is known, by machine and model; nothing where the file is not there or is damaged."""
    try:
        raw = strict_loads(_file().read_text(encoding="utf-8"))
        return {
            where: {model: choice for model, choice in models.items() if _is_whole(model, choice)}
            for where, models in raw.items()
        }
    except (OSError, ValueError, AttributeError):
        return {}


def _is_whole(model: str, choice: Any) -> bool:
    """Whether what was read from a file names a layout for each class of each shape of a model."""
    return isinstance(choice, dict) and all(
        isinstance(choice.get(shape), list)
        and len(choice[shape]) == len(BOUNDS)
        and {*map(str, choice[shape])} <= {*LAYOUTS}
        for shape in (part.partition(" of ")[2] for part in model.split(", "))
    )


def _write(model: str, choice: Choice) -> None:
    """Keep what was found; a cache that cannot be written costs the next run some tenths of a second."""
    # What another process writes in between is lost, and measured again.
    entries = _entries()
    entries[machine()] = {**entries.get(machine(), {}), model: choice}
    with contextlib.suppress(OSError):
        _file().parent.mkdir(parents=True, exist_ok=True)
        write_json(_file(), entries)
