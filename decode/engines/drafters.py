"""Drafters inside an engine: a draft model with a cache row for each request, or any drafter of the loop that reads no hidden
states of the target, which engines do not pass on.
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

_INITIAL_TOKENS = 512
"""Length of a row at the beginning."""


class ModelRows:
    """`DraftRows` of a draft model and its cache, which grows with the longest text.

    Args:
        model: the draft.
        rows: of the cache.
        vocabulary: number of tokens that the target scores.
        reading: how the draft can be read.
    """

    def __init__(self, model: PreTrainedModel, rows: int, vocabulary: int, reading: Reading = READS_ALL) -> None:
        self._model, self._vocabulary, self._reading = model, vocabulary, reading
        self._texts: list[list[int]] = [[] for _ in range(rows)]
        self._cache = open_cache(model, _INITIAL_TOKENS, vocabulary, streams=rows, reading=reading)

    @torch.inference_mode()
    def read(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], depth: int) -> Tensor:
        """See `DraftRows.read`."""
        for row, more in zip(rows, tokens, strict=True):
            self._texts[row].extend(more)
        longest = max(len(self._texts[row]) for row in rows)
        if self._cache.capacity < longest:  # the larger cache is empty, and rows are read again when they are needed
            size, streams = 2 ** (longest - 1).bit_length(), len(self._texts)
            self._cache = open_cache(self._model, size, self._vocabulary, streams=streams, reading=self._reading)
        return self._cache.read_parts([Part(row, self._texts[row][self._cache.lengths[row] :], 1) for row in rows])

    def roll_back(self, row: int, length: int) -> None:
        """See `DraftRows.roll_back`."""
        del self._texts[row][length:]
        if self._cache.lengths[row] > length:
            self._cache.roll_back(length, row)


@dataclass(slots=True)
class _Row:
    """The text including drafts; how many of its tokens the drafter knows as committed; the round after these."""

    text: list[int] = field(default_factory=list)
    committed: int = 0
    round: RoundState | None = None


class DrafterRows:
    """`DraftRows` of a drafter of the loop, with a stream for each row.

    Args:
        drafter: reads no hidden states of the target.
        rows: R.
        depth: K.
        vocabulary: number of tokens that the target scores.
    """

    def __init__(self, drafter: Drafter, rows: int, depth: int, vocabulary: int) -> None:
        self._drafter, self._vocabulary, self._topology = drafter, vocabulary, chain(depth)
        self._rows = [_Row() for _ in range(rows)]
        self._capacity = _INITIAL_TOKENS
        drafter.reserve(rows, self._capacity)

    @torch.inference_mode()
    def read(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], depth: int) -> Tensor:
        """See `DraftRows.read`."""
        states = [self._rows[row] for row in rows]
        if depth == 0:
            self._reserve(max(len(state.text) + len(more) for state, more in zip(states, tokens, strict=True)))
            zeros = np.zeros(len(self._rows), dtype=np.int64)
            self._round = RoundState(self._topology, zeros > 0, zeros, zeros)
        for row, state, more in zip(rows, states, tokens, strict=True):
            if depth == 0 and state.round is not None:
                # `roll_back` has removed the rejected tokens of the last round.
                state.round.on_path[row, : len(state.text) - state.committed] = True
            state.text.extend(more)
            if depth == 0:
                if new := state.text[state.committed : -1]:
                    self._drafter.committed(row, new, None)
                    state.committed = len(state.text) - 1
                state.round = self._round
            self._round.tokens[row, depth] = state.text[-1]
        order = np.argsort(rows, kind="stable")  # a round has its streams in ascending order
        fed = [(rows[at], [depth]) for at in order.tolist()]
        scores = self._drafter.propose(self._round, depth, fed).dense(self._vocabulary)
        return scores[np.argsort(order)]

    def _reserve(self, longest: int) -> None:
        """Reserve room for texts of this length and a draft. After that, the drafter has to be given all texts again."""
        needed = longest + self._topology.deepest + 1
        if needed > self._capacity:
            self._capacity = 2 ** (needed - 1).bit_length()
            self._drafter.reserve(len(self._rows), self._capacity)
            for state in self._rows:
                state.committed, state.round = 0, None

    def roll_back(self, row: int, length: int) -> None:
        """See `DraftRows.roll_back`."""
        state = self._rows[row]
        del state.text[length:]
        if length <= state.committed:  # drafters cannot forget committed tokens
            self._drafter.begin(row)
            state.committed, state.round = 0, None


def load_rows(
    drafter: str, draft: str, target: str, device: torch.device, dtype: torch.dtype, vocabulary: int, rows: int, depth: int,
) -> tuple[DraftRows, int]:  # fmt: skip
    """Return the drafter for the requests of an engine, and the longest text that it reads.

    Args:
        drafter: value of `--drafter`.
        draft: folder or hub name of the draft model, if the drafter has one.
        target: folder or hub name of the engine's target, for its tokenizer.
        device, dtype: of the draft.
        vocabulary: number of tokens that the target scores.
        rows: number of requests with drafts.
        depth: K, maximum length of a draft.

    Raises:
        InputError: there is no such drafter, or it reads hidden states of the target.
        PairError: a model cannot be loaded, or the draft has another vocabulary.
    """
    model, reading = None, READS_ALL
    if needs_draft(check_engine_drafter(drafter, "vllm")):
        checkpoint = open_checkpoint(draft, "draft")
        size = int(checkpoint.config.get_text_config().vocab_size)
        if abs(size - vocabulary) >= 512:  # vocabularies that are padded to different sizes differ by less
            raise PairError(
                f"draft: {draft} scores {size} tokens, but the target {vocabulary}; choose a draft of the target's family"
            )
        model = load_model(checkpoint, device, dtype).eval()
        reading = check_model("draft", model)
        model = speed_up(model, choose_engine(model))
        if drafter == "model":
            return ModelRows(model, rows, vocabulary, reading), readable(model)
    checkpoint = open_checkpoint(target, "target")
    skeleton: Any = checkpoint.skeleton  # without weights, because the engine has the target
    tokenizer = load_tokenizer(checkpoint)
    readings = (READS_ALL, reading)
    pair = Pair(skeleton.to(dtype), model, tokenizer, vocabulary, drafter=drafter, home=device, readings=readings)
    proposer = find_drafter(drafter, pair)
    check_engine_drafter(drafter, "vllm", reads=bool(proposer.layers))  # a plugin may read states too
    return DrafterRows(proposer, rows, depth, vocabulary), proposer.readable
