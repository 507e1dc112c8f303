"""Counter-based random numbers (SplitMix64): a draw depends on its key and its number only."""

from __future__ import annotations

from typing import Any

import numpy as np

from .contract import Array
from .kernels import on_first_use

GOLDEN = 0x9E3779B97F4A7C15

kernels = on_first_use("features")


def signed(value: int) -> int:
    """Return a 64-bit pattern as an int64: counters are signed because torch has no unsigned arithmetic."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


# Shift and factor of each round.
_ROUNDS = ((30, signed(0xBF58476D1CE4E5B9)), (27, signed(0x94D049BB133111EB)), (31, 1))


def mix(value: Any) -> Any:
    """Return the SplitMix64 finaliser (Steele, Lea, Flood 2014): a bijection that scrambles all bits.

    Args:
        value: int64 array or tensor of at least one dimension; numpy scalars warn on overflow.
    """
    return mix_in_place(value ^ 0)  # ^ 0 copies arrays and tensors


def mix_in_place(value: Any) -> Any:
    """Scramble an int64 array or tensor in place; allocating a wide row costs more than computing it."""
    # Operators only: this code runs on arrays, on tensors, and on scalars in compiled code.
    for bits, factor in _ROUNDS:
        shifted = value >> bits
        shifted &= (1 << (64 - bits)) - 1  # >> copies the sign bit
        value ^= shifted
        if factor != 1:
            value *= factor
    return value


def keyed_uniform(keys: Array, number: Array, count: int) -> Array:
    """Return [S, count] float64 uniforms in (0, 1) of 53 bits.

    Args:
        keys: [S] int64 keys of the streams.
        number: [S] int64 numbers of the draws.
        count: uniforms per draw.
    """
    out = np.empty((len(keys), count))
    kernels().write_uniform(keys, number, out)
    return out


def keyed_normal(keys: Array, number: Array, count: int) -> Array:
    """Return [S, count] float64 standard normals; see `keyed_uniform`."""
    from scipy.special import ndtri  # slow to import, and few policies draw normals

    out: Array = ndtri(np.minimum(keyed_uniform(keys, number, count), 1.0 - 2.0**-53))
    return out
