"""SpecDec++'s acceptance head: residual blocks on the draft's hidden state, one token behind."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from .errors import PolicyError
from .heads_base import NO_ARRAYS, NO_VECTORS, Arrays, OnDevice, TensorHead, array, expect, take, vector, width_of
from .layers import Blocks
from .vectors import DRAFT_HIDDEN

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
    behind x_{j-1}, from the forward that yields q_j: it knows that token and scores it, so `accept` at depth j speaks of
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

    def __init__(self, names: Sequence[str], tensors: Mapping[str, Tensor]) -> None:
        plain = ("block.weight", "block.bias", "order", "leave.weight", "leave.bias", "first")
        self._tensors = t = take(tensors, plain)
        if names:
            raise PolicyError(f"specdec head: expected no scalar feature, got {', '.join(names)}")
        size, blocks = width_of(t["leave.weight"]), t["block.weight"]
        count = len(blocks) if blocks.dim() else 0
        expect(t["leave.weight"], (2, size), "leave.weight")
        expect(t["leave.bias"], (2,), "leave.bias")
        expect(t["first"], (1,), "first")
        expect(blocks, (count, size, size), "block.weight")
        expect(t["block.bias"], (count, size), "block.bias")
        order = t["order"]
        if order.dim() != 1 or len(order) > MOST_BLOCKS or not size:
            raise PolicyError(f"specdec head: expected at most {MOST_BLOCKS} blocks, got order {list(order.shape)}")
        self._order: list[int] = order.tolist()
        if set(self._order) != set(range(count)):
            raise PolicyError(f"specdec head: expected order to name each of {count} blocks, got {self._order}")
        self.sizes = {DRAFT_HIDDEN: size}
        self._size = size
        leave, beyond = t["leave.weight"], t["leave.bias"]
        self._placed = OnDevice(blocks, t["block.bias"], leave[1:] - leave[:1], beyond[1:] - beyond[:1], t["first"])
        middle = [(blocks[at], t["block.bias"][at]) for at in self._order]
        self._one = Blocks(middle, (leave[1:] - leave[:1], beyond[1:] - beyond[:1]))
        self._opening: list[float] = t["first"].tolist()

    @property
    def shares(self) -> bool:
        """Whether a block stands in several places, as in the published code."""
        return len(self._order) > len(set(self._order))

    def logits(self, features: Tensor, depth: int, vectors: Mapping[str, Tensor] = NO_VECTORS) -> Tensor:
        """Return [..., 2], twice the same; see `Head`."""
        x = vector(vectors, DRAFT_HIDDEN, self._size)
        blocks, biases, leave, beyond, first = self._placed(x.device)
        if depth == 0:
            return first.expand(*x.shape[:-1], 2)
        for at in self._order:
            x = x + silu(linear(x, blocks[at], biases[at]))
        x = linear(x, leave, beyond)
        return x.expand(*x.shape[:-1], 2)

    def logits_one(self, features: Sequence[float], depth: int, vectors: Arrays = NO_ARRAYS) -> list[float]:
        """Return [accept, next] of one row, twice the same; see `Head`."""
        state = array(vectors, DRAFT_HIDDEN, self._size)
        if depth == 0:
            return self._opening * 2
        self._one.state[:] = state
        return self._one() * 2


def unbiased(leave_bias: Tensor, weight: float) -> Tensor:
    """Return the last bias [2] with the bias of the rejection weight taken out.

    Cross-entropy with weight w on rejections is least at p' = a / (a + w (1 - a)) where the true chance is a. So
    a = w p' / (1 - p' + w p'): in log-odds, ln(a / (1 - a)) = ln(p' / (1 - p')) + ln w.
    """
    return leave_bias + torch.tensor([0.0, math.log(weight)])


def biased(chance: Tensor, weight: float) -> Tensor:
    """Return p' = a / (a + w (1 - a)) [...], what a head trained with weight w says where the true chance is a [...]."""
    return chance / (chance + weight * (1.0 - chance))
