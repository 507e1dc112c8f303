"""One stream, one branch, on the CPU: the features of a row as plain numbers, in as few operations as they can be had.

A small pair drafts a token in half a millisecond, of which a dozen tensor operations would eat a tenth: each kind of
operation costs several microseconds once a model call has emptied the processor's caches. So all features come out of one
pass, which works in buffers of its own and reads single entries through a memoryview. The definitions stay in `features`;
the tests hold this module to `Rows`, and a feature that it does not know is computed there.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .errors import PolicyError
from .features import TOP, Rows, compute

Array = np.ndarray[Any, Any]
_LEAST = -1e30
_NONE = float("-inf")
_NO_SCORES = "noisy_* features need the match verification: choose it, or a policy without them"

_RANKS = tuple(f"top{rank}" for rank in range(1, TOP + 1))
_OTHERS = (
    "margin", "top1_logit", "entropy", "drawn_prob", "path_logprob", "noisy_margin", "noisy_score", "depth",
    "noisy_lead", "branch_rank", "temperature", "drawn_token", "above_token",
)  # fmt: skip
_PLACE = {name: place for place, name in enumerate((*_OTHERS, *_RANKS))}
_PLACE.update(
    {f"anchor_{name}": _PLACE[name] for name in ("entropy", "top1", "margin")},
    anchor_prob=_PLACE["drawn_prob"],
    anchor_token=_PLACE["drawn_token"],
    before_token=_PLACE["above_token"],
)

_CHEAP = (
    "noisy_margin",
    "noisy_score",
    "depth",
    "temperature",
    "drawn_token",
    "above_token",
    "anchor_token",
    "before_token",
)
"""Features for which the row of logits need not be read, but for its two largest scores."""


class Row:
    """What `features.Rows` is, for a single row: arguments as there, tensors of shape [1, V].

    Args:
        above: the row of the branch's parent, or the log-probability of the path down to it.
        behind: the token that `token` stands behind; -1 = unknown.
    """

    __slots__ = ("above", "behind", "depth", "logits", "path", "sampled", "scores", "temperature", "token")

    def __init__(
        self,
        logits: Tensor,
        temperature: float,
        scores: Tensor | None,
        token: int,
        above: Row | float = 0.0,
        depth: int = 0,
        sampled: Tensor | None = None,
        behind: int = -1,
    ) -> None:
        self.logits, self.temperature, self.scores, self.token = logits, temperature, scores, token
        self.above, self.depth, self.sampled, self.behind = above, depth, sampled, behind
        self.path: float | None = None


class Reader:
    """Computes the named features of one row after the other, in buffers that it keeps.

    Args:
        names: PRE, POST and ANCHOR features.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._known = all(name in _PLACE for name in names)
        self._places = [_PLACE.get(name, 0) for name in names]
        bare = {name.removeprefix("anchor_") for name in names}
        self._deep = not bare.isdisjoint(_RANKS[2:])
        self._second = not bare.isdisjoint(("top2", "margin"))
        self._entropy = "entropy" in bare
        self._noisy = not bare.isdisjoint(("noisy_margin", "noisy_score", "noisy_lead"))
        self._drawn = not bare.isdisjoint(("prob", "drawn_prob", "path_logprob"))
        self._shaped = "drawn_prob" in names
        self._logit = self._entropy or self._drawn or "top1_logit" in bare
        self._softmax = self._second or self._deep or self._logit or "top1" in bare
        # Most heads for small pairs read these alone, and then the fewest steps are to be gone through.
        self._few = [_CHEAP.index(name) for name in names] if set(names) <= set(_CHEAP) else None
        self._above = Reader(("path_logprob",)) if "path_logprob" in bare and len(names) > 1 else self
        self._raw, self._probs, self._scores = (_Buffer(0, torch.float32) for _ in range(3))

    def __call__(self, row: Row) -> list[float]:
        """Return the features of `row` in the order of the names: what `features.compute` returns for it."""
        if self._few is not None:
            score, behind = self._two_scores(row) if self._noisy else (0.0, 0.0)
            cheap = (score - behind, score, row.depth, row.temperature, row.token, row.behind, row.token, row.behind)
            return [cheap[place] for place in self._few]
        if not self._known:
            return self._as_many(row)
        raw, scores, token = row.logits, row.scores, row.token
        greedy = scores is raw  # then the drawn token is the largest of both, and the second largest serves both
        if self._noisy and scores is None:
            raise PolicyError(_NO_SCORES)
        if raw.shape[-1] != self._raw.width or raw.dtype is not self._raw.dtype:
            self._raw, self._probs = (_Buffer(raw.shape[-1], raw.dtype) for _ in range(2))
        top1 = top2 = most = entropy = prob = score = behind = 0.0
        ranks: Sequence[float] = ()
        logits, values = self._raw.tensor, self._raw.values
        if self._softmax or (greedy and self._noisy):
            logits.copy_(raw)
        if greedy:
            most = score = values[token]
            if self._second or self._noisy:
                values[token] = _NONE
                behind = logits.max().item()
                values[token] = most
        elif self._logit:
            most = raw.max().item()
        if self._softmax:
            probs, shares = self._probs.tensor, self._probs.values
            torch.softmax(raw, -1, out=probs)
            place = token if greedy else int(probs.argmax()) if self._second else -1
            top1 = shares[place] if place >= 0 else probs.max().item()
            if self._drawn:
                prob = values[token] - most + log(top1)
            if self._entropy:
                entropy = self._spread(most, top1)
            if self._deep:
                ranks = probs.topk(min(TOP, self._probs.width), -1)[0][0].tolist()
            if greedy:
                top2 = top1 * exp(behind - most) if self._second else 0.0
            elif self._second:
                shares[place] = 0.0
                top2 = probs.max().item()
        if self._noisy and not greedy:
            score, behind = self._two_scores(row)
        return self._laid_out(row, top1, top2, most, entropy, prob, score, behind, ranks)

    def _laid_out(
        self, row: Row, top1: float, top2: float, most: float, entropy: float, logprob: float, score: float,
        behind: float, ranks: Sequence[float],
    ) -> list[float]:  # fmt: skip
        drawn, path, lead = 0.0, logprob, score - behind if self._noisy else 0.0
        if self._drawn:
            if self._shaped and (row.sampled is not None or row.temperature not in (0.0, 1.0)):
                drawn = self._sampled_prob(row)
            else:
                drawn = exp(logprob)
            path = row.path = logprob + (row.above if isinstance(row.above, float) else self._path_of(row.above))
        values = (
            top1 - top2, most, entropy, drawn, path, lead, score, row.depth,
            lead, 0.0, row.temperature, row.token, row.behind, top1, top2, *ranks[2:], *[0.0] * (TOP - max(len(ranks), 2)),
        )  # fmt: skip
        return [values[place] for place in self._places]

    def _path_of(self, row: Row) -> float:
        """Return the log-probability of the path down to `row`, which may not have been asked for before."""
        if row.path is None:
            row.path = self._above(row)[0]
        return row.path

    def _spread(self, most: float, top1: float) -> float:
        """Return the entropy; the buffered logits are shifted by the largest one."""
        logits, probs = self._raw.tensor, self._probs.tensor
        logits.sub_(most)
        mean = torch.dot(probs[0], logits[0]).item()
        if mean != mean:  # 0 times minus infinity
            mean = torch.dot(probs[0], logits[0].clamp_min_(_LEAST)).item()
        return max(-log(top1) - mean, 0.0)

    def _two_scores(self, row: Row) -> tuple[float, float]:
        """Return the drawn token's noisy score, which is the largest, and the second."""
        scores = row.scores
        if scores is None:
            raise PolicyError(_NO_SCORES)
        if scores.shape[-1] != self._scores.width or scores.dtype is not self._scores.dtype:
            self._scores = _Buffer(scores.shape[-1], scores.dtype)
        tensor, values = self._scores.tensor, self._scores.values
        tensor.copy_(scores)
        score: float = values[row.token]
        values[row.token] = _NONE
        return score, tensor.max().item()

    def _sampled_prob(self, row: Row) -> float:
        """Return the probability of the drawn token in the distribution that is sampled from."""
        scaled = row.logits / row.temperature if row.sampled is None else row.sampled
        self._probs.tensor.copy_(torch.softmax(scaled, -1))
        prob: float = self._probs.values[row.token]
        return prob

    def _as_many(self, row: Row) -> list[float]:
        """Return the features as `features` computes them for any number of rows."""
        device = row.logits.device
        token = torch.tensor([row.token], device=device)
        above = row.above if isinstance(row.above, float) else Reader(("path_logprob",))._path_of(row.above)
        parent = row.logits.new_tensor([above])
        behind = torch.tensor([row.behind], device=device)
        rows = Rows(row.logits, row.temperature, row.scores, token, parent, row.depth, row.sampled, above=behind)
        values: list[float] = compute(self.names, rows)[0].tolist()
        return values


class _Buffer:
    """A row [1, width] as a tensor, and its entries: reading one through a memoryview costs next to nothing."""

    __slots__ = ("dtype", "tensor", "values", "width")

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        with torch.inference_mode(False):  # usable with and without inference mode
            self.tensor = torch.zeros(1, width, dtype=dtype)
        self.values: Any = memoryview(self.tensor.numpy()[0])
        self.width, self.dtype = width, dtype


def compute_row(names: Sequence[str], row: Row) -> list[float]:
    """Return the named features of one row in that order: what `features.compute` returns for it."""
    return Reader(names)(row)
