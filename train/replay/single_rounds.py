"""Single rounds of a live trace with texts that depend on the policy: the value of each round by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ...collect.acceptance import LENGTHS, identified_depth
from ...decode.round_state import RoundState
from ...decode.rounds import play_round
from ...policies.contract import Array, StopPolicy
from ...policies.errors import TraceError
from ...policies.features import HISTORY_FEATURES
from ...policies.host import PolicyHost
from ...policies.profile import Profile
from .arrays import TraceArrays
from .rounds import COUNTS, Rounds
from .source import TraceSource

ROUND_COLUMNS = ("draft_prob", "target_prob", "observed", "sent", "backlog", "explored")
"""Columns that `evaluate_rounds` requires of `trace_arrays` as `extra`."""

CAVEATS = (
    "rounds are taken where the recorded run had them: this policy would have come to other anchors, because what follows a "
    "round depends on where it stops; round values are no throughput of whole texts",
    "earlier rounds, which HISTORY features and adaptive policies look at, are those recorded (of a run with --explore those "
    "that explored), cut to this policy's length",
)
_IN_EXPECTATION = "acceptance is the expectation over the stored probabilities, min(1, p / q) by token"
_AS_DRAWN = "acceptance is as it was drawn when the trace was recorded, candidates left out counting as rejected"


def evaluate_rounds(arrays: TraceArrays, policy: StopPolicy, profile: Profile, depth: int | None = None) -> Rounds:
    """Call a policy in every recorded round that was drafted to full depth.

    Args:
        arrays: of a live trace, with `extra=ROUND_COLUMNS`.
        policy: any policy that does not read the clock.
        profile: costs of rounds.
        depth: of an engine's records, the draft length from which on rounds are used, so that several policies are compared
            on the same rounds; None = the depth of this policy.

    Returns:
        The rounds with expected `committed` tokens in float64, and `caveats` that must be shown with figures of them. Prompts
        and first tokens are not counted.

    Raises:
        TraceError: the trace is dense, or censored: no round was drafted as deep as the policy may want to; or the policy is
            not identified (`check_identified`).
    """
    header = arrays.header
    if header.collector != "live" or arrays.drawn is None:
        raise TraceError("single rounds are of live traces; replay dense ones")
    if (
        policy.reads_clock
        or policy.max_depth > arrays.depth
        or any(name not in arrays.hidden for name in policy.hidden)
    ):
        raise TraceError(f"{policy.name} reads what the trace does not hold, or drafts deeper than {arrays.depth}")
    check_identified(arrays, policy)
    source, host = RecordedRounds(arrays, policy), PolicyHost(policy, profile=profile)
    host.start(arrays.keys.numpy())
    # If acceptance is by token and the trace has p and q, which an engine's records lack.
    in_expectation = header.verification.startswith("rejection") and arrays.tree.is_chain and header.texts == "target"
    lengths = header.facts.get(LENGTHS)
    depth = policy.max_depth if depth is None else depth
    # Without exploration all uncut rounds are used, and `verify` refuses a policy that drafts what was not drawn.
    used = arrays.extra["explored"] | (header.explore == 0.0)
    full = (used if lengths is None else arrays.drawn.sum(1) >= depth).numpy() & ~arrays.cut.numpy()
    turns: list[Array] = []
    feeds: list[Array] = []
    expected: list[Array] = []
    while source.visit(full):
        active, sequence, anchor = source.active, source.sequence, source.anchor
        round = play_round(source, host)
        source.check_observed(round, in_expectation)
        committed = _expected(arrays, source.row, round) if in_expectation else round.accepted
        expected.append(committed[active] + 1.0)
        fed = round.fed_by_step
        steps = round.drafted if fed is None else (fed > 0).sum(1)
        columns = (
            sequence, anchor, round.context, round.drafted, round.verified, round.accepted, round.committed,
            round.backlog, round.decisions, steps,
        )  # fmt: skip
        turns.append(np.stack(columns)[:, active])
        feeds += [] if fed is None else [fed[active]]
    table = torch.from_numpy(np.concatenate(turns, 1))
    if not table.shape[1]:
        raise TraceError("no recorded round was drafted to full depth; collect with --explore, or without a policy")
    order = torch.argsort(table[0], stable=True)  # by text; the turns are in the order of decoding
    caveats = (*CAVEATS, _IN_EXPECTATION if in_expectation else _AS_DRAWN)
    none = torch.zeros_like(arrays.prompt_tokens)
    counts: dict[str, Any] = dict(zip((*COUNTS, "steps"), table[:, order], strict=True))
    counts["committed"] = torch.from_numpy(np.concatenate(expected))[order]
    counts["history"] = torch.zeros(len(counts["steps"]), len(HISTORY_FEATURES))
    fed_by_step = torch.from_numpy(np.concatenate(feeds))[order] if feeds else None
    return Rounds(policy, profile, none, none, fed=fed_by_step, caveats=caveats, **counts)


def check_identified(arrays: TraceArrays, policy: StopPolicy) -> None:
    """Refuse a policy that may draft deeper than an engine's records identify.

    Raises:
        TraceError: the engine's draft lengths vary, and one of its drafts was shorter.
    """
    limit = identified_limit(arrays)
    if policy.max_depth > limit:
        raise TraceError(
            f"expected a policy of at most {limit} tokens, got {policy.name}: in this trace draft lengths vary and "
            "may depend on acceptance, so the value of longer drafts is not identified; record with a fixed draft length"
        )


def identified_limit(arrays: TraceArrays) -> int:
    """Return the depth to which a live trace identifies the value of policies (`acceptance.identified_depth`)."""
    assert arrays.drawn is not None
    return identified_depth(arrays.header, arrays.drawn[~arrays.cut].numpy())


class RecordedRounds(TraceSource):
    """The rounds of a live trace as recorded: those of each text one after the other, whatever the policy does.

    Args:
        arrays: with the extra column `backlog`.
        policy: reads features and hidden states of the trace.
    """

    def __init__(self, arrays: TraceArrays, policy: StopPolicy) -> None:
        super().__init__(arrays, policy, np.arange(arrays.sequences)[:, None])
        self._anchors_at, self._unread = arrays.anchor_by_row.numpy(), arrays.extra["backlog"].numpy().astype(np.int64)
        self._rounds, self._next = arrays.rows.numpy(), 0

    def visit(self, wanted: Array) -> bool:
        """Move to the next round of each text; streams are active if it is `wanted` [N]. Return whether there was any."""
        turn, self._next = self._next, self._next + 1
        # A text without another round keeps its last one, inactive: rows must exist.
        self.row = self._offset + np.minimum(turn, self._rounds - 1)
        self.active = (turn < self._rounds) & wanted[self.row]
        self.anchor, self.backlog = self._anchors_at[self.row], self._unread[self.row]
        return turn < int(self._rounds.max())

    def begin(self) -> RoundState:
        """See `decode.rounds.RoundSource`."""
        round = super().begin()
        if round.limit is not None and self.arrays.drawn is not None and self.topology.is_chain:
            # An engine also drafts past the length limit of a text.
            round.limit = np.maximum(round.limit, self.arrays.drawn.numpy()[self.row].sum(1))
        return round

    def rows(self) -> Array:
        """Return [R], the current rows."""
        return self.row

    def check_observed(self, round: RoundState, in_expectation: bool) -> None:
        """Refuse rounds that verify tokens that were drafted and not verified: that is not a rejection.

        Args:
            round: the rounds.
            in_expectation: the target's probabilities of sent tokens are used instead of outcomes.

        Raises:
            TraceError: the trace does not show the outcome of a token.
        """
        arrays, tree, row = self.arrays, self.topology, self.row
        sent = round.sent[:, 1:] & self.active[:, None]  # [R, nodes]
        observed = arrays.extra["sent"].numpy()[row, : tree.nodes].astype(bool)
        if not in_expectation:
            observed |= arrays.extra["observed"].numpy()[row, : tree.nodes].astype(bool)
            path = arrays.accepted_nodes(torch.from_numpy(row)).numpy()[:, : tree.nodes]
            # After a rejection there is no outcome to observe.
            sent &= np.concatenate([np.ones((len(row), 1), dtype=bool), path], 1)[:, tree.parents[1:]]
        if (sent & ~observed).any():
            raise TraceError(
                f"{self.policy.name} verifies tokens that {arrays.header.policy} drafted and did not send when the trace was "
                "recorded; collect dense traces, or live ones with --explore"
            )

    def commit(self, round: RoundState) -> None:
        """Stay in place: `visit` moves to the next recorded round."""
        round.committed, round.ended = self._taken + 1, np.zeros(len(self.row), dtype=bool)


def likelihood_ratios(arrays: TraceArrays, row: Array | slice = slice(None)) -> Array:
    """Return [R, K] p / q of the tokens drawn in these rows, 0 if none was drawn."""
    q, p = (arrays.extra[name].numpy()[row].astype(np.float64) for name in ("draft_prob", "target_prob"))
    # `where` computes both branches: the division must not fail where q is 0.
    return np.where(q > 0, p / np.maximum(q, 1e-300), 0.0)


def _expected(arrays: TraceArrays, row: Array, round: RoundState) -> Array:
    """Return [R], E[min(A, k)] of chains: the sum over j <= k of the product of min(1, p / q)."""
    survival = np.minimum(likelihood_ratios(arrays, row), 1.0).cumprod(1)
    out: Array = (survival * (np.arange(arrays.depth) < round.verified[:, None])).sum(1)
    return out
