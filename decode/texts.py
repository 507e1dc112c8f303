"""Texts that are being decoded: the request, the committed tokens, and the anchor of the next round."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import StoppingCriteria

from .models.cache import ReadPrompt
from .verify.noise import KeyedSource
from .verify.sampler import Sampler
from .verify.sampling import SamplingParams


@dataclass(frozen=True)
class Request:
    """A prompt to decode.

    Attributes:
        prompt: token ids, at least one.
        key: random key of the stream (`noise.stream_key`); no effect at temperature 0.
        padding: tokens to the left of the prompt that logits processors and stopping criteria receive and models do not.
        shaping: sampling parameters of this text; None = those of the settings.
        read: a prompt that the target has already read (`hf.prefill`); None = the loop reads the token ids.
    """

    prompt: Sequence[int]
    key: int = 0
    padding: Sequence[int] = ()
    shaping: SamplingParams | None = None
    read: ReadPrompt | None = None

    @property
    def excess(self) -> tuple[int, int]:
        """Cache slots and positions that the prompt uses beyond its number of tokens, each at least 0."""
        if self.read is None:
            return 0, 0
        shift = self.read.slots - len(self.prompt)
        return max(shift, 0), max(shift + int(self.read.offset.max()), 0)


@dataclass(slots=True)
class Anchor:
    """The target row from which an anchor was drawn.

    Attributes:
        rows: [R, V] raw logits of the target call.
        at: index of the row. The row is sliced on access, as most policies do not read it.
        hidden: [1, H] last hidden state of the target at that row; None if not kept.
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
    """A sequence that is being decoded.

    Attributes:
        tokens: committed, prompt included. The last one is the anchor of the next round.
        prompt: number of prompt tokens.
        key: random key of the stream.
        source: source of its random numbers.
        sampler: processes its logits.
        anchor: the row from which the last token was drawn.
        round: number of the next round, from 1; the prompt is 0.
        ended: whether the text is complete.
        shift: number of cache slots of the target that the prompt uses, minus its number of tokens.
    """

    tokens: list[int]
    prompt: int
    key: int
    source: KeyedSource
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
        """Commit tokens one by one until the text ends, and return the number committed.

        Args:
            new: tokens to commit.
            limit: maximum number of generated tokens.
            eos: token ids that end the text.
            stops: stopping criteria of transformers, called after each token as in plain decoding.
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
