"""The interface of drafters, built-in ones and plugins alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...policies.contract import Array
from ...policies.features import SIGNALS
from ..models.device import upload
from ..models.view import ENDLESS
from ..round_state import RoundState, Rows


@dataclass(slots=True)
class Proposal:
    """Scores of the next tokens after R rows.

    Attributes:
        scores: [R, V] logits or log-probabilities, or [R, n] those of the tokens `ids`; -inf where there is no token.
        ids: [R, n] int64; None = all tokens in order. Only proposals with ids may have rows without any token.
        states: [R, H] hidden states that the scores were computed from, which policies may read; None = none.
    """

    scores: Tensor
    ids: Tensor | None = None
    states: Tensor | None = None

    @classmethod
    def of_weights(cls, rows: Sequence[Mapping[int, float]], dtype: torch.dtype, device: torch.device) -> Proposal:
        """Return a sparse proposal from the weights by token of R rows."""
        # Short rows are padded with token 0 of weight 0: log 0 = -inf is never drawn.
        width = max(1, *map(len, rows))
        ids = [[*row, *[0] * (width - len(row))] for row in rows]
        weights = [[*row.values(), *[0.0] * (width - len(row))] for row in rows]
        return cls(torch.tensor(weights, dtype=dtype, device=device).log_(), upload(ids, device))

    def dense(self, vocabulary: int) -> Tensor:
        """Return [R, V] scores, -inf for the tokens that are not proposed."""
        if self.ids is None:
            return self.scores
        rows = self.scores.new_full((len(self.scores), vocabulary), -torch.inf)
        # The maximum: padding with token 0 at -inf must not hide the score of token 0.
        return rows.scatter_reduce_(1, self.ids, self.scores, "amax")


class Drafter:
    """Proposes candidates for S streams from the committed tokens. Rows of a round are fed depth by depth.

    A drafter with hidden states that policies may read also has a method `keep_states()`. It returns their width H, and
    proposals contain them from then on.

    Attributes:
        layers: layers of the target that it reads the hidden states of, numbered as `hidden_states` of transformers:
            0 = the embeddings, -1 = the input of the output layer.
        readable: length of the longest text that it can read.
        reading: the tokens that it reads before a round, which replay charges: "path" = the committed tokens that it was
            not fed as candidates; "all" = all committed tokens; or "nothing".
        needs_draft: whether it uses the draft model of the pair.
        carries: whether it keeps earlier texts. Its proposals then depend on them; the decoded text does not.
        max_depth: maximum depth of its candidates; None = no limit.
        has_signals: whether `signals` are known.
        skips: whether steps that are not needed are skipped (`RoundState.needed`).
    """

    layers: tuple[int, ...] = ()
    readable: int = ENDLESS
    reading: str = "path"
    needs_draft: bool = False
    carries: bool = False
    max_depth: int | None = None
    has_signals: bool = False
    skips: bool = False
    _streams: int = 1

    def reserve(self, streams: int, tokens: int) -> None:
        """Forget all texts, and allocate memory for `tokens` of each stream, candidates of a round included."""
        self._streams = streams

    def begin(self, stream: int) -> None:
        """Forget the text of a stream, where a new one begins."""

    def keep_prefix(self, stream: int, length: int) -> int:
        """Begin a text that has the first `length` committed tokens in common with the last one of the stream.

        Returns:
            How many of them are kept and will not be committed again; 0 by default.
        """
        self.begin(stream)
        return 0

    def committed(self, stream: int, tokens: Sequence[int], states: Tensor | None) -> None:
        """Receive tokens that the target has read: the prompt, then the anchor and the accepted path of each round.

        `RoundState.path` has the rows of that path. The other candidates of the round must be forgotten.

        Args:
            stream: index of the stream.
            tokens: n tokens. The last token that the target drew is not among them: it is the next anchor.
            states: [n, layers x H] hidden states of the target at these tokens, layer by layer; None without `layers`.
        """

    def backlog(self) -> Array:
        """Return [S] int64, the tokens to read before it can propose, the anchor included; undefined without a text."""
        return np.zeros(self._streams, dtype=np.int64)

    def signals(self, stream: int, anchor: int) -> tuple[float, ...]:
        """Return `policies.features.SIGNALS` of a stream before it drafts: 0 for what it does not know.

        Args:
            stream: index of the stream.
            anchor: the last committed token, which the target has not read.
        """
        return (0.0,) * len(SIGNALS)

    def propose(self, round: RoundState, depth: int, rows: Rows) -> Proposal:
        """Return the scores of the tokens after rows of one depth. Their parents were fed before."""
        raise NotImplementedError

    def prepare(self, lengths: Sequence[int]) -> None:
        """Do one-time work for chains in texts of these lengths before rounds are timed."""

    def reset(self) -> None:
        """Forget all texts, including earlier ones that it keeps."""
