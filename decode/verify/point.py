"""Point drafts: the draft's best token while the text is sampled, accepted with the target's probability. Lossless."""

from __future__ import annotations

from torch import Tensor

from ..round_state import RoundState, Rows
from .base import Draw
from .match import Match, _widths, best_tokens


class Point(Match):
    """What engines without draft probabilities do at temperatures above 0: rejection against a draft that is certain.

    Accepted is what equals the target's own token under its keyed noise, which has probability p; so the text of a stream is
    that of `match`, whatever is drafted.
    """

    name, label = "point", "point"

    def draw(self, round: RoundState, rows: Rows, sampled: Tensor) -> Draw:
        """Propose the draft's best tokens; see `Verification.draw`."""
        return Draw(best_tokens(sampled, _widths(round, rows)))
