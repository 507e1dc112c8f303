"""Single rounds of a live trace whose text depends on the policy: what each would have brought, one by one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...policies.contract import RoundOutcome, StopPolicy
from ...policies.errors import TraceError
from ...policies.latency.profile import Profile
from .arrays import TraceArrays
from .drafting import TreeShape, draft_trees
from .log import Rounds
from .state import Array, Drafted, Walk

ROUND_COLUMNS = ("draft_prob", "target_prob", "sent", "backlog", "explored")
"""What `evaluate_rounds` wants of `trace_arrays` as `extra`."""

CAVEATS = (
    "rounds are taken where the recorded run had them: this policy would have come to other anchors, because what follows a "
    "round depends on where it stops; round values are no throughput of whole texts",
    "earlier rounds, which HISTORY features and adaptive policies look at, are those recorded, cut to this policy's length",
)
_IN_EXPECTATION = "acceptance is the expectation over the stored probabilities, min(1, p / q) by token"
_AS_DRAWN = "acceptance is as it was drawn when the trace was recorded, candidates left out counting as rejected"


@dataclass(frozen=True)
class RoundValues:
    """What a policy's rounds are worth.

    Attributes:
        name: of the policy.
        rounds: number evaluated.
        committed: [rounds] expected tokens, the target's own included.
        seconds: [rounds] modelled.
        drafted, verified: [rounds].
        caveats: what a reader must know; always to be printed.
        taken: what they consisted of.
    """

    name: str
    rounds: int
    committed: Tensor
    seconds: Tensor
    drafted: Tensor
    verified: Tensor
    caveats: tuple[str, ...]
    taken: Rounds

    @property
    def rate(self) -> float:
        """Tokens per second of these rounds, a ratio of sums."""
        return float(self.committed.sum() / self.seconds.sum())


def evaluate_rounds(arrays: TraceArrays, policy: StopPolicy, profile: Profile) -> RoundValues:
    """Ask a policy at every recorded round that was drafted to full depth.

    Args:
        arrays: of a live trace, with `extra=ROUND_COLUMNS`.
        policy: any policy but one that reads the clock.
        profile: what rounds cost.

    Raises:
        TraceError: the trace is dense, or censored: nothing was drafted as deep as the policy may want to.
    """
    header = arrays.header
    if header.collector != "live" or arrays.drawn is None:
        raise TraceError("single rounds are of live traces; replay dense ones")
    unknown = [name for name in policy.hidden if name not in arrays.vectors]
    if unknown or policy.reads_clock or policy.max_depth > arrays.depth:
        raise TraceError(f"{policy.name} reads what the trace does not hold, or drafts deeper than {arrays.depth}")
    walk = Walk(arrays, policy, profile, np.arange(arrays.sequences)[:, None])
    shape = TreeShape(arrays.tree.limited(policy.max_depth))
    soft = header.verification.startswith("rejection") and arrays.tree.is_chain and header.texts == "target"
    full = (arrays.extra["explored"] | (header.explore == 0.0)).numpy() & ~arrays.cut.numpy()
    anchors, unread = recorded_anchors(arrays), arrays.extra["backlog"].numpy().astype(np.int64)
    offset, rows = arrays.offset.numpy(), arrays.rows.numpy()
    lines, counts, feeds = [], [], []
    for turn in range(int(rows.max())):
        row = offset + np.minimum(turn, rows - 1)
        walk.active = (turn < rows) & full[row]
        walk.anchor, walk.backlog = anchors[row], unread[row]
        made = draft_trees(walk, shape, row)
        context, on = walk.context(), walk.active
        seconds = profile.round_seconds(
            context, made.drafted, made.verified, walk.backlog, made.decisions, walk.price, made.fed
        )
        expected = _expected(arrays, row, made) if soft else made.accepted
        walk.history = walk.history.after(made.accepted, made.verified, on & ~made.capped)
        lines.append(np.stack([expected + 1.0, seconds, made.drafted, made.verified], 1)[on])
        columns = (walk.sequence, walk.anchor, context, made.drafted, made.verified, made.accepted, walk.backlog)
        steps = made.drafted if made.fed is None else (made.fed > 0).sum(1)
        counts.append(np.stack([*columns, made.decisions, steps], 1)[on])
        feeds += [] if made.fed is None else [made.fed[on]]
        walk.observe(RoundOutcome(on, made.drafted, made.verified, made.accepted, made.capped, seconds))
    table = torch.from_numpy(np.concatenate(lines))
    if not len(table):
        raise TraceError("no recorded round was drafted to full depth; collect with --explore, or without a policy")
    caveats = (*CAVEATS, _IN_EXPECTATION if soft else _AS_DRAWN)
    sequence, anchor, whole, drafted, verified, accepted, owed, decided, passes = torch.from_numpy(
        np.concatenate(counts)
    ).unbind(1)
    taken = Rounds(
        sequence, anchor, whole, drafted, verified, accepted, owed, decided, passes,
        torch.from_numpy(np.concatenate(feeds)) if feeds else None, policy.cost_name,
    )  # fmt: skip
    return RoundValues(policy.name, len(table), table[:, 0], table[:, 1], table[:, 2], table[:, 3], caveats, taken)


def _expected(arrays: TraceArrays, row: Array, made: Drafted) -> Array:
    """Return [R], E[min(A, k)] of chains: the sum over j <= k of the product of min(1, p / q)."""
    q, p = (arrays.extra[name].numpy()[row].astype(np.float64) for name in ("draft_prob", "target_prob"))
    survival = np.where(q > 0, np.minimum(p / np.maximum(q, 1e-300), 1.0), 0.0).cumprod(1)
    out: Array = (survival * (np.arange(arrays.depth) < made.verified[:, None])).sum(1)
    return out


def recorded_anchors(arrays: TraceArrays) -> Array:
    """Return [N], the anchor of every row."""
    if arrays.anchors is not None:
        return arrays.anchors.numpy()
    starts = zip(arrays.rows.tolist(), arrays.first_anchor.tolist(), strict=True)
    return np.concatenate([np.arange(count) + first for count, first in starts])
