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
        joint = [_joint(weight, bias) for weight, bias in layers]
        *hidden, last = joint
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


class Blocks:
    """Blocks x + SiLU(W x + b) one behind the other, then a linear layer; made as `Layers` is.

    Args:
        blocks: (weight [W, W], bias [W]) in order.
        leave: (weight [out, W], bias [out]).

    Attributes:
        state: [W], where the input is put; it is written over.
    """

    def __init__(self, blocks: Sequence[tuple[Tensor, Tensor]], leave: tuple[Tensor, Tensor]) -> None:
        *middle, last = (_joint(*layer) for layer in (*blocks, leave))
        self._full = np.ones(last.shape[1], dtype=np.float32)
        self.state = self._full[:-1]
        self._half, self._bent = np.empty_like(self.state), np.empty_like(self.state)
        self._leave = last.dot
        self._blocks = [(0.5 * matrix).dot for matrix in middle]

    def __call__(self) -> list[float]:
        """Return the outputs for what is in `state`."""
        state, half, bent = self.state, self._half, self._bent
        for product in self._blocks:
            product(self._full, half)
            np.tanh(half, bent)
            np.multiply(half, bent, bent)
            np.add(half, bent, bent)
            np.add(state, bent, state)
        outputs: list[float] = self._leave(self._full).tolist()
        return outputs


class Residual:
    """A linear layer from numbers and arrays to the width of `Blocks`, and these.

    Args:
        enter: (weight [W, in], bias [W]) for the numbers.
        parts: [W, H] for each array.
        blocks, leave: see `Blocks`.
    """

    def __init__(
        self, enter: tuple[Tensor, Tensor], parts: Sequence[Tensor], blocks: Sequence[tuple[Tensor, Tensor]],
        leave: tuple[Tensor, Tensor],
    ) -> None:  # fmt: skip
        first = _joint(*enter)
        given: Any = np.ones(first.shape[1], dtype=np.float32)
        self._given = given
        self._first: Any = memoryview(given)
        self._inputs = range(len(given) - 1)
        self._enter = first.dot
        self._parts = [np.ascontiguousarray(part.numpy()).dot for part in parts]
        self._blocks = Blocks(blocks, leave)
        self._share = np.empty_like(self._blocks.state)

    def __call__(self, x: Sequence[float], arrays: Sequence[Array] = ()) -> list[float]:
        """Return the outputs for one row of numbers and an array [H] for each part."""
        first, state = self._first, self._blocks.state
        for at in self._inputs:
            first[at] = x[at]
        self._enter(self._given, state)
        for product, array in zip(self._parts, arrays, strict=True):
            product(array, self._share)
            np.add(state, self._share, state)
        return self._blocks()


def _joint(weight: Tensor, bias: Tensor) -> Array:
    """Return [out, in + 1], the bias as the column of a last input of 1."""
    return np.ascontiguousarray(np.concatenate([weight.numpy(), bias.numpy()[:, None]], 1), dtype=np.float32)
