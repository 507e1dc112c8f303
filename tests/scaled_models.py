"""Small random models that scale or cap the numbers of their output layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

SIZES = {
    "vocab_size": 48, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64, "initializer_range": 0.5, "bos_token_id": 1,
    "eos_token_id": None, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
FACTOR, CAP = 0.25, 2.0
SCALED: dict[str, Callable[[], PreTrainedConfig]] = {
    "granite": lambda: GraniteConfig(**SIZES, logits_scaling=1 / FACTOR),
    "cohere": lambda: CohereConfig(**SIZES, logit_scale=FACTOR),
    "gemma2": lambda: Gemma2Config(**SIZES, head_dim=8, query_pre_attn_scalar=8, final_logit_softcapping=CAP),
}


def scaled_model(name: str) -> PreTrainedModel:
    """Return a model of one kind, in float64."""
    torch.manual_seed(0)
    # Gemma 2 has no other attention for its soft-capped scores.
    model: PreTrainedModel = AutoModelForCausalLM.from_config(SCALED[name](), attn_implementation="eager")
    return model.double().eval()
