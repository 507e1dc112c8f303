"""Candidates from a smaller language model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from ...policies.contract import Array
from ..models.cuda.graph import open_cache
from ..models.finite import check_rows
from ..models.hidden import hidden_width
from ..models.packed import Part, TreeRows
from ..models.pair import Pair
from ..models.reading.modes import readable
from ..round_state import RoundState, Rows
from .base import Proposal


@dataclass(slots=True)
class _Read:
    """What the draft has read of one stream: `text` says what is committed, `fed` the rows in the slots after it."""

    text: list[int] = field(default_factory=list)
    round: RoundState | None = None
    fed: list[int] = field(default_factory=list)
    looked_at: bool = False  # the first logits of a text tell a broken model


class ModelDrafter:
    """A smaller language model of the same tokenizer.

    Args:
        pair: whose draft it is.
    """

    layers: tuple[int, ...] = ()

    def __init__(self, pair: Pair) -> None:
        self._pair, self._draft = pair, pair.draft_model
        self.readable = readable(self._draft)
        self._hidden = False
        self._open(1, 0)

    def _open(self, streams: int, capacity: int) -> None:
        vocabulary, reading = self._pair.vocabulary, self._pair.readings[1]
        self._model = open_cache(self._draft, capacity, vocabulary, self._hidden, streams, reading=reading)
        self._streams = [_Read() for _ in range(streams)]

    def keep_states(self) -> int:
        """See `hidden.KeepsStates`."""
        if not self._hidden:
            self._hidden = True
            self._open(len(self._streams), 0)
        return hidden_width(self._draft)

    def reserve(self, streams: int, tokens: int) -> None:
        """See `Drafter`."""
        if self._model.capacity < tokens or len(self._streams) != streams:
            self._open(streams, tokens)
        else:
            self._model.refresh()
        for stream in range(streams):
            self.begin(stream)

    def begin(self, stream: int) -> None:
        """See `Drafter`."""
        self._model.roll_back(0, stream)
        self._streams[stream] = _Read()

    def prepare(self, lengths: Sequence[int]) -> None:
        """See `Prepares`."""
        # A step reads one token, a round's first one two where all of a draft was accepted: its last token was never fed.
        self._model.prepare([(1, 1), (2, 1)], lengths)

    def committed(self, stream: int, tokens: Sequence[int], states: Tensor | None) -> None:
        """See `Drafter`."""
        own = self._streams[stream]
        round, base = own.round, len(own.text)
        if round is not None and self._model.lengths[stream] > base:  # else nothing was drafted, and the backlog grows
            # Rows lie in the cache in the order in which they were fed; of the path the last one may never have been.
            slot = {row: base + at for at, row in enumerate(own.fed)}
            self._model.keep(base, [slot[row] for row in round.path(stream) if row in slot], stream)
        own.round = None
        own.text.extend(tokens)

    def backlog(self) -> Array:
        """See `Drafter`."""
        read = zip(self._streams, self._model.lengths, strict=True)
        return np.array([len(own.text) + 1 - length for own, length in read])  # the root is not in `text` yet

    def propose(self, round: RoundState, depth: int, rows: Rows) -> Proposal:
        """See `Drafter`."""
        logits = self._model.read_parts([self._part(round, depth, stream, own) for stream, own in rows])
        self._look(rows, logits)
        for stream, own in rows:
            self._streams[stream].fed.extend(own)
        states = self._model.states
        return Proposal(logits, None, None if states is None else states[0, -len(logits) :])

    def _part(self, round: RoundState, depth: int, stream: int, rows: Sequence[int]) -> Part:
        """Return what is read of one stream: with the anchor of a round the backlog as well."""
        own, tokens = self._streams[stream], round.tokens[stream, rows].tolist()
        if depth == 0:
            own.round, own.fed = round, []
            tokens = own.text[self._model.lengths[stream] :] + tokens
        if len(rows) == 1 and len(own.fed) == depth:  # all that was fed leads to this row
            return Part(stream, tokens, 1)
        return Part(stream, tokens, tree=TreeRows(round.topology, len(own.text), own.fed, rows))

    def _look(self, rows: Rows, logits: Tensor) -> None:
        """Refuse logits that are not finite where a stream's are seen for the first time."""
        if all(self._streams[stream].looked_at for stream, _ in rows):
            return
        first = 0
        for stream, own in rows:
            if not self._streams[stream].looked_at:
                check_rows(logits[first : first + len(own)], "draft")
                self._streams[stream].looked_at = True
            first += len(own)
