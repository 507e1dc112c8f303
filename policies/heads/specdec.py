"""SpecDec++'s acceptance head: residual blocks on the draft's hidden state, one token behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..contract import Array
from ..errors import PolicyError
from ..features import DRAFT_HIDDEN
from .base import NO_HIDDEN, Head, Hidden, hidden_of, size_of
from .resnet import residual

_MAX_BLOCKS = 64


class SpecDecHead(Head):
    """D blocks x + SiLU(W x + b) of the width of the hidden state, then two logits, whose difference is the score.

    SpecDec++ (arXiv 2405.19715; code Kaffaljidhmah2/SpecDec_pp, `wrap_model.py`, `hf_generation.py`). Its input is the
    state after x_{j-1}, from the forward that yields q_j: it scores that token, so `accept` at depth j refers to x_{j-1}
    (`lag` 1), and the published minimum of two tokens needs no rule. `next` is the same logit; at depth 0 a constant.

    Tensors: `block.weight` [n, H, H], `block.bias` [n, H], `leave.weight` [2, H], `leave.bias` [2] (rejection, acceptance),
    `first` [1], and `order` [D] int64, the block at each position. The published code builds `[ResBlock(h)] * D`, one shared
    block: 0, 0, 0.
    """

    kind = "specdec"
    lag = 1

    def __init__(self, names: Sequence[str], tensors: Mapping[str, Array]) -> None:
        if names:
            raise PolicyError(f"specdec head: expected no scalar feature, got {', '.join(names)}")
        size, count, depth = (size_of(tensors, *at) for at in (("leave.weight",), ("block.weight", 0), ("order", 0)))
        shapes: dict[str, tuple[int, ...]] = {"block.weight": (count, size, size), "block.bias": (count, size)}
        shapes |= {"order": (depth,), "leave.weight": (2, size), "leave.bias": (2,), "first": (1,)}
        super().__init__(names, tensors, shapes)
        order: list[int] = tensors["order"].tolist()
        if depth > _MAX_BLOCKS or not size:
            raise PolicyError(f"specdec head: expected at most {_MAX_BLOCKS} blocks, got {depth}")
        if set(order) != set(range(count)):
            raise PolicyError(f"specdec head: expected order to name each of {count} blocks, got {order}")
        self.sizes = {DRAFT_HIDDEN: size}
        self._blocks = [(tensors["block.weight"][at], tensors["block.bias"][at]) for at in order]
        # Under a softmax of two logits the log-odds of acceptance are their difference.
        (reject, accept), (reject_bias, accept_bias) = tensors["leave.weight"], tensors["leave.bias"]
        self._leave, self._bias = accept - reject, accept_bias - reject_bias

    def scores(self, features: Array, depth: int, hidden: Hidden = NO_HIDDEN) -> Array:
        """Return [R, 2], twice the same; see `Head`."""
        states = hidden_of(hidden, DRAFT_HIDDEN, self.sizes[DRAFT_HIDDEN])
        if depth == 0:
            return np.full((len(states), 2), float(self._tensors["first"][0]))
        x = states.copy()  # the blocks work in place
        residual(x, self._blocks)
        return np.repeat((x @ self._leave + self._bias).astype(np.float64)[:, None], 2, axis=1)
