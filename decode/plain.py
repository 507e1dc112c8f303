"""Plain decoding of a batch: one token a step, no draft. The text every `match` policy must reproduce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..policies.arguments import check_token_ids
from .models.attention import Part
from .models.cuda import open_cache
from .models.device import download
from .models.outputs import broken, stored
from .models.pair import Pair
from .models.view import hidden_width
from .settings import shaping_of
from .verify.noise import gumbel, target_tokens
from .verify.sampler import BatchSampler, require_token
from .verify.sampling import MODEL_DEFAULTS, SamplingParams

ENDED_EVERY = 8
"""Steps on a device between two checks whether all texts have ended: the host waits each time."""


@dataclass(frozen=True)
class PlainTexts:
    """Texts of a batch and the target's rows.

    Attributes:
        tokens: generated ids by prompt; a text ends with its EOS or at the limit.
        logits: [B, N, V], the raw row that each generated token was drawn from; rows after an EOS are undefined.
        states: [B, N, H] float16, the last hidden states of these rows (`features.HIDDEN_STATES`), if requested.
        noise: [B, N, V], the noise that each was drawn with, if requested; None at temperature 0.
    """

    tokens: list[list[int]]
    logits: Tensor
    states: Tensor | None = None
    noise: Tensor | None = None


@torch.inference_mode()
def plain_texts(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    keys: Sequence[int],
    max_new_tokens: int,
    temperature: float = 0.0,
    ignore_eos: bool = False,
    hidden: bool = False,
    noise: bool = False,
    shaping: SamplingParams = MODEL_DEFAULTS,
) -> PlainTexts:
    """Decode a batch of prompts with the target alone.

    Args:
        pair: whose target is used.
        prompts: B lists of token ids, none empty.
        keys: B stream keys (`noise.stream_key`), without effect at temperature 0.
        max_new_tokens: N, the length limit of each text.
        temperature: 0 = greedy, else sampling by the streams' keyed noise.
        ignore_eos: go on after the end-of-text token.
        hidden: return the hidden states too.
        noise: return the noise too.
        shaping: what else changes the distribution that is sampled from.

    Raises:
        PairError: the target gives logits that are not finite.
        InputError: a processor cannot be called for any prefix, or a grammar and other options leave no token.
    """
    check_token_ids(prompts)
    device, batch = pair.device, len(prompts)
    pair.check_prompts(prompts)
    capacity, reading = max(map(len, prompts)) + max_new_tokens, pair.readings[0]
    model = open_cache(pair.target, capacity, pair.vocabulary, hidden, batch, device=device, reading=reading)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    stream = torch.tensor(list(keys), device=device)[:, None]  # [B, 1]
    ends = () if ignore_eos else pair.eos
    shaping = shaping_of(pair, shaping, max_new_tokens)
    sampler = BatchSampler(shaping, temperature, prompts, ends, device)
    texts = _Texts.begin(pair, ends, (batch, max_new_tokens), hidden, noise and temperature > 0)
    logits = texts.rows.new_zeros(batch, pair.vocabulary)
    logits[:] = model.read_parts([Part(at, prompt, 1) for at, prompt in enumerate(prompts)])
    going = list(range(batch))
    for step in range(max_new_tokens):
        # Keyed by the token's place in the text, as in the loop: under `match` both must draw the same text.
        drawn_with = gumbel(stream, lengths + step, pair.vocabulary, pair.logits_dtype) if temperature > 0 else None
        texts.note(step, going, logits, model.states, drawn_with)
        sampled = sampler(logits, partial(_prefixes, prompts, texts.tokens[:, :step], ends))
        if sampler.constrained:
            require_token(sampled)
        texts.add(step, target_tokens(sampled, drawn_with))
        last = step + 1 == max_new_tokens
        if last or (step + 1) % (1 if device.type == "cpu" else ENDED_EVERY) == 0:
            going = texts.going()
            if last or not going:
                break
        # Rows of texts that have ended stay as they were: void.
        logits[going] = model.read_parts([Part(at, texts.tokens[at, step : step + 1]) for at in going])
    return texts.made(step + 1)


@dataclass
class _Texts:
    """What is decoded so far; on a device the host does not wait for it.

    Attributes:
        tokens: [B, N].
        ends: [.] ids that end a text.
        rows, states, noise: as of `PlainTexts`.
        ended, bad: [B] bool, whether a text has ended, and whether the target gave a row that is not finite before that.
    """

    tokens: Tensor
    ends: Tensor
    rows: Tensor
    states: Tensor | None
    noise: Tensor | None
    ended: Tensor
    bad: Tensor

    @classmethod
    def begin(cls, pair: Pair, ends: Sequence[int], size: tuple[int, int], hidden: bool, noise: bool) -> _Texts:
        """Return room for texts of `size` [B, N]."""
        zeros = partial(torch.zeros, device=pair.device)
        rows = zeros(*size, pair.vocabulary, dtype=pair.logits_dtype)
        states = zeros(*size, hidden_width(pair.target), dtype=torch.float16) if hidden else None
        ended, bad = zeros(2, size[0], dtype=torch.bool)
        eos = torch.tensor(ends, dtype=torch.int64, device=pair.device)
        return cls(
            zeros(*size, dtype=torch.int64), eos, rows, states, torch.zeros_like(rows) if noise else None, ended, bad
        )

    def note(
        self, step: int, going: list[int], logits: Tensor, states: Tensor | None, drawn_with: Tensor | None
    ) -> None:
        """Keep the rows [B, V] of a step, the states of the texts that go on, and the noise."""
        # On the device, until `going` asks: nobody waits for it here.
        self.bad |= ~logits.amax(-1).isfinite() & ~self.ended
        self.rows[:, step] = logits
        if self.states is not None and states is not None:
            self.states[going, step] = stored(states[0])
        if self.noise is not None and drawn_with is not None:
            self.noise[:, step] = drawn_with

    def add(self, step: int, tokens: Tensor) -> None:
        """Append tokens [B]."""
        self.tokens[:, step] = tokens
        self.ended |= torch.isin(tokens, self.ends)

    def going(self) -> list[int]:
        """Return the texts that have not ended.

        Raises:
            PairError: one has met a row that is not finite.
        """
        bad, ended = download(self.bad, self.ended)
        if any(bad):
            raise broken("target")
        return [at for at, has_ended in enumerate(ended) if not has_ended]

    def made(self, steps: int) -> PlainTexts:
        """Return the texts after so many steps."""
        ends = self.ends.tolist()
        texts = [cut_at(text, ends) for text in self.tokens[:, :steps].tolist()]
        return PlainTexts(texts, self.rows, self.states, self.noise)


def _prefixes(prompts: Sequence[Sequence[int]], generated: Tensor, ends: Sequence[int]) -> list[list[int] | None]:
    """Return the texts so far: each prompt [.] and what follows it, a row of [B, n]; None for one that has ended."""
    return [
        None if any(end in tokens for end in ends) else [*prompt, *tokens]
        for prompt, tokens in zip(prompts, generated.tolist(), strict=True)
    ]


def cut_at(text: list[int], eos: Sequence[int]) -> list[int]:
    """Return the text up to its first end-of-text token, that token included."""
    return next((text[: i + 1] for i, token in enumerate(text) if token in eos), text)
