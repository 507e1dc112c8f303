"""What a verification mode is: how candidates are drawn, which path is accepted, whether the output stays the target's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..candidates import Candidates
from .noise import Choices, Purpose


@dataclass(slots=True)
class Turn:
    """One stream's share of a call: its candidates, its places there (fed, or read by the target), its random choices."""

    found: Candidates
    places: Sequence[int]
    choices: Choices


Accepted = tuple[list[int], list[int]]
"""The places of a path, from a root on; the next roots (one, which is committed at once, unless `deferred`)."""


@dataclass(slots=True)
class Drawn:
    """Candidates below the places that were fed, stream by stream.

    Attributes:
        tokens: by place, at most as many as were asked for, in the order in which they are tried.
        scores: [R, V], what `match` took the largest of; None where nothing like it exists.
        best: by place the best of them in falling order, one more than the most tokens of a place, where they were looked up.
        source: by place, the distribution [V] that its candidates were drawn from, if the acceptance needs it.
    """

    tokens: list[list[int]]
    scores: Tensor | None = None
    source: Sequence[Tensor] | None = None
    best: list[list[float]] | None = None


class Verification(ABC):
    """Draws candidates and accepts a path among them; one object serves every text.

    Attributes:
        name: as in commands and reports.
        lossless: the output distribution is the target's.
        label: what a trace calls the acceptance that heads are trained on.
        deferred: the roots of a round are alternatives, of which the accepted path keeps one; else the one root is
            committed text.
        hides: what is sent to the target must not depend on the tokens drawn, or the output would be biased.
    """

    name: ClassVar[str]
    lossless: ClassVar[bool]
    label: ClassVar[str]
    deferred: ClassVar[bool] = False
    hides: ClassVar[bool] = False
    chains_only: ClassVar[bool] = False

    @abstractmethod
    def draw(self, sampled: Tensor, widths: Sequence[int], turns: Sequence[Turn]) -> Drawn:
        """Return candidates below the places that were just fed.

        Args:
            sampled: [R, V] the draft's scores there, processed.
            widths: R, how many are wanted below each.
            turns: of the streams, whose places, all of one depth, are R in all.
        """

    def start(self, sampled: Tensor, count: int, choices: Choices) -> list[int]:
        """Return the roots of the first round from the target's scores [V] after the prompt; `count` if `deferred`."""
        return [choices.draw(torch.softmax(sampled.double(), -1), 0, Purpose.RESIDUAL)]

    def accept(self, turns: Sequence[Turn], sampled: Tensor) -> list[Accepted]:
        """Return the accepted path and the next roots of each stream.

        Args:
            turns: of the streams, whose places are what the target has read, R in all, the roots of each first.
            sampled: [R, V] the target's scores, processed.
        """
        if len(turns) == 1:
            return [self.accept_one(turns[0], sampled)]
        rows = sampled.split([len(turn.places) for turn in turns])
        return [self.accept_one(turn, own) for turn, own in zip(turns, rows, strict=True)]

    @abstractmethod
    def accept_one(self, turn: Turn, sampled: Tensor) -> Accepted:
        """Return the accepted path and the next roots of one stream; see `accept`."""
