"""Heads of residual blocks x + SiLU(W x + b): one on any inputs, and the one published with SpecDec++."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..contract import Array
from ..errors import PolicyError
from ..features import DRAFT_HIDDEN, HIDDEN_STATES, Kind
from .base import NO_HIDDEN, Basis, Head, Hidden, Layer, basis_shapes, kernels, reduced, size_of

_MAX_BLOCKS = 64


def _apply_blocks(x: Array, blocks: Sequence[Layer]) -> None:
    """Apply blocks x + SiLU(x W' + b) to x [R, W] float32, in place."""
    for weight, bias in blocks:
        kernels().add_silu(x, x @ weight.T + bias)  # BLAS: the last bits depend on the number of rows


class ResNetHead(Head):
    """Residual blocks with two outputs, after a linear layer of width W on all inputs.

    SpecDec++'s head (arXiv 2405.19715, `wrap_model.py`) on any inputs, each block with separate weights. At depth 0, PRE
    and POST columns and the draft's hidden state count as their means, and a flag is set.

    Tensors: `mean`, `scale` [F'] of the basis; `enter.weight` [W, F' + 1], the last column for the flag, `enter.bias` [W];
    for each hidden state `enter.NAME` [W, H], `mean.NAME` and `scale.NAME` [H]; `block.weight` [D, W, W], `block.bias`
    [D, W]; `leave.weight` [2, W], `leave.bias` [2].
    """

    kind = "resnet"

    def __init__(self, names: Sequence[str], tensors: Mapping[str, Array]) -> None:
        self.sizes = {n: size_of(tensors, f"enter.{n}") for n in HIDDEN_STATES if f"enter.{n}" in tensors}
        if not names and not self.sizes:
            raise PolicyError("resnet head: expected scalar features, hidden states, or both")
        shapes = basis_shapes(names)
        width, blocks = size_of(tensors, "enter.weight", 0), size_of(tensors, "block.weight", 0)
        shapes |= {"enter.weight": (width, shapes["mean"][0] + 1), "enter.bias": (width,)}
        shapes |= {"block.weight": (blocks, width, width), "block.bias": (blocks, width)}
        shapes |= {"leave.weight": (2, width), "leave.bias": (2,)}
        for name, size in self.sizes.items():
            shapes |= {f"enter.{name}": (width, size), f"mean.{name}": (size,), f"scale.{name}": (size,)}
        super().__init__(names, tensors, shapes)
        self.basis = Basis(names, tensors["mean"], tensors["scale"])
        self._blocks = list(zip(tensors["block.weight"], tensors["block.bias"], strict=True))
        self._entries = self._entry(first=False), self._entry(first=True)
        # At depth 0 a caller passes zeros for the draft's state, which does not exist yet.
        no_bias = np.zeros(width, dtype=np.float32)
        entered = zip(self.sizes, self._entries[0][2], strict=True)
        self.reductions = {name: [("linear", weight, no_bias)] for name, weight in entered}
        shared = [tensors[name] for name in ("block.weight", "block.bias", "leave.weight", "leave.bias")]
        later, first = ((self.bounds[i], self.basis.odds, *self._entries[i][:2], *shared) for i in (0, 1))
        self.arguments = later, first

    def _entry(self, first: bool) -> tuple[Array, Array, list[Array]]:
        """Return the first layer on raw inputs: weight and bias of the columns, and the weight of each hidden state."""
        t = self._tensors
        flag = t["enter.weight"][:, -1] if first else 0.0
        weight, bias = self.basis.fold(t["enter.weight"][:, :-1], t["enter.bias"] + flag, first)
        state_weights = []
        for name in self.sizes:
            scaled = t[f"enter.{name}"].astype(np.float64) / t[f"scale.{name}"]
            if first and HIDDEN_STATES[name] is not Kind.ANCHOR:
                scaled = np.zeros_like(scaled)  # unknown: counts as its mean
            bias = bias - scaled @ t[f"mean.{name}"]
            state_weights.append(scaled.astype(np.float32))
        return weight.astype(np.float32), bias.astype(np.float32), state_weights

    def scores(self, features: Array, depth: int, hidden: Hidden = NO_HIDDEN) -> Array:
        """Return [R, 2]; see `Head`."""
        weight, bias, state_weights = self._entries[depth == 0]
        x = self.basis.expand(features, self.bounds[depth == 0]) @ weight.T + bias
        for name, state_weight in zip(self.sizes, state_weights, strict=True):
            values = hidden.get(reduced(name))
            x += self._states(hidden, name) @ state_weight.T if values is None else values
        _apply_blocks(x, self._blocks)
        out: Array = x @ self._tensors["leave.weight"].T + self._tensors["leave.bias"]
        return out.astype(np.float64)


class SpecDecHead(Head):
    """D blocks of the width of the draft's hidden state, then two logits. Their difference is the score.

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
            raise PolicyError(f"specdec head: expected no scalar features, got {', '.join(names)}")
        size, count, depth = (size_of(tensors, *at) for at in (("leave.weight",), ("block.weight", 0), ("order", 0)))
        shapes: dict[str, tuple[int, ...]] = {"block.weight": (count, size, size), "block.bias": (count, size)}
        shapes |= {"order": (depth,), "leave.weight": (2, size), "leave.bias": (2,), "first": (1,)}
        super().__init__(names, tensors, shapes)
        order: list[int] = tensors["order"].tolist()
        if depth > _MAX_BLOCKS or not size or set(order) != set(range(count)):
            raise PolicyError(
                f"specdec head: expected order to name each of {count} blocks, at most {_MAX_BLOCKS} times in all, "
                f"got {order[:_MAX_BLOCKS]}"
            )
        self.sizes = {DRAFT_HIDDEN: size}
        self._blocks = [(tensors["block.weight"][i], tensors["block.bias"][i]) for i in order]
        # Under a softmax of two logits the log-odds of acceptance are their difference.
        (reject, accept), (reject_bias, accept_bias) = tensors["leave.weight"], tensors["leave.bias"]
        self._leave, self._bias = accept - reject, accept_bias - reject_bias
        leave = "linear", self._leave[None], np.array([self._bias], dtype=np.float32)
        self.reductions = {DRAFT_HIDDEN: [*(("residual", *block) for block in self._blocks), leave]}

    def scores(self, features: Array, depth: int, hidden: Hidden = NO_HIDDEN) -> Array:
        """Return [R, 2], twice the same; see `Head`."""
        values = hidden.get(reduced(DRAFT_HIDDEN))
        x = self._states(hidden, DRAFT_HIDDEN) if values is None else values
        if depth == 0:
            return np.full((len(x), 2), float(self._tensors["first"][0]))
        if values is None:
            x = x.copy()  # the blocks work in place
            _apply_blocks(x, self._blocks)
            x = (x @ self._leave + self._bias)[:, None]
        return np.repeat(x.astype(np.float64), 2, axis=1)
