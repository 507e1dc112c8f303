"""How far a learned policy's survival can be believed: predicted against observed, by depth.

Rows are the rounds that the policy itself comes to, every drawn candidate of them, also after a rejection, because a live
policy does not know that a branch has failed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeGuard

import numpy as np
import torch
from torch import Tensor

from ...policies.contract import Array, DraftStep, StopPolicy
from ...policies.learned import LearnedPolicy, TreeGain
from ..heads.calibration import BINS, calibration_error, perfect_error
from ..replay.log import Rounds
from ..replay.run import Replayed
from ..replay.traces.arrays import TraceArrays, seen_features
from ..replay.traces.hidden_states import seen_states

MOST_ROUNDS = 20_000
_DRAWS = 20
_CHUNK = 4096
"""Rounds at once, which bounds the memory of features and hidden states."""

_Z = 1.96


@dataclass(frozen=True)
class Bin:
    """Candidates of like prediction: their mean prediction, the share accepted, its 95% interval (Wilson)."""

    predicted: float
    observed: float
    low: float
    high: float
    count: int


@dataclass(frozen=True)
class Depth:
    """Reliability at one depth.

    Attributes:
        depth: j.
        all: every candidate as one bin.
        ece: expected calibration error, the mean distance of the bins' predicted and observed shares.
        ece_perfect: what a perfectly calibrated predictor of the same predictions would show, by chance alone.
        bins: of equal counts.
    """

    depth: int
    all: Bin
    ece: float
    ece_perfect: float
    bins: tuple[Bin, ...]


@dataclass(frozen=True)
class Reliability:
    """Of one policy: by depth, and the mean over depths, weighted by counts."""

    name: str
    rounds: int
    ece: float
    ece_perfect: float
    depths: tuple[Depth, ...]


def has_survival(policy: StopPolicy) -> TypeGuard[LearnedPolicy]:
    """Whether a policy computes the survival of a depth; policies of trees weigh nodes instead."""
    return isinstance(policy, LearnedPolicy) and not isinstance(policy, TreeGain)


def survival(policy: LearnedPolicy, arrays: TraceArrays, row: Tensor, history: Tensor) -> Tensor:
    """Return [R, N] float64, S of every node as the policy computes it while it drafts; NaN where it is not asked.

    Args:
        policy: asked, with every branch alive.
        arrays: the trace.
        row: [R] of the anchors.
        history: [R, 4] when the rounds began.
    """
    seen = seen_features(arrays, policy.features, row, history).numpy()
    tree, streams = arrays.tree.limited(policy.max_depth), len(row)
    out = np.full((streams, arrays.tree.nodes), np.nan)
    state = policy.start(streams, np.zeros(streams, dtype=np.int64))  # learned policies draw no random numbers
    for depth in range(policy.first, tree.deepest + 1):
        level = np.array(tree.levels[depth]) - 1  # nodes; row 0 is the root, -1 at depth 0
        nodes = torch.from_numpy(level)
        step = DraftStep(
            depth,
            np.ones((streams, len(level)), dtype=bool),  # after a rejection too: a live one does not know
            np.tile(tree.parent_in_level[depth], (streams, 1)),
            np.ascontiguousarray(seen[:, level + 1]),
            {name: seen_states(arrays.hidden_state(name), row, nodes if depth else None) for name in policy.hidden},
            np.arange(streams),
        )
        _, state = policy.keep(step, state)
        if depth:
            out[:, level] = policy.latest(state)
    return torch.from_numpy(out)


def reliability(policy: LearnedPolicy, arrays: TraceArrays, rounds: Rounds, result: Replayed, seed: int) -> Reliability:
    """Compare S with what was accepted; of many rounds, in a random sample.

    Where the first decision is at a depth above 1, S leaves out what lies before it, and so does the comparison.
    """
    row = arrays.offset[rounds.sequence] + rounds.anchor - arrays.first_anchor[rounds.sequence]
    use = torch.nonzero(~arrays.cut[row])[:, 0]
    if len(use) > MOST_ROUNDS:
        generator = np.random.default_rng(seed)
        use = torch.from_numpy(np.sort(generator.choice(use.numpy(), MOST_ROUNDS, replace=False)))
    row, history = row[use], result.history[use]
    predicted = torch.cat(
        [survival(policy, arrays, *part) for part in zip(row.split(_CHUNK), history.split(_CHUNK), strict=True)]
    )
    tree, start = arrays.tree, max(policy.first, 1)
    path = arrays.accepted_nodes(row)
    depths = []
    for depth in range(start, min(arrays.depth, policy.max_depth) + 1):
        level = torch.tensor(tree.levels[depth]) - 1
        known = torch.ones(len(row), len(level), dtype=torch.bool)
        if start > 1:  # S begins at `start`: given that what is above it was accepted
            known = path[:, torch.tensor([_ancestor(tree.parent, int(n) + 1, depth - start + 1) - 1 for n in level])]
        guess = predicted[:, level][known].numpy()
        if len(guess):
            depths.append(_at_depth(depth, guess, path[:, level][known].numpy(), seed))
    total = sum(d.all.count for d in depths) or 1
    ece, perfect = (sum(getattr(d, name) * d.all.count for d in depths) / total for name in ("ece", "ece_perfect"))
    return Reliability(policy.shown_name, len(row), ece, perfect, tuple(depths))


def _ancestor(parent: tuple[int, ...], node: int, up: int) -> int:
    for _ in range(up):
        node = parent[node]
    return node


def _at_depth(depth: int, guess: Array, accepted: Array, seed: int) -> Depth:
    order = np.argsort(guess, kind="stable")
    guess, accepted = guess[order], accepted[order]
    perfect = perfect_error(guess, seed, BINS, _DRAWS)[0]
    parts = (np.array_split(side, min(BINS, len(guess))) for side in (guess, accepted))
    bins = tuple(_bin(*both) for both in zip(*parts, strict=True))
    return Depth(depth, _bin(guess, accepted), calibration_error(guess, accepted, BINS), perfect, bins)


def _bin(guess: Array, accepted: Array) -> Bin:
    """Return a bin with Wilson's interval of its share."""
    count, share = len(guess), float(accepted.mean())
    centre = (share + _Z**2 / (2 * count)) / (1 + _Z**2 / count)
    half = _Z / (1 + _Z**2 / count) * (share * (1 - share) / count + _Z**2 / (4 * count**2)) ** 0.5
    return Bin(float(guess.mean()), share, max(centre - half, 0.0), min(centre + half, 1.0), count)
