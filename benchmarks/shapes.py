"""Llamas of given shapes without training: what they compute takes the time of trained ones, what they say is made up.

A target says a fixed successor of each token, a draft the same one for a chosen share of the tokens. So the share of
accepted drafts is known, the right text too, and no rounding ever decides: the successor leads by far. Embedding and output
layer are the same numbers, permuted; the layers in between compute as always, and add next to nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from specstop.decode import Pair
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

LEAD = 30.0
"""Logit of the successor; the others' lie around 0, and within 3."""

ADDED = 1e-3
"""Of the usual scale: weights that add to the residual stream."""


@dataclass(frozen=True)
class Shape:
    """What sets the time of a model: `LlamaConfig`'s numbers."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int

    def config(self, longest: int) -> LlamaConfig:
        """Return the configuration, for texts of up to `longest` tokens."""
        return LlamaConfig(
            **vars(self), max_position_embeddings=longest, bos_token_id=0, eos_token_id=None, pad_token_id=0
        )


SHAPES = {
    "8B": Shape(4096, 14336, 32, 32, 8, 128256),
    "1B": Shape(2048, 8192, 16, 32, 8, 128256),
    "100M": Shape(640, 1712, 12, 10, 10, 32000),
    "18M": Shape(256, 688, 2, 4, 4, 32000),
    "tiny target": Shape(64, 128, 2, 4, 2, 512),
    "tiny draft": Shape(64, 96, 1, 4, 2, 512),
}
"""Llama 3.1 8B and Llama 3.2 1B, two that a processor can serve, and two that it runs in milliseconds."""


def random_model(shape: Shape, device: str, dtype: torch.dtype, longest: int, seed: int = 0) -> LlamaForCausalLM:
    """Return a model with weights as they are before training, made where it is to run."""
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return LlamaForCausalLM(shape.config(longest)).eval()
    finally:
        torch.set_default_dtype(before)


def successors(vocabulary: int, seed: int = 0) -> Tensor:
    """Return [V] the token after each token: a permutation."""
    return torch.randperm(vocabulary, generator=torch.Generator().manual_seed(seed))


def differing(after: Tensor, agreement: float, seed: int = 1) -> Tensor:
    """Return a permutation that agrees with `after` [V] on this share of the tokens."""
    drawn = torch.rand(len(after), generator=torch.Generator().manual_seed(seed))
    other = (drawn >= agreement).nonzero()[:, 0]
    out = after.clone()
    out[other] = after[other.roll(1)]
    return out


@torch.no_grad()
def teach(model: LlamaForCausalLM, after: Tensor) -> LlamaForCausalLM:
    """Make a model say `after[t]` after every token t, and return it."""
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.mul_(ADDED)
        layer.mlp.down_proj.weight.mul_(ADDED)
    embed, head = model.model.embed_tokens.weight, model.lm_head.weight
    embed.normal_()
    head[after.to(head.device)] = embed * (LEAD / embed.shape[1])
    return model


def scripted_pair(
    names: tuple[str, str], device: str, dtype: torch.dtype, longest: int, agreement: float
) -> tuple[Pair, Tensor]:
    """Return a pair of two shapes whose drafts are accepted at this rate, and the target's successors [V]."""
    target, draft = (SHAPES[name] for name in names)
    after = successors(target.vocab_size)
    models = [
        teach(random_model(target, device, dtype, longest), after),
        teach(random_model(draft, device, dtype, longest, 1), differing(after, agreement)),
    ]
    return Pair(models[0], models[1], None, target.vocab_size), after


def right_text(after: Tensor, prompt: list[int], tokens: int) -> list[int]:
    """Return what the target says after a prompt."""
    text, token = [], prompt[-1]
    for _ in range(tokens):
        token = int(after[token])
        text.append(token)
    return text
