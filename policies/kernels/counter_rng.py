"""Counter-based random numbers in compiled code: the same mixing as that of arrays (`policies.splitmix`)."""

from __future__ import annotations

from typing import Any

from ..splitmix import GOLDEN, mix_in_place, signed
from .compiled import exact, kernel

_GOLDEN = signed(GOLDEN)
_mix = exact(mix_in_place)


@kernel("void(int64[::1], int64[::1], float64[:,::1])")
def write_uniform(keys: Any, number: Any, out: Any) -> None:
    """Write uniforms in (0, 1) of 53 bits.

    Args:
        keys, number: [S]; see `keyed_uniform`.
        out: [S, count].
    """
    for s in range(out.shape[0]):
        # The start of a SplitMix64 sequence of its own, of which outputs 1, 2, ... follow. `decode.verify.noise` computes the
        # same on a device, to the last bit.
        row = _mix(_mix(number[s] * _GOLDEN + 1) ^ keys[s])
        for i in range(out.shape[1]):
            # The 53 bits that a float64 holds; not 0, whose normal would be infinite.
            bits = (_mix(row + (i + 1) * _GOLDEN) >> 11) & ((1 << 53) - 1)
            out[s, i] = max(bits * 2.0**-53, 2.0**-54)
