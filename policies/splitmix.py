"""SplitMix64: how counters are scrambled into random bits, for arrays, tensors and compiled code alike."""

from __future__ import annotations

from typing import Any

GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def signed(value: int) -> int:
    """Return the two's complement reading of a 64-bit pattern: counters are int64, for torch has no unsigned arithmetic."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


# Shift and factor of each round. The last multiplies by 1, that is by nothing: numba loops over pairs of one type only.
_ROUNDS = ((30, signed(0xBF58476D1CE4E5B9)), (27, signed(0x94D049BB133111EB)), (31, 1))


def shift(value: Any, bits: int) -> Any:
    """Return int64 values, an array or a tensor, shifted to the right as unsigned ones are."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def mix(value: Any) -> Any:
    """Return the SplitMix64 finaliser (Steele, Lea, Flood 2014): a bijection that scrambles all bits.

    Args:
        value: an int64 array or tensor, of one dimension or more; single numpy numbers warn where they overflow.
    """
    return mix_in_place(value ^ 0)  # ^ 0 is a copy, of arrays and tensors alike


def mix_in_place(value: Any) -> Any:
    """`mix` in the memory of its argument: wide rows of numbers cost more to allocate than to compute.

    Operators only, so that arrays, tensors and the numbers of compiled code all go through it.
    """
    for bits, factor in _ROUNDS:
        shifted = value >> bits
        # >> of an int64 fills up with copies of the sign bit, which unsigned shifts do not have.
        shifted &= (1 << (64 - bits)) - 1
        value ^= shifted
        if factor != 1:
            value *= factor
    return value
