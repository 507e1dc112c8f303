"""SpecDec++'s acceptance head: residual blocks on the draft's hidden state, one token behind."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from ..errors import PolicyError
from ..features.hidden_states import DRAFT_HIDDEN
from .base import NO_HIDDEN, Array, Hidden, TensorHead, expect, state_of, width_of
from .resnet import residual

MOST_BLOCKS = 64
BLOCKS, REJECTION_WEIGHT, MIX = 3, 6.0, 0.15
"""Of the published setting: D, w_rej, and the share r of the target's tokens in the text that the draft reads."""

STOP_THRESHOLDS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""The grid of h that the paper searches; the released example stops above `STOP_THRESHOLD`, one setting within 0.7% of the
best on each of its three sets."""

STOP_THRESHOLD, LEAST, MOST = 0.7, 2, 20
"""h, and the bounds of a round's length. The least needs no rule: at depth 1 the product is 1, so drafting always goes on."""


class SpecDecHead(TensorHead):
    """D blocks x + SiLU(W x + b) of the width of the hidden state, then two logits, of which the difference is scored.

    SpecDec++ (arXiv 2405.19715; code Kaffaljidhmah2/SpecDec_pp, `wrap_model.py`, `hf_generation.py`). Its input is the state
    after x_{j-1}, from the forward that yields q_j: it knows that token and scores it, so `accept` at depth j speaks of
    x_{j-1} (`lag` 1), and x_j rides along unscored. A rule that wants `next` gets the same logit; at depth 0 a constant.

    `order` says which block stands where. The published code builds `[ResBlock(h)] * D`, one block D times, so that all
    share their weights: order 0, 0, 0. Independent blocks are 0, 1, 2.

    Args:
        names: none.
        tensors: `block.weight` [n, H, H], `block.bias` [n, H], `order` [D] int64 of 0..n-1, `leave.weight` [2, H],
            `leave.bias` [2] (rejection, acceptance), `first` [1].
    """

    kind = "specdec"
    lag = 1

    def __init__(self, names: Sequence[str], tensors: Mapping[str, Array]) -> None:
        plain = ("block.weight", "block.bias", "order", "leave.weight", "leave.bias", "first")
        super().__init__(names, tensors, plain)
        t = self._tensors
        if names:
            raise PolicyError(f"specdec head: expected no scalar feature, got {', '.join(names)}")
        size, blocks = width_of(t["leave.weight"]), t["block.weight"]
        count = len(blocks) if blocks.ndim else 0
        expect(t["leave.weight"], (2, size), "leave.weight")
        expect(t["leave.bias"], (2,), "leave.bias")
        expect(t["first"], (1,), "first")
        expect(blocks, (count, size, size), "block.weight")
        expect(t["block.bias"], (count, size), "block.bias")
        order = t["order"]
        if order.ndim != 1 or len(order) > MOST_BLOCKS or not size:
            raise PolicyError(f"specdec head: expected at most {MOST_BLOCKS} blocks, got order {list(order.shape)}")
        self._order: list[int] = order.tolist()
        if set(self._order) != set(range(count)):
            raise PolicyError(f"specdec head: expected order to name each of {count} blocks, got {self._order}")
        self.sizes = {DRAFT_HIDDEN: size}
        self._size = size
        self._blocks = [(blocks[at], t["block.bias"][at]) for at in self._order]
        # Under a softmax of two logits the log-odds of acceptance are their difference.
        leave, bias = t["leave.weight"], t["leave.bias"]
        self._leave, self._bias, self._opening = leave[1] - leave[0], bias[1] - bias[0], float(t["first"][0])

    @property
    def shares(self) -> bool:
        """Whether a block stands in several places, as in the published code."""
        return len(self._order) > len(set(self._order))

    def scores(self, features: Array, depth: int, hidden: Hidden = NO_HIDDEN) -> Array:
        """Return [R, 2], twice the same; see `Head`."""
        states = state_of(hidden, DRAFT_HIDDEN, self._size)
        if depth == 0:
            return np.full((len(states), 2), self._opening)
        x = states.copy()  # the blocks work in place
        residual(x, self._blocks)
        return np.repeat((x @ self._leave + self._bias).astype(np.float64)[:, None], 2, axis=1)


def unbiased(leave_bias: Array, weight: float) -> Array:
    """Return the last bias [2] float32 with the bias of the rejection weight taken out.

    Cross-entropy with weight w on rejections is least at p' = a / (a + w (1 - a)) where the true chance is a. So
    a = w p' / (1 - p' + w p'): in log-odds, ln(a / (1 - a)) = ln(p' / (1 - p')) + ln w.
    """
    return leave_bias + np.array([0.0, math.log(weight)], dtype=np.float32)
