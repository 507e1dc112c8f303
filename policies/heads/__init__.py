"""Heads at inference: from features and hidden states to the logits `accept` and `next`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..contract import Array
from ..errors import PolicyError
from .base import Head
from .layers import HardHead, LinearHead, MLPHead, SoftHead
from .residual import ResNetHead, SpecDecHead
from .tables import TokenHead, TreesHead

HEADS = {
    head.kind: head for head in (HardHead, LinearHead, MLPHead, ResNetHead, SoftHead, SpecDecHead, TokenHead, TreesHead)
}


def build_head(kind: str, names: Sequence[str], tensors: Mapping[str, Array]) -> Head:
    """Return a head of this kind on these features; raise `PolicyError` if the kind is unknown or a tensor is wrong."""
    if kind not in HEADS:
        raise PolicyError(f"unknown head {kind!r}; expected one of {', '.join(sorted(HEADS))}")
    head: Head = HEADS[kind](names, tensors)
    return head
