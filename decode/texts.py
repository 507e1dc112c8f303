"""Texts while they are decoded: the request, the committed tokens, and what the next round starts from."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import StoppingCriteria

from .models.cache import ReadPrompt
from .verify.noise import Source
from .verify.sampling import Sampler, Shaping


@dataclass(frozen=True)
class Request:
    """A prompt to decode.

    Attributes:
        prompt: token ids, at least one.
        key: of the stream (`noise.stream_key`); without effect at temperature 0.
        padding: tokens left of the prompt that logits processors and stopping criteria see and models do not.
        shaping: of this text; None = that of the settings.
        read: the prompt as the target has read it already (`hf.prefill`); None = the loop reads the token ids.
    """

    prompt: Sequence[int]
    key: int = 0
    padding: Sequence[int] = ()
    shaping: Shaping | None = None
    read: ReadPrompt | None = None

    @property
    def excess(self) -> tuple[int, int]:
        """How many slots, and positions, the prompt takes beyond its number of tokens; at least 0."""
        if self.read is None:
            return 0, 0
        shift = self.read.slots - len(self.prompt)
        return max(shift, 0), max(shift + int(self.read.offset.max()), 0)


@dataclass(slots=True)
class Anchor:
    """What an anchor was drawn from.

    Attributes:
        rows: [R, V] raw logits of the target's call.
        at: the row of the anchor. It is sliced when needed: most policies do not read it.
        hidden: [1, H] the target's last hidden state there, where it is kept.
    """

    rows: Tensor
    at: int
    hidden: Tensor | None

    @property
    def row(self) -> Tensor:
        """[1, V] raw logits."""
        return self.rows[self.at : self.at + 1]


@dataclass
class Text:
    """One sequence while it is decoded.

    Attributes:
        tokens: committed, prompt included. The last one is the anchor of the next round.
        prompt: number of prompt tokens.
        key: of the stream.
        source: of its random numbers.
        sampler: of its logits.
        anchor: what the last token was drawn from.
        round: number of the next round, from 1; the prompt is 0.
        shift: slots of the target's cache that the prompt fills, minus its tokens.
    """

    tokens: list[int]
    prompt: int
    key: int
    source: Source
    sampler: Sampler
    anchor: Anchor
    round: int = 0
    ended: bool = False
    shift: int = 0

    @property
    def generated(self) -> int:
        """Tokens committed after the prompt."""
        return len(self.tokens) - self.prompt

    def extend(
        self, new: Sequence[int], limit: int, eos: Collection[int], stops: Sequence[StoppingCriteria] = ()
    ) -> int:
        """Commit tokens one by one until the text ends, and return their number.

        Args:
            new: tokens.
            limit: on the generated tokens.
            eos: ids that end the text.
            stops: transformers' criteria, called after each token as in plain decoding.
        """
        before = len(self.tokens)
        for token in new:
            self.tokens.append(token)
            self.ended = self.generated >= limit or token in eos or (bool(stops) and self._stops(stops))
            if self.ended:
                break
        return len(self.tokens) - before

    def _stops(self, stops: Sequence[StoppingCriteria]) -> bool:
        ids = torch.tensor([[*self.sampler.padding, *self.tokens]], device=self.anchor.rows.device)
        return any(bool(torch.as_tensor(stop(ids, None)).all()) for stop in stops)
