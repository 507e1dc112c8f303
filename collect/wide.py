"""Quantities of many rows and of several tokens drawn from each: what features are made of when a whole text is unrolled."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from ..policies.features import CHAIN_FEATURES, FEATURES, TOP, TREE_FEATURES, Kind, Rows

_LEAST = -1e30

PRE_FEATURES = tuple(name for name in TREE_FEATURES if FEATURES[name].kind is Kind.PRE)
assert TREE_FEATURES[: len(PRE_FEATURES)] == CHAIN_FEATURES[: len(PRE_FEATURES)] == PRE_FEATURES
"""Names of what belongs to a row, whatever is drawn from it; they come first at every node."""


class WideRows(Rows):
    """Rows from which several tokens are drawn, [R, B]: what belongs to a token is [R, B] as well.

    There are many of them: the same quantities as in `Rows`, with fewer passes over the vocabulary.
    """

    @cached_property
    def _sums(self) -> tuple[Tensor, Tensor]:
        """[R] the sum of exponentials of the logits above the largest one, and of those times what they lie below it."""
        below = (self.logits - self.top1_logit[:, None]).clamp_min(_LEAST)
        powers = below.exp()
        return powers.sum(-1), (powers * below).sum(-1)

    @cached_property
    def top1(self) -> Tensor:
        """[R] the largest probability."""
        return self._sums[0].reciprocal()

    @cached_property
    def log_norm(self) -> Tensor:
        """[R] log of the sum of exponentials of the raw logits."""
        return self.top1_logit + self._sums[0].log()

    @cached_property
    def ranked(self) -> tuple[Tensor, Tensor]:
        """[R, 10] the largest logits, descending, and their tokens; as many as there are in a smaller vocabulary."""
        values, tokens = self.logits.topk(min(TOP, self.logits.shape[-1]), -1)
        return values, tokens

    @cached_property
    def top(self) -> Tensor:
        """[R, 10] the largest probabilities, descending; zeros beyond the vocabulary."""
        best = (self.ranked[0] - self.log_norm[:, None]).exp()
        width = best.shape[-1]
        return torch.nn.functional.pad(best, (0, TOP - width)) if width < TOP else best

    @cached_property
    def best(self) -> Tensor:
        """[R, 2] the two largest probabilities."""
        return self.top[:, :2]

    @cached_property
    def entropy(self) -> Tensor:
        """[R] entropy in nats."""
        total, weighted = self._sums
        return (total.log() - weighted / total).clamp_min(0.0)

    def of_drawn(self, values: Tensor) -> Tensor:
        """Return [R, B], the entries of `values` [R, V] at the drawn tokens."""
        assert self.tokens is not None
        return values.gather(-1, self.tokens)

    @cached_property
    def drawn_logprob(self) -> Tensor:
        """[R, B] log-probability of the drawn tokens at temperature 1."""
        return self.of_drawn(self.logits) - self.log_norm[:, None]


class TreeNodes:
    """The quantities that POST features are made of, for the N nodes of n trees; names as in `features.Rows`.

    Args:
        drawn_prob, path_logprob: [n, N].
        best_scores: [n, N, 3].
        depth, rank: [N].
    """

    def __init__(
        self, drawn_prob: Tensor, path_logprob: Tensor, best_scores: Tensor, depth: Tensor, rank: Tensor
    ) -> None:
        self.shape, self.depth = drawn_prob.shape, depth
        self.drawn_prob, self.path_logprob = drawn_prob.flatten(), path_logprob.flatten()
        self.best_scores = best_scores.flatten(0, 1)
        self.sibling_rank = self.constant(rank)

    def constant(self, value: Tensor) -> Tensor:
        """Return [n N], what each node of a tree has in all trees."""
        return value.to(self.drawn_prob.dtype).expand(self.shape).flatten()

    def features(self, names: Sequence[str]) -> Tensor:
        """Return [n, N, F] float32."""
        return torch.stack([FEATURES[name].of(self) for name in names], -1).float().view(*self.shape, -1)
