"""Rows of a policy's state: taken, and put in the place of others, when streams end, are refilled or move."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from .contract import Array, State
from .errors import PolicyFailure


def take(state: State, rows: Array | slice) -> State:
    """Return the state of some of its streams.

    Args:
        state: None, an array, or nested tuples or dataclasses of arrays; the first axis of each is S.
        rows: [R] int64 numbers of streams, [S] bool, or a slice.
    """
    return _over(lambda array: array[rows], state)


def put(state: State, rows: Array | slice, other: State) -> State:
    """Return the state with the rows of `other` in the place of its own; both are left as they are.

    Arrays whose further axes differ, as memories that grow with a text do, are filled up with zeros; so are rows of which
    nothing is remembered yet (None).

    Args:
        state: of S streams.
        rows: of R of them; see `take`.
        other: of R streams of the same policy.
    """

    def replaced(array: Array, news: Array) -> Array:
        shape = [max(sizes) for sizes in zip(array.shape[1:], news.shape[1:], strict=True)]
        out = _filled_up(array, shape)
        out[rows] = _filled_up(news, shape)
        return out

    def emptied(array: Array) -> Array:
        out = array.copy()
        out[rows] = 0
        return out

    return _over(emptied, state) if other is None else _over(replaced, state, other)


def join(states: Sequence[State]) -> State:
    """Return the state of the streams of several, one after the other; filled up with zeros as by `put`."""
    like = next((one for one in states if one is not None), None)
    if len(states) == 1 or like is None:
        return like

    def joined(*parts: Array) -> Array:
        shape = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
        return np.concatenate([_filled_up(part, shape) for part in parts])

    return _over(joined, *states)


def empty(like: State, rows: int) -> State:
    """Return the state of so many streams of which nothing is remembered, of the form of another one."""
    return _over(lambda array: np.zeros((rows, *array.shape[1:]), dtype=array.dtype), like)


def _filled_up(array: Array, shape: Sequence[int]) -> Array:
    """Return a copy [S, *shape] with zeros beyond what there was."""
    out = np.zeros((len(array), *shape), dtype=array.dtype)
    out[(slice(None), *map(slice, array.shape[1:]))] = array  # [:, :n1, :n2, ...]
    return out


def _over(apply: Callable[..., Array], *states: State) -> State:
    """Return a state of the same form whose arrays are what `apply` makes of the arrays of these."""
    first = states[0]
    if any(type(state) is not type(first) for state in states):
        raise PolicyFailure(f"states of one policy, but a {' and a '.join(type(state).__name__ for state in states)}")
    if first is None:
        return None
    if isinstance(first, np.ndarray):
        return apply(*states)
    if isinstance(first, tuple):
        if len({len(state) for state in states}) > 1:
            raise PolicyFailure("states of one policy, but from different depths of a round")
        return tuple(_over(apply, *parts) for parts in zip(*states, strict=True))
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        # Made by position: the fields of a state are the parameters of its constructor, in order.
        names = [field.name for field in dataclasses.fields(first)]
        return type(first)(*(_over(apply, *(getattr(state, name) for state in states)) for name in names))
    kind = type(first).__name__
    raise PolicyFailure(f"a state must be None, an array, or tuples or dataclasses of arrays, not {kind}")
