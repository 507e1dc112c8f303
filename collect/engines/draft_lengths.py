"""Whether the draft lengths that an engine chose depend on acceptance.

What a round would have accepted beyond its draft was not observed. Rounds with longer drafts show it if lengths do not depend
on acceptance. This assumption has two consequences that records can contradict:

- of the rounds that drafted at least j tokens and accepted the first j - 1, the share that accepts token j is the same at
  every length (strata: j);
- what a round accepted says nothing about the length of the next round of the request (strata: the round's length, and j).

Both are tested by a score test of general association over the strata (N. Mantel, Journal of the American Statistical
Association 58, 1963). Its scores are summed by request, because rounds of one request resemble each other and may share a
length, and their mean is compared with 0 by Hotelling's T^2. No test can detect a length that depends on the token after the
draft and on nothing before it.
"""

from __future__ import annotations

import numpy as np

from ...policies.contract import Array
from ..acceptance import DEPENDENT, FIXED, INDEPENDENT

LEVEL = 0.01
"""If lengths are independent, one import in a hundred is refused longer policies. The other error costs more, because it
promises unreachable rates, and it is rare: lengths by confidence are detected in all of 40 simulated runs of 20 requests with
40 rounds each."""

FEWEST = 20
"""Requests below which rounds are resampled one by one."""

GROUPS = 8
"""The most lengths that are distinguished; where there are more, neighbours are grouped."""


def lengths_kind(accepted: Array, drafted: Array, request: Array, cut: Array, follows: Array) -> tuple[str, float]:
    """Return (`FIXED`, `INDEPENDENT` or `DEPENDENT`, p-value) of draft lengths.

    Args:
        accepted, drafted: [N] int64, tokens of each round.
        request: [N] int64, the request of each round.
        cut: [N] bool, rounds that are excluded because the end of the text decided their outcome.
        follows: [N] bool, the round comes directly after that of the row before it, in the same request.
    """
    lengths = np.unique(drafted)
    if len(lengths) < 2:
        return FIXED, 1.0
    group = np.searchsorted(lengths, drafted)
    if len(lengths) > GROUPS:
        group = group * GROUPS // len(lengths)
    # Of few requests the scores' variance is not known: each round is a unit, which rejects too often where lengths are
    # constant over a request, and not too rarely.
    unit = request if len(np.unique(request)) >= FEWEST else np.arange(len(drafted))
    row, after = np.flatnonzero(~cut), np.flatnonzero(follows)
    after = after[~cut[after - 1]]
    same = _p_value(accepted[row], drafted[row], group[row], unit[row], np.zeros_like(row))
    following = _p_value(accepted[after - 1], drafted[after - 1], group[after], unit[after - 1], drafted[after - 1])
    chance = min(1.0, 2.0 * min(same, following))  # Bonferroni
    return DEPENDENT if chance < LEVEL else INDEPENDENT, chance


def _p_value(accepted: Array, drafted: Array, group: Array, unit: Array, stratum: Array) -> float:
    """Return the p-value of: given the stratum, acceptance at each depth does not depend on the group of the length.

    Args:
        accepted, drafted: [R] of the rounds that are compared.
        group: [R] int64, of the lengths that it is compared with.
        unit: [R] int64, rounds of one unit may depend on each other.
        stratum: [R] int64, that a round falls in besides the depth.
    """
    from scipy.stats import f as f_distribution  # slow to import, and only needed where lengths vary

    if not len(accepted):
        return 1.0
    depth = np.arange(1, max(int(drafted.max()), 1) + 1)
    row, at = np.nonzero((depth <= drafted[:, None]) & (depth <= accepted[:, None] + 1))  # depths with an outcome
    if not len(row):
        return 1.0
    success = (at < accepted[row]).astype(np.float64)
    _, stratum = np.unique(stratum[row] * len(depth) + at, return_inverse=True)
    _, column = np.unique(group[row], return_inverse=True)
    _, unit = np.unique(unit[row], return_inverse=True)
    strata, columns, units = (int(index.max()) + 1 for index in (stratum, column, unit))
    size = np.bincount(stratum, minlength=strata)
    error = success - (np.bincount(stratum, success, strata) / size)[stratum]
    cells = np.bincount(stratum * columns + column, minlength=strata * columns)
    share = cells.reshape(strata, columns) / size[:, None]
    # [units, columns]: the sum of (success - its mean) * (is of this length - its mean), means over the stratum.
    scores = np.bincount(unit * columns + column, error, units * columns).reshape(units, columns)
    for length in range(columns):
        scores[:, length] -= np.bincount(unit, error * share[stratum, length], units)
    if units < 2:
        return 1.0
    mean, covariance = scores.mean(0), np.atleast_2d(np.cov(scores, rowvar=False))
    rank = int(np.linalg.matrix_rank(covariance, hermitian=True))
    if rank == 0 or units <= rank + 1:
        return 1.0
    squared = units * float(mean @ np.linalg.pinv(covariance, rcond=1e-10, hermitian=True) @ mean)
    return float(f_distribution.sf(squared * (units - rank) / (rank * (units - 1)), rank, units - rank))
