"""Drafters inside an engine: a draft model with a cache row for each request, or any drafter of the loop that reads no hidden
states (engines do not pass them on).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...policies.errors import PairError
from ..drafters.base import Drafter
from ..drafters.spec import find_drafter, needs_draft
from ..models.attention import Part
from ..models.cuda import open_cache
from ..models.engine import choose_engine, speed_up
from ..models.loading import load_model, load_tokenizer, open_checkpoint
from ..models.pair import Pair
from ..models.self_check import check_model
from ..models.view import READS_ALL, Reading, readable
from ..round_state import RoundState
from ..topology import chain
from .drafting import DraftRows
from .settings import check_engine_drafter

_LEAST = 512
"""Tokens of a row to begin with."""


def load_draft(name: str, device: torch.device, dtype: torch.dtype, vocabulary: int) -> tuple[PreTrainedModel, Reading]:
    """Return a draft model by itself, under the fastest engine that can run it, and how it can be read.

    Args:
        name: folder or hub name.
        device, dtype: of the model.
        vocabulary: tokens that the target scores.

    Raises:
        PairError: it cannot be loaded, or scores another vocabulary than the target.
    """
    checkpoint = open_checkpoint(name, "draft")
    own = int(checkpoint.config.get_text_config().vocab_size)
    if abs(own - vocabulary) >= 512:  # the same tokens, filled up to sizes of their own, differ by less
        raise PairError(
            f"draft: {name} scores {own} tokens, but the target {vocabulary}; choose a draft of the target's family"
        )
    model = load_model(checkpoint, device, dtype).eval()
    reading = check_model("draft", model)
    return speed_up(model, choose_engine(model)), reading


class ModelRows:
    """See `source.DraftRows`: a model and the texts it has read, a row of its cache for each.

    The cache grows with the longest text. What it held is read again then: that happens as often as a text doubles.

    Args:
        model: the draft.
        rows: of its cache.
        vocabulary: tokens that the target scores.
        reading: how the draft can be read.
    """

    def __init__(self, model: PreTrainedModel, rows: int, vocabulary: int, reading: Reading = READS_ALL) -> None:
        self._model, self._vocabulary, self._reading = model, vocabulary, reading
        self._texts: list[list[int]] = [[] for _ in range(rows)]
        self._cache = open_cache(model, _LEAST, vocabulary, streams=rows, reading=reading)

    @torch.inference_mode()
    def read(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], depth: int) -> Tensor:
        """See `DraftRows.read`."""
        for row, more in zip(rows, tokens, strict=True):
            self._texts[row].extend(more)
        longest = max(len(self._texts[row]) for row in rows)
        if self._cache.capacity < longest:
            # The new cache is empty: each row is read again when it is next asked for.
            size = 2 ** (longest - 1).bit_length()
            streams = len(self._texts)
            self._cache = open_cache(self._model, size, self._vocabulary, streams=streams, reading=self._reading)
        return self._cache.read_parts([Part(row, self._texts[row][self._cache.lengths[row] :], 1) for row in rows])

    def roll_back(self, row: int, length: int) -> None:
        """See `DraftRows.roll_back`."""
        del self._texts[row][length:]
        if self._cache.lengths[row] > length:
            self._cache.roll_back(length, row)


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
    round: RoundState | None = None


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
            none = np.zeros(len(self._rows), dtype=np.int64)
            self._round = RoundState(self._topology, none > 0, none, none)
            for row, own, more in zip(rows, here, tokens, strict=True):
                self._commit(row, own, more)
        for row, own, more in zip(rows, here, tokens, strict=True):
            if depth:
                own.text.extend(more)
            self._round.tokens[row, depth] = own.text[-1]
        order = sorted(range(len(rows)), key=rows.__getitem__)  # a round has its streams in ascending order
        scores = self._drafter.propose(self._round, depth, [(rows[at], [depth]) for at in order]).dense(
            self._vocabulary
        )
        return scores if order == [*range(len(rows))] else scores[np.argsort(order)]

    def _commit(self, row: int, own: _Row, more: Sequence[int]) -> None:
        """Tell the drafter what a text has grown by, and begin a round after its last token."""
        if own.round is not None:
            # What is left of the last round was accepted (`roll_back`).
            own.round.on_path[row, : len(own.text) - own.told] = True
        own.text.extend(more)
        if known := own.text[own.told : -1]:
            self._drafter.committed(row, known, None)
            own.told = len(own.text) - 1
        own.round = self._round

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
