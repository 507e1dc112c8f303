"""DynaSD's two heads: the draft's hidden state, or the entropy and the ten largest probabilities, to one logit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
from torch import Tensor
from torch.nn.functional import linear, relu

from .errors import PolicyError
from .features import TOP
from .heads_base import NO_ARRAYS, NO_VECTORS, Arrays, OnDevice, TensorHead, array, expect, take, vector, width_of
from .layers import Array
from .vectors import DRAFT_HIDDEN

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
    """

    kind: str
    reads: ClassVar[tuple[str, ...]]

    def __init__(self, names: Sequence[str], tensors: Mapping[str, Tensor]) -> None:
        count = sum(name.startswith("weight.") for name in tensors)
        layers = [f"{part}.{i}" for i in range(count) for part in ("weight", "bias")]
        self._tensors = take(tensors, (*layers, "first"))
        if tuple(names) != self.reads:
            wanted = ", ".join(self.reads) or "no scalar feature"
            raise PolicyError(f"{self.kind} head: expected {wanted}, in this order, got {', '.join(names) or 'none'}")
        expect(self._tensors["first"], (1,), "first")
        inputs = width = width_of(self._tensors["weight.0"]) if count else 0
        for i in range(count):
            weight, bias = self._tensors[f"weight.{i}"], self._tensors[f"bias.{i}"]
            width_next = len(bias) if bias.dim() else 0
            expect(bias, (width_next,), f"bias.{i}")
            expect(weight, (width_next, width), f"weight.{i}")
            width = width_next
        if width != 1 or not count:
            raise PolicyError(f"{self.kind} head: expected 1 output, got {width if count else 'no layer'}")
        self._inputs = inputs
        self._placed = OnDevice(*(self._tensors[name] for name in layers), self._tensors["first"])
        self._one = [(self._tensors[f"weight.{i}"].numpy(), self._tensors[f"bias.{i}"].numpy()) for i in range(count)]
        self._opening = [float(self._tensors["first"])] * 2

    def _score(self, x: Tensor, depth: int) -> Tensor:
        """Return [..., 2] for inputs [..., in]."""
        *layers, first = self._placed(x.device)
        if depth == 0:
            return first.expand(*x.shape[:-1], 2)
        for at, (weight, bias) in enumerate(zip(layers[::2], layers[1::2], strict=True)):
            x = linear(relu(x) if at else x, weight, bias)
        return x.expand(*x.shape[:-1], 2)

    def _score_one(self, x: Array, depth: int) -> list[float]:
        """Return the two scores of one row of inputs."""
        if depth == 0:
            return list(self._opening)
        for at, (weight, bias) in enumerate(self._one):
            x = weight.dot(np.maximum(x, 0.0) if at else x) + bias
        return [float(x[0])] * 2


class SoftHead(DynaSDHead):
    """The soft model: the draft's last hidden state to the chance of acceptance, min(1, p/q) of the token drawn from it."""

    kind = "dynasd-soft"
    reads = ()

    def __init__(self, names: Sequence[str], tensors: Mapping[str, Tensor]) -> None:
        super().__init__(names, tensors)
        self.sizes = {DRAFT_HIDDEN: self._inputs}

    def logits(self, features: Tensor, depth: int, vectors: Mapping[str, Tensor] = NO_VECTORS) -> Tensor:
        """Return [..., 2], twice the same; see `Head`."""
        return self._score(vector(vectors, DRAFT_HIDDEN, self._inputs), depth)

    def logits_one(self, features: Sequence[float], depth: int, vectors: Arrays = NO_ARRAYS) -> list[float]:
        """Return [accept, next] of one row, twice the same; see `Head`."""
        return self._score_one(array(vectors, DRAFT_HIDDEN, self._inputs), depth)


class HardHead(DynaSDHead):
    """The hard model: entropy and top-10 probabilities to whether the token drawn is accepted."""

    kind = "dynasd-hard"
    reads = HARD_FEATURES

    def __init__(self, names: Sequence[str], tensors: Mapping[str, Tensor]) -> None:
        super().__init__(names, tensors)
        if self._inputs != len(self.reads):
            raise PolicyError(f"dynasd-hard head: expected weight.0 for {len(self.reads)} inputs, got {self._inputs}")

    def logits(self, features: Tensor, depth: int, vectors: Mapping[str, Tensor] = NO_VECTORS) -> Tensor:
        """Return [..., 2], twice the same; see `Head`."""
        return self._score(features, depth)

    def logits_one(self, features: Sequence[float], depth: int, vectors: Arrays = NO_ARRAYS) -> list[float]:
        """Return [accept, next] of one row, twice the same; see `Head`."""
        return self._score_one(np.array(features, dtype=np.float32), depth)
