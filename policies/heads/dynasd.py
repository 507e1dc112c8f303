"""DynaSD's two heads: the draft's hidden state, or the entropy and the ten largest probabilities, to one logit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from ..errors import PolicyError
from ..features import TOP
from ..features.hidden_states import DRAFT_HIDDEN
from .base import NO_HIDDEN, Array, Hidden, TensorHead, expect, kernels, state_of, width_of
from .layers import checked_layers, layer_names, packed

HARD_FEATURES = ("entropy", *(f"top{rank}" for rank in range(1, TOP + 1)))
"""What the hard model reads, in its order: the entropy in nats, then the ten largest probabilities, at temperature 1."""

SOFT_LAYERS, SOFT_LAYERS_WIDE, HARD_LAYERS = (512, 256), (1024, 512), (44,)
"""Hidden widths: of the soft model for llama-68m (H = 768), for TinyLlama (H = 2048), and of the hard model."""

THRESHOLD, CLASS_THRESHOLD = 0.4, 0.5
"""Of the any-fork rule: in the scripts, and the default of the class."""


class DynaSDHead(TensorHead):
    """Linear layers with ReLU between them and one output, for `accept` and `next` alike.

    DynaSD (arXiv 2409.10644; code JackZeng0208/DynaSD, `inference/decision_models.py`: `DecisionModelV1`,
    `DecisionModelV1_Tinyllama`, `DecisionModelVTopk`; inputs as they are, not standardised). One output: whether the token
    drawn from this state is accepted. A rule that wants `next` gets the same logit; at depth 0, of which the paper knows
    nothing, a constant.

    Args:
        names: none, or `HARD_FEATURES`; see the subclasses.
        tensors: `weight.i` [out, in], `bias.i` [out] of layer i, the last with one output; `first` [1], `next` at depth 0.
            See `TensorHead` for ranges.
    """

    kind: str
    reads: ClassVar[tuple[str, ...]]

    def __init__(self, names: Sequence[str], tensors: Mapping[str, Array]) -> None:
        super().__init__(names, tensors, (*layer_names(tensors), "first"))
        if tuple(names) != self.reads:
            wanted = ", ".join(self.reads) or "no scalar feature"
            raise PolicyError(f"{self.kind} head: expected {wanted}, in this order, got {', '.join(names) or 'none'}")
        expect(self._tensors["first"], (1,), "first")
        width = width_of(self._tensors["weight.0"]) if "weight.0" in self._tensors else 0
        self._layers = checked_layers(self._tensors, width, 1, f"{self.kind} head")
        self._inputs, self._opening = width, float(self._tensors["first"][0])


class SoftHead(DynaSDHead):
    """The soft model: the draft's last hidden state to the chance of acceptance, min(1, p/q) of the token drawn from it."""

    kind = "dynasd-soft"
    reads = ()

    def __init__(self, names: Sequence[str], tensors: Mapping[str, Array]) -> None:
        super().__init__(names, tensors)
        self.sizes = {DRAFT_HIDDEN: self._inputs}

    def scores(self, features: Array, depth: int, hidden: Hidden = NO_HIDDEN) -> Array:
        """Return [R, 2], twice the same; see `Head`."""
        x = state_of(hidden, DRAFT_HIDDEN, self._inputs)
        if depth == 0:
            return np.full((len(x), 2), self._opening)
        for at, (weight, bias) in enumerate(self._layers):
            x = (np.maximum(x, 0.0) if at else x) @ weight.T + bias  # no activation before the first layer
        return np.repeat(x.astype(np.float64), 2, axis=1)


class HardHead(DynaSDHead):
    """The hard model: entropy and top-10 probabilities to whether the token drawn is accepted."""

    kind = "dynasd-hard"
    reads = HARD_FEATURES

    def __init__(self, names: Sequence[str], tensors: Mapping[str, Array]) -> None:
        super().__init__(names, tensors)
        if self._inputs != len(self.reads):
            raise PolicyError(f"dynasd-hard head: expected weight.0 for {len(self.reads)} inputs, got {self._inputs}")
        *rest, (weight, bias) = self._layers
        # The kernel gives two outputs: the one logit stands for both.
        twice = (weight.repeat(2, 0), bias.repeat(2, 0))
        self._packed = self.bounds, np.zeros(0, dtype=np.int64), *packed([*rest, twice]), True

    def scores(self, features: Array, depth: int, hidden: Hidden = NO_HIDDEN) -> Array:
        """Return [R, 2], twice the same; see `Head`."""
        if depth == 0:
            return np.full((len(features), 2), self._opening)
        out = np.empty((len(features), 2))
        kernels().score_layers(features, *self._packed, out)
        return out
