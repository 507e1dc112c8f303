"""Heads at inference: from scalar features to the two logits `accept` and `next`, as flat tensors and nothing else.

`accept` scores x_j accepted, given the features at depth j and x_1..x_{j-1} accepted; `next` scores x_{j+1} accepted, given
the same features and x_1..x_j accepted. At depth 0 only `next` means anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log
from operator import mul
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from .errors import PolicyError
from .features import Kind, feature
from .forest import forest
from .layers import Layers

_FOREST = ("feature", "threshold", "missing_left", "leaf", "base")
_KINDS = {"feature": torch.int64, "missing_left": torch.bool}
DEEPEST_TREE = 16
_EDGE = 1e-6
EDGES = float(np.float32(_EDGE)), float(np.float32(1.0) - np.float32(_EDGE))
"""Where `torch.logit` clips float32 probabilities."""

_LOW, _HIGH = EDGES


class Head(Protocol):
    """Scores a decision; what it needs travels as named tensors."""

    kind: str

    def logits(self, features: Tensor, depth: int) -> Tensor:
        """Return [..., 2], accept and next, of features [..., F] at one depth."""

    def logits_one(self, features: Sequence[float], depth: int) -> list[float]:
        """Return [accept, next] of one row of F float32 numbers: what `logits` returns for it."""

    def tensors(self) -> dict[str, Tensor]:
        """Return everything that the head consists of."""


class Basis:
    """Scalars made fit for a linear layer: probabilities also as log-odds, all standardised, unknown ones 0.

    Args:
        names: F features.
        mean, scale: [F'] of the expanded columns, F' = F + number of probabilities.

    Attributes:
        probabilities: places of the probabilities among the features.
    """

    def __init__(self, names: Sequence[str], mean: Tensor, scale: Tensor) -> None:
        kinds = [feature(name) for name in names]
        odds = [i for i, f in enumerate(kinds) if f.is_probability]
        self._odds = torch.tensor(odds, dtype=torch.int64)
        self.probabilities = odds
        node = [f.kind in (Kind.PRE, Kind.POST) for f in kinds]
        self.first_mask = torch.tensor([not flag for flag in [*node, *(node[i] for i in odds)]], dtype=torch.float32)
        self.mean, self.scale = mean, scale
        expect(mean, tuple(self.first_mask.shape), "mean")
        expect(scale, tuple(self.first_mask.shape), "scale")
        if not bool((scale > 0).all()):
            raise PolicyError("weights: scale must be above 0 everywhere")

    @property
    def width(self) -> int:
        """F', the number of columns."""
        return len(self.mean)

    def expand(self, features: Tensor) -> Tensor:
        """Return [..., F'], the features and the log-odds of the probabilities among them."""
        odds = torch.logit(features.index_select(-1, self._odds.to(features.device)), eps=_EDGE)
        return torch.cat([features, odds], -1)

    def expand_one(self, features: Sequence[float]) -> list[float]:
        """Return F' numbers of one row; see `expand`."""
        columns = list(features)
        for at in self.probabilities:
            p = features[at]
            p = _LOW if p < _LOW else _HIGH if p > _HIGH else p
            columns.append(log(p / (1.0 - p)))
        return columns

    def __call__(self, features: Tensor, depth: int) -> Tensor:
        """Return [..., F'] for features [..., F]; at depth 0 the columns that are not known yet are 0."""
        columns = (self.expand(features) - self.mean) / self.scale
        return columns * self.first_mask if depth == 0 else columns

    def fold(self, weight: Tensor, bias: Tensor, first: bool) -> tuple[Tensor, Tensor]:
        """Return (weight, bias) that do on `expand` what the given ones do on the basis, at depth 0 if `first`."""
        scaled = weight / self.scale * (self.first_mask if first else 1.0)
        return scaled, bias - scaled @ self.mean


class LinearHead:
    """Three logistic regressions on the basis: accept, next, and next at depth 0.

    Args:
        names: features.
        tensors: `mean` and `scale` [F'], `weight` [3, F'], `bias` [3].
    """

    kind = "logistic"

    def __init__(self, names: Sequence[str], tensors: Mapping[str, Tensor]) -> None:
        self._tensors = take(tensors, ("mean", "scale", "weight", "bias"))
        self.basis = Basis(names, self._tensors["mean"], self._tensors["scale"])
        weight, bias = self._tensors["weight"], self._tensors["bias"]
        expect(weight, (3, self.basis.width), "weight")
        expect(bias, (3,), "bias")
        self._later = self.basis.fold(weight[:2], bias[:2], first=False)
        self._first = self.basis.fold(weight[[0, 2]], bias[[0, 2]], first=True)
        self._one = [(*w.double().tolist(), *b.double().tolist()) for w, b in (self._later, self._first)]

    def logits(self, features: Tensor, depth: int) -> Tensor:
        """Return [..., 2], accept and next; see `Head`."""
        weight, bias = self._later if depth else self._first
        return torch.nn.functional.linear(self.basis.expand(features), weight, bias)

    def logits_one(self, features: Sequence[float], depth: int) -> list[float]:
        """Return [accept, next] of one row; see `Head`. A few products are cheaper than one call of an array library."""
        accept, following, above, beyond = self._one[0 if depth else 1]
        x = self.basis.expand_one(features)
        return [sum(map(mul, accept, x), above), sum(map(mul, following, x), beyond)]

    def folded(self) -> list[list[tuple[Tensor, Tensor]]]:
        """Return the layers that `logits` puts `Basis.expand` through, at depths from 1 on and at depth 0."""
        return [[self._later], [self._first]]

    def tensors(self) -> dict[str, Tensor]:
        """Return the head's tensors."""
        return dict(self._tensors)


class MLPHead:
    """A small network on the basis and a flag for depth 0, with two outputs.

    Args:
        names: features.
        tensors: `mean`, `scale`, and `weight.i` [out, in], `bias.i` [out] of layer i; SiLU between layers.
    """

    kind = "mlp"

    def __init__(self, names: Sequence[str], tensors: Mapping[str, Tensor]) -> None:
        count = sum(name.startswith("weight.") for name in tensors)
        layers = [f"{part}.{i}" for i in range(count) for part in ("weight", "bias")]
        self._tensors = take(tensors, ("mean", "scale", *layers))
        self.basis = Basis(names, self._tensors["mean"], self._tensors["scale"])
        pairs = [(self._tensors[f"weight.{i}"], self._tensors[f"bias.{i}"]) for i in range(count)]
        width = self.basis.width + 1
        for i, (weight, bias) in enumerate(pairs):
            expect(weight, (len(bias), width), f"weight.{i}")
            width = len(bias)
        if width != 2 or not pairs:
            raise PolicyError(f"mlp head: expected 2 outputs, got {width if pairs else 'no layer'}")
        (weight, bias), *self._rest = pairs
        self._later = self.basis.fold(weight[:, :-1], bias, first=False)
        self._first = self.basis.fold(weight[:, :-1], bias + weight[:, -1], first=True)
        self._one = [Layers(layers) for layers in self.folded()]

    def logits(self, features: Tensor, depth: int) -> Tensor:
        """Return [..., 2], accept and next; see `Head`."""
        x = torch.nn.functional.linear(self.basis.expand(features), *(self._later if depth else self._first))
        for weight, bias in self._rest:
            x = torch.nn.functional.linear(torch.nn.functional.silu(x), weight, bias)
        return x

    def logits_one(self, features: Sequence[float], depth: int) -> list[float]:
        """Return [accept, next] of one row; see `Head`."""
        return self._one[0 if depth else 1](self.basis.expand_one(features))

    def folded(self) -> list[list[tuple[Tensor, Tensor]]]:
        """Return the layers that `logits` puts `Basis.expand` through, at depths from 1 on and at depth 0."""
        return [[self._later, *self._rest], [self._first, *self._rest]]

    def tensors(self) -> dict[str, Tensor]:
        """Return the head's tensors."""
        return dict(self._tensors)


class TreesHead:
    """Two boosted ensembles as complete binary trees of one depth D, walked by gathers.

    Args:
        names: features.
        tensors: `feature` int64 and `threshold` float32 [2, T, 2^D - 1], `missing_left` bool of the same shape,
            `leaf` [2, T, 2^D], `base` [2]. A row goes left where x < threshold.
    """

    kind = "xgboost"

    def __init__(self, names: Sequence[str], tensors: Mapping[str, Tensor]) -> None:
        self._tensors = take(tensors, _FOREST)
        split, leaf = self._tensors["feature"], self._tensors["leaf"]
        self.depth = int(leaf.shape[-1]).bit_length() - 1 if leaf.dim() == 3 else 0
        if not 0 <= self.depth <= DEEPEST_TREE:
            raise PolicyError(f"weights: expected leaf of 1 to {2**DEEPEST_TREE} leaves a tree, got {list(leaf.shape)}")
        inner = (2, split.shape[1] if split.dim() == 3 else -1, 2**self.depth - 1)
        for name in ("feature", "threshold", "missing_left"):
            expect(self._tensors[name], inner, name)
        expect(leaf, (*inner[:2], 2**self.depth), "leaf")
        expect(self._tensors["base"], (2,), "base")
        if split.numel() and not 0 <= int(split.min()) <= int(split.max()) < len(names):
            raise PolicyError(f"xgboost head: a split reads a feature outside 0..{len(names) - 1}")
        trees = inner[0] * inner[1]
        self._split = split.reshape(-1)
        self._threshold = self._tensors["threshold"].reshape(-1)
        self._missing = self._tensors["missing_left"].reshape(-1)
        self._leaf = leaf.reshape(-1)
        self._inner_at = torch.arange(trees) * inner[2]
        self._leaf_at = torch.arange(trees) * 2**self.depth - inner[2]
        self._all_missing_left = bool(self._missing.all())
        self._base = self._tensors["base"]
        self._one = forest(*(self._tensors[name] for name in _FOREST)) if trees else None

    def logits(self, features: Tensor, depth: int) -> Tensor:
        """Return [..., 2], accept and next; see `Head`."""
        flat = features.reshape(-1, features.shape[-1])
        x = flat.index_select(1, self._split)
        right = x >= self._threshold  # false for missing values
        if not self._all_missing_left:
            right |= x.isnan() & ~self._missing
        step = right.long() + 1
        at = torch.zeros(flat.shape[0], len(self._inner_at), dtype=torch.int64, device=flat.device)
        for _ in range(self.depth):
            at = 2 * at + step.gather(1, at + self._inner_at)
        leaves = self._leaf[at + self._leaf_at]
        scores = leaves.view(flat.shape[0], 2, -1).sum(-1) + self._base
        return scores.view(*features.shape[:-1], 2)

    def logits_one(self, features: Sequence[float], depth: int) -> list[float]:
        """Return [accept, next] of one row; see `Head`."""
        if self._one is not None:
            return self._one(features)
        row: list[float] = self.logits(torch.tensor([[*features]]), depth)[0].tolist()
        return row

    def tensors(self) -> dict[str, Tensor]:
        """Return the head's tensors."""
        return dict(self._tensors)


HEADS: dict[str, type[LinearHead] | type[MLPHead] | type[TreesHead]] = {
    head.kind: head for head in (LinearHead, MLPHead, TreesHead)
}
"""Every kind of head by name."""


def take(tensors: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
    """Return exactly the named tensors, all finite; a missing, unknown or non-finite one is a `PolicyError`."""
    if set(tensors) != set(names):
        odd = sorted(set(tensors) ^ set(names))
        raise PolicyError(f"weights: expected the tensors {', '.join(names)}; missing or unknown: {', '.join(odd)}")
    for name in names:
        kind = _KINDS.get(name, torch.float32)
        if tensors[name].dtype != kind:
            raise PolicyError(f"weights: expected {name} as {kind}, got {tensors[name].dtype}")
        if kind == torch.float32 and not bool(tensors[name].isfinite().all()):
            raise PolicyError(f"weights: {name} has values that are not finite")
    return {name: tensors[name] for name in names}


def expect(tensor: Tensor, shape: tuple[int, ...], name: str) -> None:
    """Raise `PolicyError` unless `tensor` has this shape."""
    if tuple(tensor.shape) != shape:
        raise PolicyError(f"weights: expected {name} of shape {list(shape)}, got {list(tensor.shape)}")


def build_head(kind: str, names: Sequence[str], tensors: Mapping[str, Tensor]) -> Any:
    """Return the head of this kind; an unknown kind or wrong tensors are a `PolicyError`."""
    if kind not in HEADS:
        raise PolicyError(f"unknown head {kind!r}; expected one of {', '.join(HEADS)}")
    return HEADS[kind](names, tensors)
