"""Rows of a policy's state: selected and replaced when streams end or are refilled."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from .contract import Array, State
from .errors import PolicyFailure


def take(state: State, rows: Array | slice) -> State:
    """Return the state of a subset of its streams.

    Args:
        state: None, an array, or nested tuples or dataclasses of arrays; the first axis of each is S.
        rows: [R] int64 numbers of streams, [S] bool, or a slice.
    """
    return _map(lambda array: array[rows], state)


def put(state: State, rows: Array | slice, other: State) -> State:
    """Return the state of S streams with `rows` (see `take`) replaced by the R rows of `other`; None = zeros.

    Arrays with other further axes, such as memories that grow with a text, are padded with zeros.
    """
    if other is None:
        other = _map(lambda array: np.zeros_like(array[rows]), state)

    def replaced(array: Array, new: Array) -> Array:
        out, padded = _padded([array, new])
        out[rows] = padded
        return out

    return _map(replaced, state, other)


def _padded(arrays: Sequence[Array]) -> list[Array]:
    """Return copies of arrays, padded with zeros to common sizes of all axes but the first."""
    shape = np.max([array.shape[1:] for array in arrays], axis=0, initial=0).astype(int)
    return [np.pad(array, [(0, 0), *((0, n) for n in shape - array.shape[1:])]) for array in arrays]


def _map(apply: Callable[..., Array], *states: State) -> State:
    """Return a state of the same form with `apply` called on corresponding arrays."""
    first = states[0]
    if any(type(state) is not type(first) for state in states):
        raise PolicyFailure(
            f"the states of a policy are of types {', '.join(type(state).__name__ for state in states)}"
        )
    if first is None:
        return None
    if isinstance(first, np.ndarray):
        return apply(*states)
    if isinstance(first, tuple):
        if len({len(state) for state in states}) > 1:
            raise PolicyFailure("the states of a policy are from different depths of a round")
        return tuple(_map(apply, *parts) for parts in zip(*states, strict=True))
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        # By position: the fields of a state are the parameters of its constructor, in order.
        names = [field.name for field in dataclasses.fields(first)]
        return type(first)(*(_map(apply, *(getattr(state, name) for state in states)) for name in names))
    raise PolicyFailure(
        f"a state must be None, an array, or tuples or dataclasses of arrays, not {type(first).__name__}"
    )
