"""Traces of two drafters, made by hand, in which a signal says which of them is good."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from specstop.collect import Header
from specstop.collect.schema import first_drafters, parents
from specstop.decode.topology import chain, with_drafters
from specstop.policies.costs import CostTable
from specstop.train import TraceArrays

from specstop import Profile


def routing_trace(texts: int = 24, anchors: int = 60, depth: int = 6, seed: int = 0) -> TraceArrays:
    """Return a trace in which `lookup` accepts everything in spans that `match_length` and `agreement_run` announce.

    The signals are noisy: `agreement_run` begins one token late, and both are on in some spans in which nothing is accepted
    unless `match_length` is at least 4. `model` accepts about two tokens anywhere.
    """
    rng = np.random.default_rng(seed)
    tree = with_drafters(chain(depth), 2)
    rows = texts * anchors
    copied, length = np.zeros(rows, dtype=bool), np.zeros(rows)
    for text in range(texts):
        at = text * anchors
        while at < (text + 1) * anchors:
            span, real = int(rng.integers(4, 14)), bool(rng.random() < 0.5)
            stop = min(at + span, (text + 1) * anchors)
            if rng.random() < 0.6:
                copied[at:stop] = real
                length[at:stop] = rng.integers(4, 9) if real else rng.integers(1, 4)
            at = stop
    run, left = np.zeros(rows), np.zeros(rows)
    for row in range(rows):
        before = row % anchors > 0 and length[row - 1] > 0 and length[row] > 0
        run[row] = run[row - 1] + 1 if before else 0
    for row in reversed(range(rows)):
        after = left[row + 1] if row % anchors < anchors - 1 else 0
        left[row] = after + 1 if copied[row] else 0
    accepted = np.stack([np.minimum(left, depth), np.minimum(rng.geometric(0.35, rows) - 1, depth)], 1)
    depths = torch.tensor(tree.depth[1:])
    owner = torch.tensor(tree.drafter[1:])
    lengths = torch.from_numpy(accepted).long()
    path = depths <= lengths[:, owner]
    counts = torch.full((texts,), anchors)
    remaining = anchors - torch.arange(rows) % anchors
    zeros = np.zeros(rows)
    columns = {
        "match_length": np.stack([length, zeros], 1),
        "match_prob": np.stack([(length > 0) * 0.5 + 0.4 * (length > 5), zeros], 1),
        "agreement_run": np.stack([run, zeros], 1),
        "anchor_top1": rng.random(rows),
    }
    header = Header(
        "", "", {}, 8, (), 0.0, parents(tree), (), ("anchor_top1",), 99, 0, 1, texts, "", drafters=first_drafters(tree),
        signals=("match_length", "match_prob", "agreement_run"),
        facts={"drafter": "lookup+model", "reading": ["nothing", "path"]},
    )  # fmt: skip
    names = [str(text) for text in range(texts)]
    return TraceArrays(
        header=header, prompt_ids=names, samples=[""] * texts, text_hashes=[""] * texts, groups=[""] * texts,
        keys=torch.zeros(texts, dtype=torch.int64), offset=counts.cumsum(0) - counts, rows=counts,
        first_anchor=torch.ones_like(counts), prompt_tokens=torch.full_like(counts, 7), text_tokens=counts + 1,
        accepted=lengths.amax(1), tokens=torch.zeros(rows, tree.nodes, dtype=torch.int64),
        ends=torch.zeros(rows, tree.nodes, dtype=torch.bool), cut=remaining <= depth,
        columns={name: torch.from_numpy(values).float() for name, values in columns.items()}, path=path,
    )  # fmt: skip


def routing_profile() -> Profile:
    """Return the costs of a free drafter and of a model that takes a quarter of a verification for each token."""
    verify = tuple(4.0e-3 + 1.0e-4 * n for n in range(9))
    low = CostTable(8.0, (1.0e-5, 1.0e-5), 0.0, verify)
    free = Profile(low, dataclasses.replace(low, context=80.0), 0.0, 1.0e-4, (5.0e-3, 1.0e-4))
    table = dataclasses.replace(low, draft_s=(1.0e-3, 1.1e-3), draft_token_s=2.0e-5)
    model = dataclasses.replace(free, low=table, high=dataclasses.replace(table, context=80.0))
    return dataclasses.replace(free, others=(model,))
