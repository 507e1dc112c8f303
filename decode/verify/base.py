"""What a verification mode is: how candidates are drawn, which path is accepted, whether the output stays the target's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..candidates import Candidates
from .noise import Choices


@dataclass(slots=True)
class Drawn:
    """Candidates below the places that were fed.

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
    def draw(
        self, sampled: Tensor, widths: Sequence[int], found: Candidates, feeding: Sequence[int], choices: Choices
    ) -> Drawn:
        """Return candidates below the places that were just fed.

        Args:
            sampled: [R, V] the draft's scores there, processed.
            widths: R, how many are wanted below each.
            found: drafted so far.
            feeding: R places, all of one depth.
            choices: of the round.
        """

    @abstractmethod
    def start(self, sampled: Tensor, count: int, choices: Choices) -> list[int]:
        """Return the roots of the first round from the target's scores [V] behind the prompt; `count` if `deferred`."""

    @abstractmethod
    def accept(
        self, found: Candidates, sent: Sequence[int], sampled: Tensor, choices: Choices
    ) -> tuple[list[int], list[int]]:
        """Return the accepted path and the next roots.

        Args:
            found: what was drafted.
            sent: places that the target has read, the roots first.
            sampled: [len(sent), V] the target's scores, processed.
            choices: of the round.

        Returns:
            The places of the path, from a root on; the next roots (one, which is committed at once, unless `deferred`).
        """
