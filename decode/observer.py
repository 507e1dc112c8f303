"""Looking on while the loop runs: what was drafted in a round, from which scores, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from ..policies.contract import State
from ..policies.state import take
from .candidates import Candidates
from .policy.reader import Logits
from .records import Round
from .stream import Stream, Text


@dataclass(frozen=True)
class Seen:
    """A finished round.

    Attributes:
        text: with the tokens of the round committed.
        anchor_row: [1, V] the target's row that the round's roots were drawn from.
        found: what was drafted.
        sent: places that the target read, the roots first.
        path: accepted places, from a root on.
        raw, sampled: [len(sent), V] the target's logits after the places sent, and the processed ones.
        record: counts and times of the round; looking on is no part of them.
        anchor_hidden: [1, H] the target's last hidden state that `anchor_row` is of, where it is kept.
        state: of the policy, the round taken in.
        stream: number of the text among those that are decoded side by side.
    """

    text: Text
    anchor_row: Tensor
    found: Candidates
    sent: Sequence[int]
    path: Sequence[int]
    raw: Tensor
    sampled: Tensor
    record: Round
    anchor_hidden: Tensor | None = None
    state: State = None
    stream: int = 0

    @staticmethod
    def of(own: Stream, rows: tuple[Tensor, Tensor], record: Round, state: State, streams: int) -> Seen:
        """Return what is seen of a stream that has played its round.

        Args:
            own: the stream.
            rows: [R, V] each, the target's logits of the round and the processed ones, of all streams.
            record: of the round.
            state: of the policy, for all of them.
            streams: S.
        """
        raw, sampled = (part[own.first : own.first + len(own.sent)] for part in rows)
        alone = state if streams == 1 else take(state, np.array([own.number]))
        return Seen(
            own.text, own.before.row, own.found, own.sent, own.path, raw, sampled, record, own.before.hidden, alone,
            own.number,
        )  # fmt: skip


class Observer(Protocol):
    """Is told of every depth and every round; the loop's clock stands still only in `round`, so `level` must be short."""

    def level(self, stream: int, found: Candidates, places: Sequence[int], logits: Logits) -> None:
        """Take note of the tokens that a stream has just drawn at `places`; the tensors may be kept, not changed."""

    def round(self, seen: Seen) -> None:
        """Take note of a finished round."""
