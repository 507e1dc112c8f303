"""Which texts are requested, and when: all at once, at random at a rate, or as they were recorded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...policies.contract import Array
from ...policies.errors import InputError

FULL = 4
"""Batches that there are requests for at least: the last ones run in a batch that is not full any more."""


def deal(texts: int, size: int, seed: int) -> Array:
    """Return which text each request is: all texts at random, again for `FULL` batches; once for one stream."""
    chance = np.random.default_rng(seed)
    repeats = 1 if size == 1 else max(1, -(-FULL * size // texts))
    # Whole permutations, so that every text is requested equally often.
    return np.concatenate([chance.permutation(texts) for _ in range(repeats)])


def at_once(count: int) -> Array:
    """Return [count] float64 zeros: a batch that is full until the last requests."""
    return np.zeros(count)


def poisson(count: int, rate: float, seed: int = 0) -> Array:
    """Return [count] float64 seconds, rising: `rate` requests a second on average, each at a time of its own.

    Raises:
        InputError: the rate is no number above 0.
    """
    if not (np.isfinite(rate) and rate > 0):
        raise InputError(f"arrivals: expected a rate above 0 requests a second, not {rate:g}")
    # Gaps between the arrivals of a Poisson process are exponential with mean 1 / rate.
    out: Array = np.random.default_rng(seed).exponential(1.0 / rate, count).cumsum()
    return out


def recorded(times: Sequence[float], count: int) -> Array:
    """Return [count] float64 seconds since the first of these times, the first so many of them.

    Raises:
        InputError: they fall, are not finite, or are too few.
    """
    out = np.asarray(times, dtype=np.float64)
    if out.ndim != 1 or not len(out) or not np.isfinite(out).all() or (np.diff(out) < 0).any():
        raise InputError("arrivals: expected a list of times in seconds that do not fall")
    if len(out) < count:
        raise InputError(f"arrivals: expected {count} times, one a request, not {len(out)}")
    since: Array = out[:count] - out[0]
    return since
