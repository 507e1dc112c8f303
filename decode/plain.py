"""Plain decoding of a batch: one token a step, no draft. The text every `match` policy must reproduce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .models.cache import backend_mask
from .models.cuda_graph import open_cache
from .models.finite import broken
from .models.hidden import hidden_width, stored
from .models.pair import Pair
from .models.transfer import download
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
        prompts: B lists of token ids, none empty; they are padded on the left.
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
    device = pair.device
    longest = max(map(len, prompts))
    model = open_cache(pair.target, longest + max_new_tokens, pair.vocabulary, hidden, len(prompts))
    padding = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
    real, positions = _columns(padding, model.capacity)
    stream = torch.tensor(list(keys), device=device)[:, None]
    ends = () if ignore_eos else pair.eos
    eos = torch.tensor(ends, dtype=torch.int64, device=device)
    sampler = BatchSampler(shaping, temperature, [len(prompt) for prompt in prompts], ends, device)

    out = torch.zeros(len(prompts), max_new_tokens, dtype=torch.int64, device=device)
    rows = torch.zeros(len(prompts), max_new_tokens, pair.vocabulary, dtype=pair.logits_dtype, device=device)
    kept = torch.zeros_like(rows) if noise and temperature > 0 else None
    states = None
    if hidden:
        size = (len(prompts), max_new_tokens, hidden_width(pair.target))
        states = torch.zeros(size, dtype=torch.float16, device=device)
    ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    bad = torch.zeros_like(ended)
    tokens = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts], device=device)
    mask = backend_mask(_prompt_mask(real[:, :longest])[:, None], pair.target)
    logits = model.read(tokens, 1, mask, positions[:, :longest])[:, 0]
    later = backend_mask(real[:, None, None, :], pair.target)
    ask = 1 if device.type == "cpu" else ENDED_EVERY
    for step in range(max_new_tokens):
        bad |= ~logits.amax(-1).isfinite() & ~ended
        rows[:, step] = logits
        if states is not None and model.states is not None:
            states[:, step] = stored(model.states[:, -1])
        drawn_with = None
        if temperature > 0:
            drawn_with = gumbel(stream, longest + step - padding, pair.vocabulary, pair.logits_dtype)
            if kept is not None:
                kept[:, step] = drawn_with
        sampled = sampler(logits, partial(_prefixes, prompts, out[:, :step]))
        out[:, step] = match_scores(sampled, drawn_with).argmax(-1)
        ended |= torch.isin(out[:, step], eos)
        end = longest + step
        last = step + 1 == max_new_tokens
        if last or (step + 1) % ask == 0:
            are_bad, have_ended = download(bad, ended)
            if any(are_bad):
                raise broken("target")
            if last or all(have_ended):
                break
        logits = model.read(out[:, step : step + 1], 1, later[..., : end + 1], positions[:, end : end + 1])[:, 0]
    return PlainTexts([_cut(text, set(eos.tolist())) for text in out[:, : step + 1].tolist()], rows, states, kept)


def _prefixes(prompts: Sequence[Sequence[int]], generated: Tensor) -> list[list[int]]:
    """Return the texts so far: each prompt [.] and what follows it, a row of [B, n]."""
    return [[*prompt, *tokens] for prompt, tokens in zip(prompts, generated.tolist(), strict=True)]


def _columns(padding: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Return which columns [B, capacity] are real behind the padding [B], and the positions of the tokens there."""
    column = torch.arange(capacity, device=padding.device)
    return column >= padding[:, None], (column[None] - padding[:, None]).clamp_min(0)


def _prompt_mask(real: Tensor) -> Tensor:
    """Return [B, n, n], causal over the real columns [B, n]."""
    count = real.shape[1]
    causal = torch.ones(count, count, dtype=torch.bool, device=real.device).tril_()
    # A padding row that sees nothing would be NaN, so it sees itself; nothing else ever sees it.
    return causal & real[:, None] | torch.eye(count, dtype=torch.bool, device=real.device)


def _cut(text: list[int], eos: set[int]) -> list[int]:
    """Return the text up to its first end-of-text token, that token included."""
    return next((text[: i + 1] for i, token in enumerate(text) if token in eos), text)
