"""Heads that are fitted to noise: on report prompts the AUC of every kind of head is that of chance."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from bars import Bars
from specstop.collect.schema import Header, chain
from specstop.policies.costs import CostTable
from specstop.policies.features import DRAFT_HIDDEN, Kind, feature
from specstop.policies.fixed import FixedLength
from specstop.policies.profile import Profile
from specstop.train.fit.plan import Plan
from specstop.train.fit.run import train_arrays
from specstop.train.heads import HEADS, make_head
from specstop.train.heads.rows import SOFT_COLUMNS
from specstop.train.replay.traces.arrays import TraceArrays
from torch import Tensor

TRACES, QUICK = 12, 1
PROMPTS, ANCHORS, DEPTH, WIDTH = 60, 40, 4, 8
REPORT_SHARE = 0.4
FEATURES = ("top1", "noisy_margin", "depth")
TOKENS = 50
ERRORS = 2.0
"""Standard errors of the mean AUC over traces by which it may differ from .5."""


@dataclasses.dataclass(frozen=True)
class Random:
    """Hidden states that are noise, [N, K, H] in memory."""

    name: str
    values: Tensor
    of_nodes: bool = True

    @property
    def width(self) -> int:
        """H."""
        return int(self.values.shape[-1])

    def at(self, row: Tensor, node: Tensor | None = None) -> Tensor:
        """Return [R, H] of rows [R] and nodes [R]."""
        assert node is not None
        return self.values[row, node]

    def subset(self, row: Tensor) -> Random:
        """Return those of these rows."""
        return Random(self.name, self.values[row])


def noise_trace(names: Sequence[str], seed: int) -> TraceArrays:
    """Return a trace with these features in which a token is accepted with probability .6, whatever was observed."""
    generator = torch.Generator().manual_seed(seed)
    rows = PROMPTS * ANCHORS
    of_anchor = tuple(name for name in names if feature(name).kind is Kind.ANCHOR)
    of_nodes = tuple(name for name in names if feature(name).kind in (Kind.PRE, Kind.POST))
    header = Header(
        "", "", {}, TOKENS, (), 0.0, chain(DEPTH), of_nodes, of_anchor, 99, 0, 1, PROMPTS, "",
        hidden={DRAFT_HIDDEN: WIDTH},
    )  # fmt: skip
    accepted = (torch.rand(rows, DEPTH, generator=generator) < 0.6).long().cumprod(1).sum(1)
    counts = torch.full((PROMPTS,), ANCHORS, dtype=torch.int64)
    columns = {name: torch.rand(rows, DEPTH, generator=generator) for name in of_nodes}
    columns |= {name: torch.randint(0, TOKENS, (rows,), generator=generator).float() for name in of_anchor}
    columns["depth"] = torch.arange(1.0, DEPTH + 1).expand(rows, DEPTH)
    left = torch.arange(ANCHORS, 0, -1).repeat(PROMPTS)
    soft = {name: torch.rand(rows, DEPTH, generator=generator) * 0.8 + 0.1 for name in SOFT_COLUMNS}
    states = torch.randn(rows, DEPTH, WIDTH, generator=generator).half()
    return TraceArrays(
        header=header,
        prompt_ids=[f"p{number}" for number in range(PROMPTS)],
        samples=[""] * PROMPTS,
        text_hashes=[""] * PROMPTS,
        groups=[""] * PROMPTS,
        keys=torch.zeros(PROMPTS, dtype=torch.int64),
        offset=counts.cumsum(0) - counts,
        rows=counts,
        first_anchor=torch.ones_like(counts),
        prompt_tokens=torch.full_like(counts, 12),
        text_tokens=counts + 1,
        accepted=accepted.minimum(left),
        tokens=torch.randint(0, TOKENS, (rows, DEPTH), generator=generator).int(),
        ends=torch.zeros(rows, DEPTH, dtype=torch.bool),
        cut=left <= DEPTH,
        columns=columns,
        extra=soft,
        hidden={DRAFT_HIDDEN: Random(DRAFT_HIDDEN, states)},  # type: ignore[dict-item]
    )


def auc_of(head: str, seed: int) -> float:
    """Return the AUC of `accept` on report prompts."""
    model = make_head(head)
    table = CostTable(10.0, (0.1, 0.11), 0.0, tuple(1.0 + 0.01 * k for k in range(DEPTH + 1)))
    decisions = {name: 1e-3 for name in (head, FixedLength(1).cost_name)}
    profile = Profile(table, table, 0.01, 0.02, (1.0, 0.01), decisions, 0.0, {"device": "simulated"})
    names = model.default_features(FEATURES)
    arrays = noise_trace(dict.fromkeys([*names, *(("anchor_token",) if "above_token" in names else ())]), seed)  # type: ignore[arg-type]
    hidden = model.hidden
    if not hidden:
        arrays = dataclasses.replace(arrays, hidden={})
    if not model.soft:
        arrays = dataclasses.replace(arrays, extra={})
    if "epochs" in model.param_names():
        model.set_params(epochs=20)
    plan = Plan(model, "survival", 0.5, names, head, seed, hidden=hidden, report_share=REPORT_SHARE, passes=1)
    metrics = train_arrays(plan, arrays, profile, [0.0]).metrics
    return float(metrics["accept_auc"])


def check(bars: Bars, options: argparse.Namespace, folder: Path) -> str:
    """Add a bar for every kind of head and return what was compared."""
    traces = QUICK if options.quick else TRACES
    heads = ("logistic", "xgboost") if options.quick else HEADS.builtin
    for head in heads:
        scores = np.array([auc_of(head, seed) for seed in range(traces)])
        error = float(scores.std(ddof=1)) / traces**0.5 if traces > 1 else 0.1
        mean = float(scores.mean())
        said = f"{mean:.4f}, standard error {error:.4f} over {traces} traces; bar .5 +- {ERRORS:g} standard errors"
        bars.add(f"AUC of noise, {head}", mean, abs(mean - 0.5) <= ERRORS * error, said)
    return f"{len(heads)} kinds of head on {traces} traces of noise"
