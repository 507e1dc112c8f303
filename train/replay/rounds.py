"""Single rounds of a live trace whose text depends on the policy: what each would have brought, one by one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...collect.acceptance import LENGTHS, identified_depth
from ...decode.round_state import RoundState
from ...decode.rounds import play_round
from ...policies.contract import Array, StopPolicy
from ...policies.errors import TraceError
from ...policies.host import PolicyHost
from ...policies.profile import Profile
from .log import Rounds
from .source import TraceSource
from .traces.arrays import TraceArrays

ROUND_COLUMNS = ("draft_prob", "target_prob", "observed", "sent", "backlog", "explored")
"""What `evaluate_rounds` wants of `trace_arrays` as `extra`."""

CAVEATS = (
    "rounds are taken where the recorded run had them: this policy would have come to other anchors, because what follows a "
    "round depends on where it stops; round values are no throughput of whole texts",
    "earlier rounds, which HISTORY features and adaptive policies look at, are those recorded (of a run with --explore those "
    "that explored), cut to this policy's length",
)
_IN_EXPECTATION = "acceptance is the expectation over the stored probabilities, min(1, p / q) by token"
_AS_DRAWN = "acceptance is as it was drawn when the trace was recorded, candidates left out counting as rejected"


@dataclass(frozen=True)
class RoundValues:
    """What a policy's rounds are worth.

    Attributes:
        name: of the policy.
        committed: [rounds] expected tokens, the target's own included.
        seconds: [rounds] modelled.
        caveats: what a reader must know; always to be printed.
        taken: what they consisted of.
    """

    name: str
    committed: Tensor
    seconds: Tensor
    caveats: tuple[str, ...]
    taken: Rounds

    @property
    def rate(self) -> float:
        """Tokens per second of these rounds, a ratio of sums."""
        return float(self.committed.sum() / self.seconds.sum())


def evaluate_rounds(arrays: TraceArrays, policy: StopPolicy, profile: Profile, depth: int | None = None) -> RoundValues:
    """Call a policy at every recorded round that was drafted to full depth.

    Args:
        arrays: of a live trace, with `extra=ROUND_COLUMNS`.
        policy: any policy but one that reads the clock.
        profile: what rounds cost.
        depth: of an engine's records, the draft length from which on rounds are used, so that several policies are compared
            on the same rounds; None = the most that this policy drafts.

    Raises:
        TraceError: the trace is dense, or censored: nothing was drafted as deep as the policy may want to; or what it would
            bring is not identified (`check_identified`).
    """
    header = arrays.header
    if header.collector != "live" or arrays.drawn is None:
        raise TraceError("single rounds are of live traces; replay dense ones")
    unknown = [name for name in policy.hidden if name not in arrays.hidden]
    if unknown or policy.reads_clock or policy.max_depth > arrays.depth:
        raise TraceError(f"{policy.name} reads what the trace does not hold, or drafts deeper than {arrays.depth}")
    check_identified(arrays, policy)
    source, host = RecordedRounds(arrays, policy), PolicyHost(policy, profile=profile)
    host.start(arrays.keys.numpy())
    # Only where acceptance is by token and the trace holds p and q, which an engine's records lack.
    soft = header.verification.startswith("rejection") and arrays.tree.is_chain and header.texts == "target"
    lengths = header.facts.get(LENGTHS)
    depth = policy.max_depth if depth is None else depth
    # Without exploration every uncut round is used; `verify` refuses a policy that wants what was not drawn.
    used = arrays.extra["explored"] | (header.explore == 0.0)
    full = (used if lengths is None else arrays.drawn.sum(1) >= depth).numpy() & ~arrays.cut.numpy()
    worth, counts, feeds = [], [], []
    while source.visit(full):
        on, sequence, anchor = source.active, source.sequence, source.anchor
        made = play_round(source, host)
        fed = made.fed_by_step
        source.check_observed(made, soft)
        expected = _expected(arrays, source.row, made) if soft else made.accepted
        worth.append(np.stack([expected + 1.0, made.seconds], 1)[on])
        columns = (sequence, anchor, made.context, made.drafted, made.verified, made.accepted, made.backlog)
        steps = made.drafted if fed is None else (fed > 0).sum(1)
        counts.append(np.stack([*columns, made.decisions, steps])[:, on])
        feeds += [] if fed is None else [fed[on]]
    committed, seconds = torch.from_numpy(np.concatenate(worth)).unbind(1)
    if not len(committed):
        raise TraceError("no recorded round was drafted to full depth; collect with --explore, or without a policy")
    caveats = (*CAVEATS, _IN_EXPECTATION if soft else _AS_DRAWN)
    fed_by_step = torch.from_numpy(np.concatenate(feeds)) if feeds else None
    at, start, context, drafted, verified, accepted, backlog, asked, passes = torch.from_numpy(
        np.concatenate(counts, 1)
    )
    taken = Rounds(
        at, start, context, drafted, verified, accepted, backlog, asked, passes, fed_by_step, policy.cost_name
    )
    return RoundValues(policy.name, committed, seconds, caveats, taken)


def check_identified(arrays: TraceArrays, policy: StopPolicy) -> None:
    """Refuse a policy that may draft deeper than an engine's records identify.

    Raises:
        TraceError: the engine's draft lengths vary, and one of its drafts was shorter.
    """
    limit = identified_limit(arrays)
    if policy.max_depth > limit:
        raise TraceError(
            f"expected a policy of at most {limit} tokens, got {policy.name}: in this trace draft lengths vary and "
            "may depend on acceptance, so that what longer drafts would bring is not identified; record with a fixed draft "
            "length"
        )


def identified_limit(arrays: TraceArrays) -> int:
    """Return the depth to which a live trace identifies what policies would bring (`acceptance.identified_depth`)."""
    assert arrays.drawn is not None
    return identified_depth(arrays.header, arrays.drawn[~arrays.cut].numpy())


class RecordedRounds(TraceSource):
    """The rounds of a live trace as they were recorded: each text's one after the other, wherever a policy would have gone.

    Args:
        arrays: with the extra column `backlog`.
        policy: that asks for what it holds.
    """

    def __init__(self, arrays: TraceArrays, policy: StopPolicy) -> None:
        super().__init__(arrays, policy, np.arange(arrays.sequences)[:, None])
        self._anchors_at, self._unread = arrays.every_anchor.numpy(), arrays.extra["backlog"].numpy().astype(np.int64)
        self._rounds, self._next = arrays.rows.numpy(), 0

    def visit(self, wanted: Array) -> bool:
        """Go on to the next round of each text; those that are `wanted` [N] are active. Return whether there was any."""
        turn, self._next = self._next, self._next + 1
        # A text that has no further round stays at its last one, inactive: every row must exist.
        self.row = self._offset + np.minimum(turn, self._rounds - 1)
        self.active = (turn < self._rounds) & wanted[self.row]
        self.anchor, self.backlog = self._anchors_at[self.row], self._unread[self.row]
        return turn < int(self._rounds.max())

    def begin(self) -> RoundState:
        """See `decode.rounds.RoundSource`."""
        round = super().begin()
        if round.limit is not None and self.arrays.drawn is not None and self.topology.is_chain:
            # An engine drafts past the limit of a text, too.
            round.limit = np.maximum(round.limit, self.arrays.drawn.numpy()[self.row].sum(1))
        return round

    def rows(self) -> Array:
        """Return [R], the rows visited."""
        return self.row

    def check_observed(self, round: RoundState, in_expectation: bool) -> None:
        """Refuse rounds that verify what was drafted and never verified: that is no rejection.

        Args:
            round: the rounds.
            in_expectation: probabilities serve, which the target gave of sent tokens, in the place of outcomes.

        Raises:
            TraceError: the trace does not say what became of a token.
        """
        arrays, tree, row = self.arrays, self.topology, self.row
        sent = round.sent[:, 1:] & self.active[:, None]  # [R, nodes]
        known = arrays.extra["sent"].numpy()[row, : tree.nodes].astype(bool)
        if not in_expectation:
            known |= arrays.extra["observed"].numpy()[row, : tree.nodes].astype(bool)
            path = arrays.accepted_nodes(torch.from_numpy(row)).numpy()[:, : tree.nodes]
            # After a rejection nothing is left to be observed.
            sent &= np.concatenate([np.ones((len(row), 1), dtype=bool), path], 1)[:, tree.parents[1:]]
        if (sent & ~known).any():
            raise TraceError(
                f"{self.policy.name} verifies tokens that {arrays.header.policy} drafted and did not send when the trace was "
                "recorded; collect dense traces, or live ones with --explore"
            )

    def commit(self, round: RoundState) -> None:
        """Stay: the next round is the one that was recorded."""
        round.committed, round.ended = self._taken + 1, np.zeros(len(self.row), dtype=bool)


def likelihood_ratios(arrays: TraceArrays, row: Array | slice = slice(None)) -> Array:
    """Return [R, K] p / q of the tokens drawn in these rows, 0 where none was."""
    q, p = (arrays.extra[name].numpy()[row].astype(np.float64) for name in ("draft_prob", "target_prob"))
    # `where` works out both sides, so that the division must not fail where q is 0.
    return np.where(q > 0, p / np.maximum(q, 1e-300), 0.0)


def _expected(arrays: TraceArrays, row: Array, round: RoundState) -> Array:
    """Return [R], E[min(A, k)] of chains: the sum over j <= k of the product of min(1, p / q)."""
    survival = np.minimum(likelihood_ratios(arrays, row), 1.0).cumprod(1)
    out: Array = (survival * (np.arange(arrays.depth) < round.verified[:, None])).sum(1)
    return out
