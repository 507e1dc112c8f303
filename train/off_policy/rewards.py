"""The regression of the direct method and the doubly robust one: what a round brings, from what every round shows."""

from __future__ import annotations

import numpy as np
import torch
from sklearn.linear_model import RidgeCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from ...policies.contract import Array
from ..replay.traces.arrays import TraceArrays
from .rounds import Shown

FOLDS = 5
FEWEST_ROWS = 20
"""Rows of a stratum below which its mean serves."""


def context(arrays: TraceArrays, base: Shown | None) -> Array:
    """Return [N, C] of what does not depend on the coin: the anchor, and the deepest token of the logging policy's own.

    Features of a token that the logging policy alone would not have drawn must stay out: they would tell which rounds
    explored. Without that policy only the anchor serves.
    """
    columns = [values for values in arrays.columns.values() if values.dim() == 1]  # [N], of the anchor
    if base is not None:
        drafted = torch.from_numpy(base.drafted)
        # The node of the last token that it draws; 0 for all of its features where it draws none.
        at = (drafted - 1).clamp_min(0)[:, None]
        own = drafted > 0
        nodes = [values.gather(1, at)[:, 0] * own for values in arrays.columns.values() if values.dim() == 2]
        columns += [*nodes, drafted, *((drafted == k) for k in range(arrays.depth))]
    wide = torch.stack([torch.ones(len(arrays.accepted)), *(c.float() for c in columns)], 1)
    return np.nan_to_num(wide.numpy().astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)


def predicted(
    arrays: TraceArrays, base: Shown | None, reward: Array, seen: Array, needs: Array, seed: int = 0
) -> Array:
    """Return [N] rewards by ridge regression, each round's from other prompts than its own, so that its noise is not in it.

    Args:
        arrays: the trace.
        base: what it shows of the logging policy, or None.
        reward: [N], known where `seen`.
        seen: [N] bool.
        needs: [N] bool, rounds that show the policy only if they explore: fitted apart from the others.
        seed: of the folds.
    """
    x = context(arrays, base)
    _, prompt = np.unique(np.asarray(arrays.clusters), return_inverse=True)
    order = np.random.default_rng(seed).permutation(int(prompt.max()) + 1)
    # By prompt: rounds of one text resemble each other, and a regression that knows them would fit their noise.
    fold = np.repeat(order[prompt] % FOLDS, arrays.rows.numpy())
    out = np.zeros(len(x))
    for part in range(FOLDS):
        others = (fold != part) & seen
        # Rounds that need the coin are seen at a share eps, all others always: in one regression these would outweigh them.
        for kind in (False, True):
            here, fit = (fold == part) & (needs == kind), others & (needs == kind)
            if not here.any() or not others.any():
                continue
            if fit.sum() < FEWEST_ROWS:
                out[here] = reward[fit].mean() if fit.any() else reward[others].mean()
                continue
            model = make_pipeline(StandardScaler(), RidgeCV(np.logspace(-1, 4, 6)))
            out[here] = model.fit(x[fit], reward[fit]).predict(x[here])
    return out
