"""Drafters of an engine that are no draft model alone: what follows earlier in the text (`lookup`, `suffix`), a plugin's, two
at once.

They come through the protocol that our own loop drafts by. What reads the target's hidden states cannot run here: engines do
not hand them to a class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..candidates import Candidates
from ..drafters.base import Drafter
from ..drafters.find import find_drafter
from ..drafters.known import needs_draft
from ..models.loading import load_tokenizer, open_checkpoint
from ..models.long_rope import readable
from ..models.pair import Pair
from ..models.view import READS_ALL
from ..topology import chain
from .models import ModelRows, load_draft
from .policies import check_engine_drafter
from .source import DraftRows

_LEAST = 512
"""Tokens of a row that room is made for to begin with."""


def load_rows(
    drafter: str, draft: str, target: str, device: torch.device, dtype: torch.dtype, vocabulary: int, rows: int, depth: int,
) -> tuple[DraftRows, int]:  # fmt: skip
    """Return what drafts for the requests of an engine, and the longest text that it reads.

    Args:
        drafter: as of `--drafter`.
        draft: folder or hub name of the draft model, if the drafter has one.
        target: folder or hub name of the engine's target, whose tokenizer a file is read with.
        device, dtype: of the draft.
        vocabulary: tokens that the target scores.
        rows: requests that are drafted for at once.
        depth: K, the most tokens of a draft.

    Raises:
        InputError: there is no such drafter, or it reads the target's hidden states.
        PairError: a model cannot be loaded, or the draft is of another vocabulary.
    """
    model, reading = None, READS_ALL
    if needs_draft(check_engine_drafter(drafter, "vllm")):
        model, reading = load_draft(draft, device, dtype, vocabulary)
    if drafter == "model" and model is not None:
        return ModelRows(model, rows, vocabulary, reading), readable(model)
    checkpoint = open_checkpoint(target, "target")
    # The engine has the target: what stands for it in the pair has no weights.
    shapes: Any = checkpoint.skeleton
    tokenizer = load_tokenizer(checkpoint)
    readings = (READS_ALL, reading)
    pair = Pair(shapes.to(dtype), model, tokenizer, vocabulary, drafter=drafter, home=device, readings=readings)
    found = find_drafter(drafter, pair)
    check_engine_drafter(drafter, "vllm", reads=bool(found.layers))  # a plugin's own say
    return DrafterRows(found, rows, depth, vocabulary), found.readable


@dataclass(slots=True)
class _Row:
    """The text of a row as far as it was read, drafts included; `told` tokens of it the drafter was told as committed, and
    `round` is what it drafted after the token that follows them."""

    text: list[int] = field(default_factory=list)
    told: int = 0
    round: Candidates | None = None


class DrafterRows:
    """See `source.DraftRows`: a drafter, one of its streams for each row.

    Args:
        drafter: of any kind that reads no hidden states.
        rows: R.
        depth: K.
        vocabulary: tokens that the target scores.
    """

    def __init__(self, drafter: Drafter, rows: int, depth: int, vocabulary: int) -> None:
        self._drafter, self._vocabulary, self._topology = drafter, vocabulary, chain(depth)
        self._rows = [_Row() for _ in range(rows)]
        self._room = _LEAST
        drafter.reserve(rows, self._room)

    @torch.inference_mode()
    def read(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], depth: int) -> Tensor:
        """See `DraftRows.read`."""
        here = [self._rows[row] for row in rows]
        if depth == 0:
            self._make_room(max(len(own.text) + len(more) for own, more in zip(here, tokens, strict=True)))
            for row, own, more in zip(rows, here, tokens, strict=True):
                self._commit(row, own, more)
        found = []
        for own, more in zip(here, tokens, strict=True):
            assert own.round is not None
            if depth:
                own.text.extend(more)
                own.round.add(depth - 1, depth, more[0])  # a chain: places, rows and depths are the same
            found.append(own.round)
        return self._drafter.propose(rows, found, [[depth]] * len(rows)).dense(self._vocabulary)

    def _commit(self, row: int, own: _Row, more: Sequence[int]) -> None:
        """Tell the drafter what a text has grown by, and begin a round after its last token."""
        if own.round is not None:
            # What is left of the last round was accepted (`roll_back`).
            own.round.accepted = list(range(len(own.text) - own.told))
        own.text.extend(more)
        if known := own.text[own.told : -1]:
            self._drafter.committed(row, known, None)
            own.told = len(own.text) - 1
        own.round = Candidates.at(own.text[-1:], self._topology)

    def _make_room(self, longest: int) -> None:
        """Have the drafter hold texts that long and a draft; one that has to be given more room is told all texts again."""
        needed = longest + self._topology.deepest + 1
        if needed > self._room:
            self._room = 2 ** (needed - 1).bit_length()
            self._drafter.reserve(len(self._rows), self._room)
            for own in self._rows:
                own.told, own.round = 0, None

    def roll_back(self, row: int, length: int) -> None:
        """See `DraftRows.roll_back`."""
        own = self._rows[row]
        del own.text[length:]
        # A drafter can forget what it drafted, not what it was told: the root of a round is no draft.
        if length <= own.told:
            self._drafter.begin(row)
            own.told, own.round = 0, None
