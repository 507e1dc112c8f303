"""What a verification mode is: how candidates are drawn, which path is accepted, whether the output stays the target's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..round_state import RoundState, Rows
from .noise import Choices, Purpose

Accepted = tuple[list[int], int]
"""The rows of the accepted path, row 0 first; the target's token after it."""


@dataclass(slots=True)
class Draw:
    """Candidates drawn below fed rows.

    Attributes:
        tokens: by fed row its candidates, in the order in which they are tried; or [R] int64, one below each row.
        scores: [R, V], what `match` took the largest of; None under other modes.
        best: by fed row the largest of these scores in descending order, one more than candidates, where they are known.
    """

    tokens: list[list[int]] | Tensor
    scores: Tensor | None = None
    best: list[list[float]] | None = None


class Verification(ABC):
    """Draws candidates and accepts a path among them; one object serves every text.

    Attributes:
        name: as in commands and reports.
        lossless: the output distribution is the target's.
        label: what a trace calls the acceptance that heads are trained on.
        hides: what is sent to the target must not depend on the tokens drawn, or the output would be biased.
    """

    name: ClassVar[str]
    lossless: ClassVar[bool]
    label: ClassVar[str]
    hides: ClassVar[bool] = False
    chains_only: ClassVar[bool] = False

    @abstractmethod
    def draw(self, round: RoundState, rows: Rows, sampled: Tensor) -> Draw:
        """Draw candidates below fed rows of one depth, as many as each has children in the topology.

        Args:
            round: whose `draft_probs` are set where the acceptance needs them.
            rows: fed rows, R in total.
            sampled: [R, V] processed scores of the draft.
        """

    def start(self, sampled: Tensor, choices: Choices) -> int:
        """Return the first token of a text from the processed scores [V] of the target after the prompt."""
        return choices.draw(torch.softmax(sampled.double(), -1), 0, Purpose.RESIDUAL)

    def accept(self, round: RoundState, rows: Rows, sampled: Tensor) -> list[Accepted]:
        """Return what is accepted of each stream.

        Args:
            round: with its candidates.
            rows: what the target has read, R rows in total, row 0 of each stream first.
            sampled: [R, V] processed scores of the target.
        """
        parts = sampled.split([len(sent) for _, sent in rows])
        return [self.accept_one(round, stream, sent, own) for (stream, sent), own in zip(rows, parts, strict=True)]

    @abstractmethod
    def accept_one(self, round: RoundState, stream: int, sent: Sequence[int], sampled: Tensor) -> Accepted:
        """Return what is accepted of one stream, whose rows `sent` have the scores `sampled` [n, V]."""


def choices_of(round: RoundState, stream: int) -> Choices:
    """Return the random choices of an active stream."""
    choices = round.choices[stream]
    assert choices is not None
    return choices
