"""Timed passes over the weights of a model, in layouts of choice: as forwards meet them, with little else."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from .products import Product, prepared

ROWS = (1, 2, 5, 16)
"""Rows that a class is measured with."""

ORDER = (0, 0, 1, 2, 0, 3, 2, 1, 3)
"""Classes of the passes of a turn: as in a decoding loop, another size nearly every time. The first pass is not timed."""

SAMPLE = 128 << 20
"""Bytes of a model's weights that are enough to measure it by: more than stay in a cache from one pass to the next."""

_LEAST_TURNS, _MOST_TURNS, _BUDGET_S = 3, 15, 0.3

Choice = dict[str, tuple[str, ...]]
"""The layouts of a shape, by class of rows."""


def shape_of(product: Product) -> str:
    """Return what products need to have in common for their layouts to be the same ones."""
    weight = product.weights
    return f"{weight.shape[0]}x{weight.shape[1]} {str(weight.dtype).removeprefix('torch.')}"


def sample(products: Sequence[Product]) -> list[Product]:
    """Return products that stand for the model, in its order: at least one of each shape, `SAMPLE` bytes where there are."""
    # Reversed, so that of each shape the first one stays.
    firsts = {shape_of(product): at for at, product in reversed([*enumerate(products)])}
    taken, left = {*firsts.values()}, SAMPLE - sum(products[at].weights.nbytes for at in firsts.values())
    for at, product in enumerate(products):
        if at not in taken and product.weights.nbytes <= left:
            taken.add(at)
            left -= product.weights.nbytes
    return [products[at] for at in sorted(taken)]


def pass_seconds(products: Sequence[Product], choices: Sequence[Choice]) -> list[dict[str, list[float]]]:
    """Return for each choice the seconds of all products of a shape by class of rows: medians of passes over the model.

    Choices take turns; in a turn sizes change from pass to pass.
    """
    shapes = [shape_of(product) for product in products]
    wanted = {(at, layout) for choice in choices for at, shape in enumerate(shapes) for layout in choice[shape]}
    packed = {(at, layout): prepared(layout, products[at].weights, products[at].bias) for at, layout in sorted(wanted)}
    passes = [
        [[(shape, packed[at, choice[shape][size]]) for at, shape in enumerate(shapes)] for size in range(len(ROWS))]
        for choice in choices
    ]
    inputs = {
        (shape, size): torch.ones(1, rows, product.weights.shape[1], dtype=product.weights.dtype)
        for shape, product in zip(shapes, products, strict=True)
        for size, rows in enumerate(ROWS)
    }
    timed: list[dict[tuple[str, int], list[float]]] = [defaultdict(list) for _ in choices]
    begin = time.perf_counter()
    for turn in range(_MOST_TURNS):
        if turn >= _LEAST_TURNS and time.perf_counter() - begin > _BUDGET_S:
            break
        for at, by_size in enumerate(passes):
            for number, size in enumerate(ORDER):
                seconds = _one_pass(by_size[size], inputs, size)
                for shape in seconds if number else ():
                    timed[at][shape, size].append(seconds[shape])
    return [
        {shape: [statistics.median(found[shape, size]) for size in range(len(ROWS))] for shape in dict.fromkeys(shapes)}
        for found in timed
    ]


def _one_pass(
    calls: Sequence[tuple[str, Callable[[Tensor], Tensor]]], inputs: Mapping[tuple[str, int], Tensor], size: int
) -> dict[str, float]:
    """Multiply once with each weight, and return the seconds by shape."""
    seconds: dict[str, float] = defaultdict(float)
    for shape, product in calls:
        x = inputs[shape, size]
        begin = time.perf_counter()
        product(x)
        seconds[shape] += time.perf_counter() - begin
    return seconds
