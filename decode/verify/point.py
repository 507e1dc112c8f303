"""Point drafts: the draft's best token while the text is sampled, accepted with the target's probability. Lossless."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .base import Drawn, Turn
from .match import Match, best_tokens


class Point(Match):
    """What engines without draft probabilities do at temperatures above 0: rejection against a draft that is certain.

    Accepted is what equals the target's own token under its keyed noise, which has probability p; so the text of a stream is
    that of `match`, whatever is drafted.
    """

    name, label = "point", "point"

    def draw(self, sampled: Tensor, widths: Sequence[int], turns: Sequence[Turn]) -> Drawn:
        """Propose the draft's best tokens; see `Verification.draw`."""
        return Drawn(best_tokens(sampled, widths))
