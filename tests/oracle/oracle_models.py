"""Section of other architectures: sliding windows, learned positions, several engines, in float64 and float32."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import access
import torch
from oracle_inputs import Inputs, build_draft
from oracle_texts import answer, lines
from specstop.decode import Pair, Settings, Speculator, join, stream_key, with_engine
from specstop.policies import load_policy
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

Cases = Iterator[tuple[str, Any]]

WINDOW = 6
IDS = {"vocab_size": 48, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
NARROW = {**IDS, "hidden_size": 32, "num_attention_heads": 2, "tie_word_embeddings": False}
WIDE = {
    **NARROW,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "max_position_embeddings": 160,
    "initializer_range": 0.4,
}
GROUPED = {**WIDE, "num_key_value_heads": 1, "head_dim": 16}
QWEN2 = {name: value for name, value in GROUPED.items() if name != "head_dim"}
GEMMA = {
    **GROUPED,
    "sliding_window": WINDOW,
    "query_pre_attn_scalar": 16,
    "layer_types": ["sliding_attention", "full_attention"],
}
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**GROUPED),
    "qwen2": lambda: Qwen2Config(**QWEN2),
    "qwen2 window": lambda: Qwen2Config(**QWEN2, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "qwen3": lambda: Qwen3Config(**GROUPED),
    "mistral window": lambda: MistralConfig(**GROUPED, sliding_window=WINDOW),
    "gemma2": lambda: Gemma2Config(**GEMMA),
    "gemma3": lambda: Gemma3TextConfig(**GEMMA),
    "gpt2": lambda: GPT2Config(
        **IDS, n_embd=32, n_layer=2, n_head=2, n_positions=160, initializer_range=0.4, tie_word_embeddings=False
    ),
    "gpt-neox": lambda: GPTNeoXConfig(**WIDE),
    "opt": lambda: OPTConfig(
        **NARROW, ffn_dim=48, num_hidden_layers=2, max_position_embeddings=160, init_std=0.4, word_embed_proj_dim=32
    ),
}


def build_pair(name: str, dtype: torch.dtype) -> Pair:
    """Return a random target of an architecture, and as its draft a noisy copy."""
    attention = "eager" if name == "gemma2" else "sdpa"
    torch.manual_seed(4)
    target = AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation=attention).to(dtype).eval()
    return join(target, build_draft(target))


def models(inputs: Inputs, small: bool = False) -> Cases:
    """Texts of other architectures."""
    for name, dtype, engine in itertools.product(
        list(CONFIGS)[:1] if small else CONFIGS, (torch.float64, torch.float32), ("plain", "packed", "compact", "auto")
    ):
        told = f"{name} | {str(dtype).removeprefix('torch.')} | {engine}"
        try:
            pair = with_engine(build_pair(name, dtype), engine)
        except Exception as error:
            yield told, {"refused": type(error).__name__}
            continue
        yield f"{told} | engines", list(pair.engines)
        for (verification, tree), batch in itertools.product((("match", None), ("rejection", "3,2,1")), (1, 3)):
            shown = f"{told} | {verification} | {tree or 'chain'} | S={batch}"
            yield shown, answer(lambda p=pair, v=verification, t=tree, b=batch: run(inputs, p, v, t, b))


def run(inputs: Inputs, pair: Pair, verification: str, tree: str | None, batch: int) -> Any:
    """Return the lines of a few texts."""
    loop = Speculator(
        pair, load_policy("confidence:0.3"), Settings(0.8, 12, verification=verification, tree=tree), batch=batch
    )
    requests = [access.request(ids, stream_key(0, str(at))) for at, ids in enumerate(inputs.prompt_ids[-3:])]
    return lines(loop.run(requests))
