"""Texts that are being decoded: the request, the committed tokens, and the anchor of the next round."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import StoppingCriteria

from ..policies.errors import PolicyFailure
from .models.cache import ReadPrompt
from .prompts import as_token_ids
from .records import Generation, Round
from .verify.noise import KeyedSource
from .verify.sampler import Sampler
from .verify.sampling import SamplingParams


@dataclass(frozen=True)
class Request:
    """A prompt to decode.

    Attributes:
        prompt: token ids, at least one; tensors and arrays are converted.
        key: random key of the stream (`noise.stream_key`); no effect at temperature 0.
        padding: tokens to the left of the prompt that logits processors and stopping criteria receive and models do not.
        sampling: sampling parameters of this text; None = those of the settings.
        read: a prompt that the target has already read (`hf.prefill`); None = the loop reads the token ids.
    """

    prompt: Sequence[int]
    key: int = 0
    padding: Sequence[int] = ()
    sampling: SamplingParams | None = None
    read: ReadPrompt | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt", as_token_ids(self.prompt))

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
        prompt_tokens: number of prompt tokens.
        source: source of its random numbers.
        sampler: processes its logits.
        anchor: the row from which the last token was drawn.
        shift: number of cache slots of the target that the prompt uses, minus its number of tokens.
        ended: whether the text is complete.
        number: index of its request.
        prefill_s: seconds of reading the prompt.
        records: of its rounds.
    """

    tokens: list[int]
    prompt_tokens: int
    source: KeyedSource
    sampler: Sampler
    anchor: Anchor
    shift: int = 0
    ended: bool = False
    number: int = 0
    prefill_s: float = 0.0
    records: list[Round] = field(default_factory=list)

    @property
    def generated(self) -> int:
        """Tokens committed after the prompt."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def slot(self) -> int:
        """Slot of the target's cache for the anchor."""
        return len(self.tokens) - 1 + self.shift

    def extend(self, new: Sequence[int], limit: int, eos: Collection[int], stops: Sequence[StoppingCriteria]) -> int:
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

    def generation(self, failure: PolicyFailure | None) -> Generation:
        """Return the result; `failure` is that of the policy."""
        tokens, seconds = (
            tuple(self.tokens[self.prompt_tokens :]),
            self.prefill_s + sum(one.seconds for one in self.records),
        )
        return Generation(tokens, tuple(self.records), self.prompt_tokens, self.prefill_s, seconds, failure=failure)

    def _stops(self, stops: Sequence[StoppingCriteria]) -> bool:
        ids = torch.tensor([[*self.sampler.padding, *self.tokens]], device=self.anchor.rows.device)
        return any(bool(torch.as_tensor(stop(ids, None)).all()) for stop in stops)
