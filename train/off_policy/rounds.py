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

import numpy as np

from ...decode.round_state import RoundState
from ...decode.rounds import draft
from ...policies.contract import Array, DraftStep, RoundOutcome, StopPolicy
from ...policies.errors import TraceError
from ...policies.host import PolicyHost
from ...policies.profile import Profile
from ..replay.rounds import RecordedRounds, likelihood_ratios
from ..replay.traces.arrays import TraceArrays

COLUMNS = ("draft_prob", "target_prob", "sent", "backlog", "explored", "decisions")
"""What `shown_rounds` wants of `trace_arrays` as `extra`."""


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
        recorded: the policy is the one that was recorded: it observes the rounds as they were, and no seconds, for without a
            profile the collector tells it of none. Else it observes its own rounds, and recorded ones where its own are not
            shown.

    Raises:
        TraceError: the trace is dense or of trees, or the policy reads what it does not hold.
    """
    check_logged(arrays, policy)
    source, trace, cut = _Drawn(arrays, policy), _Recorded(arrays), arrays.cut.numpy()
    host, price = _Overruled(policy), profile.decision(policy.cost_name)
    host.start(arrays.keys.numpy())
    out = np.zeros((5, len(cut)))
    while source.visit(np.ones(len(cut), dtype=bool)):
        round = source.begin()
        active, row = round.active, source.row
        # Only the recorded policy was overruled; another one is asked as if it ran alone.
        host.overrule(trace.explored[row] & recorded)
        draft(source, host, round)
        drafted, verified, decisions = host.own(round)
        # It wanted a token that was not drawn while it was still drafting by itself, or one that was drawn and not sent.
        unseen = (source.unseen & host.drafting) | (verified > trace.sent[row])
        tokens = trace.tokens(row, verified)
        seconds = profile.round_seconds(round.context, drafted, verified, round.backlog, decisions, price)
        # HISTORY goes on with the policy's own round where that is shown, else with the recorded one.
        own = ~unseen & (not recorded)
        sent = np.where(own, verified, trace.sent[row])
        accepted = np.minimum(arrays.accepted.numpy()[row], sent)
        heard = np.zeros_like(seconds) if recorded else seconds
        drew = np.where(own, drafted, trace.drawn[row])
        line = np.stack([~unseen, drafted, verified, tokens * ~unseen, seconds * ~unseen])
        out[:, row[active]] = line[:, active]
        host.observe(RoundOutcome(active, drew, sent, accepted, cut[row], heard))
    seen, drafted, verified, tokens, seconds = out
    return Shown(seen > 0, drafted.astype(np.int64), verified.astype(np.int64), tokens, seconds)


def recorded_rounds(arrays: TraceArrays, profile: Profile) -> tuple[Array, Array]:
    """Return [N] tokens and [N] modelled seconds of the rounds as they were recorded; arguments as of `shown_rounds`."""
    trace, row = _Recorded(arrays), np.arange(len(arrays.accepted))
    context = (arrays.prompt_tokens[arrays.owner] + arrays.every_anchor).numpy()
    price = profile.decision(arrays.header.policy.partition(":")[0])
    decisions = arrays.extra["decisions"].numpy()
    seconds = profile.round_seconds(context, trace.drawn, trace.sent, trace.backlog, decisions, price)
    return trace.tokens(row, trace.sent), seconds


def check_logged(arrays: TraceArrays, policy: StopPolicy) -> None:
    """Refuse traces and policies that single rounds cannot be estimated of; the `TraceError` says why."""
    header = arrays.header
    if header.collector != "live" or arrays.drawn is None:
        raise TraceError(
            "off-policy estimates are of live traces (collect --collector live); dense ones replay exactly"
        )
    if header.texts == "vllm":
        raise TraceError(
            "expected rounds with recorded exploration (collect --explore), got vLLM's records without random lengths; "
            "`specstop evaluate` values lengths on them, as deep as they identify"
        )
    if not arrays.tree.is_chain:
        raise TraceError("off-policy estimates are of chains; collect live traces without --tree")
    if policy.hidden or policy.reads_clock:
        raise TraceError(f"{policy.name} reads hidden states or the clock, which this trace does not hold")
    if type(policy).select is not StopPolicy.select:
        raise TraceError(f"{policy.name} selects among drawn tokens; estimates are of policies that stop or trim")


class _Recorded:
    """The rounds as they were recorded, by row."""

    def __init__(self, arrays: TraceArrays) -> None:
        assert arrays.drawn is not None
        depth, header = arrays.depth, arrays.header
        drawn = arrays.drawn.numpy()
        self.drawn, self.sent = drawn.sum(1), arrays.extra["sent"].numpy().astype(bool).sum(1)
        self.backlog = arrays.extra["backlog"].numpy().astype(np.int64)
        self.explored = arrays.extra["explored"].numpy().astype(bool)
        ends = arrays.ends.numpy() & drawn  # tokens that were not drawn are zeros, which may be an id that ends texts
        self.first_end = np.where(ends.any(1), ends.argmax(1) + 1, depth + 1)
        self._soft = header.verification.startswith(("rejection", "block")) and header.texts == "target"
        self._survival = _survival(arrays) if self._soft else np.zeros((0, depth))
        self._accepted, self._node = arrays.accepted.numpy(), np.arange(depth)

    def tokens(self, row: Array, verified: Array) -> Array:
        """Return [R] tokens committed when so many are verified: in expectation, or as drawn."""
        ends = verified == self.first_end[row]  # an accepted end of text is followed by no token of the target's
        if self._soft:
            survival = self._survival[row]
            # E[tokens] = sum over j <= k of P(A >= j), and the target's own token unless an end of text was accepted last.
            last = np.take_along_axis(survival, np.maximum(verified - 1, 0)[:, None], 1)[:, 0]
            expected: Array = (survival * (self._node < verified[:, None])).sum(1) + 1.0 - last * ends
            return expected
        accepted = np.minimum(self._accepted[row], verified)
        out: Array = accepted + 1.0 - (ends & (accepted == verified))
        return out


def _survival(arrays: TraceArrays) -> Array:
    """Return [N, K] P(A >= j | x_1..x_j): the product of min(1, p / q), or of block verification min(1, w p / q)."""
    ratio = likelihood_ratios(arrays)
    if not arrays.header.verification.startswith("block"):
        return np.minimum(ratio, 1.0).cumprod(1)
    weight, out = np.ones(len(ratio)), np.empty_like(ratio)  # w_i = min(1, w_{i-1} p / q)
    for at in range(ratio.shape[1]):
        weight = np.minimum(weight * ratio[:, at], 1.0)
        out[:, at] = weight
    return out


class _Drawn(RecordedRounds):
    """Grows what was drawn, and no more.

    Attributes:
        unseen: [R] bool, streams that were to grow further.
    """

    def __init__(self, arrays: TraceArrays, policy: StopPolicy) -> None:
        super().__init__(arrays, policy)
        assert arrays.drawn is not None
        self._drawn = arrays.drawn.numpy()
        # Tokens that were not drawn are zeros, which may be an id that ends texts.
        self._ends = self._ends & self._drawn if self._ends is not None else None

    def begin(self) -> RoundState:
        """See `RoundSource`."""
        self.unseen = np.zeros(len(self.row), dtype=bool)
        return super().begin()

    def grow(self, round: RoundState, depth: int, feeding: Array) -> tuple[Array, Array]:
        """See `RoundSource`."""
        # Of a chain, node `depth` is the token that a row of this depth draws.
        there = self._drawn[self.row, depth]
        self.unseen |= feeding[:, 0] & ~there
        return super().grow(round, depth, feeding & there[:, None])


class _Overruled(PolicyHost):
    """Asks on after the policy has stopped where the recorded run overruled it: its state went on too."""

    def overrule(self, streams: Array) -> None:
        """Begin a round in which these streams [R] are drafted on whatever the policy says."""
        self._streams, self.drafting = streams, np.ones(len(streams), dtype=bool)
        self._stopped = np.zeros(len(streams), dtype=np.int64)

    def keep(self, step: DraftStep) -> Array:
        """See `PolicyHost`."""
        kept = super().keep(step)
        overruled = step.alive & self._streams[:, None] & ~kept
        # Its first stop counts; after it the policy is asked on, since its state went on in the recorded run.
        stops = overruled[:, 0] & self.drafting
        self._stopped[stops] = step.depth
        self.drafting &= ~stops
        return kept | overruled

    def own(self, round: RoundState) -> tuple[Array, Array, Array]:
        """Return [R] drafted, verified and decisions as they are without being overruled."""
        stopped = ~self.drafting
        drafted = np.where(stopped, self._stopped, round.drafted)
        # A policy that trims drops the token it stops at.
        verified = np.where(stopped, self._stopped - (self.trims & (self._stopped > 0)), round.verified)
        return drafted, verified, np.where(stopped, self._stopped - self.first + 1, round.decisions)
