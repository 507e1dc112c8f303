"""Plain decoding of a batch: one token per step, no draft. Under `match` every policy must reproduce its texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from ..policies.arguments import check_limits
from ..policies.errors import InputError
from .models.attention import Part
from .models.cuda import open_cache
from .models.device import download
from .models.outputs import nonfinite_error, stored
from .models.pair import Pair
from .models.view import hidden_width
from .prompts import as_token_ids
from .settings import resolve_sampling
from .verify.noise import gumbel, target_tokens
from .verify.sampler import Prefixes, Sampler, require_token
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
    sampling: SamplingParams = MODEL_DEFAULTS,
) -> PlainTexts:
    """Decode a batch of prompts with the target alone.

    Args:
        pair: provides the target.
        prompts: B lists of token ids, none empty.
        keys: B stream keys (`noise.stream_key`), without effect at temperature 0.
        max_new_tokens: N, the length limit of each text.
        temperature: 0 = greedy, else sampling by the streams' keyed noise.
        ignore_eos: continue after the end-of-text token.
        hidden: return the hidden states too.
        noise: return the noise too.
        sampling: other sampling parameters.

    Raises:
        PairError: the target returns logits that are not finite.
        InputError: there is no prompt, a prompt is empty, an option is out of range, the numbers of prompts and keys
            differ, a processor cannot be called for any prefix, or a grammar and other options leave no token.
    """
    check_limits(temperature=temperature, max_new_tokens=max_new_tokens)
    prompts = _validated_prompts(prompts, keys)
    device, batch = pair.device, len(prompts)
    pair.check_prompts(prompts)
    capacity, reading = max(map(len, prompts)) + max_new_tokens, pair.readings[0]
    model = open_cache(pair.target, capacity, pair.vocabulary, hidden, batch, device=device, reading=reading)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    streams = torch.tensor(list(keys), device=device)[:, None]  # [B, 1]
    eos = () if ignore_eos else pair.eos
    ends = torch.tensor(eos, dtype=torch.int64, device=device)
    sampling = resolve_sampling(pair, sampling, max_new_tokens)
    samplers = [Sampler(sampling.build(temperature, prompt, eos, device), temperature) for prompt in prompts]
    tokens = torch.zeros(batch, max_new_tokens, dtype=torch.int64, device=device)
    rows = torch.zeros(batch, max_new_tokens, pair.vocabulary, dtype=pair.logits_dtype, device=device)
    all_noise = torch.zeros_like(rows) if noise and temperature > 0 else None
    states = None
    if hidden:
        states = torch.zeros(*tokens.shape, hidden_width(pair.target), dtype=torch.float16, device=device)
    # By text, whether it has ended, and whether the target returned a row that is not finite before that.
    ended, broken_rows = torch.zeros(2, batch, dtype=torch.bool, device=device)
    active = list(range(batch))  # texts that have not ended, as far as the host knows
    logits = rows.new_zeros(batch, pair.vocabulary)
    logits[:] = model.read_parts([Part(at, prompt, 1) for at, prompt in enumerate(prompts)])
    for step in range(max_new_tokens):
        broken_rows |= ~logits.amax(-1).isfinite() & ~ended
        rows[:, step] = logits
        if states is not None and model.states is not None:
            states[active, step] = stored(model.states[0])
        # Keyed by the token's position in the text, as in the loop: under `match` both must draw the same text.
        step_noise = gumbel(streams, lengths + step, pair.vocabulary, pair.logits_dtype) if temperature > 0 else None
        if all_noise is not None and step_noise is not None:
            all_noise[:, step] = step_noise
        sampled = _process(samplers, logits, partial(_prefixes, prompts, tokens[:, :step], eos))
        if samplers[0].has_grammar:
            require_token(sampled)
        tokens[:, step] = target_tokens(sampled, step_noise)
        ended |= torch.isin(tokens[:, step], ends)
        is_last = step + 1 == max_new_tokens
        if is_last or (step + 1) % (1 if device.type == "cpu" else ENDED_EVERY) == 0:
            has_broken, has_ended = download(broken_rows, ended)
            if any(has_broken):
                raise nonfinite_error("target")
            active = [at for at in range(batch) if not has_ended[at]]
            if is_last or not active:
                break
        # Rows of texts that have ended are not read again: they are undefined.
        logits[active] = model.read_parts([Part(at, tokens[at, step : step + 1]) for at in active])
    generated = tokens[:, : step + 1].tolist()
    texts = [text[: next((count for count, token in enumerate(text, 1) if token in eos), None)] for text in generated]
    return PlainTexts(texts, rows, states, all_noise)


def _validated_prompts(prompts: Sequence[Sequence[int]], keys: Sequence[int]) -> list[list[int]]:
    """Return the token ids of each prompt."""
    ids = list(map(as_token_ids, prompts))
    if not ids or not all(ids):
        raise InputError("prompts: expected at least one prompt, and at least one token in each")
    if len(keys) != len(ids):
        raise InputError(f"keys: expected one for each of {len(ids)} prompts, not {len(keys)}")
    return ids


def _process(samplers: Sequence[Sampler], logits: Tensor, prefixes: Prefixes) -> Tensor:
    """Return [B, V] processed logits, a row for each text."""
    if not samplers[0].reads_prefix:
        return samplers[0](logits, prefixes)
    texts = cache(prefixes)
    rows = [sampler(logits[at : at + 1], lambda at=at: [texts()[at]]) for at, sampler in enumerate(samplers)]  # type: ignore[misc]
    return torch.cat(rows)


def _prefixes(prompts: Sequence[Sequence[int]], generated: Tensor, ends: Sequence[int]) -> list[list[int] | None]:
    """Return each prompt and its `generated` tokens, a row of [B, n]; None for a text that has ended."""
    return [
        None if any(end in tokens for end in ends) else [*prompt, *tokens]
        for prompt, tokens in zip(prompts, generated.tolist(), strict=True)
    ]
