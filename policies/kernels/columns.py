"""The formulas of the features: one number for each token and feature, from the summary of its row."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..features.codes import BOUND, Code
from .compiled import inlined, kernel

_MARGIN, _LARGEST, _ENTROPY = int(Code.MARGIN), int(Code.LARGEST), int(Code.ENTROPY)
_TOKEN_PROBABILITY, _SAMPLED, _PATH = int(Code.TOKEN_PROBABILITY), int(Code.SAMPLED_PROBABILITY), int(Code.PATH)
_NOISY_MARGIN, _NOISY_SCORE, _NOISY_LEAD = int(Code.NOISY_MARGIN), int(Code.NOISY_SCORE), int(Code.NOISY_LEAD)
_TOKEN, _PARENT, _DEPTH, _RANK = int(Code.TOKEN), int(Code.PARENT_TOKEN), int(Code.DEPTH), int(Code.RANK)
_TEMPERATURE, _PROBABILITY = int(Code.TEMPERATURE), int(Code.PROBABILITY)


@inlined
def _probability(top: Any, norm: Any, rank: Any) -> Any:
    """Return the probability of the token of this rank; 0 beyond the vocabulary, where `top` is -infinity."""
    return np.exp(np.float64(top[rank]) - np.float64(top[0]) - norm)


@inlined
def _bounded(margin: Any) -> Any:
    return min(max(margin, -BOUND), BOUND)


@kernel(
    "void(int64[::1], int64[::1], float32[:,::1], float64[:,::1], float32[:,::1], int64[:,::1], float64[:,::1], float64, "
    "float32[:,::1])"
)
def write_columns(
    codes: Any, at: Any, top: Any, stats: Any, best: Any, ids: Any, numbers: Any, temperature: float, out: Any
) -> None:
    """Write F columns of B tokens.

    Args:
        codes: [F], see `Code`.
        at: [F] the column of `out` that each goes to.
        top, stats: [R, .] of the rows; see `rows.read_rows`.
        best: [R, m] noisy scores of the rows in falling order, the drawn ones first.
        ids: [B, 6] of each token: its row, its id, its parent's, its rank among its siblings, their number, its depth.
        numbers: [B, 4]: its log-probability, the one in the distribution that is sampled from, that of its path, and how far
            it is ahead of the tokens that a filter left out.
        temperature: of the sampling.
        out: [B, .].
    """
    last = best.shape[1] - 1
    for b in range(ids.shape[0]):
        r, rank = ids[b, 0], ids[b, 3]
        for f in range(codes.shape[0]):
            code = codes[f]
            if code >= _PROBABILITY:
                value = _probability(top[r], stats[r, 0], code - _PROBABILITY)
            elif code == _MARGIN:
                value = _probability(top[r], stats[r, 0], 0) - _probability(top[r], stats[r, 0], 1)
            elif code == _LARGEST:
                value = np.float64(top[r, 0])
            elif code == _ENTROPY:
                value = stats[r, 1]
            elif code == _TOKEN_PROBABILITY:
                value = np.exp(numbers[b, 0])
            elif code == _SAMPLED:
                value = np.exp(numbers[b, 1])
            elif code == _PATH:
                value = numbers[b, 2]
            elif code == _NOISY_SCORE:
                value = np.float64(best[r, rank])
            elif code == _NOISY_MARGIN:  # to the best token that was not drawn
                ahead = np.float64(best[r, rank]) - np.float64(best[r, min(ids[b, 4], last)])
                value = _bounded(min(ahead, numbers[b, 3]))
            elif code == _NOISY_LEAD:  # to the best other token, a sibling or not
                ahead = np.float64(best[r, rank]) - np.float64(best[r, 0 if rank > 0 else 1])
                value = _bounded(min(ahead, numbers[b, 3]))
            elif code == _TOKEN:
                value = np.float64(ids[b, 1])
            elif code == _PARENT:
                value = np.float64(ids[b, 2])
            elif code == _DEPTH:
                value = np.float64(ids[b, 5])
            elif code == _RANK:
                value = np.float64(rank)
            else:
                value = temperature
            out[b, at[f]] = value
