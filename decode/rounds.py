"""A round of speculative decoding for S streams: draft, verify, commit.

A *source* supplies candidates and outcomes: the models of a pair (`model_source`), or a trace (`train.replay.source`).
Replay therefore plays exactly the rounds of the live loop. A chain is a tree of width 1.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ..policies.contract import Array, DraftStep
from ..policies.features import History
from ..policies.host import PolicyHost
from .hooks import Timer
from .round_state import RoundState


class CandidateSource(Protocol):
    """Supplies the candidates of S streams.

    Attributes:
        timer: times the calls of the policy.
        decides_ended: policies also decide about candidates that end a text (`verify.Verification.hides`).
        selects_levels: policies select after each level, not once after drafting, and do not receive the tokens.
    """

    timer: Timer
    decides_ended: bool
    selects_levels: bool

    def step(self, round: RoundState, depth: int, alive: Array, history: History) -> DraftStep:
        """Return the arguments of a policy for the branches that are `alive` [S, B]."""

    def grow(self, round: RoundState, depth: int, feeding: Array) -> tuple[Array, Array]:
        """Feed rows [S, B] of a depth and mark what was drawn below them.

        Returns:
            [S, B'] bool each: the rows of the next depth that were drawn, and those of them that do not end a text. In rounds
            of a fixed length, the end of a text may be left to `verify`.
        """


class RoundSource(CandidateSource, Protocol):
    """Supplies candidates and their verification."""

    def begin(self) -> RoundState:
        """Begin a round of all streams with texts that have not ended."""

    def verify(self, round: RoundState) -> None:
        """Set the number `accepted` of the candidates sent, and the accepted path."""

    def commit(self, round: RoundState) -> None:
        """Commit the accepted candidates and one more token: set `committed` and `ended`."""


def play_round(source: RoundSource, host: PolicyHost) -> RoundState:
    """Play a round of every stream: draft until the policy stops, verify, commit, call the policy's `observe`."""
    round = source.begin()
    draft(source, host, round)
    source.verify(round)
    source.commit(round)
    mark = source.timer.mark(on_host=True)
    host.end_round(round)
    source.timer.add("policy", mark)
    return round


def draft(source: CandidateSource, host: PolicyHost, round: RoundState) -> None:
    """Draft depth by depth while the policy keeps a branch, then compute which rows are sent."""
    tree, limit, timer = round.topology, round.limit, source.timer
    alive = continuing = round.active[:, None].repeat(tree.drafters, 1)  # [S, B]; `continuing`: it does not end a text
    nearest = tree.deepest if limit is None else int(limit.min())  # no length limit applies above this depth
    first, deepest, selects = host.first, tree.deepest, host.selects
    if (length := host.fixed_length(alive)) is not None:
        first, deepest, selects = deepest, min(length, deepest), False
    round.has_fixed_length = first >= deepest and not selects
    if round.has_fixed_length or host.on_decision is not None:
        round.device_policy = None
    if round.device_policy is not None:
        round.device_policy.begin(round, host.history)
    for depth in range(deepest):
        level, below = tree.spans[depth], tree.spans[depth + 1]
        if limit is not None and depth >= nearest:
            is_full = limit <= depth
            round.hit_limit |= is_full & alive.any(1)
            alive = alive & ~is_full[:, None]
        if host.lengths is not None and (depth or first):  # decided at depth 0, or not at all
            alive = alive & (depth < host.lengths[tree.drafter_of_branch[depth]])
        elif depth >= first and (depth == 0 or round.device_policy is None):
            if not np.count_nonzero(alive):
                break
            round.decided[:, level] = alive if depth else alive.any(1, keepdims=True)
            mark = timer.mark()
            kept = host.keep(source.step(round, depth, alive, host.history))
            timer.add("policy", mark)
            if host.trims and depth:  # the anchor is committed
                round.dropped[:, level] = alive & ~kept
            alive = kept
        feeding = _without_ended(round, alive, continuing) if source.decides_ended else alive
        if (leaves := tree.leaves[depth]) is not None:
            feeding = feeding & ~leaves
        if not np.count_nonzero(feeding):
            break
        if depth == 0:
            round.drafting = feeding
        round.fed[:, level] = feeding if depth else feeding.any(1, keepdims=True)
        drawn, continuing = source.grow(round, depth, feeding)
        # If decisions must not depend on tokens, a policy also decides about an end of text. It is removed before feeding.
        alive = drawn if source.decides_ended else _without_ended(round, drawn, continuing)
        if selects and source.selects_levels:  # at once, as the selection must not depend on tokens drawn later
            _select(source, host, round, below)
            alive = alive & ~round.dropped[:, below]
    else:
        if source.decides_ended:  # the deepest level is not fed, so ended texts were not removed from it above
            _without_ended(round, alive, continuing)
    if selects and not source.selects_levels:
        _select(source, host, round, slice(1, len(tree)))
    if round.device_policy is not None:
        mark = timer.mark()
        round.device_policy.settle()
        timer.add("policy", mark)
        round.device_policy = None  # it refers to the round, and cycles keep memory
    round.count()


def _without_ended(round: RoundState, alive: Array, continuing: Array) -> Array:
    """Return the branches that do not end a text; mark streams that have none left."""
    if continuing is alive:
        return alive
    left = alive & continuing
    if np.count_nonzero(left) < np.count_nonzero(alive):
        round.hit_limit |= alive.any(1) & ~left.any(1)
    return left


def _select(source: CandidateSource, host: PolicyHost, round: RoundState, span: slice) -> None:
    """Drop the rows of a span that the policy does not select; do not call it if nothing was drawn."""
    if not np.count_nonzero(round.drawn):
        return
    round.count()  # sets `sent`, which the policy receives
    tree = round.draft_tree(hide_tokens=source.selects_levels)
    mark = source.timer.mark()
    mask = host.select(tree)
    source.timer.add("policy", mark)
    if mask is not None:
        round.dropped[:, span] |= round.drawn[:, span] & ~mask[:, span.start - 1 : span.stop - 1]
