"""`Verification`: how candidates are drawn, and which of them are accepted."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..models.device import download
from ..round_state import RoundState, Rows
from .noise import Choices, Purpose, best_scores, in_order

Accepted = tuple[list[int], int]
"""The rows of the accepted path, row 0 first, and the next token of the target."""


class Draw(NamedTuple):
    """Candidates below fed rows.

    Attributes:
        tokens: by fed row its candidates, in the order in which they are tried.
        scores: [R, V], the scores of which `match` takes the largest; None in other modes.
        best: by fed row the largest of these scores, descending, one more than candidates; None if unknown.
    """

    tokens: list[list[int]]
    scores: Tensor | None = None
    best: list[list[float]] | None = None


class Verification(ABC):
    """A verification mode. It has no state: one object serves all texts.

    Subclasses implement `accept_one`, or `accept` for all streams at once.

    Attributes:
        name: as in commands and reports.
        lossless: whether the output has the distribution of the target.
        label: name in traces of the kind of acceptance that heads are trained on.
        hides: whether the rows sent to the target must not depend on the tokens drawn, as the output would be biased.
        chains_only: whether trees are not supported.
    """

    name: ClassVar[str]
    lossless: ClassVar[bool]
    label: ClassVar[str]
    hides: ClassVar[bool] = False
    chains_only: ClassVar[bool] = False

    def draw(self, round: RoundState, rows: Rows, sampled: Tensor) -> Draw:
        """Draw candidates below fed rows of one depth; by default the best tokens of the draft.

        Args:
            round: provides the topology and the random choices; `draft_probs` are set if the acceptance needs them.
            rows: fed rows, R in total.
            sampled: [R, V] processed logits of the draft.
        """
        return Draw(best_tokens(sampled, candidate_counts(round, rows))[0])

    def start(self, sampled: Tensor, choices: Choices) -> int:
        """Return the first token of a text, drawn from the processed logits [V] of the target after the prompt."""
        return choices.draw(torch.softmax(sampled.double(), -1), 0, Purpose.RESIDUAL)

    def accept(self, round: RoundState, rows: Rows, sampled: Tensor) -> list[Accepted]:
        """Return the accepted path of each stream.

        Args:
            round: with its candidates.
            rows: rows that the target has read, R in total, row 0 of each stream first.
            sampled: [R, V] processed logits of the target.
        """
        parts = sampled.split([len(sent) for _, sent in rows])
        return [self.accept_one(round, stream, sent, part) for (stream, sent), part in zip(rows, parts, strict=True)]

    def accept_one(self, round: RoundState, stream: int, sent: Sequence[int], sampled: Tensor) -> Accepted:
        """Return the accepted path of one stream, given the processed logits [n, V] of the target after the rows `sent`."""
        raise NotImplementedError


def choices_of(round: RoundState, stream: int) -> Choices:
    """Return the random choices of an active stream."""
    choices = round.choices[stream]
    assert choices is not None
    return choices


def candidate_counts(round: RoundState, rows: Rows) -> list[int]:
    """Return the number of candidates to draw below each fed row."""
    return [len(round.topology.children[row]) for _, fed in rows for row in fed]


def best_tokens(scores: Tensor, counts: Sequence[int], extra: int = 0) -> tuple[list[list[int]], list[list[float]]]:
    """Return the best `counts[row]` tokens of each row [R, V], and the best max(counts) + `extra` scores, descending.

    Of equal scores the first token comes first. Tokens with a score of -inf are left out.
    """
    size = max(counts) + extra
    values, tokens, tied = download(*best_scores(scores, size))
    if ties := [row for row, has_ties in enumerate(tied) if has_ties]:  # frequencies, or numbers in half precision
        for row, ordered in zip(ties, in_order(scores[ties], size).tolist(), strict=True):
            tokens[row] = ordered
    possible = [
        [token for token, value in zip(row[:count], best, strict=False) if value > -torch.inf]
        for row, best, count in zip(tokens, values, counts, strict=True)
    ]
    return possible, values
