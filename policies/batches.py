"""The streams that share a verification, and tables of what their steps cost."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from .arguments import validate_number
from .contract import Array
from .costs import Costs
from .errors import InputError, PolicyError
from .kernels import on_first_use
from .profile import Profile

kernels = on_first_use("batches")


@dataclass(frozen=True, slots=True)
class Batches:
    """The batches of S streams; within a batch the order of rows does not matter."""

    members: Array  # [M] int64, the streams with a round, batch after batch, each sorted by key
    starts: Array  # [G + 1] int64, index of the first member of each batch
    largest: int  # streams of the largest batch

    @staticmethod
    def of(batch: Array, keys: Array) -> Batches:
        """Return the batches of `batch` [S] int64 (see `DraftStep`; -1 = no round), sorted by `keys` [S] int64."""
        return _batches_of(batch.tobytes(), keys.tobytes())

    @property
    def sizes(self) -> Array:
        """[G] int64, streams of each."""
        out: Array = self.starts[1:] - self.starts[:-1]
        return out

    def spread(self, values: Array, streams: int) -> Array:
        """Return [S, ...], the value [G, ...] of each stream's batch; zeros for streams without a round."""
        out = np.zeros((streams, *values.shape[1:]), dtype=values.dtype)
        out[self.members] = values.repeat(self.sizes, axis=0)
        return out

    def sums(self, values: Array) -> Array:
        """Return [G, ...], the sums over each batch of values [S, ...]."""
        if not len(self.members):
            return np.zeros((0, *values.shape[1:]), dtype=values.dtype)
        out: Array = np.add.reduceat(values[self.members], self.starts[:-1], axis=0)
        return out

    def best(self, values: Array, offered: Array, budgets: Array) -> Array:
        """Return [S, N] bool, the `budgets` [G] largest of the offered values [S, N] float64 of each batch.

        No value may be above its parent's.
        """
        sent = np.zeros_like(offered)
        kernels().send_best(np.ascontiguousarray(values), offered, self.members, self.starts, budgets, sent)
        return sent

    def best_budgets(
        self, values: Array, offered: Array, verify: Array, rates: Array, spent: Array | None = None
    ) -> Array:
        """Return [G] int64, how many of the largest offered values of each batch to send; the smallest of equal ones.

        Args:
            values, offered: see `best`.
            verify: [R, T] seconds; see `CostGrid`.
            rates: [R] tokens that a second is worth, by streams; 0 = maximise the tokens per second of this round.
            spent: [G] float64, seconds of the round before the verification.
        """
        budgets = np.zeros(len(self.sizes), dtype=np.int64)
        spent = np.zeros(len(budgets)) if spent is None else spent
        kernels().best_budgets(values, offered, self.members, self.starts, spent, verify, rates, budgets)
        return budgets


@functools.lru_cache(maxsize=4)  # the same at each depth of a round; arrays have no hash, so they are passed as bytes
def _batches_of(batch_bytes: bytes, key_bytes: bytes) -> Batches:
    batch, keys = np.frombuffer(batch_bytes, dtype=np.int64), np.frombuffer(key_bytes, dtype=np.int64)
    order = np.lexsort((keys, batch))[np.count_nonzero(batch < 0) :]  # stable; streams without a round come first
    sorted_batch = batch[order]
    bounds = np.flatnonzero(sorted_batch[1:] != sorted_batch[:-1]) + 1
    starts = np.concatenate([[0], bounds, [len(order)]]) if len(order) else np.zeros(1, dtype=np.int64)
    return Batches(order, starts, int(np.diff(starts).max(initial=0)))


@dataclass(frozen=True)
class LinearCosts:
    """Costs in units of a target call of one token, used without a profile."""

    draft: float = 0.1  # of a draft step
    token: float = 0.01  # of each token beyond the first, as a share of a draft step, or of a verification

    def draft_s(self, streams: ArrayLike, context: float) -> Array:
        """Return the seconds of a draft step."""
        count = np.asarray(streams, dtype=np.float64)
        return np.where(count > 0, self.draft * (1.0 + self.token * (count - 1.0)), 0.0)

    first_draft_s = draft_s

    def verify_s(self, streams: ArrayLike, tokens: ArrayLike, context: float) -> Array:
        """Return the seconds of a verification of so many tokens in all, anchors included."""
        return 1.0 + self.token * (np.asarray(tokens, dtype=np.float64) - 1.0)


@dataclass(eq=False)
class CostGrid:
    """Seconds of the steps of a batch as float64 tables, which grow with the batches.

    Args:
        costs: of the steps: of a profile, or `LinearCosts`.
        context: tokens in the cache.
        decision: seconds of a decision, one for each draft step.

    Attributes:
        drafts: [2, R] of the first and each later draft step of a round, by streams.
        verify: [R, T] of a verification by streams and tokens in all, anchors included.
    """

    costs: Costs | LinearCosts
    context: float
    decision: float = 0.0

    def __post_init__(self) -> None:
        # No fields: a digest of a policy must not depend on how far the tables have grown.
        self.drafts, self.verify = np.zeros((2, 0)), np.zeros((0, 0))

    @staticmethod
    def of_profile(profile: Profile, decision: float = 0.0) -> CostGrid:
        """Return the costs of a profile, midway between its two contexts."""
        return CostGrid(profile, 0.5 * (profile.low.context + profile.high.context), decision)

    @staticmethod
    def of_options(owner: str, profile: str | Path | Profile, draft: float, token: float) -> CostGrid:
        """Return the costs that the options of a policy name: a profile or its path, or `LinearCosts` if that is empty.

        Raises:
            PolicyError: there is no such profile.
        """
        if not profile:
            draft, token = (validate_number(owner, k, v, 0.0) for k, v in (("draft", draft), ("token", token)))
            return CostGrid(LinearCosts(draft, token), 0.0)
        try:
            return CostGrid.of_profile(profile if isinstance(profile, Profile) else Profile.load(str(profile)))
        except InputError as error:
            raise PolicyError(f"{owner}: {error.command_line.removeprefix('--profile: ')}") from None

    def with_profile(self, profile: Profile) -> CostGrid:
        """Return the costs of a profile if these are the default ones, else these."""
        return CostGrid.of_profile(profile) if self.costs == LinearCosts() else self

    def fit(self, streams: int, nodes: int) -> CostGrid:
        """Extend the tables to so many streams, each with up to so many drafted tokens, and return self."""
        rows = max(len(self.verify), 16, 1 << streams.bit_length())
        tokens = max(rows * (nodes + 1) + 1, self.verify.shape[1])
        if (rows, tokens) != self.verify.shape:
            costs, count = self.costs, np.arange(rows)
            # No streams cost as one does, and fewer tokens than anchors as the anchors.
            batch, sent = np.broadcast_arrays(np.maximum(count, 1)[:, None], np.arange(tokens))
            verify = costs.verify_s(batch, np.maximum(sent, batch), self.context)
            drafts = np.stack([of(count, self.context) for of in (costs.first_draft_s, costs.draft_s)])
            self.drafts = np.ascontiguousarray(drafts + self.decision * (count > 0), dtype=np.float64)
            self.verify = np.ascontiguousarray(verify, dtype=np.float64)
        return self

    def drafting_s(self, streams: Array, steps: Array) -> Array:
        """Return the seconds of so many draft steps of so many streams, broadcast."""
        first, later = self.drafts[:, streams]
        out: Array = (steps > 0) * first + np.maximum(steps - 1, 0) * later
        return out

    def length_rates(self, streams: Array, tokens: Array) -> Array:
        """Return [n, K + 1] tokens per second of every fixed length in batches of `streams` [n].

        `tokens` [K + 1] or [n, K + 1] are those that a stream is expected to commit in a round of each length.
        """
        lengths, rows = np.arange(tokens.shape[-1]), streams[:, None]
        self.fit(int(streams.max(initial=1)), len(lengths))
        out: Array = rows * tokens / (self.drafting_s(rows, lengths) + self.verify[rows, rows * (lengths + 1)])
        return out
