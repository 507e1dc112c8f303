"""A trace as the source of rounds: features and accepted tokens are looked up."""

from __future__ import annotations

from collections.abc import Sequence
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
from .arrays import TraceArrays

kernels = on_first_use("features")

_NO_HISTORY = np.zeros((0, 0), dtype=np.float32)


class TraceSource:
    """The `decode.rounds.RoundSource` of R streams, each with a queue of texts that are decoded one after the other.

    The tensors of the trace are viewed as numpy arrays: small operations between two decisions are faster on them.

    Args:
        arrays: a trace.
        policy: reads features and hidden states of it.
        queues: [R, Q] int64 sequences.
        together: all streams share one verification, on which the decisions of joint policies depend.

    Attributes:
        active: [R] bool, streams that have a round.
        sequence, anchor: [R] int64, position of each stream.
        backlog: [R] int64, committed tokens that the draft has not read; [R, D] with several drafters.
        row: [R] int64, row of the round in the trace; any row of the text for a stream without a round.
    """

    timer = NO_TIMER

    def __init__(self, arrays: TraceArrays, policy: StopPolicy, queues: Array, together: bool = False) -> None:
        self.arrays, self.policy, self.queues = arrays, policy, queues
        self._batch = np.zeros(len(queues), dtype=np.int64) if together else np.arange(len(queues))
        # As in the live loop with this verification. Under `match`, trimming may depend on anything.
        hides = arrays.header.given_text and MODES[arrays.header.verification].hides
        self.decides_ended, self.selects_levels = hides and policy.trims, hides and is_trimming(policy)
        self._shows_tokens = type(policy).select is not StopPolicy.select and not hides
        self.topology = arrays.tree.limited(policy.max_depth)
        layout = Layout(policy.features)
        self._names, self._width = layout.history, len(layout.names)
        columns = layout.anchor_at, layout.history_at, layout.node_at
        self._anchor_at, self._history_at, self._node_at = (np.array(at, dtype=np.int64) for at in columns)
        anchors, nodes = arrays.tensors(policy.features)
        # The kernel accepts strided nodes: a contiguous copy would double their memory.
        self._anchors, self._nodes = anchors.float().contiguous().numpy(), nodes.float().numpy()
        self._route = layout.route
        self._route_at = layout.route_at
        recorded = [arrays.column(name).numpy() for name in layout.route if name != "idle_tokens"]  # [N, D] each
        self._signals = recorded
        self._hidden = {name: arrays.hidden_state(name) for name in policy.hidden}
        self._accepted, self._tokens = arrays.accepted.numpy(), arrays.tokens.numpy()
        self._first_anchor, self._offset = arrays.first_anchor.numpy(), arrays.offset.numpy()
        self._prompt, self._text = arrays.prompt_tokens.numpy(), arrays.text_tokens.numpy()
        self._turn = np.zeros(len(queues), dtype=np.int64)
        self._readings = arrays.header.readings  # of each drafter, see `drafters.Drafter.reading`
        self.sequence = queues[:, 0]
        self.anchor = self._first_anchor[self.sequence]
        self.backlog = self._unread_text(self.context())
        self.active = np.ones(len(queues), dtype=bool)
        self.row = np.zeros(len(queues), dtype=np.int64)
        self.start_next_texts()

    def context(self) -> Array:
        """Return [R], the number of committed tokens, including the prompts."""
        out: Array = self._prompt[self.sequence] + self.anchor
        return out

    def _unread_text(self, context: Array) -> Array:
        """Return the backlog at the beginning of a text with so many committed tokens."""
        # A draft that reads all on the target's states has none for the first token.
        unread = {"nothing": np.zeros_like(context), "all": context - 1, "path": context}
        return _by_drafter([unread[reading] for reading in self._readings])

    def start_next_texts(self) -> Array:
        """Move streams with ended texts to their next text; return the streams that begin one."""
        begun = np.zeros(len(self.queues), dtype=bool)
        # Repeat, because a text that ends with its first token has no round.
        while True:
            ended = self.ended_texts()
            if not ended.any():
                return np.flatnonzero(begun)
            self._turn = self._turn + ended
            self.active = self._turn < self.queues.shape[1]
            at = np.minimum(self._turn, self.queues.shape[1] - 1)  # a finished stream keeps its last text
            self.sequence = np.take_along_axis(self.queues, at[:, None], 1)[:, 0]
            begins = ended & self.active
            begun |= begins
            self.anchor = np.where(begins, self._first_anchor[self.sequence], self.anchor)
            unread = self._unread_text(self.context())
            self.backlog = np.where(_like(begins, unread), unread, self.backlog)

    def ended_texts(self) -> Array:
        """Return [R] bool, the active streams with ended texts."""
        out: Array = self.active & (self.anchor >= self._text[self.sequence])
        return out

    def start_text(self, stream: int, sequence: int) -> None:
        """Begin a text in a stream. The stream stays inactive if the text ends with its first token."""
        self.sequence[stream], self.anchor[stream] = sequence, self._first_anchor[sequence]
        self.backlog[stream] = self._unread_text(self._prompt[sequence : sequence + 1] + self.anchor[stream])[0]
        self.active[stream] = self.anchor[stream] < self._text[sequence]

    def take(self, streams: Array) -> None:
        """Keep only these streams [R']."""
        self.queues, self._turn, self.sequence = self.queues[streams], self._turn[streams], self.sequence[streams]
        self.anchor, self.backlog, self.active = self.anchor[streams], self.backlog[streams], self.active[streams]

    def begin(self) -> RoundState:
        """See `decode.rounds.RoundSource`."""
        self.row = self.rows()
        allowed = self.arrays.header.max_new_tokens - self.anchor - 1  # the target's token takes one place
        limit = np.minimum(allowed, self.topology.deepest)
        limit[~self.active] = self.topology.deepest  # the loop reads the smallest limit
        round = RoundState(self.topology, self.active, self.context(), self.backlog, limit)
        if self._shows_tokens:
            round.tokens[:, 1:] = self._tokens[self.row, : self.topology.nodes]
        return round

    def rows(self) -> Array:
        """Return [R], the row of each stream's anchor; any row of the text for inactive streams.

        Raises:
            TraceError: the trace has no round there, as it was recorded under a policy that did not visit the anchor.
        """
        row = self.arrays.find(self.sequence, self.anchor)
        missing = self.active & (row < 0)
        if missing.any():
            at, header = int(missing.argmax()), self.arrays.header
            name = self.arrays.prompt_ids[int(self.sequence[at])]
            origin = f"was recorded under {header.policy}" if header.policy else f"has texts of {header.texts}"
            raise TraceError(
                f"{self.policy.name} comes to anchor {int(self.anchor[at])} of {name!r}, where the trace has no round "
                f"(it {origin}); collect dense traces to replay any policy"
            )
        return np.where(self.active, row, self._offset[self.sequence])

    def step(self, round: RoundState, depth: int, alive: Array, history: History) -> DraftStep:
        """See `decode.rounds.RoundSource`."""
        first = self.topology.spans[depth].start - 1 if depth else -1  # node = row - 1; the root is not a node
        features = np.zeros((*alive.shape, self._width), dtype=np.float32)
        if self._width:
            has_one = self.topology.drafters == 1
            past = history.values(self._names) if self._names and has_one else _NO_HISTORY
            kernels().look_up(
                self._anchors, self._anchor_at, past, self._history_at[: past.shape[1]], self._nodes, self._node_at,
                self.row, first, np.ascontiguousarray(alive), features,
            )  # fmt: skip
        # Added to zeros: a broadcast view would not be C-contiguous, as compiled policies require.
        parent = np.zeros(alive.shape, dtype=np.int64)
        parent += self.topology.parent_in_level[depth]
        hidden = {name: self._states(name, first, alive) for name in self._hidden}
        batch = np.where(self.active, self._batch[: len(alive)], -1)
        owner = self.topology.drafter_of_branch[depth]
        if self._route:
            self._add_signals(history, owner, alive, features)
        if self.topology.drafters == 1:
            return DraftStep(depth, alive.copy(), parent, features, hidden, batch)
        if self._names:
            features[..., self._history_at] = np.where(alive[..., None], history.values(self._names)[:, owner], 0.0)
        above = self.topology.drafter_of_branch[max(depth - 1, 0)]
        return DraftStep(depth, alive.copy(), parent, features, hidden, batch, owner, above)

    def _add_signals(self, history: History, owner: Array, alive: Array, features: Array) -> None:
        """Write the ROUTE columns of the branches that are alive; `owner` [B] has the drafter of each."""
        signals = iter(self._signals)
        for name, at in zip(self._route, self._route_at, strict=True):
            if name != "idle_tokens":
                values = next(signals)[self.row]
            elif history.idle is None:
                continue
            else:
                values = history.idle
            features[..., at] = np.where(alive, values[:, owner], 0.0)

    def _states(self, name: str, first: int, alive: Array) -> Array:
        """Return [R, B, H] float32, a hidden state of the alive branches, which begin at node `first`."""
        recorded = self._hidden[name]
        states = np.zeros((*alive.shape, recorded.width), dtype=np.float32)
        if first >= 0 or not recorded.of_nodes:
            stream, branch = alive.nonzero()
            at = None if first < 0 else torch.from_numpy(first + branch)
            states[stream, branch] = recorded.at(torch.from_numpy(self.row[stream]), at).float().numpy()
        return states

    def grow(self, round: RoundState, depth: int, feeding: Array) -> tuple[Array, Array]:
        """See `decode.rounds.RoundSource`."""
        span = self.topology.spans[depth + 1]
        nodes = slice(span.start - 1, span.stop - 1)
        # All children of a row that is fed are drawn, as in the trace.
        drawn = feeding if self.topology.is_chain else feeding[:, self.topology.parent_in_level[depth + 1]]
        if self._missing is not None:
            drawn = drawn & ~self._missing[self.row, nodes]
        round.drawn[:, span] = drawn
        return drawn, drawn if self._ends is None else drawn & ~self._ends[self.row, nodes]

    @cached_property
    def _missing(self) -> Array | None:
        """[N, K] bool, nodes for which a filter left no token; None if there are none."""
        missing: Array = self._tokens == NO_TOKEN
        return missing if missing.any() else None

    @cached_property
    def _ends(self) -> Array | None:
        """[N, K] bool, nodes that drew EOS; None if there are none."""
        ends: Array = self.arrays.ends.numpy()
        return ends if ends.any() else None

    def verify(self, round: RoundState) -> None:
        """See `decode.rounds.RoundSource`.

        Raises:
            TraceError: the round drafts candidates that the recorded live run did not.
        """
        arrays, nodes = self.arrays, self.topology.nodes
        if arrays.drawn is not None and (round.drawn[:, 1:] & ~arrays.drawn.numpy()[self.row, :nodes]).any():
            raise TraceError(
                f"{self.policy.name} drafts what {arrays.header.policy} did not when the trace was recorded; "
                "collect dense traces, or live ones with --explore"
            )
        if arrays.path is None:  # a chain: a prefix of the draft is sent
            self._taken = np.minimum(self._accepted[self.row], round.verified)
            # The last token drawn is never fed: the draft has not read it even if it was accepted.
            self._read = np.minimum(self._taken, round.drafted - 1)
        else:
            path = round.on_path[:, 1:]
            np.logical_and(arrays.path.numpy()[self.row, :nodes], round.sent[:, 1:], out=path)
            if self.topology.drafters > 1:
                self._keep_longest(path)
            self._taken = path.sum(1)
            self._read = self._by_owner(path & round.fed[:, 1:])
            if self.selects_levels:
                self._check_siblings(round)
        round.accepted = self._taken * self.active

    def _check_siblings(self, round: RoundState) -> None:
        """Refuse a round that sends only a part of the candidates after a token.

        Under rejection, the acceptance of a candidate depends on which ones were tried before it. In the trace all were.
        """
        parents = self.topology.parents[1:]
        drawn, sent = round.drawn[:, 1:] & self.active[:, None], round.sent[:, 1:]
        for parent in np.unique(parents):
            level = parents == parent
            partial = (drawn & sent)[:, level].any(1) & (drawn & ~sent)[:, level].any(1)
            if partial.any():
                raise TraceError(
                    f"{self.policy.name} sends only a part of the candidates after a token: under "
                    f"{self.arrays.header.verification} that changes which are accepted, which a dense trace cannot show; "
                    "use match verification, or measure it live (`specstop bench`)"
                )

    def commit(self, round: RoundState) -> None:
        """See `decode.rounds.RoundSource`."""
        left = self._text[self.sequence] - self.anchor
        # The end of the text cuts the target's token, and accepted tokens beyond it.
        round.committed = np.minimum(self._taken + 1, left) * self.active
        round.ended = round.committed >= left
        drafting = round.drafting if self.topology.drafters > 1 else round.drafted > 0
        backlog = self._next_backlog(round.committed, drafting)
        self.backlog = np.where(_like(self.active, backlog), backlog, self.backlog)
        self.anchor = self.anchor + round.committed

    def _next_backlog(self, committed: Array, drafting: Array) -> Array:
        """Return the backlog of the next round. It grows by what was committed if the drafter did not draft this round."""
        if self.topology.drafters == 1:
            return _backlog_after(self._readings[0], committed, drafting, self._read, self.backlog)
        columns = (drafting, self._read, self.backlog)
        parts = [
            _backlog_after(reading, committed, *(column[:, index] for column in columns))
            for index, reading in enumerate(self._readings)
        ]
        return np.stack(parts, 1)

    def _by_owner(self, marks: Array) -> Array:
        """Return how many nodes [R, K] are marked: [R], or [R, D] by drafter."""
        if self.topology.drafters == 1:
            counts: Array = marks.sum(1)
            return counts
        owner = self.topology.drafter_of[1:]
        return np.stack([marks[:, owner == index].sum(1) for index in range(self.topology.drafters)], 1)

    def _keep_longest(self, path: Array) -> None:
        """Clear all accepted paths but the longest, of equal ones that of the first drafter, as `match` does."""
        lengths = self._by_owner(path)
        path &= self.topology.drafter_of[1:] == lengths.argmax(1)[:, None]


def _backlog_after(reading: str, committed: Array, drafting: Array, read: Array, backlog: Array) -> Array:
    """Return the backlog [R] of a drafter after a round in which it read `read` of the accepted candidates."""
    if reading == "nothing":
        return np.zeros_like(committed)
    # A draft model has read the accepted candidates that it was fed. A draft that reads all on the target's states has read
    # nothing of this round, nor its root.
    kept = -np.ones_like(committed) if reading == "all" else read
    out: Array = committed + np.where(drafting, -kept, backlog)
    return out


def _by_drafter(columns: Sequence[Array]) -> Array:
    """Return [R] of one drafter, [R, D] of several."""
    return columns[0] if len(columns) == 1 else np.stack(columns, 1)


def _like(mask: Array, values: Array) -> Array:
    """Return a mask [R] that broadcasts with values [R] or [R, D]."""
    return mask if values.ndim == 1 else mask[:, None]
