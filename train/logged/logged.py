"""A live trace of a censored policy as logged feedback: what each round shows of what another policy would have brought.

A policy stops by what it sees, so its length in a round is unknown where the recorded run stopped earlier. With exploration,
a share eps of the rounds, chosen by a coin that looks at nothing, was drafted to full depth. A round *shows* a policy that
stops at or before the depth recorded: its length, its tokens, its modelled seconds. The chance of that is 1 where the
logging policy goes at least as deep by itself, else eps. Assumed are

- the coin: independent of the round, with the share that the header names;
- that the logging policy can be asked again, and says of explored rounds how deep it would have gone by itself. Where it
  cannot, only the explored rounds serve, each with chance eps;
- that acceptance of the first k tokens does not depend on how many were sent. That holds round by round for `match` and
  `rejection`, and in expectation for `block` (arXiv 2403.10444: P(tau >= i) = w_i, whatever stop looks at x_1..x_k only).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...policies.contract import DraftStep, RoundOutcome, StopPolicy, checked_keep, checked_observe
from ...policies.costs import Profile
from ...policies.errors import TraceError
from ..traces.data import TraceArrays
from ..traces.walk import Walk

COLUMNS = ("draft_prob", "target_prob", "sent", "backlog", "explored", "decisions")
"""What `shown_rounds` wants of `trace_arrays` as `extra`."""

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Shown:
    """What a trace shows of a policy, by round in the order of the trace; all [N].

    Attributes:
        seen: the round was drafted and verified as deep as the policy wants.
        drafted, verified: of the policy where seen; else as far as is known.
        tokens: committed, the target's own included (expected over acceptance where probabilities were stored); 0 unseen.
        seconds: modelled; 0 unseen.
    """

    seen: Array
    drafted: Array
    verified: Array
    tokens: Array
    seconds: Array

    def reaches(self, other: Shown) -> Array:
        """Whether, round by round, this policy drafts and verifies at least as much as the other."""
        enough: Array = (self.drafted >= other.drafted) & (self.verified >= other.verified)
        return enough


def shown_rounds(arrays: TraceArrays, policy: StopPolicy, profile: Profile, *, recorded: bool = False) -> Shown:
    """Ask a policy at every recorded round, as far as the round was drafted.

    Args:
        arrays: of a live trace of chains, with `extra=COLUMNS`.
        policy: any that stops or trims by what a trace holds.
        profile: what rounds cost.
        recorded: the policy is the one that was recorded: it observes the rounds as they were, and no seconds, for the
            collector tells it of none. Else it observes its own rounds, and recorded ones where its own are not shown.

    Raises:
        TraceError: the trace is dense or of trees, or the policy reads what it does not hold.
    """
    check_logged(arrays, policy)
    walk = Walk(arrays, policy, profile, torch.arange(arrays.sequences)[:, None])
    trace = _Recorded(arrays)
    out = torch.zeros(5, len(arrays.accepted), dtype=torch.float64)
    for turn in range(int(arrays.rows.max())):
        row = arrays.offset + torch.minimum(torch.tensor(turn), arrays.rows - 1)
        active = turn < arrays.rows
        walk.active, walk.anchor, walk.backlog = active, trace.anchors[row], trace.backlog[row]
        drafted, verified, decisions, unseen = _draft(walk, trace, row, trace.explored[row] & recorded)
        tokens = trace.tokens(row, verified)
        context = arrays.prompt_tokens + walk.anchor
        seconds = profile.round_seconds(context, drafted, verified, walk.backlog, decisions, walk.price)
        own = ~unseen & (not recorded)
        sent = torch.where(own, verified, trace.sent[row])
        accepted = torch.minimum(arrays.accepted[row], sent)
        heard = torch.zeros_like(seconds) if recorded else seconds
        drew = torch.where(own, drafted, trace.drawn[row])
        walk.history = walk.history.after(accepted, sent, active & ~arrays.cut[row])
        line = torch.stack([v.double() for v in (~unseen, drafted, verified, tokens * ~unseen, seconds * ~unseen)])
        out[:, row[active]] = line[:, active]
        walk.state = checked_observe(
            policy, RoundOutcome(active, drew, sent, accepted, arrays.cut[row], heard), walk.state
        )
    seen, drafted, verified, tokens, seconds = out.numpy()
    return Shown(seen > 0, drafted.astype(np.int64), verified.astype(np.int64), tokens, seconds)


def recorded_rounds(arrays: TraceArrays, profile: Profile) -> tuple[Array, Array]:
    """Return [N] tokens and [N] modelled seconds of the rounds as they were recorded; arguments as of `shown_rounds`."""
    trace, row = _Recorded(arrays), torch.arange(len(arrays.accepted))
    prompt = torch.repeat_interleave(arrays.prompt_tokens, arrays.rows)
    price = profile.decision(arrays.header.policy.partition(":")[0])
    decisions = arrays.extra["decisions"].long()
    seconds = profile.round_seconds(prompt + trace.anchors, trace.drawn, trace.sent, trace.backlog, decisions, price)
    return trace.tokens(row, trace.sent).numpy(), seconds.numpy()


def check_logged(arrays: TraceArrays, policy: StopPolicy) -> None:
    """Refuse traces and policies that single rounds cannot be estimated of; the `TraceError` says why."""
    header = arrays.header
    if header.collector != "live" or arrays.drawn is None:
        raise TraceError(
            "off-policy estimates are of live traces (collect --collector live); dense ones replay exactly"
        )
    if header.texts == "vllm":
        raise TraceError("the trace is vLLM's, whose lengths no coin has chosen: nothing can be estimated of others")
    if not arrays.tree.is_chain:
        raise TraceError("off-policy estimates are of chains; collect live traces without --tree")
    if policy.vectors or policy.reads_clock:
        raise TraceError(f"{policy.name} reads hidden states or the clock, which this trace does not hold")
    if type(policy).select is not StopPolicy.select:
        raise TraceError(f"{policy.name} selects among drawn tokens; estimates are of policies that stop or trim")


class _Recorded:
    """The rounds as they were recorded, by row."""

    def __init__(self, arrays: TraceArrays) -> None:
        assert arrays.drawn is not None
        depth, header = arrays.depth, arrays.header
        drawn = arrays.drawn
        self.drawn, self.sent = drawn.sum(1), arrays.extra["sent"].bool().sum(1)
        self.backlog, self.explored = arrays.extra["backlog"].long(), arrays.extra["explored"].bool()
        ends = arrays.ends & drawn  # tokens that were not drawn are zeros, which may be an id that ends texts
        self.first_end = torch.where(ends.any(1), ends.int().argmax(1) + 1, depth + 1)
        self.anchors = _following(arrays) if arrays.anchors is None else arrays.anchors
        self._soft = header.verification.startswith(("rejection", "block")) and header.texts == "target"
        self._survival = _survival(arrays) if self._soft else torch.zeros(0)
        self._accepted, self._node = arrays.accepted, torch.arange(depth)

    def tokens(self, row: Tensor, verified: Tensor) -> Tensor:
        """Return [R] tokens committed when so many are verified: in expectation, or as drawn."""
        ends = verified == self.first_end[row]  # an accepted end of text is followed by no token of the target's
        if self._soft:
            survival = self._survival[row]
            last = survival.gather(1, (verified - 1).clamp_min(0)[:, None])[:, 0]
            return (survival * (self._node < verified[:, None])).sum(1) + 1.0 - last * ends
        accepted = torch.minimum(self._accepted[row], verified)
        return accepted.double() + 1.0 - (ends & (accepted == verified)).double()


def _survival(arrays: TraceArrays) -> Tensor:
    """Return [N, K] P(A >= j | x_1..x_j): the product of min(1, p / q), or of block verification min(1, w p / q)."""
    q, p = arrays.extra["draft_prob"].double(), arrays.extra["target_prob"].double()
    ratio = torch.where(q > 0, p / q.clamp_min(1e-300), 0.0)
    if not arrays.header.verification.startswith("block"):
        return ratio.clamp_max(1.0).cumprod(1)
    weight, out = torch.ones(len(q), dtype=torch.float64), []
    for column in ratio.unbind(1):
        weight = (weight * column).clamp_max(1.0)
        out.append(weight)
    return torch.stack(out, 1)


def _following(arrays: TraceArrays) -> Tensor:
    return torch.cat([torch.arange(int(n)) + f for n, f in zip(arrays.rows, arrays.first_anchor, strict=True)])


def _draft(walk: Walk, trace: _Recorded, row: Tensor, overruled: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ask the policy along what was drawn; return [R] drafted, verified, decisions, and whether it wants more than that.

    Where the recorded run `overruled` it [R], the policy was asked on after it had stopped, and its state with it.
    """
    policy, drawn = walk.policy, trace.drawn[row]
    depth = min(walk.arrays.depth, policy.max_depth)
    bound = torch.minimum(walk.allowed().clamp(max=depth), trace.first_end[row])
    base = walk.base(row)
    nodes = walk.node_columns[row.numpy()]
    drafting, parent = walk.active, torch.zeros(len(row), 1, dtype=torch.int64)
    drafted, dropped, decisions = (torch.zeros_like(row) for _ in range(3))
    unseen = torch.zeros_like(drafting)
    for j in range(depth):
        drafting = drafting & (bound > j)
        asked = drafting | (overruled & walk.active & (bound > j))
        if not bool(asked.any()):
            break
        if j >= policy.first:
            seen = walk.layout.step(base, nodes[:, j - 1]) if j else base
            features = torch.from_numpy(seen * asked.numpy()[:, None])
            step = DraftStep(j, asked[:, None].clone(), parent, features[:, None])
            keep, walk.state = checked_keep(policy, step, walk.state)
            decisions += drafting
            if policy.trims and j > 0:
                dropped += drafting & ~keep[:, 0]
            drafting = drafting & keep[:, 0]
        unseen |= drafting & (drawn <= j)
        drafting = drafting & ~unseen
        drafted += drafting
    verified = drafted - dropped
    return drafted, verified, decisions, unseen | (verified > trace.sent[row])
