"""Which layout of a weight multiplies fastest on this machine, measured when a model is loaded and kept for the next time.

Kept under processor, threads, torch and type, so that runs agree with themselves: another layout rounds differently in the
last bits. `SPECSTOP_LAYOUT=reordered` (`linear`, `transposed`) takes one for all products and measures nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
from collections.abc import Sequence
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

import torch

from ....policies.errors import InputError
from ....policies.files.atomic import cache_folder, write_json
from .products import BOUNDS, LAYOUTS, Product, can_pack, prepared

FORCED = "SPECSTOP_LAYOUT"
ROWS = (1, 2, 5, 16)
"""Rows that a class is measured with."""

SMALL = 64 << 10
"""Bytes of a weight below which nothing is measured: every layout takes a few microseconds, most of them the call itself."""

LEAST_GAIN = 0.03
"""A layout takes the place of the default, and a second one is kept beside it, where that saves at least this share."""

EXTRA = 1 << 30
"""Bytes that second layouts of a model may take in all."""

STALL_S, SLOWEST = 5e-4, 1e10
"""A call that takes longer than this and a row read at so many bytes a second has waited for something."""

_WEIGHTS, _LEAST_TURNS, _MOST_TURNS, _BUDGET_S = 4, 3, 25, 0.1

Seconds = dict[str, list[float]]
"""By layout, of a product by class of rows."""


def choose_layouts(products: Sequence[Product]) -> None:
    """Have products multiply in the layouts that are fastest here; those of one shape alike."""
    if forced := os.environ.get(FORCED):
        if forced not in LAYOUTS:
            raise InputError(f"{FORCED}: expected one of {', '.join(LAYOUTS)}, not {forced!r}")
        for product in products:
            product.settle((forced,) * len(BOUNDS))
        return
    by_shape: dict[str, list[Product]] = {}
    for product in products:
        if is_measured(product):
            weight = product.weights
            by_shape.setdefault(f"{weight.shape[0]}x{weight.shape[1]} {weight.dtype}", []).append(product)
    known = _read()
    found = {shape: measured(some) for shape, some in by_shape.items() if shape not in known}
    found = {shape: seconds for shape, seconds in found.items() if is_undisturbed(seconds, by_shape[shape][0])}
    if found:
        _write(found)
        known |= found
    left = EXTRA
    for shape, some in by_shape.items():
        if shape not in known:  # until the machine is quieter
            continue
        extra = sum(product.weights.nbytes for product in some)
        layouts = best_layouts(known[shape], 2 if extra <= left else 1)
        left -= extra if len(set(layouts)) > 1 else 0
        for product in some:
            product.use(layouts)
    for product in products:
        product.settle(product.layouts)


def is_measured(product: Product) -> bool:
    """Whether there is a choice for a product, and one that matters."""
    if product.weight is None:  # it has been settled
        return False
    return product.weight.nbytes >= SMALL and not can_pack(product.weight.device, product.weight.dtype)


def best_layouts(seconds: Seconds, most: int) -> tuple[str, ...]:
    """Return the layout for each class of rows, of at most `most` different ones: the least time, all classes alike.

    Each class counts by its share of the default's time, so that many rows do not outweigh one.
    """
    usual = LAYOUTS[0]
    best, least = (usual,) * len(BOUNDS), 1.0
    for kept in sorted({*combinations_with_replacement(LAYOUTS, most)}, key=lambda kept: len(set(kept))):
        chosen = tuple(min(kept, key=lambda layout: seconds[layout][at]) for at in range(len(BOUNDS)))
        share = sum(seconds[layout][at] / seconds[usual][at] for at, layout in enumerate(chosen)) / len(BOUNDS)
        if share < least - LEAST_GAIN:
            best, least = chosen, share
    return best


@torch.inference_mode()
def measured(products: Sequence[Product]) -> Seconds:
    """Return the seconds of a product of this shape, of each weight the least of several turns: what else runs only adds.

    Weights of several layers and all layouts take turns, so that none stays in the cache nearest to the core: no forward
    finds it there.
    """
    some = products[:_WEIGHTS]
    like = some[0].weights
    inputs = [torch.ones(1, rows, like.shape[1], dtype=like.dtype) for rows in ROWS]
    calls = [
        (layout, at, form, x)
        for layout in LAYOUTS
        for form in [prepared(layout, one.weights, one.bias) for one in some]
        for at, x in enumerate(inputs)
    ]
    least = [float("inf")] * len(calls)
    begin = time.perf_counter()
    for turn in range(_MOST_TURNS):
        if turn >= _LEAST_TURNS and time.perf_counter() - begin > _BUDGET_S:
            break
        for call, (_, _, form, x) in enumerate(calls):
            now = time.perf_counter()
            form(x)
            least[call] = min(least[call], time.perf_counter() - now)
    seconds: Seconds = {layout: [0.0] * len(ROWS) for layout in LAYOUTS}
    for value, (layout, at, _, _) in zip(least, calls, strict=True):
        seconds[layout][at] += value / len(some)
    return seconds


def is_undisturbed(seconds: Seconds, product: Product) -> bool:
    """Whether the machine had time for these timings.

    Where others take all cores, threads wait for each other, for milliseconds.
    """
    most = STALL_S + max(ROWS) * product.weights.nbytes / SLOWEST
    return all(value < most for values in seconds.values() for value in values)


def machine() -> str:
    """Return what timings hold for: processor, threads, torch."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{name}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def _file() -> Path:
    return cache_folder() / "layouts.json"


def _read() -> dict[str, Seconds]:
    """Return what is known of this machine, by shape; nothing where the file is not there or is damaged."""
    return _entries().get(machine(), {})


def _entries() -> dict[str, dict[str, Seconds]]:
    try:
        raw = json.loads(_file().read_text(encoding="utf-8"))
        return {
            where: {shape: seconds for shape, seconds in shapes.items() if _is_whole(seconds)}
            for where, shapes in raw.items()
        }
    except (OSError, ValueError, AttributeError):
        return {}


def _is_whole(seconds: Any) -> bool:
    """Whether timings read from a file are those of all layouts and classes."""
    return isinstance(seconds, dict) and all(
        isinstance(seconds.get(layout), list)
        and len(seconds[layout]) == len(ROWS)
        and all(isinstance(value, float) and value > 0.0 for value in seconds[layout])
        for layout in LAYOUTS
    )


def _write(found: dict[str, Seconds]) -> None:
    """Keep what was found; a cache that cannot be written costs the next run some tenths of a second."""
    entries = _entries()
    entries[machine()] = {**entries.get(machine(), {}), **found}
    with contextlib.suppress(OSError):
        _file().parent.mkdir(parents=True, exist_ok=True)
        write_json(_file(), entries)
