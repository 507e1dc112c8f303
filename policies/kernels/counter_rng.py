"""Counter-based random numbers in compiled code."""

from __future__ import annotations

from typing import Any

from ..counter_rng import GOLDEN, mix_in_place, signed
from .compiled import kernel, kernel_part

_GOLDEN = signed(GOLDEN)
_mix = kernel_part(mix_in_place)


@kernel("void(int64[::1], int64[::1], float64[:,::1])")
def write_uniform(keys: Any, number: Any, out: Any) -> None:
    """Write [S, count] uniforms; see `keyed_uniform`."""
    for s in range(out.shape[0]):
        # Each draw has its own SplitMix64 sequence. `decode.verify.noise` computes the same bits on a device.
        row = _mix(_mix(number[s] * _GOLDEN + 1) ^ keys[s])
        for i in range(out.shape[1]):
            bits = (_mix(row + (i + 1) * _GOLDEN) >> 11) & ((1 << 53) - 1)  # the precision of float64
            out[s, i] = max(bits * 2.0**-53, 2.0**-54)  # 0 has no logarithm
