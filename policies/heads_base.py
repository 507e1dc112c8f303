"""What heads are made of: the protocol, checks of their tensors, and scalars made fit for a linear layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from math import log
from types import MappingProxyType
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from .errors import PolicyError
from .features import Kind, feature
from .layers import Array

_KINDS = {"feature": torch.int64, "missing_left": torch.bool, "order": torch.int64, "strides": torch.int64}
_EDGE = 1e-6
EDGES = float(np.float32(_EDGE)), float(np.float32(1.0) - np.float32(_EDGE))
"""Where `torch.logit` clips float32 probabilities."""

_LOW, _HIGH = EDGES
NO_VECTORS: Mapping[str, Tensor] = MappingProxyType({})
Arrays = Mapping[str, Array]
"""The hidden states [H] of one row, float32, by name."""

NO_ARRAYS: Arrays = MappingProxyType({})
_States = TypeVar("_States", Tensor, Array)


class Head(Protocol):
    """Scores a decision; what it needs travels as named tensors.

    Attributes:
        kind: its name in `HEADS`.
        sizes: H of each hidden-state vector that it reads, by name; empty for a head of scalars.
        lag: its `accept` at depth j speaks of x_{j - lag}; 0 for all but SpecDec++'s, whose input has not seen x_j.
    """

    kind: str
    sizes: Mapping[str, int]
    lag: int

    def logits(self, features: Tensor, depth: int, vectors: Mapping[str, Tensor] = NO_VECTORS) -> Tensor:
        """Return [..., 2], accept and next, of features [..., F] and vectors [..., H] at one depth."""

    def logits_one(self, features: Sequence[float], depth: int, vectors: Arrays = NO_ARRAYS) -> list[float]:
        """Return [accept, next] of one row of F float32 numbers and arrays [H]: what `logits` returns for it."""

    def logits_few(self, columns: Sequence[Sequence[float]], branches: Sequence[int], depth: int) -> list[list[float]]:
        """Return what `logits_one` returns, for some branches of a depth of one round; `columns` [F][B] are by feature."""

    def tensors(self) -> dict[str, Tensor]:
        """Return everything that the head consists of."""


class TensorHead(ABC):
    """What heads that are made of tensors share; see `Head`."""

    sizes: Mapping[str, int] = MappingProxyType({})
    lag = 0
    _tensors: dict[str, Tensor]

    def tensors(self) -> dict[str, Tensor]:
        """Return the head's tensors."""
        return dict(self._tensors)

    @abstractmethod
    def logits_one(self, features: Sequence[float], depth: int, vectors: Arrays = NO_ARRAYS) -> list[float]:
        """Return [accept, next] of one row; see `Head`."""

    def logits_few(self, columns: Sequence[Sequence[float]], branches: Sequence[int], depth: int) -> list[list[float]]:
        """Return [accept, next] of some branches; see `Head`."""
        return [self.logits_one([column[b] for column in columns], depth) for b in branches]


class OnDevice:
    """Tensors that are copied once to each device on which they are needed.

    Args:
        tensors: on the CPU.
    """

    def __init__(self, *tensors: Tensor) -> None:
        self._copies = {torch.device("cpu"): tensors}

    def __call__(self, device: torch.device) -> tuple[Tensor, ...]:
        """Return the tensors there."""
        if device not in self._copies:
            self._copies[device] = tuple(t.to(device) for t in self._copies[torch.device("cpu")])
        return self._copies[device]


def log_odds(p: float) -> float:
    """Return what `torch.logit` returns of a probability, clipped as `Basis` does."""
    p = _LOW if p < _LOW else _HIGH if p > _HIGH else p
    return log(p / (1.0 - p))


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
        self._odds = OnDevice(torch.tensor(odds, dtype=torch.int64))
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
        odds = torch.logit(features.index_select(-1, *self._odds(features.device)), eps=_EDGE)
        return torch.cat([features, odds], -1)

    def expand_one(self, features: Sequence[float]) -> list[float]:
        """Return F' numbers of one row; see `expand`."""
        columns = list(features)
        for at in self.probabilities:
            columns.append(log_odds(features[at]))
        return columns

    def __call__(self, features: Tensor, depth: int) -> Tensor:
        """Return [..., F'] for features [..., F]; at depth 0 the columns that are not known yet are 0."""
        columns = (self.expand(features) - self.mean) / self.scale
        return columns * self.first_mask if depth == 0 else columns

    def fold(self, weight: Tensor, bias: Tensor, first: bool) -> tuple[Tensor, Tensor]:
        """Return (weight, bias) that do on `expand` what the given ones do on the basis, at depth 0 if `first`."""
        scaled = weight / self.scale * (self.first_mask if first else 1.0)
        return scaled, bias - scaled @ self.mean


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


def width_of(weight: Tensor) -> int:
    """Return the inputs of a layer: the last dimension of its weight [out, in]; 0 of a number."""
    return int(weight.shape[-1]) if weight.dim() else 0


def vector(vectors: Mapping[str, Tensor], name: str, size: int) -> Tensor:
    """Return the hidden states [..., H] called `name` as float32.

    Raises:
        PolicyError: there are none, or they are of another size: the head was fitted for another model.
    """
    states = _of_size(vectors, name, size)
    return states.float()


def array(vectors: Arrays, name: str, size: int) -> Array:
    """Return the hidden state [H] called `name` of one row; raises as `vector` does."""
    return _of_size(vectors, name, size)


def _of_size(vectors: Mapping[str, _States], name: str, size: int) -> _States:
    if name not in vectors:
        raise PolicyError(f"the head reads {name}, which it was not given")
    states = vectors[name]
    if states.shape[-1] != size:
        raise PolicyError(f"the head reads {name} of size {size}, but this model's is {states.shape[-1]}")
    return states
