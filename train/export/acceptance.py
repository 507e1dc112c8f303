"""Coefficients for vLLM's adaptive verification (`decode.engines.vllm_plugin`): acceptance from the draft's top probability.

sigmoid(slope x log-odds of max q, clamped to +-40, + intercept of the position): what vLLM fits while it serves, from a cold
start of .5 and -.2; here it is fitted on traces before.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.sparse import csr_matrix, hstack
from sklearn.linear_model import LogisticRegression

from ..replay.traces.arrays import TraceArrays

CLAMP = 40.0
"""As in vLLM's `acceptance_estimator.py` (0.32.0, 0.33.0)."""

_MOST_ROWS = 200_000
_LEAST_ROWS = 100


def fit_acceptance(arrays: TraceArrays, depth: int) -> dict[str, Any] | None:
    """Return `slope` and `intercepts` by position, fitted on what a verification shows: accepted tokens and the first other.

    Args:
        arrays: of a trace of chains.
        depth: positions.

    Returns:
        None where the trace has no `top1`, or hardly a row.
    """
    if "top1" not in arrays.columns:
        return None
    top = arrays.column("top1")[:, :depth].double().numpy()
    reached = arrays.accepted.numpy()
    position = np.arange(depth)
    seen = (position <= reached[:, None]) & ~arrays.cut.numpy()[:, None]
    row, at = np.nonzero(seen)
    accepted = at < reached[row]
    if len(row) < _LEAST_ROWS or accepted.all() or not accepted.any():
        return None
    if len(row) > _MOST_ROWS:
        chosen = np.random.default_rng(0).choice(len(row), _MOST_ROWS, replace=False)
        row, at, accepted = row[chosen], at[chosen], accepted[chosen]
    odds = log_odds(top[row, at])
    # A column for the slope, and one for the intercept of each position.
    where = csr_matrix((np.ones(len(row)), (np.arange(len(row)), at)), shape=(len(row), depth))
    model = LogisticRegression(C=1e3, fit_intercept=False, max_iter=1000)  # hardly regularised: vLLM fits on from here
    model.fit(hstack([csr_matrix(odds[:, None]), where]), accepted)
    slope, *intercepts = model.coef_[0].tolist()
    return {"slope": max(slope, 0.0), "intercepts": intercepts, "rows": len(row)}


def log_odds(probability: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return log(p / (1 - p)), within +-`CLAMP`."""
    # log 1e-18 is -41, outside the clamp; p = 1 gives infinity, which is clamped as well.
    p = np.clip(probability, 1e-18, 1.0)
    with np.errstate(divide="ignore"):
        found: np.ndarray[Any, Any] = np.clip(np.log(p) - np.log1p(-p), -CLAMP, CLAMP)
    return found
