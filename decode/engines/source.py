"""The drafts of an engine's step as a source of candidates: chains of likeliest tokens, for all requests side by side.

An engine verifies; what it does not pass on (the target's rows and states, the noise) no policy can read here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ...policies.contract import Array, DraftStep, DraftTree
from ...policies.features import DrawnTokens, Layout
from ...policies.history import History
from ..candidates import shown_tree
from ..policy.summaries import read_columns
from ..topology import Topology
from ..verify.noise import best_of_rows

Look = Callable[[int, Array, Tensor, DrawnTokens], None]
"""Shown each depth: the depth, the streams [R] that drew there, the draft's logits [R, V], and the tokens drawn."""


class DraftRows(Protocol):
    """A drafter that has read a text in each of its rows."""

    def read(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], depth: int) -> Tensor:
        """Append tokens, at least one each, to the texts of some rows; return [R, V], what comes after the last of each.

        Args:
            rows: R of them.
            tokens: of each: at depth 0 what the text has grown by, at another the one that was drawn there.
            depth: of the tokens in the draft.
        """

    def roll_back(self, row: int, length: int) -> None:
        """Forget all of a row but its first `length` tokens."""


class Chains:
    """Drafts S chains of tokens; see `rounds.RoundSource`, of which the part that drafts is here.

    Args:
        draft: what they are read by.
        layout: of the policy's features.
        rows: [S], where the streams are in `draft`.
        unread: by stream, the tokens that the draft has not read, the anchor last; at least one.
        anchors: [S, 2] int64, the anchor and the token before it (-1 = none).
        topology: a chain.
        temperature: of the sampling, as features read it.
        eos: tokens after which nothing is drafted.
        look: see `Look`.

    Attributes:
        tokens: [S, K] int64, the tokens drawn, -1 elsewhere.
        backlog: [S] int64, the tokens that the draft had to read before it could draw.
        read: [S] int64, the tokens that it has read, drawn ones included.
    """

    asks_ended = selects_levels = False

    def __init__(
        self,
        draft: DraftRows,
        layout: Layout,
        rows: Sequence[int],
        unread: Sequence[Sequence[int]],
        anchors: Array,
        topology: Topology,
        temperature: float,
        eos: frozenset[int],
        look: Look | None = None,
    ) -> None:
        self.topology, self._draft, self._rows, self._unread = topology, draft, rows, unread
        self._layout, self._anchors, self._temperature, self._look = layout, anchors, temperature, look
        self._ends, self._columns = eos, layout.node_columns
        self.tokens = np.full((len(rows), topology.deepest), -1, dtype=np.int64)
        self.backlog = np.array([len(tokens) for tokens in unread], dtype=np.int64)
        self.read = np.zeros(len(rows), dtype=np.int64)
        self._path = np.zeros(len(rows))
        # One batch: an engine verifies all requests of a step together.
        self._parent, self._batch = np.zeros((len(rows), 1), dtype=np.int64), np.zeros(len(rows), dtype=np.int64)
        self._base: Array | None = None
        self._nodes = np.zeros((len(rows), len(layout.names)), dtype=np.float32)
        self._drawn: tuple[Array, Tensor, DrawnTokens] | None = None

    def grow(self, depth: int, feeding: Array) -> tuple[Array, Array]:
        """Feed the streams [S, 1]; return which have drawn a token, and which of them go on."""
        if self._columns.needs.path:
            self._read()  # paths lead through what nobody asked about
        at = np.flatnonzero(feeding[:, 0])
        places = at.tolist()
        fed = [self._unread[i] for i in places] if depth == 0 else self.tokens[at, depth - 1 : depth].tolist()
        logits = self._draft.read([self._rows[i] for i in places], fed, depth)
        self.read[at] += self.backlog[at] if depth == 0 else 1
        likeliest = best_of_rows(logits)
        best, token = logits.gather(-1, likeliest[:, None])[:, 0], likeliest.cpu().numpy()
        if not math.isfinite(float(best.sum())):  # a lookup may know of no token, a broken model of none to compare
            known = torch.isfinite(best)
            at, token, logits = at[known.cpu().numpy()], token[known.cpu().numpy()], logits[known]
        self.tokens[at, depth] = token
        if len(at):
            self._note(depth, at, logits, token)
        drawn = np.zeros_like(feeding)
        drawn[at] = True
        ended = [place for place, one in zip(at.tolist(), token.tolist(), strict=True) if one in self._ends]
        if not ended:
            return drawn, drawn
        going = drawn.copy()
        going[ended] = False
        return drawn, going

    def _note(self, depth: int, at: Array, logits: Tensor, token: Array) -> None:
        """Keep what tokens were drawn from until the policy is asked about them."""
        if not self._layout.node and self._look is None:
            return
        count = len(at)
        # A `features.summary.Token` each: row, id, parent, rank 0 of 1 sibling, depth.
        ids = np.zeros((count, 6), dtype=np.int64)
        ids[:, 0], ids[:, 1], ids[:, 4], ids[:, 5] = np.arange(count), token, 1, depth + 1
        ids[:, 2] = self._anchors[at, 0] if depth == 0 else self.tokens[at, depth - 1]
        drawn = DrawnTokens(ids, self._path[at])
        if self._layout.node:
            self._drawn = at, logits, drawn
        if self._look is not None:
            self._look(depth + 1, at, logits, drawn)

    def _read(self) -> None:
        """Read the columns of the tokens drawn last, unless they are."""
        if self._drawn is None:
            return
        (at, logits, drawn), every = self._drawn, len(self._drawn[0]) == len(self._rows)
        nodes = self._nodes if every else self._nodes[at]
        # The draft takes the likeliest tokens, so the scores that it took the largest of are the logits.
        path = read_columns(self._columns, logits, drawn, self._temperature, nodes, scores=logits)
        if not every:
            self._nodes[at] = nodes
        self._drawn = None
        if self._columns.needs.path:
            self._path[at] = path

    def step(self, depth: int, alive: Array, history: History) -> DraftStep:
        """Return what a policy is shown of the drafts that are `alive` [S, 1]."""
        layout = self._layout
        if self._base is None:
            known = {"anchor_token": self._anchors[:, 0], "before_token": self._anchors[:, 1]}
            # The temperature is the only other ANCHOR feature here (`policies.ANCHORS`).
            anchor = [known.get(name, np.full(len(alive), self._temperature)) for name in layout.anchor]
            columns = np.stack(anchor, 1) if anchor else np.zeros((len(alive), 0))
            self._base = layout.base(columns, history.values(layout.history))
        self._read()
        # Each fills columns of its own, with zeros elsewhere.
        features = self._base + self._nodes
        if np.count_nonzero(alive) < len(alive):
            features[~alive[:, 0]] = 0.0
        return DraftStep(depth, alive, self._parent, features[:, None], {}, self._batch)

    def tree(self, sent: Array) -> DraftTree:
        """Return the tokens drawn [S, K] as a policy sees them."""
        return shown_tree(self.topology, self.tokens, sent[:, 1:])
