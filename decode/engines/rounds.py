"""A round inside an engine: a draft that it was given, and what followed it in the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ...policies.contract import Array
from ...policies.features import DrawnTokens


@dataclass(slots=True)
class Sent:
    """A draft that the engine was given.

    Attributes:
        row: of the request.
        context: tokens of the text before it.
        tokens: given to the engine; `drafted` were drawn.
        drafted, decisions, backlog: tokens drawn, times the policy was asked, committed tokens that the draft had to read.
        batch: requests that were drafted for in this step.
        capped: an end of text ended it, not the policy.
        began_s: when the step began to draft.
    """

    row: int
    context: int
    tokens: list[int]
    drafted: int = 0
    decisions: int = 0
    backlog: int = 0
    batch: int = 1
    capped: bool = False
    began_s: float = 0.0


@dataclass(slots=True)
class Heard:
    """What came of a draft.

    Attributes:
        sent: the draft.
        new: tokens that followed, at least one.
        accepted, verified: of the draft.
    """

    sent: Sent
    new: list[int]
    accepted: int
    verified: int

    @staticmethod
    def of(sent: Sent, new: list[int]) -> Heard:
        """Compare a draft with the tokens that followed.

        An engine commits the accepted tokens and one more. Where all that is new was drafted, the draft was trimmed: the last
        of the new tokens was the target's own.
        """
        agreed = 0
        while agreed < min(len(sent.tokens), len(new)) and sent.tokens[agreed] == new[agreed]:
            agreed += 1
        trimmed = agreed == len(new)
        return Heard(sent, new, len(new) - 1, len(new) - 1) if trimmed else Heard(sent, new, agreed, len(sent.tokens))


class Observer(Protocol):
    """Looks on, as a trace does."""

    def began(self, row: int, text: Array, name: str | None) -> None:
        """Take note of a new text in a row, and of the engine's name for it."""

    def level(self, depth: int, rows: Array, logits: Tensor, drawn: DrawnTokens) -> None:
        """Take note of the tokens of a depth, drawn in `rows` [R] from logits [R, V]."""

    def sent(self, drafts: Sequence[Sent], draft_s: float) -> None:
        """Take note of the drafts of a step, and of the seconds that it took to make them."""

    def heard(self, rounds: Sequence[Heard], step_s: Sequence[float]) -> None:
        """Take note of what followed drafts, and of the seconds since each was begun."""
