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


class Residual:
    """A linear layer, blocks x + SiLU(W x + b), and a linear layer; made as `Layers` is.

    Args:
        enter, leave: (weight [out, in], bias [out]) of the first and the last layer.
        blocks: those of the blocks, each [W, W] and [W].
    """

    def __init__(
        self, enter: tuple[Tensor, Tensor], blocks: Sequence[tuple[Tensor, Tensor]], leave: tuple[Tensor, Tensor]
    ) -> None:
        first, *middle, last = (
            np.ascontiguousarray(np.concatenate([weight.numpy(), bias.numpy()[:, None]], 1), dtype=np.float32)
            for weight, bias in (enter, *blocks, leave)
        )
        given: Any = np.ones(first.shape[1], dtype=np.float32)
        self._given = given
        self._first: Any = memoryview(given)
        self._inputs = range(len(given) - 1)
        self._state = np.ones(last.shape[1], dtype=np.float32)
        self._x = self._state[:-1]
        self._half, self._bent = np.empty_like(self._x), np.empty_like(self._x)
        self._enter, self._leave = first.dot, last.dot
        self._blocks = [(0.5 * matrix).dot for matrix in middle]

    def __call__(self, x: Sequence[float]) -> list[float]:
        """Return the outputs for one row of inputs."""
        first, state, half, bent = self._first, self._x, self._half, self._bent
        for at in self._inputs:
            first[at] = x[at]
        self._enter(self._given, state)
        for product in self._blocks:
            product(self._state, half)
            np.tanh(half, bent)
            np.multiply(half, bent, bent)
            np.add(half, bent, bent)
            np.add(state, bent, state)
        outputs: list[float] = self._leave(self._state).tolist()
        return outputs
