"""One stream, one branch, on the CPU: the features of a row in numpy.

A small pair drafts a token in half a millisecond, of which a dozen tensor operations would eat a tenth. The definitions
stay in `features`; this module only supplies their quantities for one row, and the tests hold them to `Rows`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from .errors import PolicyError
from .features import FEATURES, TOP

Array = np.ndarray[Any, Any]
_LEAST = -1e30


class Row:
    """What `features.Rows` is, for a single row; arguments and attributes as there, arrays of shape [1] and [1, V]."""

    def __init__(
        self,
        logits: Tensor,
        temperature: float,
        scores: Tensor | None,
        token: int,
        parent_logprob: Array | None,
        depth: int,
        sampled: Tensor | None = None,
    ) -> None:
        self.sampled: Array | None = None if sampled is None else sampled.numpy()
        self.logits: Array = logits.numpy()
        self.scores: Array | None = None if scores is None else scores.numpy()
        self.temperature, self.token, self.parent_logprob, self.depth = temperature, token, parent_logprob, depth

    @cached_property
    def top1_logit(self) -> Array:
        """[1] the largest raw logit."""
        top: Array = self.logits.max(-1)
        return top

    @cached_property
    def _powers(self) -> tuple[Array, Array]:
        """[1, V] exponentials of the logits above the largest one, and their sum [1]."""
        powers = np.exp(self.logits - self.top1_logit)
        return powers, powers.sum(-1)

    @cached_property
    def probs(self) -> Array:
        """[1, V] softmax of the raw logits."""
        powers, total = self._powers
        probs: Array = powers / total
        return probs

    @cached_property
    def top1(self) -> Array:
        """[1] the largest probability."""
        top: Array = 1.0 / self._powers[1]
        return top

    @cached_property
    def best(self) -> Array:
        """[1, 2] the two largest probabilities."""
        return _two_largest(self.probs)

    @cached_property
    def top(self) -> Array:
        """[1, 10] the largest probabilities, descending; zeros beyond the vocabulary."""
        width = min(TOP, self.probs.shape[-1])
        best = np.sort(np.partition(self.probs[0], -width)[-width:])[::-1]
        return np.pad(best, (0, TOP - width))[None]

    @cached_property
    def log_norm(self) -> Array:
        """[1] log of the sum of exponentials of the raw logits."""
        norm: Array = self.top1_logit + np.log(self._powers[1])
        return norm

    @cached_property
    def entropy(self) -> Array:
        """[1] entropy in nats."""
        below = np.maximum(self.logits[0] - self.top1_logit, _LEAST)
        entropy: Array = np.maximum(np.log(self._powers[1]) - np.dot(self.probs[0], below), 0.0)
        return entropy

    @cached_property
    def best_scores(self) -> Array:
        """[1, 3] the largest noisy score, which is the drawn token's, again, and the second."""
        if self.scores is None:
            raise PolicyError("noisy_* features need the match verification: choose it, or a policy without them")
        best, second = _two_largest(self.scores)[0]
        return np.array([[best, best, second]])

    @property
    def sibling_rank(self) -> Array:
        """[1] zero: the only branch."""
        return self.constant(0.0)

    @cached_property
    def drawn_logprob(self) -> Array:
        """[1] log-probability of the drawn token at temperature 1."""
        logprob: Array = self.logits[:, self.token] - self.log_norm
        return logprob

    @cached_property
    def path_logprob(self) -> Array:
        """[1] log-probability of the path at temperature 1, the drawn token included."""
        assert self.parent_logprob is not None
        path: Array = self.parent_logprob + self.drawn_logprob
        return path

    @cached_property
    def drawn_prob(self) -> Array:
        """[1] probability of the drawn token in the distribution that is sampled from."""
        if self.sampled is None and self.temperature in (0.0, 1.0):
            return np.exp(self.drawn_logprob)
        scaled = self.logits / self.temperature if self.sampled is None else self.sampled
        powers = np.exp(scaled - scaled.max(-1))
        prob: Array = powers[:, self.token] / powers.sum(-1)
        return prob

    def constant(self, value: float) -> Array:
        """Return [1], the value."""
        return np.array([value])


def _two_largest(values: Array) -> Array:
    """Return [1, 2], the two largest of [1, V], descending."""
    row = values[0]
    first = int(row.argmax())
    behind = [part.max() for part in (row[:first], row[first + 1 :]) if part.size]
    return np.array([[row[first], max(behind)]])


def compute_row(names: Sequence[str], row: Row) -> list[float]:
    """Return the named features of one row in that order: what `features.compute` returns for it."""
    return [FEATURES[name].of(row)[0] for name in names]
