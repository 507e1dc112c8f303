"""Plain decoding of a batch: one token a step, no draft. The text every `match` policy must reproduce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .models.cuda.graph import open_cache
from .models.cuda.transfer import download
from .models.finite import broken
from .models.hidden import hidden_width, stored
from .models.packed import Part
from .models.pair import Pair
from .verify.noise import gumbel, match_scores
from .verify.sampling import UNCHANGED, BatchSampler, Shaping

ENDED_EVERY = 8
"""Steps on a device after which it is asked whether all texts have ended: the host would wait each time."""


@dataclass(frozen=True)
class PlainTexts:
    """Texts of a batch and the target's rows.

    Attributes:
        tokens: generated ids by prompt; a text ends with its EOS or at the limit.
        logits: [B, N, V], the raw row that each generated token was drawn from; rows after an EOS are void.
        states: [B, N, H] float16, the last hidden states of these rows (`features.hidden_states`), if asked for.
        noise: [B, N, V], the noise that each was drawn with, if asked for and there is any.
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
    shaping: Shaping = UNCHANGED,
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
    """
    device, batch = pair.device, len(prompts)
    longest = max(map(len, prompts))
    model = open_cache(pair.target, longest + max_new_tokens, pair.vocabulary, hidden, batch)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    stream = torch.tensor(list(keys), device=device)[:, None]
    ends = () if ignore_eos else pair.eos
    eos = torch.tensor(ends, dtype=torch.int64, device=device)
    sampler = BatchSampler(shaping, temperature, [len(prompt) for prompt in prompts], ends, device)

    out = torch.zeros(batch, max_new_tokens, dtype=torch.int64, device=device)
    rows = torch.zeros(batch, max_new_tokens, pair.vocabulary, dtype=pair.logits_dtype, device=device)
    kept = torch.zeros_like(rows) if noise and temperature > 0 else None
    states = None
    if hidden:
        size = (batch, max_new_tokens, hidden_width(pair.target))
        states = torch.zeros(size, dtype=torch.float16, device=device)
    ended = torch.zeros(batch, dtype=torch.bool, device=device)
    bad = torch.zeros_like(ended)
    going = list(range(batch))
    logits = rows.new_zeros(batch, pair.vocabulary)
    logits[:] = model.read_parts([Part(at, prompt, 1) for at, prompt in enumerate(prompts)])
    last_states = model.states
    ask = 1 if device.type == "cpu" else ENDED_EVERY
    for step in range(max_new_tokens):
        bad |= ~logits.amax(-1).isfinite() & ~ended
        rows[:, step] = logits
        if states is not None and last_states is not None:
            states[going, step] = stored(last_states[0])
        drawn_with = None
        if temperature > 0:
            drawn_with = gumbel(stream, lengths + step, pair.vocabulary, pair.logits_dtype)
            if kept is not None:
                kept[:, step] = drawn_with
        sampled = sampler(logits, partial(_prefixes, prompts, out[:, :step]))
        out[:, step] = match_scores(sampled, drawn_with).argmax(-1)
        ended |= torch.isin(out[:, step], eos)
        last = step + 1 == max_new_tokens
        if last or (step + 1) % ask == 0:
            are_bad, have_ended = download(bad, ended)
            if any(are_bad):
                raise broken("target")
            going = [at for at, has_ended in enumerate(have_ended) if not has_ended]
            if last or not going:
                break
        logits[going] = model.read_parts([Part(at, out[at, step : step + 1]) for at in going])
        last_states = model.states
    return PlainTexts([cut_at(text, ends) for text in out[:, : step + 1].tolist()], rows, states, kept)


def _prefixes(prompts: Sequence[Sequence[int]], generated: Tensor) -> list[list[int]]:
    """Return the texts so far: each prompt [.] and what follows it, a row of [B, n]."""
    return [[*prompt, *tokens] for prompt, tokens in zip(prompts, generated.tolist(), strict=True)]


def cut_at(text: list[int], eos: Sequence[int]) -> list[int]:
    """Return the text up to its first end-of-text token, that token included."""
    return next((text[: i + 1] for i, token in enumerate(text) if token in eos), text)
