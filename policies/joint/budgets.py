"""A budget of tokens for the whole batch, spent on those that look likeliest to be accepted, whosever they are."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from ..baselines.scores import check_number, check_whole
from ..baselines.trees import node_values, with_level
from ..builtins import builtin
from ..contract import Array, DraftStep, DraftTree, RoundOutcome, State, StopPolicy
from ..kernels import on_first_use
from ..profile import Profile
from .grid import ByCosts, priced
from .groups import Batches, batches_of

kernels = on_first_use("batches")
fits = on_first_use("acceptance")

Levels = tuple[Array, ...]


@dataclass(frozen=True, slots=True)
class TetrisState:
    """Of `Tetris`.

    Attributes:
        key, batch: [S] int64.
        levels: of each depth so far, [S, B] float32, the log-probability of the paths.
    """

    key: Array
    batch: Array
    levels: Levels = ()


@builtin("tetris", "each", "tetris:3 sends the likeliest tokens of a batch, 3 a stream on average")
class Tetris(StopPolicy):
    """Draft a few tokens more than can be verified, and send the batch's likeliest ones, by the probability of their paths.

    TETRIS (arXiv 2502.15197; its vLLM: a capacity of (K - extra) tokens a stream, K being drafted). The best tokens of a
    batch are the first ones of each stream, since a path is never likelier than what it begins with. It reads the drawn
    tokens and leaves some out, so it is for `match` and `point` verification, and for temperature 0.

    Args:
        each: tokens sent a stream, on average over the batch.
        extra: tokens drafted beyond that.
        capacity: tokens sent of the whole batch, whatever its size; 0 = `each` a stream.
    """

    reads_seconds: ClassVar[bool] = False
    features = ("path_logprob",)
    joint: ClassVar[bool] = True
    # At `max_depth` no policy is asked: where that is 1, depth 0 alone tells which streams share a verification.
    first = 0

    def __init__(self, each: float = 3, extra: int = 2, capacity: int = 0) -> None:
        self.each = check_number("tetris", "each", each, 0.0, 1024.0)
        self.capacity = check_whole("tetris", "capacity", capacity, 0)
        self.max_depth = math.ceil(self.each) + check_whole("tetris", "extra", extra, 0)
        self.name = f"tetris:{each:g}"

    def start(self, streams: int, keys: Array) -> State:
        """Return no levels."""
        return TetrisState(keys.copy(), np.full(streams, -1, dtype=np.int64))

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Keep all, and remember the paths' probabilities."""
        levels: Levels = with_level(state.levels, step, step.features[:, :, 0]) if step.depth else ()
        return step.alive.copy(), TetrisState(state.key, step.batch, levels)

    def select(self, tree: DraftTree, state: State) -> Array:
        """Return the likeliest tokens of each batch."""
        groups, sent = batches_of(state.batch, state.key), np.zeros_like(tree.drawn)
        budget = np.full(len(groups.sizes), self.capacity)
        if not self.capacity:
            budget = (self.each * groups.sizes).astype(np.int64)
        # No value is above its parent's, so the best ones are closed under parents.
        values = node_values(state.levels, tree).astype(np.float64)
        kernels().send_best(values, tree.drawn, groups.members, groups.starts, budget, sent)
        return sent

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        """Forget the round."""
        return replace(state, levels=())


@dataclass(frozen=True, slots=True)
class AcceptanceState:
    """Of `AdaptiveVerification`; what a batch has learned stands in each of its rows.

    Attributes:
        key, batch: [S] int64.
        weights: [S, 1 + K] float64, the slope and the intercept of each depth.
        updates: [S] int64, how often they were fitted.
        rounds: [S] int64, since then.
        sums: [S, K, 6] float64 of this stream since then: w z z, w z, w, r z, r and the number of tokens known.
        odds: [S, K] float64 log-odds of this round by depth; infinite = not seen.
        stale: [S, K] float64 confidences of the round before.
    """

    key: Array
    batch: Array
    weights: Array
    updates: Array
    rounds: Array
    sums: Array
    odds: Array
    stale: Array


@builtin("adaptive-verification", "length", "adaptive-verification:4 sends as many tokens of a batch as pay (vLLM)")
class AdaptiveVerification(ByCosts):
    """Draft K tokens for every stream, and send as many of the batch's as make the most tokens a second.

    vLLM's adaptive verification (0.33, `v1/worker/gpu/spec_decode/adaptive_verification.py` and `acceptance_estimator.py`). A
    token at depth k is accepted with probability sigmoid(w z + b_k), z the log-odds of the draft's likeliest token within
    +-40, and survives with the product along its stream. How many are sent, B, is the argmax of (streams + the B best
    survivals) / (draft seconds + verification seconds of streams + B tokens), by the survivals of the round before; then the
    B best of this round are. It starts from w = 0.5, b = -0.2; every 100 rounds one Newton step on the tokens known since
    (the accepted ones and the first refused) moves them, ridge 0.001, damped by n / (n + 50).

    It trims verification, never drafting. As only features that do not depend on the drawn token count, it is exact under
    `rejection` too, where it is asked level by level: what is left of the budget goes to the level's best, by the confidences
    known before it. The last depth, at which no policy is asked, counts with the odds of the one before. vLLM begins a
    request with confidences of 1; here a text goes on with those of the text before it in its row. In a tree a depth counts
    as its best branch.

    Args:
        length: K.
        draft, token: costs where there is no profile (`grid.LinearCosts`).
        profile: a latency profile with the costs, or its path; where none is given and `draft` and `token` are left as they
            are, `evaluate` and runs with a profile give theirs.
    """

    reads_seconds: ClassVar[bool] = False
    features = ("top1",)
    joint: ClassVar[bool] = True
    carries: ClassVar[bool] = True
    first = 0

    SLOPE, INTERCEPT, MOST_ODDS = 0.5, -0.2, 40.0
    EVERY, RIDGE, DAMPING = 100, 1e-3, 50.0

    def __init__(
        self, length: int = 4, draft: float = 0.1, token: float = 0.01, profile: str | Path | Profile = ""
    ) -> None:
        self.max_depth = check_whole("adaptive-verification", "length", length)
        self._grids = priced("adaptive-verification", profile, draft, token)
        self._length = length
        self.name = f"adaptive-verification:{length}"

    def start(self, streams: int, keys: Array) -> State:
        """Return the state of streams that have seen nothing."""
        depths, none = self._length, np.zeros(streams, dtype=np.int64)
        weights = np.tile([self.SLOPE, *[self.INTERCEPT] * depths], (streams, 1))
        sums, odds = np.zeros((streams, depths, 6)), np.full((streams, depths), np.inf)
        return AcceptanceState(keys.copy(), none - 1, weights, none, none, sums, odds, np.ones((streams, depths)))

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Keep all, and note the odds."""
        if step.depth == 0:
            # Streams that were not in the batch for some rounds have missed its fits.
            groups, weights = batches_of(step.batch, state.key), state.weights.copy()
            fits().share_latest(groups.members, groups.starts, state.updates, state.weights, weights)
            return step.alive.copy(), replace(
                state, batch=step.batch, weights=weights, odds=np.full_like(state.odds, np.inf)
            )
        odds = state.odds.copy()
        fits().note_odds(step.alive, step.features, step.depth, self.MOST_ODDS, odds)
        return step.alive.copy(), replace(state, odds=odds)

    def _confidences(self, state: AcceptanceState) -> Array:
        """Return [S, K] of this round; of depths not seen yet by the odds before them, or as in the round before."""
        out = np.empty(state.odds.shape)
        fits().say_confidences(state.odds, state.weights, state.stale, out)
        return out

    def select(self, tree: DraftTree, state: State) -> Array:
        """Return the tokens of each batch that survive best, as many as pay."""
        groups, offered = batches_of(state.batch, state.key), tree.offered
        settled = groups.sums((tree.drawn & ~offered).sum(1))  # [G], of the levels before: they are sent already
        left = np.maximum(self._budgets(tree, groups, state.stale) - settled, 0)
        # [S, N], products of chances: no value is above its parent's, as `send_best` wants it.
        values = np.cumprod(self._confidences(state), 1)[:, np.minimum(tree.depth[0], self._length) - 1]
        sent = np.zeros_like(offered)
        kernels().send_best(np.ascontiguousarray(values), offered, groups.members, groups.starts, left, sent)
        return sent

    def _budgets(self, tree: DraftTree, groups: Batches, stale: Array) -> Array:
        """Return [G], the tokens that each batch sends, by the confidences of the round before."""
        # No confidence of this round enters: an argmax over its tokens would let those drawn later decide what is sent, which
        # `rejection` does not allow.
        drawn = np.zeros(stale.shape, dtype=bool)
        stream, node = tree.drawn.nonzero()
        drawn[stream, tree.depth[stream, node] - 1] = True  # [S, K]; in a tree a depth counts once
        if tree.by_level:  # nobody knows yet how far the streams will get
            drawn = drawn.any(1, keepdims=True) & (np.arange(self._length) < self.max_depth)
        grid, n = self._grids.of(groups.largest, self._length), groups.sizes
        steps = (groups.sums(drawn.astype(np.int64)) > 0).sum(1)  # [G]; a step is one of all the batch's streams
        spent = grid.drafting_s(n, steps)
        found, none = np.zeros(len(n), dtype=np.int64), np.zeros(len(n), dtype=np.int64)
        # Rates of 0: tokens over seconds of this very round are what is maximised.
        batches, by_ratio = (groups.members, groups.starts), np.zeros(len(grid.verify))
        kernels().best_budgets(np.cumprod(stale, 1), drawn, *batches, none, spent, grid.verify, by_ratio, found)
        return found

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        """Return the state with what the round has shown, fitted anew where it is time."""
        stale = self._confidences(state)
        weights, updates, rounds, sums = (a.copy() for a in (state.weights, state.updates, state.rounds, state.sums))
        # Where nobody was asked in this round, the state still has the batches of an older one.
        groups = batches_of(np.where(outcome.active, state.batch, -1), state.key)
        told = outcome.active, outcome.cut, outcome.accepted, outcome.verified
        constants = np.array((self.EVERY, self.RIDGE, self.DAMPING))
        fits().learn(*told, state.odds, constants, groups.members, groups.starts, weights, updates, rounds, sums)
        return replace(state, weights=weights, updates=updates, rounds=rounds, sums=sums, stale=stale)
