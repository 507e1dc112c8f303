"""Counter-based random numbers: scrambled counters, so that a draw depends on its key and number and on nothing else."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import cast

import numpy as np

from .contract import Array
from .kernels import on_first_use

kernels = on_first_use("counter_rng")


@functools.cache
def _inverse_normal() -> Callable[[Array], Array]:
    from scipy.special import ndtri  # half of scipy, for what few policies draw

    return cast(Callable[[Array], Array], ndtri)


def keyed_uniform(keys: Array, number: Array, count: int) -> Array:
    """Return [S, count] float64 uniforms in (0, 1) of 53 bits.

    Args:
        keys: [S] int64 of the streams.
        number: [S] int64, which draw of the stream it is.
        count: uniforms of a draw.
    """
    out = np.empty((len(keys), count))
    kernels().write_uniform(keys, number, out)
    return out


def keyed_normal(keys: Array, number: Array, count: int) -> Array:
    """Return [S, count] float64 standard normals; arguments as of `keyed_uniform`."""
    return _inverse_normal()(np.minimum(keyed_uniform(keys, number, count), 1.0 - 2.0**-53))
