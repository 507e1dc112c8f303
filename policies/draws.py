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
    value = (value ^ shift(value, 30)) * _MIX1
    value = (value ^ shift(value, 27)) * _MIX2
    return value ^ shift(value, 31)


def keyed_uniform(key: Tensor, number: Tensor, count: int) -> Tensor:
    """Return [S, count] float64 uniforms in (0, 1) of 53 bits.

    Args:
        key: [S] int64 of the streams.
        number: [S] int64, which draw of the stream it is.
        count: uniforms of a draw.
    """
    row = mix(mix(number * signed(GOLDEN) + 1) ^ key)[:, None]
    at = torch.arange(1, count + 1, device=key.device) * signed(GOLDEN)
    return (shift(mix(row + at), 11).double() * 2.0**-53).clamp_min(2.0**-54)


def keyed_normal(key: Tensor, number: Tensor, count: int) -> Tensor:
    """Return [S, count] float64 standard normals; arguments as of `keyed_uniform`."""
    normal: Tensor = torch.special.ndtri(keyed_uniform(key, number, count).clamp_max(1.0 - 2.0**-53))
    return normal
