"""The round of speculative decoding: draft, decide, verify, commit, for S streams side by side.

What is decoded is a *source*'s: the models of a pair (`model_source`), or a trace that is looked up (`train.replay.source`).
Nothing here knows which, so that replay does what the live loop does. A chain is a tree of width 1. Guarding a policy,
timing and looking on are wrapped around the parts.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ..policies.contract import Array, DraftStep, DraftTree
from ..policies.features.history import History
from ..policies.host import PolicyHost
from .drafted import Drafted, Finished
from .topology import Topology


class CandidateSource(Protocol):
    """Who has the candidates of S streams.

    Attributes:
        topology: the tree of a round.
        asks_ended: policies are asked about tokens that end their branch as well (`verify.Verification.hides`).
        selects_levels: policies select level by level, not once all is drafted.
    """

    topology: Topology
    asks_ended: bool
    selects_levels: bool

    def step(self, depth: int, alive: Array, history: History) -> DraftStep:
        """Return what a policy is shown of the branches that are `alive` [S, B]."""

    def grow(self, depth: int, feeding: Array) -> tuple[Array, Array]:
        """Feed rows [S, B] of a depth; return [S, B'] which rows of the next were drawn, and which of them go on."""

    def tree(self, sent: Array) -> DraftTree:
        """Return the nodes that would be sent [S, N] as a policy may see them."""


class RoundSource(CandidateSource, Protocol):
    """Who has, beside candidates, what the target says of them."""

    def begin(self) -> tuple[Array, Array, Array, Array, Array | None]:
        """Begin a round.

        Returns:
            [S] bool, the streams that have one; [S, roots] bool, the roots that do not end the text; [S] int64 each:
            tokens committed, those of them that the draft has not read, and the depth at which a limit ends drafting
            (None where none does).
        """

    def drafted_unread(self, found: Drafted) -> Array | None:
        """Return [S] bool, the streams whose round was drafted by a drafter that reads nothing, beside one that does.

        None = there is only one drafter.
        """

    def verify(self, found: Drafted) -> Array:
        """Return [S] int64, how many of the tokens sent are accepted."""

    def commit(self, found: Drafted) -> tuple[Array, Array]:
        """Commit what was accepted and one token more; return [S] tokens committed and [S] whether the text has ended."""


def play_round(source: RoundSource, host: PolicyHost) -> Finished:
    """Play a round of every stream: draft as far as the policy goes, verify, commit, tell the policy."""
    active, alive, context, backlog, limit = source.begin()
    found = draft(source, host, alive, limit)
    if (unread := source.drafted_unread(found)) is not None:
        backlog = np.where(unread, 0, backlog)
    accepted = source.verify(found)
    committed, ended = source.commit(found)
    made = Finished(active, context, backlog, found, accepted, committed, found.capped | ended)
    host.finished(made)
    return made


def draft(source: CandidateSource, host: PolicyHost, alive: Array, limit: Array | None) -> Drafted:
    """Draft depth by depth, as far as the policy keeps a branch.

    Args:
        source: of the candidates.
        host: of the policy.
        alive: [S, roots] bool, where to begin.
        limit: [S] int64, the depth at which a length limit ends drafting; None = at none.
    """
    tree = source.topology
    found = Drafted(len(alive), tree)
    going = alive  # what has not drawn an end of text
    nearest = tree.deepest if limit is None else int(limit.min())  # before it no limit need be looked at
    first, deepest, selects = host.first, tree.deepest, host.selects
    if (length := host.fixed_length(alive)) is not None:
        first, deepest, selects = deepest, min(length, deepest), False
    for depth in range(deepest):
        here, below = tree.spans[depth], tree.spans[depth + 1]
        if limit is not None and depth >= nearest:
            alive = _held(found, alive, limit <= depth)
        if depth >= first:
            if not np.count_nonzero(alive):
                break
            found.asked[:, here] = alive
            kept = host.keep(source.step(depth, alive, host.history))
            if host.trims and depth:  # roots are not the policy's to drop
                found.dropped[:, here] = alive & ~kept
            alive = kept if depth else alive & kept  # alternatives for the next token are decided on as one
        feeding = alive
        if source.asks_ended:
            feeding = _going(found, alive, going)
        if not tree.all_extend[depth]:
            feeding = feeding & tree.extends[depth]
        if not np.count_nonzero(feeding):
            break
        found.fed[:, here] = feeding
        drawn, going = source.grow(depth, feeding)
        found.drawn[:, below] = drawn
        # Where tokens must not matter an end of text is asked about as any other, and held back when it would be fed.
        alive = drawn if source.asks_ended else _going(found, drawn, going)
        # At once: what is sent must not depend on anything that is drawn later.
        if selects and source.selects_levels:
            _select(source, host, found, below)
            alive = alive & ~found.dropped[:, below]
    else:
        # Nothing is fed from the deepest level, so what ended there has not been looked at yet.
        if source.asks_ended:
            _going(found, alive, going)
    if selects and not source.selects_levels:
        _select(source, host, found, slice(tree.roots, len(tree)))
    found.count()
    return found


def _held(found: Drafted, alive: Array, held: Array) -> Array:
    """Return the branches left where a limit holds streams [S] back."""
    found.capped |= held & alive.any(1)
    return alive & ~held[:, None]


def _going(found: Drafted, alive: Array, going: Array) -> Array:
    """Return the branches that go on; a stream all of whose branches have drawn an end of text is capped by it."""
    if going is alive:
        return alive
    on = alive & going
    if np.count_nonzero(on) < np.count_nonzero(alive):
        found.capped |= alive.any(1) & ~on.any(1)
    return on


def _select(source: CandidateSource, host: PolicyHost, found: Drafted, span: slice) -> None:
    """Drop those rows of a span that the policy does not select; it is not asked where nothing was drawn."""
    if not np.count_nonzero(found.drawn):
        return
    # Counted so far, for `sent`: the policy is shown what the target would read.
    found.count()
    mask = host.select(source.tree(found.sent))
    if mask is not None:
        first = source.topology.roots
        found.dropped[:, span] |= found.drawn[:, span] & ~mask[:, span.start - first : span.stop - first]
