"""Candidates from a smaller language model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from ...policies.contract import Array
from ..candidates import Candidates
from ..models.cuda.graph import open_cache
from ..models.finite import check_rows
from ..models.hidden import hidden_width
from ..models.long_rope import readable
from ..models.packed import Part, TreeRows
from ..models.pair import Pair
from .base import Proposal


@dataclass(slots=True)
class _Read:
    """What the draft has read of one stream: `text` says what is committed, `fed` the places in the slots after it."""

    text: list[int] = field(default_factory=list)
    found: Candidates | None = None
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
        found, base = own.found, len(own.text)
        if found is not None and self._model.lengths[stream] > base:  # else nothing was drafted, and the backlog grows
            # Places lie in the cache in the order in which they were fed; of the path the last one may never have been.
            slot = {place: base + at for at, place in enumerate(own.fed)}
            self._model.keep(base, [slot[place] for place in found.accepted if place in slot], stream)
        own.found = None
        own.text.extend(tokens)

    def backlog(self) -> Array:
        """See `Drafter`."""
        read = zip(self._streams, self._model.lengths, strict=True)
        return np.array([len(own.text) + 1 - length for own, length in read])  # the root is not in `text` yet

    def propose(
        self, streams: Sequence[int], found: Sequence[Candidates], feeding: Sequence[Sequence[int]]
    ) -> Proposal:
        """See `Drafter`."""
        parts = [self._part(stream, here, places) for stream, here, places in zip(streams, found, feeding, strict=True)]
        logits = self._model.read_parts(parts)
        self._look(streams, feeding, logits)
        for stream, places in zip(streams, feeding, strict=True):
            self._streams[stream].fed.extend(places)
        states = self._model.states
        return Proposal(logits, None, None if states is None else states[0, -len(logits) :])

    def _part(self, stream: int, here: Candidates, places: Sequence[int]) -> Part:
        """Return what is read of one stream: with the first places of a round the backlog as well."""
        own = self._streams[stream]
        depth, tokens = here.depth[places[0]], [here.tokens[place] for place in places]
        if depth == 0:
            own.found, own.fed = here, []
            unread = own.text[self._model.lengths[stream] :]
            if here.roots > 1 and unread:  # the roots do not see each other
                self._model.read_parts([Part(stream, unread, 1)])
            elif here.roots == 1:
                tokens = unread + tokens
        if len(places) == 1 and len(own.fed) == depth:  # all it has read leads to this place
            return Part(stream, tokens, 1)
        # What was fed lies in the slots in this order, whatever its depths.
        before, rows = ([here.rows[place] for place in some] for some in (own.fed, places))
        return Part(stream, tokens, tree=TreeRows(here.topology, len(own.text), before, rows))

    def _look(self, streams: Sequence[int], feeding: Sequence[Sequence[int]], logits: Tensor) -> None:
        """Refuse logits that are not finite where a stream's are seen for the first time."""
        if all(self._streams[stream].looked_at for stream in streams):
            return
        first = 0
        for stream, places in zip(streams, feeding, strict=True):
            if not self._streams[stream].looked_at:
                check_rows(logits[first : first + len(places)], "draft")
                self._streams[stream].looked_at = True
            first += len(places)
