"""A small network for one row: matrix products and SiLU in buffers of their own, biases and halves folded in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

Array = np.ndarray[Any, Any]


class Layers:
    """Linear layers with SiLU between them.

    SiLU(x) is g + g tanh(g) with g = x / 2, so all layers but the last are halved beforehand: three array operations, none
    of which overflows. A last input of 1 stands for the bias.

    Args:
        layers: (weight [out, in], bias [out]) in order.
    """

    def __init__(self, layers: Sequence[tuple[Tensor, Tensor]]) -> None:
        joint = [np.concatenate([weight.numpy(), bias.numpy()[:, None]], 1) for weight, bias in layers]
        *hidden, last = (np.ascontiguousarray(matrix, dtype=np.float32) for matrix in joint)
        inputs = [np.ones(matrix.shape[1], dtype=np.float32) for matrix in joint]
        given: Any = inputs[0]
        self._first: Any = memoryview(given)
        self._width = range(len(inputs[0]) - 1)
        self._hidden = [
            ((0.5 * matrix).dot, given, np.empty(len(matrix), dtype=np.float32), below[:-1])
            for matrix, given, below in zip(hidden, inputs, inputs[1:], strict=False)
        ]
        self._last, self._given = last.dot, inputs[-1]

    def __call__(self, x: Sequence[float]) -> list[float]:
        """Return the outputs for one row of inputs."""
        first = self._first
        for at in self._width:
            first[at] = x[at]
        for product, given, half, bent in self._hidden:
            product(given, half)
            np.tanh(half, bent)
            np.multiply(half, bent, bent)
            np.add(half, bent, bent)
        outputs: list[float] = self._last(self._given).tolist()
        return outputs
