"""Candidates from a smaller language model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from ...policies.contract import Array
from ..candidates import Candidates
from ..models.cuda_graph import open_cache
from ..models.finite import check_rows
from ..models.hidden import hidden_width
from ..models.pair import Pair, readable
from ..models.transfer import upload
from .base import Proposal


class ModelDrafter:
    """A smaller language model of the same tokenizer, for one stream.

    Args:
        pair: whose draft it is.
    """

    layers: tuple[int, ...] = ()

    def __init__(self, pair: Pair) -> None:
        self._pair, self._draft = pair, pair.draft_model
        self.readable = readable(self._draft)
        self._hidden = False
        self._model = open_cache(self._draft, 0, pair.vocabulary)
        self._looked_at = False  # the first logits of a text tell a broken model
        self._text: list[int] = []
        self._found: Candidates | None = None
        self._fed: list[int] = []  # places in the cache, in the order of its slots after the text

    def keep_states(self) -> int:
        """See `hidden.KeepsStates`."""
        if not self._hidden:
            self._hidden = True
            self._model = open_cache(self._draft, 0, self._pair.vocabulary, True)
        return hidden_width(self._draft)

    def reserve(self, streams: int, tokens: int) -> None:
        """See `Drafter`."""
        if self._model.capacity < tokens:
            self._model = open_cache(self._draft, tokens, self._pair.vocabulary, self._hidden)
        self._model.roll_back(0)
        self._text, self._found = [], None
        self._looked_at = False

    def prepare(self, lengths: Sequence[int]) -> None:
        """Do ahead what drafting chains in texts of these lengths takes to be done once (`CachedModel.prepare`)."""
        self._model.prepare([(1, 1), (2, 1)], lengths)

    def committed(self, stream: int, tokens: Sequence[int], states: Tensor | None) -> None:
        """See `Drafter`."""
        found, base = self._found, len(self._text)
        if found is not None and self._model.length > base:  # else nothing was drafted, and the backlog grows
            slot = {place: base + at for at, place in enumerate(self._fed)}
            self._model.keep(base, [slot[place] for place in found.accepted if place in slot])
        self._found = None
        self._text.extend(tokens)

    def backlog(self) -> Array:
        """See `Drafter`."""
        return np.array([len(self._text) + 1 - self._model.length])

    def propose(self, found: Sequence[Candidates], feeding: Sequence[Sequence[int]]) -> Proposal:
        """See `Drafter`."""
        (here,), (places,) = found, feeding
        depth, base = here.depth[places[0]], len(self._text)
        tokens = [here.tokens[place] for place in places]
        if depth == 0:
            self._found, self._fed = here, []
            unread = self._text[self._model.length :]
            if here.roots > 1 and unread:  # the roots do not see each other
                self._read(unread)
            elif here.roots == 1:
                tokens = unread + tokens
        if len(places) == 1 and len(self._fed) == depth:  # all it has read leads to this place
            logits = self._read(tokens)
        else:
            before, rows = ([here.rows[place] for place in some] for some in (self._fed, places))
            logits = self._model.read_tree(tokens, base, here.topology, before, rows)[0]
        if not self._looked_at:
            check_rows(logits, "draft")
            self._looked_at = True
        self._fed.extend(places)
        states = self._model.states
        return Proposal(logits, None, None if states is None else states[0, -len(logits) :])

    def _read(self, tokens: Sequence[int]) -> Tensor:
        return self._model.read(upload([list(tokens)], self._pair.device), rows=1)[0]
