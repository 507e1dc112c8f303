"""Traces, training rows and costs of batches made by hand, whose truth is known."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from specstop.collect import Header
from specstop.collect.schema import parents
from specstop.decode.topology import chain
from specstop.policies.costs import BatchCosts, BatchTable
from specstop.train import TraceArrays
from specstop.train.heads.rows import FitRows
from torch import Tensor

from specstop import Profile

PROMPT_TOKENS = 7


def synthetic_trace(
    accepted: Sequence[Sequence[int]], depth: int, names: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
) -> TraceArrays:
    """Return a trace with these accepted lengths by anchor of each text, and random columns.

    A text of n anchors has n + 1 tokens, so its last `depth` anchors are cut.

    Args:
        accepted: by text, by anchor.
        depth: K.
        names: ANCHOR and node features to make up.
    """
    header = Header("", "", {}, 8, (), 0.0, parents(chain(depth)), names[1], names[0], 99, 0, 1, len(accepted), "")
    counts = torch.tensor([len(lengths) for lengths in accepted])
    flat = torch.tensor([a for lengths in accepted for a in lengths])
    left = torch.tensor([len(lengths) - t for lengths in accepted for t in range(len(lengths))])
    generator = torch.Generator().manual_seed(0)
    columns = {name: torch.rand(len(flat), generator=generator) for name in names[0]}
    columns |= {name: torch.rand(len(flat), depth, generator=generator) for name in names[1]}
    return TraceArrays(
        header=header,
        prompt_ids=[str(i) for i in range(len(accepted))],
        samples=[""] * len(accepted),
        text_hashes=[""] * len(accepted),
        groups=[""] * len(accepted),
        keys=torch.zeros(len(accepted), dtype=torch.int64),
        offset=counts.cumsum(0) - counts,
        rows=counts,
        first_anchor=torch.ones_like(counts),
        prompt_tokens=torch.full_like(counts, PROMPT_TOKENS),
        text_tokens=counts + 1,
        accepted=flat,
        tokens=torch.zeros(len(flat), depth, dtype=torch.int64),
        ends=torch.zeros(len(flat), depth, dtype=torch.bool),
        cut=left <= depth,
        columns=columns,
    )


NAMES = ("entropy", "anchor_entropy", "noisy_score")
"""Features without log-odds columns: one known at depth 0, two that are not."""

TRUE_WEIGHT = torch.tensor([[-1.2, 0.4, 0.8], [-0.6, 0.9, 0.3], [0.0, 1.1, 0.0]])
TRUE_BIAS = torch.tensor([0.5, -0.3, 0.2])


def true_logits(features: Tensor, first: Tensor) -> Tensor:
    """Return [M, 2], the logits that `synthetic_rows` draws its labels with; at depth 0 the second is the third output."""
    scores = features @ TRUE_WEIGHT.T + TRUE_BIAS
    return torch.stack([scores[:, 0], torch.where(first, scores[:, 2], scores[:, 1])], 1)


def synthetic_rows(count: int, seed: int = 0) -> FitRows:
    """Return rows at depths 0 to 3 of 3, their labels drawn from logistic models that are linear in the features."""
    generator = torch.Generator().manual_seed(seed)
    depth = torch.randint(0, 4, (count,), generator=generator)
    first = depth == 0
    features = 1.5 * torch.randn(count, len(NAMES), generator=generator) + 0.7
    features[first[:, None] & torch.tensor([True, False, True])] = 0.0
    drawn = torch.rand(count, 2, generator=generator) < torch.sigmoid(true_logits(features, first))
    accepted = drawn[:, 0] | first
    known = torch.stack([~first, accepted & (depth < 3)], 1)
    return FitRows(features, depth, torch.stack([accepted, drawn[:, 1] & accepted], 1).float(), known)


def telling_trace(texts: int = 24, anchors: int = 40, depth: int = 4) -> TraceArrays:
    """Return a trace whose feature `entropy` says at each node how much longer the draft is right, or 0 after its end."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(0, depth + 1, (texts, anchors), generator=generator)
    arrays = synthetic_trace(lengths.tolist(), depth, (("anchor_entropy",), ("entropy",)))
    left = (arrays.accepted[:, None] - torch.arange(1, depth + 1)).clamp_min(-1).float()
    return with_signal(arrays, left, arrays.accepted.float())


def with_signal(arrays: TraceArrays, nodes: torch.Tensor, anchor: torch.Tensor) -> TraceArrays:
    depth = torch.arange(1.0, nodes.shape[1] + 1).expand(nodes.shape)
    return dataclasses.replace(arrays, columns={"entropy": nodes, "anchor_entropy": anchor, "depth": depth})


def with_batches(profile: Profile) -> Profile:
    """Return a profile with batches of 2 and 4 texts: costs that rise evenly, in a step, and not at all."""
    verify = {2: ((2, 4e-3), (12, 6e-3)), 4: ((4, 5e-3), (16, 5e-3), (17, 8e-3), (24, 8e-3))}
    low = BatchTable(8.0, ((1, 8e-4), (4, 1.5e-3)), verify)
    return dataclasses.replace(profile, batch=BatchCosts(low, dataclasses.replace(low, context=40.0)))
