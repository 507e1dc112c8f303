"""Candidates from a smaller language model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from ...policies.contract import Array
from ..models.attention import Part, TreeRows
from ..models.cuda import open_cache
from ..models.outputs import check_rows
from ..models.pair import Pair
from ..models.view import hidden_width, readable
from ..round_state import RoundState, Rows
from .base import Drafter, Proposal


@dataclass(slots=True)
class _Stream:
    """Committed tokens of a stream, and the rows of the round with keys after them in the cache."""

    tokens: list[int] = field(default_factory=list)
    round: RoundState | None = None
    fed: list[int] = field(default_factory=list)
    is_checked: bool = False  # whether its first logits are finite; later ones are not checked


class ModelDrafter(Drafter):
    """A smaller language model with the same tokenizer: the draft model of the pair."""

    needs_draft = True

    def __init__(self, pair: Pair) -> None:
        self._pair, self._draft = pair, pair.draft_model
        self.readable = readable(self._draft)
        self._keeps = False
        self._open(1, 0)

    def _open(self, streams: int, capacity: int) -> None:
        vocabulary, reading = self._pair.vocabulary, self._pair.readings[1]
        self._model = open_cache(self._draft, capacity, vocabulary, self._keeps, streams, reading=reading)
        self._texts = [_Stream() for _ in range(streams)]

    @property
    def skips(self) -> bool:  # type: ignore[override]
        """See `Drafter`."""
        return self._model.skips

    def keep_states(self) -> int:
        """Return the hidden states with every proposal from now on; the result is their width H."""
        if not self._keeps:
            self._keeps = True
            self._open(len(self._texts), 0)
        return hidden_width(self._draft)

    def reserve(self, streams: int, tokens: int) -> None:
        """See `Drafter`."""
        if self._model.capacity < tokens or len(self._texts) != streams:
            self._open(streams, tokens)
        else:
            self._model.refresh()
        for stream in range(streams):
            self.begin(stream)

    def begin(self, stream: int) -> None:
        """See `Drafter`."""
        self.keep_prefix(stream, 0)

    def keep_prefix(self, stream: int, length: int) -> int:
        """See `Drafter`."""
        length = min(length, self._model.lengths[stream])
        self._model.roll_back(length, stream)
        self._texts[stream] = _Stream(self._texts[stream].tokens[:length])
        return length

    def prepare(self, lengths: Sequence[int]) -> None:
        """Record CUDA graphs: a step reads one token, the first step of a round the backlog, which grows without drafts."""
        self._model.prepare([(1, 1), (2, 1), (4, 1), (8, 1)], lengths)

    def committed(self, stream: int, tokens: Sequence[int], states: Tensor | None) -> None:
        """See `Drafter`."""
        text = self._texts[stream]
        base = len(text.tokens)
        if text.round is not None and self._model.lengths[stream] > base:  # else nothing was drafted
            # The last row of the path may not have been fed, or in a step that was skipped.
            slots = {row: base + at for at, row in enumerate(text.fed) if text.round.fed[stream, row]}
            self._model.keep(base, [slots[row] for row in text.round.path(stream) if row in slots], stream)
        text.round = None
        text.tokens.extend(tokens)

    def backlog(self) -> Array:
        """See `Drafter`."""
        lengths = zip(self._texts, self._model.lengths, strict=True)
        return np.array([len(text.tokens) + 1 - length for text, length in lengths])  # `tokens` lacks the anchor

    def propose(self, round: RoundState, depth: int, rows: Rows) -> Proposal:
        """See `Drafter`."""
        logits = self._model.read_parts([self._part(round, depth, stream, fed) for stream, fed in rows], round.needed)
        first = 0
        for stream, fed in rows:
            if not self._texts[stream].is_checked:
                check_rows(logits[first : first + len(fed)], "draft")
                self._texts[stream].is_checked = True
            first += len(fed)
        states = self._model.states
        return Proposal(logits, None, None if states is None else states[0, -len(logits) :])

    def _part(self, round: RoundState, depth: int, stream: int, rows: Sequence[int]) -> Part:
        """Return what the draft reads of a stream: rows, after the backlog at depth 0."""
        if round.device_tokens is not None:  # a chain with tokens that the host does not know
            self._texts[stream].fed += rows
            return Part(stream, round.device_tokens[stream, depth : depth + 1], 1)
        text, tokens = self._texts[stream], round.tokens[stream, rows].tolist()
        if depth == 0:
            text.round, text.fed = round, []
            tokens = text.tokens[self._model.lengths[stream] :] + tokens
        fed = list(text.fed)
        text.fed += rows
        if len(rows) == 1 and len(fed) == depth:  # all fed rows are ancestors of this row
            return Part(stream, tokens, 1)
        return Part(stream, tokens, tree=TreeRows(round.topology, len(text.tokens), fed, rows))
