"""Counter-based random numbers: scrambled counters, so that a draw depends on its key and number and on nothing else."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, cast

import numpy as np

Array = np.ndarray[Any, Any]

GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def signed(value: int) -> int:
    """Return the two's complement reading of a 64-bit pattern: counters are int64, for torch has no unsigned arithmetic."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


_ROUNDS = ((30, signed(0xBF58476D1CE4E5B9)), (27, signed(0x94D049BB133111EB)), (31, 1))


def shift(value: Any, bits: int) -> Any:
    """Return int64 values, an array or a tensor, shifted to the right as unsigned ones are."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def mix(value: Any) -> Any:
    """Return the SplitMix64 finaliser (Steele, Lea, Flood 2014): a bijection that scrambles all bits.

    Args:
        value: an int64 array or tensor, of one dimension or more; single numpy numbers warn where they overflow.
    """
    return mix_in_place(value ^ 0)


def mix_in_place(value: Any) -> Any:
    """`mix` in the memory of its argument: wide rows of numbers cost more to allocate than to compute.

    Operators only, so that arrays, tensors and the numbers of compiled code (`kernels.draws`) all go through it.
    """
    for bits, factor in _ROUNDS:
        shifted = value >> bits
        shifted &= (1 << (64 - bits)) - 1
        value ^= shifted
        if factor != 1:
            value *= factor
    return value


@functools.cache
def kernels() -> ModuleType:
    """Return the compiled code; importing it takes half a second."""
    from .kernels import draws

    return draws


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
