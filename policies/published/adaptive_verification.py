"""vLLM's adaptive verification: a budget of tokens for a batch by a model of acceptance that is learned while decoding."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ..arguments import validate_int
from ..batch_rules import Batches, CostGrid
from ..contract import Array, DraftStep, DraftTree, RoundOutcome, State, StopPolicy
from ..kernels.compiled import copy_row, kernel, known_depths, sigmoid
from ..profile import Profile

SLOPE, INTERCEPT, MAX_ODDS = 0.5, -0.2, 40.0
RIDGE, DAMPING = 1e-3, 50.0


@kernel("void(i8[::1], i8[::1], i8[::1], f8[:,::1])")
def share_latest(members: Any, starts: Any, updates: Any, weights: Any) -> None:
    """Write to the streams of each batch the weights of the one that was fitted most often: others may have paused."""
    for g in range(starts.shape[0] - 1):
        rows = members[starts[g] : starts[g + 1]]
        latest = rows[0]
        for s in rows:
            if updates[s] > updates[latest]:
                latest = s
        for s in rows:
            copy_row(weights[latest], weights[s])


@kernel("void(b1[:,::1], f4[:,:,::1], i8, f8[:,::1])")
def store_odds(alive: Any, features: Any, depth: int, odds: Any) -> None:
    """Write the log-odds of a depth to `odds` [S, K], clipped: the largest of a stream, infinite if there is none."""
    for s in range(alive.shape[0]):
        prob = -1.0
        for b in range(alive.shape[1]):
            if alive[s, b]:
                prob = max(prob, np.float64(features[s, b, 0]))
        if prob >= 0.0:  # 0 and 1 give infinities, which are clipped
            odds[s, depth - 1] = min(max(np.log(prob / (1.0 - prob)), -MAX_ODDS), MAX_ODDS)


@kernel("void(f8[:,::1], f8[:,::1], f8[:,::1], f8[:,::1])")
def predict(odds: Any, weights: Any, previous: Any, out: Any) -> None:
    """Write the confidences [S, K]; a depth without odds has those of the depth before it, or its previous confidence."""
    for s in range(odds.shape[0]):
        z = np.inf
        for k in range(odds.shape[1]):
            if not np.isinf(odds[s, k]):
                z = odds[s, k]
            out[s, k] = previous[s, k] if np.isinf(z) else sigmoid(weights[s, 0] * z + weights[s, 1 + k])


@kernel("void(b1[::1], b1[::1], i8[::1], i8[::1], f8[:,::1], f8[:,::1], f8[:,:,::1])")
def add_tokens(active: Any, cut: Any, accepted: Any, verified: Any, odds: Any, confidences: Any, sums: Any) -> None:
    """Add the tokens of a round that are known to the sums; see `AcceptanceState`."""
    for s in range(odds.shape[0]):
        for k in range(min(known_depths(active[s], cut[s], accepted[s], verified[s]), odds.shape[1])):
            z, prob = odds[s, k], confidences[s, k]
            if not np.isinf(z):
                # Gradient and curvature at the weights of the last fit, which all streams of the batch share.
                w, rest = prob * (1.0 - prob), (1.0 if k < accepted[s] else 0.0) - prob
                for i, value in enumerate((w * z * z, w * z, w, rest * z, rest, 1.0)):
                    sums[s, k, i] += value


def newton_step(sums: Array, weights: Array) -> Array:
    """Return the weights [1 + K], slope w and intercepts b_k, after a damped Newton step, given sums [K, 6]."""
    # The curvature is diagonal except for the row and column of w: the b_k are eliminated (`slope` is the Schur complement
    # of w), then computed by substitution. A step is damped by the number of tokens that it is estimated from.
    slopes, mixed, levels, to_slope, to_level, count = sums.T
    levels, total = levels + RIDGE, count.sum()
    slope = RIDGE + (slopes - mixed * mixed / levels).sum()
    step = (to_slope - mixed * to_level / levels).sum() / slope * total / (total + DAMPING)
    if not weights[0] + step >= 0.0:  # a slope below 0 would invert the confidence; `not` also catches NaN
        step = 0.0
    moved: Array = weights + np.append(step, (to_level - mixed * step) / levels * count / (count + DAMPING))
    return moved


@dataclass(slots=True)  # not frozen, like `DraftStep`
class AcceptanceState:
    """State of `AdaptiveVerification`; each row has the weights of its batch."""

    key: Array  # [S] int64
    batch: Array  # [S] int64
    weights: Array  # [S, 1 + K] float64, the slope and the intercept of each depth
    updates: Array  # [S] int64, number of fits
    rounds: Array  # [S] int64, since the last fit
    sums: Array  # [S, K, 6] float64 of this stream since then: w z z, w z, w, r z, r and the number of tokens known
    odds: Array  # [S, K] float64 log-odds of this round by depth; infinite if not called
    previous: Array  # [S, K] float64 confidences of the round before


class AdaptiveVerification(StopPolicy):
    """Draft K tokens for each stream, and send as many of the batch's as make the most tokens per second.

    vLLM's adaptive verification (0.33, `v1/worker/gpu/spec_decode/adaptive_verification.py` and `acceptance_estimator.py`). A
    token at depth k is accepted with probability sigmoid(w z + b_k), where z is the log-odds of the draft's likeliest token,
    clipped to +-40. Its survival is the product along its stream. The number of sent tokens is the B that maximises
    (streams + the B best survivals) / (draft seconds + verification seconds of streams + B tokens), by the survivals of the
    round before. The B best tokens of this round are sent. w starts at 0.5 and b_k at -0.2. Every 100 rounds one Newton step
    on the observed tokens (the accepted ones and the first rejected) updates them, with ridge 0.001, damped by n / (n + 50).

    It trims verification, never drafting. It reads only features that do not depend on the drawn token, so it is exact under
    `rejection` too, where it is called level by level: the rest of the budget goes to the level's best, by the confidences
    known before it. The last depth, at which no policy is called, has the odds of the one before. vLLM begins a request with
    confidences of 1; here they pass from text to text. In a tree a depth counts as its best branch.

    Args:
        length: K.
        draft, token, profile: costs; see `SmartSpec`.
    """

    reads_seconds: ClassVar[bool] = False
    features = ("top1",)
    joint: ClassVar[bool] = True
    carries: ClassVar[bool] = True
    first = 0
    interval = 100  # rounds between fits

    def __init__(
        self, length: int = 4, draft: float = 0.1, token: float = 0.01, profile: str | Path | Profile = ""
    ) -> None:
        self.max_depth = self._length = validate_int("adaptive-verification", "length", length)
        self._grid = CostGrid.from_options("adaptive-verification", profile, draft, token)
        self.name = f"adaptive-verification:{length}"

    def with_costs(self, profile: Profile) -> StopPolicy:
        """Return this policy with the costs of a profile, unless it was given others."""
        other = copy.copy(self)
        other._grid = self._grid.with_profile(profile)
        return self if other._grid is self._grid else other

    def start(self, streams: int, keys: Array) -> State:
        """Return the state of streams without rounds."""
        shape, zeros = (streams, self._length), np.zeros(streams, dtype=np.int64)
        weights = np.tile([SLOPE, *[INTERCEPT] * self._length], (streams, 1))
        odds, previous = np.full(shape, np.inf), np.ones(shape)
        return AcceptanceState(keys.copy(), zeros - 1, weights, zeros, zeros, np.zeros((*shape, 6)), odds, previous)

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Keep all, and store the odds."""
        if step.depth == 0:
            batches, weights = Batches.of(step.batch, state.key), state.weights.copy()
            share_latest(batches.members, batches.starts, state.updates, weights)
            odds = np.full_like(state.odds, np.inf)
            return step.alive.copy(), replace(state, batch=step.batch, weights=weights, odds=odds)
        odds = state.odds.copy()
        store_odds(step.alive, step.features, step.depth, odds)
        return step.alive.copy(), replace(state, odds=odds)

    def _confidences(self, state: AcceptanceState) -> Array:
        """Return [S, K] of this round."""
        out = np.empty(state.odds.shape)
        predict(state.odds, state.weights, state.previous, out)
        return out

    def select(self, tree: DraftTree, state: State) -> Array:
        """Return the tokens of each batch with the largest survival, as many as pay."""
        batches, offered, depths = Batches.of(state.batch, state.key), tree.offered, np.arange(1, self._length + 1)
        at_depth = tree.depth[:, :, None] == depths
        drawn = (tree.drawn[:, :, None] & at_depth).any(1)  # [S, K]; in a tree depths count once
        if tree.by_level:  # how far the streams will draft is not known yet
            drawn = drawn.any(1, keepdims=True) & (depths <= self.max_depth)
        grid, steps = (
            self._grid.extend_to(batches.largest, self._length),
            (batches.sums(drawn.astype(np.int64)) > 0).sum(1),
        )
        spent, no_rates = grid.drafting_s(batches.sizes, steps), np.zeros(len(grid.verify))
        # By the confidences of the round before: tokens drawn later must not decide what is sent under `rejection`.
        budgets = batches.best_budgets(np.cumprod(state.previous, 1), drawn, grid.verify, no_rates, spent)
        sent_before = batches.sums((tree.drawn & ~offered).sum(1))  # [G], of the levels before
        values = np.cumprod(self._confidences(state), 1)[:, np.minimum(tree.depth[0], self._length) - 1]  # [S, N]
        return batches.best(values, offered, np.maximum(budgets - sent_before, 0))

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        """Return the state with the round's outcomes, fitted if it is due."""
        weights, updates, rounds, sums = (a.copy() for a in (state.weights, state.updates, state.rounds, state.sums))
        # If the policy was not called in this round, the state still has the batches of an older one.
        batches, previous = Batches.of(np.where(outcome.active, state.batch, -1), state.key), self._confidences(state)
        add_tokens(outcome.active, outcome.cut, outcome.accepted, outcome.verified, state.odds, previous, sums)
        rounds[batches.members] += 1
        due, starts = rounds >= self.interval, batches.starts
        for batch in range(len(starts) - 1) if due.any() else ():
            rows = batches.members[starts[batch] : starts[batch + 1]]
            if due[rows].any():
                weights[rows] = newton_step(sums[rows].sum(0), weights[rows[0]])
                updates[rows], rounds[rows], sums[rows] = updates[rows].max() + 1, 0, 0.0
        return AcceptanceState(state.key, state.batch, weights, updates, rounds, sums, state.odds, previous)
