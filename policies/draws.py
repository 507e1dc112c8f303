"""Counter-based random numbers: scrambled counters, so that a draw depends on its key and number and on nothing else."""

from __future__ import annotations

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def signed(value: int) -> int:
    """Return the two's complement reading of a 64-bit pattern: torch has no unsigned arithmetic."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


_MIX1, _MIX2 = signed(0xBF58476D1CE4E5B9), signed(0x94D049BB133111EB)


def shift(value: Tensor, bits: int) -> Tensor:
    """Return int64 values shifted to the right as unsigned ones are."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def mix(value: Tensor) -> Tensor:
    """Return the SplitMix64 finaliser of int64 values (Steele, Lea, Flood 2014): a bijection that scrambles all bits."""
    return _mix_in_place(value.clone())


def _mix_in_place(value: Tensor) -> Tensor:
    """`mix` in the memory of its argument: wide rows of numbers cost more to allocate than to compute."""
    for bits, factor in ((30, _MIX1), (27, _MIX2), (31, 1)):
        value ^= (value >> bits).bitwise_and_((1 << (64 - bits)) - 1)
        if factor != 1:
            value *= factor
    return value


def unit(bits: Tensor) -> Tensor:
    """Return float64 uniforms in (0, 1) of 53 bits from scrambled int64 values, whose memory is used up."""
    bits = bits.bitwise_right_shift_(11).bitwise_and_((1 << 53) - 1)
    return bits.double().mul_(2.0**-53).clamp_min_(2.0**-54)


def wide_uniform(row: Tensor, count: int) -> Tensor:
    """Return [R, count] uniforms as of `unit`, for scrambled counters `row` [R, 1]."""
    at = torch.arange(1, count + 1, device=row.device) * signed(GOLDEN)
    return unit(_mix_in_place(row + at))


def keyed_uniform(key: Tensor, number: Tensor, count: int) -> Tensor:
    """Return [S, count] float64 uniforms in (0, 1) of 53 bits.

    Args:
        key: [S] int64 of the streams.
        number: [S] int64, which draw of the stream it is.
        count: uniforms of a draw.
    """
    return wide_uniform(mix(mix(number * signed(GOLDEN) + 1) ^ key)[:, None], count)


def keyed_normal(key: Tensor, number: Tensor, count: int) -> Tensor:
    """Return [S, count] float64 standard normals; arguments as of `keyed_uniform`."""
    normal: Tensor = torch.special.ndtri(keyed_uniform(key, number, count).clamp_max(1.0 - 2.0**-53))
    return normal
