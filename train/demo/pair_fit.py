"""Fit a demo pair: the target on text, the draft on the distribution of the target."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import timeit
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaForCausalLM

from ...policies.progress import Progress
from .pair_recipe import PairRecipe

_TASK = "demo pair"
# Temperatures of the target's own text, row by row: greedy and sampled decoding are both met later.
_TEMPERATURES = (0.0, 0.35, 0.7, 1.0)
_OWN_BATCH = 128


def fit_pair(
    stream: torch.Tensor, starts: torch.Tensor, recipe: PairRecipe, end: int, progress: Progress
) -> tuple[LlamaForCausalLM, LlamaForCausalLM, dict[str, float]]:
    """Train both models on `stream`, then the draft alone on text that the target continues from `starts`.

    Args:
        stream: Tokens of the text to learn.  # [tokens]
        starts: Tokens from which the beginnings of the target's own text are cut.  # [tokens]
        recipe: Shapes, steps and seed.
        end: The end-of-text token.
        progress: Called with the steps done, those of both phases.

    Returns:
        Target, draft and their last mean losses in nats per token.
    """
    with _clean_slate(recipe.seed):
        target, draft = (
            shape.build(recipe.vocabulary, recipe.positions, end).train() for shape in (recipe.target, recipe.draft)
        )
        total = recipe.steps + recipe.own_steps
        progress(_TASK, 0, total)
        losses = _learn(target, draft, stream, recipe, lambda done: progress(_TASK, done, total))
        own = _own_text(target, starts, recipe)
        followed = _follow(draft, *own, recipe, lambda done: progress(_TASK, recipe.steps + done, total))
    return target.train(False), draft.train(False), {**losses, "draft_divergence_own_text": followed}


def _learn(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    stream: torch.Tensor,
    recipe: PairRecipe,
    tick: Callable[[int], None],
) -> dict[str, float]:
    """Train both models in one pass: the draft follows the target's logits of the same step."""
    target_losses: list[float] = []
    draft_losses: list[float] = []
    target_adam, draft_adam = _adam(target, recipe), _adam(draft, recipe)
    layers = _empty_upper_layers(target, recipe)
    for step, batch in enumerate(_batches(stream, recipe)):
        share = _schedule(step, recipe.steps, recipe.warmup)
        target.model.layers = layers[: _depth(step, recipe)]
        logits = _logits(target, batch[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        target_losses.append(_update(target, target_adam, loss, share * recipe.target_rate))
        loss = _divergence(logits.detach(), _logits(draft, batch[:, :-1]))  # no gradient for the target
        draft_losses.append(_update(draft, draft_adam, loss, share * recipe.draft_rate))
        tick(step + 1)
    target.model.layers = layers
    return {"target_cross_entropy": _tail(target_losses), "draft_divergence": _tail(draft_losses)}


def _own_text(target: LlamaForCausalLM, starts: torch.Tensor, recipe: PairRecipe) -> tuple[torch.Tensor, torch.Tensor]:
    """Let the target continue beginnings cut from `starts`; return the texts and its logits over them.

    Returns:
        Tokens [own_rows, own_prefix + own_tokens] and logits [own_rows, ..., vocabulary] of `_fast_type`.
    """
    generator = torch.Generator().manual_seed(recipe.seed)
    width = min(recipe.own_prefix, len(starts) - 1)
    places = torch.randint(len(starts) - width, (recipe.own_rows,), generator=generator)
    prefixes = starts[places[:, None] + torch.arange(width)]
    texts, logits = [], []
    # A copy, as autocast would cast all weights again for every token.
    # Only the weights, as rounded rotary frequencies would turn far positions by wrong angles.
    writer: Any = copy.deepcopy(target).train(False)
    for weight in writer.parameters():
        weight.data = weight.data.to(_fast_type())
    with torch.no_grad():
        for text in torch.split(prefixes, _OWN_BATCH):
            temperature = torch.tensor(_TEMPERATURES).repeat(len(text) // len(_TEMPERATURES) + 1)[: len(text), None]
            out = writer(input_ids=text, use_cache=True)
            seen = [out.logits]
            for _ in range(recipe.own_tokens):
                scores = out.logits[:, -1].float()
                # Gumbel-max sampling: the largest of scores + T g, g = -log(-log u); at T = 0 the best token.
                # u = 0 would make g infinite, and 0 times that NaN.
                uniform = torch.rand(scores.shape, generator=generator).clamp_min(1e-20)
                token = (scores - temperature * uniform.log().neg().log()).argmax(-1, keepdim=True)
                text = torch.cat([text, token], dim=1)
                out = writer(input_ids=token, past_key_values=out.past_key_values, use_cache=True)
                seen.append(out.logits)
            texts.append(text)
            logits.append(torch.cat(seen, dim=1))  # [rows, prefix + own_tokens, V]
    return torch.cat(texts), torch.cat(logits)


def _follow(
    draft: LlamaForCausalLM,
    texts: torch.Tensor,
    logits: torch.Tensor,
    recipe: PairRecipe,
    tick: Callable[[int], None],
) -> float:
    """Train the draft on the target's logits over the target's own text."""
    adam = _adam(draft, recipe)
    losses: list[float] = []
    for step, chosen in enumerate(_shuffled(len(texts), recipe.own_batch, recipe.own_steps, recipe.seed)):
        loss = _divergence(logits[chosen].float(), _logits(draft, texts[chosen]))
        share = _schedule(step, recipe.own_steps, recipe.warmup)
        losses.append(_update(draft, adam, loss, share * recipe.own_rate))
        tick(step + 1)
    return _tail(losses)


def _tail(losses: list[float]) -> float:
    """Return the mean of the last twentieth."""
    last = losses[-max(1, len(losses) // 20) :]
    return sum(last) / max(1, len(last))


@contextlib.contextmanager
def _clean_slate(seed: int) -> Iterator[None]:
    """Train on the CPU with gradients and a seeded generator; leave what the caller has set untouched."""
    with (
        torch.random.fork_rng(devices=[]),
        torch.device("cpu"),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        # Not torch.manual_seed, which would also seed the accelerators.
        torch.default_generator.manual_seed(seed)
        yield


def _batches(stream: torch.Tensor, recipe: PairRecipe) -> Iterator[torch.Tensor]:
    """Yield one batch per step; windows repeat only after all of the text was seen."""  # [batch, length + 1]
    windows = (len(stream) - 1) // recipe.length
    for chosen in _shuffled(windows, recipe.batch, recipe.steps, recipe.seed):
        yield stream[chosen[:, None] * recipe.length + torch.arange(recipe.length + 1)]


def _shuffled(count: int, batch: int, steps: int, seed: int) -> Iterator[torch.Tensor]:
    """Yield `batch` of the numbers below `count` per step, each number once before any comes again."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.empty(0, dtype=torch.int64)
    for _ in range(steps):
        while len(order) < batch:
            order = torch.cat([order, torch.randperm(count, generator=generator)])
        chosen, order = order[:batch], order[batch:]
        yield chosen


def _empty_upper_layers(target: LlamaForCausalLM, recipe: PairRecipe) -> nn.ModuleList:
    """Return the target's layers, those above `shallow_layers` initialised to add nothing to the stream."""
    layers: nn.ModuleList = target.model.layers
    for name, weight in layers[recipe.shallow_layers :].named_parameters():
        # What writes into the residual stream: with these at 0 a layer that joins in later changes nothing at first.
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            nn.init.zeros_(weight)
    return layers


def _depth(step: int, recipe: PairRecipe) -> int:
    """Return the layers trained at `step`: few for most of the time, as a step costs less then."""
    return recipe.shallow_layers if step < recipe.shallow_share * recipe.steps else recipe.target.layers


def _adam(model: LlamaForCausalLM, recipe: PairRecipe) -> torch.optim.AdamW:
    matrices = [weight for weight in model.parameters() if weight.ndim > 1]
    not_decayed = [weight for weight in model.parameters() if weight.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": not_decayed, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


def _schedule(step: int, steps: int, warmup: float) -> float:
    """Rise linearly over the warm-up, then fall linearly to zero."""
    rise = max(1, math.ceil(warmup * steps))
    return min((step + 1) / rise, (steps - step) / max(1, steps - rise))


def _logits(model: LlamaForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    """Run a model, in bfloat16 where that is both safe and fast."""
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=_fast_type() == torch.bfloat16):
        logits: torch.Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits.float()


@functools.cache
def _fast_type() -> torch.dtype:
    """Return the number type whose products are the faster ones on this processor.

    With instructions for it bfloat16 trains the embedded pair 2.6 times as fast; without, a product took 90 times as long.
    """
    seconds = {}
    for number in (torch.float32, torch.bfloat16):
        rows, weight = torch.ones(128, 384, dtype=number), torch.ones(384, 1024, dtype=number)
        # The first one sets up the kernel.
        seconds[number] = min(timeit.repeat(functools.partial(torch.matmul, rows, weight), number=1, repeat=4)[1:])
    return min(seconds, key=lambda number: seconds[number])


def _divergence(target: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
    """Return KL(target || draft) per position."""
    p = functional.log_softmax(target, dim=-1).flatten(0, 1)
    q = functional.log_softmax(draft, dim=-1).flatten(0, 1)
    return functional.kl_div(q, p, reduction="batchmean", log_target=True)


def _update(model: LlamaForCausalLM, adam: torch.optim.AdamW, loss: torch.Tensor, rate: float) -> float:
    """Take one clipped step at learning rate `rate` and return the loss before it."""
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for group in adam.param_groups:
        group["lr"] = rate
    adam.step()
    adam.zero_grad(set_to_none=True)
    return float(loss.detach())
