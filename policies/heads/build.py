"""Heads at inference: from scalar features and hidden states to the two logits `accept` and `next`.

`accept` scores x_j accepted, given the features at depth j and x_1..x_{j-1} accepted; `next` scores x_{j+1} accepted, given
the same features and x_1..x_j accepted. At depth 0 only `next` means anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .. import heads
from ..errors import PolicyError
from ..lazy import modules
from .base import Array, Basis as Basis, Head as Head, TensorHead, with_ranges as with_ranges
from .boosted import TreesHead as TreesHead
from .dynasd import HardHead as HardHead, SoftHead as SoftHead
from .layers import LinearHead as LinearHead, MLPHead as MLPHead
from .resnet import ResNetHead as ResNetHead
from .specdec import SpecDecHead as SpecDecHead
from .tokens import TokenHead as TokenHead

HEADS: dict[str, Callable[[Sequence[str], Mapping[str, Array]], Any]] = {
    made.kind: made
    for module in modules(heads)
    for made in vars(module).values()
    if isinstance(made, type) and issubclass(made, TensorHead) and hasattr(made, "kind")  # bases only declare it
}
"""Every kind of head by name: the classes of this folder that name one."""


def build_head(kind: str, names: Sequence[str], tensors: Mapping[str, Array]) -> Head:
    """Return the head of this kind; an unknown kind or wrong tensors are a `PolicyError`."""
    if kind not in HEADS:
        raise PolicyError(f"unknown head {kind!r}; expected one of {', '.join(sorted(HEADS))}")
    head: Head = HEADS[kind](names, tensors)
    return head
