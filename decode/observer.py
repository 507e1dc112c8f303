"""Looking on while the loop runs: what was drafted in a round, from which scores, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ..policies.contract import State
from .candidates import Candidates
from .reader import Logits
from .records import Round
from .settings import Text


@dataclass(frozen=True)
class Seen:
    """A finished round.

    Attributes:
        text: with the tokens of the round committed.
        anchor_row: [1, V] the target's row that the round's roots were drawn from.
        found: what was drafted.
        sent: places that the target read, the roots first.
        path: accepted places, from a root on.
        raw, sampled: [len(sent), V] the target's logits behind the places sent, and the processed ones.
        record: counts and times of the round; looking on is no part of them.
        anchor_hidden: [1, H] the target's last hidden state that `anchor_row` is of, where it is kept.
        state: of the policy, the round taken in.
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


class Observer(Protocol):
    """Is told of every depth and every round; the loop's clock stands still only in `round`, so `level` must be short."""

    def level(self, found: Candidates, places: Sequence[int], logits: Logits) -> None:
        """Take note of the tokens just drawn at `places`; the tensors may be kept, not changed."""

    def round(self, seen: Seen) -> None:
        """Take note of a finished round."""
