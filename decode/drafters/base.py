"""What a drafter is told, and what it proposes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ...policies.contract import Array
from ..models.cuda.transfer import upload
from ..round_state import RoundState, Rows


@dataclass(slots=True)
class Proposal:
    """What a drafter says of the tokens that may come after R places.

    Attributes:
        scores: [R, V] logits or log-probabilities; of a sparse proposal [R, n] those of the tokens `ids`. A row that knows
            fewer tokens, or none, ends in -inf.
        ids: [R, n] int64; None = all tokens in their order.
        states: [R, H] the hidden states that the scores were computed from, where they are kept (`hidden.KeepsStates`).
    """

    scores: Tensor
    ids: Tensor | None = None
    states: Tensor | None = None

    @classmethod
    def of_weights(cls, rows: Sequence[Mapping[int, float]], dtype: torch.dtype, device: torch.device) -> Proposal:
        """Return a sparse proposal from the weights by token of R places."""
        # Rows that know fewer tokens, or none, end in token 0 with weight 0: log 0 = -inf, which is never drawn.
        most = max(1, *map(len, rows))
        ids = [[*row, *[0] * (most - len(row))] for row in rows]
        weights = [[*row.values(), *[0.0] * (most - len(row))] for row in rows]
        return cls(torch.tensor(weights, dtype=dtype, device=device).log_(), upload(ids, device))

    def dense(self, vocabulary: int) -> Tensor:
        """Return [R, V] scores, -inf for the tokens that are not proposed."""
        if self.ids is None:
            return self.scores
        rows = self.scores.new_full((len(self.scores), vocabulary), -torch.inf)
        # The larger one: short rows are filled up with token 0 at -inf, which must not hide a score that it has.
        return rows.scatter_reduce_(1, self.ids, self.scores, "amax")


READINGS = READS_PATH, READS_ALL, READS_NOTHING = "path", "all", "nothing"
"""What a drafter has to read before a round (`Drafter.backlog`), as replay works it out: what was committed, but for what it
was fed of the accepted path; all that was committed and the root before it, on the target's states; nothing. A class says it
as `reading`, and where it does not it is the first."""


class Drafter(Protocol):
    """Proposes candidates for S streams, and is told what was committed.

    Rows are fed depth by depth, so a drafter that knows all depths after one pass (heads on the target) answers the later
    calls from what it kept, and leaves the choice of what to verify to the policy's `select`.

    Attributes:
        layers: of the target, whose hidden states it wants to be told, as transformers counts `hidden_states`: 0 = the
            embeddings, -1 = what the output layer reads. None for none.
        readable: the longest text that it reads.
    """

    layers: tuple[int, ...]
    readable: int

    def reserve(self, streams: int, tokens: int) -> None:
        """Forget all texts, and make room for as many of `tokens`, those of a round's candidates included."""

    def begin(self, stream: int) -> None:
        """Forget the text of a stream: another one begins there."""

    def committed(self, stream: int, tokens: Sequence[int], states: Tensor | None) -> None:
        """Take in what the target has read of a text for good: the prompt, then each round's root and accepted path.

        Candidates of the round that are not on the accepted path (`RoundState.path`) are forgotten.

        Args:
            stream: of the text.
            tokens: n, in their order. What the target drew last it has not read: that is the root of the next round.
            states: [n, layers x H] its hidden states at these tokens, layer by layer, if `layers` are wanted.
        """

    def backlog(self) -> Array:
        """Return [S] int64, the committed tokens that it has to read before it can propose, the root included.

        Of streams that have no text it is void.
        """

    def propose(self, round: RoundState, depth: int, rows: Rows) -> Proposal:
        """Return what may come after rows of the topology.

        Args:
            round: with the candidates drawn so far.
            depth: of the rows.
            rows: that are fed, R in total; all their parents were fed before.
        """


MEMBERS = ("layers", "readable", "reserve", "begin", "committed", "backlog", "propose")


def lacks(drafter: object) -> list[str]:
    """Return what an object lacks to be a `Drafter`."""
    return [name for name in MEMBERS if not hasattr(drafter, name)]


@runtime_checkable
class Bounded(Protocol):
    """A drafter that knows no more than so many tokens ahead, such as one head for each depth.

    Attributes:
        most: their number.
    """

    most: int


@runtime_checkable
class Prepares(Protocol):
    """A drafter that has something to do once, ahead of the rounds that are timed."""

    def prepare(self, lengths: Sequence[int]) -> None:
        """Do ahead what drafting chains in texts of these lengths takes to be done once (`CachedModel.prepare`)."""


@runtime_checkable
class Carries(Protocol):
    """A drafter that may know earlier texts while it drafts the next one.

    Attributes:
        carries: whether it does. What it proposes then depends on which texts came before; what is decoded does not.
    """

    carries: bool

    def renew(self) -> None:
        """Forget all texts, as when it was made."""


@runtime_checkable
class Chooses(Protocol):
    """A drafter that leaves each round to one of several, of which the last alone may have anything to read."""

    def reads(self, stream: int) -> bool:
        """Whether the one that drafts the round of a stream reads the text; known once the roots were fed."""


def carries(drafter: Drafter) -> bool:
    """Whether a drafter passes what it knows from text to text."""
    return isinstance(drafter, Carries) and drafter.carries
