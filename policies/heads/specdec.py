"""SpecDec++'s acceptance head: residual blocks on the draft's hidden state, one token behind."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from ..errors import PolicyError
from ..features import DRAFT_HIDDEN
from ..typing import Array
from .base import NO_HIDDEN, Head, Hidden, check_shape, hidden_of, size_of
from .resnet import residual

MAX_BLOCKS = 64
BLOCKS, REJECTION_WEIGHT = 3, 6.0
"""D and w_rej of the published setting."""

STOP_THRESHOLDS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""The grid of h that the paper searches."""

STOP_THRESHOLD, MAX_DRAFT = 0.7, 20
"""h of the released example, within 0.7% of the best on each of its three sets, and the longest round. The published minimum
of two tokens needs no rule: at depth 1 the product is 1, so drafting continues."""


class SpecDecHead(Head):
    """D blocks x + SiLU(W x + b) of the width of the hidden state, then two logits, whose difference is the score.

    SpecDec++ (arXiv 2405.19715; code Kaffaljidhmah2/SpecDec_pp, `wrap_model.py`, `hf_generation.py`). Its input is the state
    after x_{j-1}, from the forward that yields q_j: it scores that token, so `accept` at depth j refers to x_{j-1} (`lag` 1).
    `next` is the same logit; at depth 0 a constant.

    `order` is the block at each position. The published code builds `[ResBlock(h)] * D`, which is one shared block: 0, 0, 0.

    Args:
        names: none.
        tensors: `block.weight` [n, H, H], `block.bias` [n, H], `order` [D] int64 of 0..n-1, `leave.weight` [2, H],
            `leave.bias` [2] (rejection, acceptance), `first` [1].
    """

    kind = "specdec"
    lag = 1

    def __init__(self, names: Sequence[str], tensors: Mapping[str, Array]) -> None:
        required = ("block.weight", "block.bias", "order", "leave.weight", "leave.bias", "first")
        super().__init__(names, tensors, required)
        t = self._tensors
        if names:
            raise PolicyError(f"specdec head: expected no scalar feature, got {', '.join(names)}")
        size, count = size_of(t["leave.weight"]), size_of(t["block.weight"], 0)
        leave, leave_bias = check_shape(t, "leave.weight", 2, size), check_shape(t, "leave.bias", 2)
        blocks, biases = check_shape(t, "block.weight", count, size, size), check_shape(t, "block.bias", count, size)
        if t["order"].ndim != 1 or len(t["order"]) > MAX_BLOCKS or not size:
            raise PolicyError(f"specdec head: expected at most {MAX_BLOCKS} blocks, got order {list(t['order'].shape)}")
        order: list[int] = t["order"].tolist()
        if set(order) != set(range(count)):
            raise PolicyError(f"specdec head: expected order to name each of {count} blocks, got {order}")
        self.sizes = {DRAFT_HIDDEN: size}
        self.shares_blocks = len(order) > len(set(order))
        self._blocks = [(blocks[at], biases[at]) for at in order]
        # Under a softmax of two logits the log-odds of acceptance are their difference.
        self._leave, self._bias = leave[1] - leave[0], leave_bias[1] - leave_bias[0]
        self._first = float(check_shape(t, "first", 1)[0])

    def scores(self, features: Array, depth: int, hidden: Hidden = NO_HIDDEN) -> Array:
        """Return [R, 2], twice the same; see `Head`."""
        states = hidden_of(hidden, DRAFT_HIDDEN, self.sizes[DRAFT_HIDDEN])
        if depth == 0:
            return np.full((len(states), 2), self._first)
        x = states.copy()  # the blocks work in place
        residual(x, self._blocks)
        return np.repeat((x @ self._leave + self._bias).astype(np.float64)[:, None], 2, axis=1)


def unbiased(leave_bias: Array, weight: float) -> Array:
    """Return the last bias [2] float32 without the effect of the rejection weight w.

    Cross-entropy with weight w on rejections is least at p' = a / (a + w (1 - a)), a the true chance. So in log-odds
    ln(a / (1 - a)) = ln(p' / (1 - p')) + ln w.
    """
    return leave_bias + np.array([0.0, math.log(weight)], dtype=np.float32)
