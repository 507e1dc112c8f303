"""`RoundState`: one round of S streams over a topology, from the first draft step to the committed tokens.

The source fills it, policies receive parts of it, verification marks the accepted path, and records and traces are written
from it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from ..policies.contract import Array, DraftTree, State
from ..policies.features import DrawnTokens
from ..policies.kernels import on_first_use
from .models.device import to_host
from .topology import Topology

if TYPE_CHECKING:
    from .device_policies import DevicePolicy
    from .feature_reader import NextAnchors
    from .records import Round
    from .texts import Anchor, Text
    from .verify.noise import Choices

Rows = Sequence[tuple[int, Sequence[int]]]
"""(stream, rows of the topology), both ascending: the order of the R rows of scores [R, V]."""

kernels = on_first_use("features")


@dataclass(slots=True)
class DraftScores:
    """The scores from which the candidates of one depth were drawn.

    Attributes:
        rows: the fed rows, R in total, all of one depth.
        counts: by fed row, number of candidates drawn below it.
        raw: [R, V] logits of the draft.
        sampled: [R, V] log-weights that are sampled from; None = raw / T.
        untruncated: [R, V] `sampled` before a filter (top-k, top-p) removed tokens; None without a filter.
        scores: [R, V] of which `match` takes the largest; None in other modes.
        best: by fed row, its largest scores in descending order, one more than there are candidates; None if unknown.
        states: [R, H] last hidden states of the draft; None if not kept.
        drafter: index of the drafter that was fed.
    """

    rows: Rows
    counts: list[int]
    raw: Tensor
    sampled: Tensor | None = None
    untruncated: Tensor | None = None
    scores: Tensor | None = None
    best: list[list[float]] | None = None
    states: Tensor | None = None
    drafter: int = 0

    def part(self, stream: int) -> DraftScores | None:
        """Return the scores of one stream; None if none of its rows was fed."""
        first = 0
        for other, rows in self.rows:
            if other == stream:
                part = slice(first, first + len(rows))
                values = ((field.name, getattr(self, field.name)) for field in fields(self)[1:-1])
                parts: dict[str, Any] = {name: value[part] for name, value in values if value is not None}
                return DraftScores([(stream, rows)], drafter=self.drafter, **parts)
            first += len(rows)
        return None


class RoundState:
    """A round of S streams over a topology of N rows, K deep.

    Args:
        topology: tree of the round.
        active: [S] bool, streams that have a round; other rows are undefined.
        context: [S] int64, number of committed tokens before the round.
        backlog: [S] int64, number of these that the draft has not read; 0 if the drafter reads nothing. [S, D] with several
            drafters.
        limit: [S] int64, depth at which a length limit ends drafting; None = no limit.

    Attributes:
        drawn: [S, N] bool, a candidate was drawn at the row.
        dropped: [S, N] bool, the policy excluded the candidate from verification.
        fed: [S, N] bool, the draft read the row, to draw below it.
        decided: [S, N] bool, the policy decided whether to extend the row.
        drafting: [S, D] bool, drafters that drafted.
        sent: [S, N] bool, rows that the target reads: row 0, and rows below it that were drawn and not dropped.
        on_path: [S, N] bool, the accepted path, including row 0. Not set for chains in replay, where `accepted` suffices.
        drafted, verified, decisions: [S] int64, candidates drawn, candidates sent, depths at which the policy was called.
        accepted, committed: [S] int64, min(A, k), and number of tokens added to the text.
        hit_limit: [S] bool, an end of text or a length limit ended drafting.
        ended: [S] bool, the text has ended.
        seconds: [S] float64, modelled by the latency profile; 0 without one.
        steps: [S, K] int64, rows fed at each depth; one column at least. [S, D, K] with several drafters.
        has_fixed_length: the policy is not called in this round.
        device_tokens: [S, N] int64, tokens on the device while the host does not know the candidates; otherwise None.
        device_policy: decides at depths above 0 on the device, without a wait; None = the host decides.
        needed: [] bool on the device, whether a stream drafts on; None = the host knows.
        ends: token ids that end a text.
        next_anchors: the rows that the next anchors are drawn from, if the policy reads them before it drafts.
        levels: by depth of the fed rows, the scores of each drafter that drew. This and the following: live rounds only.
        draft_probs: by (stream, fed row, drafter), the distribution [V] of its candidates, under rejection modes.
        ended_rows: (stream, row) of the candidates that end a text.
        choices: by active stream, its random choices in this round.
        texts, anchors: by stream, the text, and the row from which its anchor was drawn.
        target_rows: rows that the target has read.
        target_raw, target_sampled: [R, V] logits of the target after these rows, raw and processed.
        next_tokens: by stream, the token of the target after the accepted path.
        records: by stream, the public record of the round.
        policy_state: the policy's state after the round.
        signals: [S, D, .] float32, `policies.features.ROUTE_FEATURES`; None if nothing reads them.
    """

    sent: Array
    drafted: Array
    verified: Array
    decisions: Array
    steps: Array
    accepted: Array
    committed: Array
    ended: Array
    has_fixed_length = False
    choices: dict[int, Choices]
    texts: Sequence[Text | None] = ()
    anchors: Sequence[Anchor | None] = ()
    target_rows: Rows = ()
    target_raw: Tensor
    target_sampled: Tensor
    next_tokens: dict[int, int]
    records: dict[int, Round]
    policy_state: State = None
    signals: Array | None = None
    device_tokens: Tensor | None = None
    device_policy: DevicePolicy | None = None
    needed: Tensor | None = None
    ends: Collection[int] = ()
    next_anchors: NextAnchors | None = None
    _tokens: Array | None = None

    def __init__(
        self, topology: Topology, active: Array, context: Array, backlog: Array, limit: Array | None = None
    ) -> None:
        self.topology, self.active, self.context, self.backlog, self.limit = topology, active, context, backlog, limit
        # One block [5, S, N], which the counting kernel takes as one argument.
        self._marks = np.zeros((5, len(active), len(topology)), dtype=bool)
        self.drawn, self.dropped, self.fed, self.decided, self.on_path = self._marks
        self.drafting = np.zeros((len(active), topology.drafters), dtype=bool)
        self.hit_limit = np.zeros(len(active), dtype=bool)
        self.seconds = np.zeros(len(active))
        self.levels: list[list[DraftScores]] = []
        self.draft_probs: dict[tuple[int, int, int], Tensor] = {}
        self.ended_rows: set[tuple[int, int]] = set()

    @property
    def tokens(self) -> Array:
        """[S, N] int64, -1 where nothing was drawn; column 0 has the anchors. Waits for `device_tokens`."""
        if self._tokens is None:
            self._tokens = np.full(self.drawn.shape, -1, dtype=np.int64)
        if self.device_tokens is not None:
            self._tokens, self.device_tokens = self.device_tokens.cpu().numpy(), None
        return self._tokens

    def fetch(self, values: Tensor, at: Tensor | None = None, by_row: bool = True) -> list[int]:
        """Return int64 `values` [n] as a list, and copy `device_tokens` and `next_anchors` to the host at the same time.

        Args:
            values: computed by the verification.
            at: [B, 2] int64 rows of the target and the tokens after them, among them those of the next anchors.
            by_row: whether `at` has all rows; if not, it has one for each stream.
        """
        anchors = [] if self.next_anchors is None or at is None else self.next_anchors.launch(at, by_row)
        if not anchors and self.device_tokens is None:
            return list(values.tolist())
        tokens = [] if self.device_tokens is None else [self.device_tokens]
        first, *others = to_host(values, *tokens, *anchors)
        if self.device_tokens is not None:
            self._tokens, self.device_tokens = others.pop(0).numpy(), None
        if self.next_anchors is not None and anchors:
            self.next_anchors.on_host = others
        return list(first.tolist())

    def end_texts(self) -> None:
        """Undo what was drafted after the first candidate of each chain that ends its text.

        Needed if the host did not know the candidates while they were drafted.
        """
        for stream, tokens in enumerate(self.tokens.tolist()):
            row = next((row for row, token in enumerate(tokens) if row and token in self.ends), 0)
            if not row:
                continue
            self.hit_limit[stream] = True
            self._shorten(stream, row)
            self.count()
            self.accepted = np.minimum(self.accepted, self.verified)

    def _shorten(self, stream: int, length: int) -> None:
        """Undo what a chain drafted beyond `length` candidates."""
        self.drawn[stream, length + 1 :] = self.fed[stream, length:] = self.on_path[stream, length + 1 :] = False
        self.tokens[stream, length + 1 :] = -1
        for level in chain.from_iterable(self.levels[length:]):
            level.counts = [0 if other == stream else n for (other, _), n in zip(level.rows, level.counts, strict=True)]

    def settle(self, lengths: Sequence[int], tokens: Array, first: int) -> None:
        """Set what the host would have known of chains if it had decided from depth `first` on.

        Args:
            lengths: by stream, number of candidates until the device stopped.
            tokens: [S, N] int64, the anchors and candidates.
            first: at least 1.
        """
        self._tokens, self.device_tokens, self.needed, deepest = tokens, None, None, self.topology.deepest
        for stream, length in enumerate(lengths):
            self._shorten(stream, length)
            limit = deepest if self.limit is None else int(self.limit[stream])
            has_ended = length > 0 and tokens[stream, length] in self.ends
            self.hit_limit[stream] = self.active[stream] and (has_ended or limit <= length < deepest)
            self.decided[stream, first : length + (not has_ended and length < limit)] = True
        del self.levels[max(lengths) :]

    def count(self) -> None:
        """Compute `sent`, `steps` and the counts of candidates and decisions."""
        tree, streams = self.topology, len(self.active)
        self.sent, counts = np.empty_like(self.drawn), np.empty((3, streams), dtype=np.int64)
        steps = np.empty((streams, tree.drafters, max(tree.deepest, 1)), dtype=np.int64)
        kernels().count_round(
            tree.parents, tree.depths, tree.drafter_of, self._marks, self.drafting, self.sent, counts, steps
        )
        self.steps = steps[:, 0] if tree.drafters == 1 else steps
        self.drafted, self.verified, self.decisions = counts

    @property
    def read_backlog(self) -> Array:
        """[S] int64, committed tokens that the drafters of the round had not read."""
        out: Array = self.backlog if self.topology.drafters == 1 else (self.backlog * self.drafting).sum(1)
        return out

    @property
    def fed_by_step(self) -> Array | None:
        """`steps` of a tree; None for a chain, where the number of tokens determines it."""
        return None if self.topology.is_chain else self.steps

    @property
    def cut(self) -> Array:
        """[S] bool, an end of text or a length limit ended the round."""
        out: Array = self.hit_limit | self.ended
        return out

    def draft_tree(self, hide_tokens: bool = False) -> DraftTree:
        """Return the candidates [S, N - 1] as a policy receives them; those to be sent are `drawn`."""
        tree, drawn = self.topology, self.sent[:, 1:]
        # Copies, as compiled policies require contiguous arrays.
        parent, depth = (values[None, 1:].repeat(len(drawn), 0) for values in (tree.parents - 1, tree.depths))
        tokens = np.full(drawn.shape, -1) if hide_tokens else np.where(drawn, self.tokens[:, 1:], -1)
        return DraftTree(tokens, parent, depth, drawn.copy())

    def path(self, stream: int) -> list[int]:
        """Return the rows of the accepted path, row 0 first."""
        rows: list[int] = np.flatnonzero(self.on_path[stream]).tolist()
        return rows

    def path_tokens(self, stream: int, row: int) -> list[int]:
        """Return the tokens from the anchor down to a row, both included."""
        tokens: list[int] = self.tokens[stream, self.topology.paths[row]].tolist()
        return tokens

    def drawn_below(self, stream: int, row: int) -> list[int]:
        """Return the children of a row that were drawn, in order."""
        children = self.topology.children[row]
        if not children:
            return []
        first = children[0]
        drawn: list[int] = (first + np.flatnonzero(self.drawn[stream, first : children[-1] + 1])).tolist()
        return drawn

    def numbers(self, stream: int) -> list[int]:
        """Return the number of each row in the order of drawing, which keys random choices; 0 = the anchor."""
        numbers: list[int] = self.drawn[stream].cumsum().tolist()
        return numbers

    def next_number(self, stream: int) -> int:
        """Return the number of the candidate that is drawn next."""
        return 1 + int(np.count_nonzero(self.drawn[stream]))

    def drawn_tokens(self, level: DraftScores) -> tuple[DrawnTokens, list[int], list[int]]:
        """Return the candidates of a level for the features, and the stream and row of each."""
        tree, tokens, ids = self.topology, self.tokens.tolist(), []
        streams: list[int] = []
        children: list[int] = []
        fed = [(stream, row) for stream, rows in level.rows for row in rows]
        for index, ((stream, row), count) in enumerate(zip(fed, level.counts, strict=True)):
            for rank, child in enumerate(tree.below(row, level.drafter)[:count]):
                ids.append((index, tokens[stream][child], tokens[stream][row], rank, count, tree.depth[child]))
                streams.append(stream)
                children.append(child)
        return DrawnTokens.of(ids), streams, children
