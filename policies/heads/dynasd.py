"""DynaSD's two heads: one logit from the draft's hidden state, or from its entropy and ten largest probabilities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from ..contract import Array
from ..errors import PolicyError
from ..features import DRAFT_HIDDEN, TOP
from .base import NO_HIDDEN, Head, Hidden, hidden_of, size_of
from .layers import layer_shapes, layers_of, pack_layers

HARD_FEATURES = ("entropy", *(f"top{rank}" for rank in range(1, TOP + 1)))


class DynaSDHead(Head):
    """Linear layers with ReLU between them and one output, for `accept` and `next` alike; at depth 0 a constant.

    DynaSD (arXiv 2409.10644; code JackZeng0208/DynaSD, `inference/decision_models.py`: `DecisionModelV1`,
    `DecisionModelV1_Tinyllama`, `DecisionModelVTopk`). Inputs are not standardised.

    Tensors: `weight.i` [out, in], `bias.i` [out] of layer i; `first` [1], the logit at depth 0.
    """

    reads: ClassVar[tuple[str, ...]]

    def __init__(self, names: Sequence[str], tensors: Mapping[str, Array]) -> None:
        if tuple(names) != self.reads:
            expected = ", ".join(self.reads) or "no scalar feature"
            raise PolicyError(f"{self.kind} head: expected {expected}, in this order, got {', '.join(names) or 'none'}")
        shapes = layer_shapes(tensors, size_of(tensors, "weight.0"), 1, self.kind)
        super().__init__(names, tensors, {**shapes, "first": (1,)})


class SoftHead(DynaSDHead):
    """The soft model: from the draft's last hidden state to the chance min(1, p/q) of the token drawn from it."""

    kind = "dynasd-soft"
    reads = ()

    def __init__(self, names: Sequence[str], tensors: Mapping[str, Array]) -> None:
        super().__init__(names, tensors)
        self.sizes, self._layers = {DRAFT_HIDDEN: size_of(tensors, "weight.0")}, layers_of(tensors)

    def scores(self, features: Array, depth: int, hidden: Hidden = NO_HIDDEN) -> Array:
        """Return [R, 2], twice the same; see `Head`."""
        x = hidden_of(hidden, DRAFT_HIDDEN, self.sizes[DRAFT_HIDDEN])
        if depth == 0:
            return np.full((len(x), 2), float(self._tensors["first"][0]))
        for at, (weight, bias) in enumerate(self._layers):
            x = (np.maximum(x, 0.0) if at else x) @ weight.T + bias
        return np.repeat(x.astype(np.float64), 2, axis=1)


class HardHead(DynaSDHead):
    """The hard model: from entropy and top-10 probabilities to whether the drawn token is accepted."""

    kind = "dynasd-hard"
    reads = HARD_FEATURES
    _kernel = "score_layers"

    def __init__(self, names: Sequence[str], tensors: Mapping[str, Array]) -> None:
        super().__init__(names, tensors)
        *rest, (weight, bias) = layers_of(tensors)
        if (inputs := size_of(tensors, "weight.0")) != len(names):
            raise PolicyError(f"dynasd-hard head: expected weight.0 for {len(names)} inputs, got {inputs}")
        later = [*rest, (weight.repeat(2, 0), bias.repeat(2, 0))]  # the kernel has two outputs
        first = [(np.zeros((2, inputs)), tensors["first"].repeat(2))]
        bounds, no_odds = self.bounds, np.zeros(0, dtype=np.int64)
        self._arguments = (
            (bounds[0], no_odds, *pack_layers(later), True),
            (bounds[1], no_odds, *pack_layers(first), True),
        )
