"""A trace as the source of rounds: what a policy sees is looked up, and so is what the target accepts."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch

from ...collect.schema import NO_TOKEN
from ...decode.hooks import NO_TIMER
from ...decode.round_state import RoundState
from ...decode.verify.modes import MODES, is_trimming
from ...policies.contract import Array, DraftStep, StopPolicy
from ...policies.errors import TraceError
from ...policies.features import History, Layout
from ...policies.kernels import on_first_use
from .traces.arrays import TraceArrays

kernels = on_first_use("features")

_NO_HISTORY = np.zeros((0, 0), dtype=np.float32)


class TraceSource:
    """See `decode.rounds.RoundSource`. R streams, each with a queue of texts that are decoded one after the other.

    The trace is tensors, replay works on views of them as arrays: what it does between two decisions is many small steps.

    Args:
        arrays: a trace.
        policy: that asks for what it holds.
        queues: [R, Q] int64 sequences.

    Attributes:
        active: [R] bool, streams that have a round.
        sequence, anchor, backlog: [R] int64, where they are, and the tokens that the draft has not read.
        row: [R] int64, of the round, in the trace; any row of a stream without one.
    """

    def __init__(self, arrays: TraceArrays, policy: StopPolicy, queues: Array) -> None:
        self.arrays, self.policy, self.queues = arrays, policy, queues
        # As the live loop does under that verification; under `match` trimming may depend on anything.
        hides = arrays.header.given_text and MODES[arrays.header.verification].hides
        self.decides_ended, self.selects_levels = hides and policy.trims, hides and is_trimming(policy)
        self._shows_tokens = type(policy).select is not StopPolicy.select and not hides
        self.topology = arrays.tree.limited(policy.max_depth)
        layout = Layout(policy.features)
        self._names, self._width = layout.history, len(layout.names)
        columns = layout.anchor_at, layout.history_at, layout.node_at
        self._anchor_at, self._history_at, self._node_at = (np.array(at, dtype=np.int64) for at in columns)
        anchors, nodes = arrays.tensors(policy.features)
        # The kernel takes nodes with strides: a contiguous copy would hold them in memory twice.
        self._anchors, self._nodes = anchors.float().contiguous().numpy(), nodes.float().numpy()
        self._hidden = {name: arrays.hidden_state(name) for name in policy.hidden}
        self._accepted, self._tokens = arrays.accepted.numpy(), arrays.tokens.numpy()
        self._first_anchor, self._offset = arrays.first_anchor.numpy(), arrays.offset.numpy()
        self._prompt, self._text = arrays.prompt_tokens.numpy(), arrays.text_tokens.numpy()
        self._turn = np.zeros(len(queues), dtype=np.int64)
        # By kind of drafter (`drafters.base.READS_PATH`); a trace that does not say is one of a draft model.
        self._reading = arrays.header.facts.get("reading", "path")
        self._reads = None if arrays.reads is None else arrays.reads.numpy()
        self.sequence = queues[:, 0]
        self.anchor = self._first_anchor[self.sequence]
        self.backlog = self._unread_text(self.context())
        self.active = np.ones(len(queues), dtype=bool)
        self.row = np.zeros(len(queues), dtype=np.int64)
        self.next_texts()

    def context(self) -> Array:
        """Return [R], the tokens committed, the prompts' included."""
        out: Array = self._prompt[self.sequence] + self.anchor
        return out

    def _unread_text(self, context: Array) -> Array:
        """Return what a draft has to read where a text begins, by its length."""
        if self._reading == "nothing":
            return np.zeros_like(context)
        # Before the first token there is no state of the target to read it on.
        return context - 1 if self._reading == "all" else context

    def next_texts(self) -> Array:
        """Go on to the next text of each stream whose text has ended; return the streams that have."""
        begun = np.zeros(len(self.queues), dtype=bool)
        # Again and again, since a text that ended with its first token is over before it has had a round.
        while True:
            ended = self.over()
            if not ended.any():
                return np.flatnonzero(begun)
            self._turn = self._turn + ended
            self.active = self._turn < self.queues.shape[1]
            at = np.minimum(self._turn, self.queues.shape[1] - 1)  # who is through stays at its last text
            self.sequence = np.take_along_axis(self.queues, at[:, None], 1)[:, 0]
            begins = ended & self.active
            begun |= begins
            self.anchor = np.where(begins, self._first_anchor[self.sequence], self.anchor)
            self.backlog = np.where(begins, self._unread_text(self.context()), self.backlog)

    def over(self) -> Array:
        """Return [R] bool, the streams with a round whose texts have ended."""
        out: Array = self.active & (self.anchor >= self._text[self.sequence])
        return out

    def open(self, stream: int, sequence: int) -> None:
        """Begin a text in a stream; one that ended with its first token has no round."""
        self.sequence[stream], self.anchor[stream] = sequence, self._first_anchor[sequence]
        self.backlog[stream] = self._unread_text(self._prompt[sequence] + self.anchor[stream])
        self.active[stream] = self.anchor[stream] < self._text[sequence]

    def take(self, streams: Array) -> None:
        """Go on with these streams [R'] alone."""
        self.queues, self._turn, self.sequence = self.queues[streams], self._turn[streams], self.sequence[streams]
        self.anchor, self.backlog, self.active = self.anchor[streams], self.backlog[streams], self.active[streams]

    timer = NO_TIMER

    def begin(self) -> RoundState:
        """See `decode.rounds.RoundSource`."""
        self.row = self.rows()
        allowed = self.arrays.header.max_new_tokens - self.anchor - 1  # one place is the target's
        limit = np.minimum(allowed, self.topology.deepest)
        limit[~self.active] = self.topology.deepest  # who has no round holds nobody back
        round = RoundState(self.topology, self.active, self.context(), self.backlog, limit)
        if self._shows_tokens:
            round.tokens[:, 1:] = self._tokens[self.row, : self.topology.nodes]
        return round

    def rows(self) -> Array:
        """Return [R], the row of each stream's anchor; any row for those without a round.

        Raises:
            TraceError: the trace has no round there: it was recorded under a policy that did not visit it.
        """
        row = self.arrays.find(self.sequence, self.anchor)
        missing = self.active & (row < 0)
        if missing.any():
            at = int(missing.argmax())
            name = self.arrays.prompt_ids[int(self.sequence[at])]
            raise TraceError(
                f"{self.policy.name} comes to anchor {int(self.anchor[at])} of {name!r}, where the trace has no round "
                f"({self._origin()}); collect dense traces to replay any policy"
            )
        return np.where(self.active, row, self._offset[self.sequence])

    def _origin(self) -> str:
        header = self.arrays.header
        return f"it was recorded under {header.policy}" if header.policy else f"its texts are {header.texts}"

    def step(self, round: RoundState, depth: int, alive: Array, history: History) -> DraftStep:
        """See `decode.rounds.RoundSource`."""
        first = self.topology.spans[depth].start - 1 if depth else -1  # node = row - 1: the root is none
        features = np.zeros((*alive.shape, self._width), dtype=np.float32)
        if self._width:
            past = history.values(self._names) if self._names else _NO_HISTORY
            kernels().look_up(
                self._anchors, self._anchor_at, past, self._history_at, self._nodes, self._node_at, self.row, first,
                np.ascontiguousarray(alive), features,
            )  # fmt: skip
        # Added to zeros, since a broadcast view would not be C-contiguous, as compiled policies want it.
        parent = np.zeros(alive.shape, dtype=np.int64)
        parent += self.topology.parent_in_level[depth]
        hidden = {name: self._states(name, first, alive) for name in self._hidden}
        batch = np.where(self.active, np.arange(len(alive)), -1)
        return DraftStep(depth, alive.copy(), parent, features, hidden, batch)

    def _states(self, name: str, first: int, alive: Array) -> Array:
        """Return [R, B, H] float32, a hidden state of the branches that are alive, which begin at node `first`."""
        recorded = self._hidden[name]
        full = np.zeros((*alive.shape, recorded.width), dtype=np.float32)
        if first >= 0 or not recorded.of_nodes:
            stream, branch = alive.nonzero()
            at = None if first < 0 else torch.from_numpy(first + branch)
            full[stream, branch] = recorded.at(torch.from_numpy(self.row[stream]), at).float().numpy()
        return full

    def grow(self, round: RoundState, depth: int, feeding: Array) -> tuple[Array, Array]:
        """See `decode.rounds.RoundSource`."""
        span = self.topology.spans[depth + 1]
        nodes = slice(span.start - 1, span.stop - 1)
        # Below a row that is fed all of its children are drawn, as in the trace.
        drawn = feeding if self.topology.is_chain else feeding[:, self.topology.parent_in_level[depth + 1]]
        if self._missing is not None:
            drawn = drawn & ~self._missing[self.row, nodes]
        round.drawn[:, span] = drawn
        return drawn, drawn if self._ends is None else drawn & ~self._ends[self.row, nodes]

    @cached_property
    def _missing(self) -> Array | None:
        """[N, K] bool, nodes for which a filter had left no token; None where there are none."""
        missing: Array = self._tokens == NO_TOKEN
        return missing if missing.any() else None

    @cached_property
    def _ends(self) -> Array | None:
        """[N, K] bool, nodes that drew an end of text; None where none did."""
        ends: Array = self.arrays.ends.numpy()
        return ends if ends.any() else None

    def verify(self, round: RoundState) -> None:
        """See `decode.rounds.RoundSource`; candidates that a live run did not draft are a `TraceError`."""
        arrays, nodes = self.arrays, self.topology.nodes
        if self._reads is not None:  # a drafter that reads nothing may have drafted the round
            round.backlog = np.where(~self._reads[self.row] & (round.drafted > 0), 0, round.backlog)
        if arrays.drawn is not None and (round.drawn[:, 1:] & ~arrays.drawn.numpy()[self.row, :nodes]).any():
            raise TraceError(
                f"{self.policy.name} drafts what {arrays.header.policy} did not when the trace was recorded; "
                "collect dense traces, or live ones with --explore"
            )
        if arrays.path is None:  # a chain, of which a first part is sent
            self._taken = np.minimum(self._accepted[self.row], round.verified)
            # The last token drawn is never fed, so the draft has not read it even where it was accepted.
            self._read = np.minimum(self._taken, round.drafted - 1)
        else:
            path = round.on_path[:, 1:]
            np.logical_and(arrays.path.numpy()[self.row, :nodes], round.sent[:, 1:], out=path)
            self._taken, self._read = path.sum(1), (path & round.fed[:, 1:]).sum(1)
            if self.selects_levels:
                self._check_siblings(round)
        round.accepted = self._taken * self.active

    def _check_siblings(self, round: RoundState) -> None:
        """Refuse a round that sends some of the candidates after a token and not others.

        How a candidate fares under rejection depends on which were tried before it, and in the trace that was all of them.
        """
        parents = self.topology.parents[1:]
        drawn, sent = round.drawn[:, 1:] & self.active[:, None], round.sent[:, 1:]
        for parent in np.unique(parents):
            level = parents == parent
            some = (drawn & sent)[:, level].any(1) & (drawn & ~sent)[:, level].any(1)
            if some.any():
                raise TraceError(
                    f"{self.policy.name} leaves out some of the candidates after a token and sends others: under "
                    f"{self.arrays.header.verification} that changes how those fare, which a dense trace cannot say; use "
                    "match verification, or measure it live (`specstop bench`)"
                )

    def commit(self, round: RoundState) -> None:
        """See `decode.rounds.RoundSource`."""
        left = self._text[self.sequence] - self.anchor
        # An end of text or the limit takes the target's own token, and what was accepted beyond.
        round.committed = np.minimum(self._taken + 1, left) * self.active
        round.ended = round.committed >= left
        drafting = round.drafted > 0
        if self._reads is not None:
            drafting = drafting & self._reads[self.row]
        self.backlog = np.where(self.active, self._left_unread(round.committed, drafting), self.backlog)
        self.anchor = self.anchor + round.committed

    def _left_unread(self, committed: Array, drafting: Array) -> Array:
        """Return what the draft has to read before the next round; where another one drafted, what it had to and more."""
        if self._reading == "nothing":
            return np.zeros_like(committed)
        # A draft model has read what was fed of the accepted path, and what was rejected is forgotten. One that reads all on
        # the target's states has read nothing of this round but for itself, its root included.
        kept = -np.ones_like(committed) if self._reading == "all" else self._read
        out: Array = committed + np.where(drafting, -kept, self.backlog)
        return out
