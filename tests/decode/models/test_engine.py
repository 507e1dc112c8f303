"""Engines: whatever computes, the logits are the library's, and what cannot run is refused with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import build_draft, build_model
from specstop.decode import Settings, Speculator, load_pair, parse_tree
from specstop.decode.models.attention import Part, TreeRows
from specstop.decode.models.cache import CachedModel
from specstop.decode.models.engine import PackedLinear, choose_engine, speed_up
from specstop.policies import FixedLength
from specstop.policies.errors import InputError
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
SCALED = {"rope_theta": 10000.0, "factor": 2.0}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
COMPACT = {
    "llama": LlamaConfig(**SMALL),
    "llama-biased-tied": LlamaConfig(**SMALL, attention_bias=True, tie_word_embeddings=True),
    "llama-all-heads": LlamaConfig(**{**SMALL, "num_key_value_heads": 4}),
    "llama-linear": LlamaConfig(**SMALL, rope_parameters={"rope_type": "linear", **SCALED}),
    "llama-3": LlamaConfig(**SMALL, rope_parameters={"rope_type": "llama3", **SCALED, **LLAMA3}),
    "mistral": MistralConfig(**SMALL, sliding_window=None, head_dim=8),
    "qwen2": Qwen2Config(**SMALL),
    "qwen3": Qwen3Config(**SMALL, head_dim=16),
}
OTHERS = {
    "gpt2": GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=96, initializer_range=0.3),
    "gpt-neox": GPTNeoXConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=96,
        initializer_range=0.3,
    ),
    "opt": OPTConfig(
        vocab_size=64,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=96,
        word_embed_proj_dim=32,
        init_std=0.3,
    ),
}
NEAR = 2e-4


def build(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(5)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name or name.endswith("bias"):  # the initial ones and zeros would hide a mistake
                weight.add_(0.3 * torch.randn(weight.shape))
    return model.to(dtype).eval()


def readings(model: PreTrainedModel) -> list[torch.Tensor]:
    """Return logits of every kind of call: prompt, one token, several, a tree, a part of it, a long run, the last rows."""
    generator = torch.Generator().manual_seed(2)
    cache, tree = CachedModel(model, 96, 64, hidden=True), parse_tree("2,2,1")
    out = []

    def tokens(count: int) -> torch.Tensor:
        return torch.randint(1, 64, (1, count), generator=generator)

    for count, rows in ((7, 1), (1, 0), (4, 0), (66, 3)):
        out.append(cache.read(tokens(count), rows))
        assert cache.states is not None
        out.append(cache.states)
    cache.roll_back(20)
    row = tokens(len(tree))[0].tolist()
    out.append(cache.read_parts([Part(0, row[:3], tree=TreeRows(tree, 20, [], [0, 1, 2]))]))
    out.append(cache.read_parts([Part(0, [row[4]], tree=TreeRows(tree, 20, [0, 1, 2], [4]))]))
    cache.keep(20, [20, 22])
    out.append(cache.read(tokens(2)))
    return out


@torch.no_grad()
@pytest.mark.parametrize("name", list(COMPACT))
def test_the_compact_forward_gives_the_librarys_logits(name: str) -> None:
    model = build(COMPACT[name], torch.float32)
    expected, found = readings(model), readings(speed_up(model, choose_engine(model, "compact")))
    for a, b in zip(expected, found, strict=True):
        assert float(a.std()) > 0.1
        torch.testing.assert_close(b, a, atol=NEAR, rtol=NEAR)


@torch.no_grad()
def test_the_compact_forward_has_the_states_of_every_layer() -> None:
    model = build(COMPACT["llama"], torch.float32)
    tokens = torch.arange(1, 12)[None]
    caches = [CachedModel(one, 16, 64, hidden=(0, 2, -1)) for one in (model, speed_up(model, "compact"))]
    for cache in caches:
        cache.read(tokens, 1)
    theirs, ours = (cache.states for cache in caches)
    assert theirs is not None and ours is not None and ours.shape == (1, 11, 3 * 32)
    torch.testing.assert_close(ours, theirs, atol=NEAR, rtol=NEAR)


@torch.no_grad()
@pytest.mark.parametrize("name", [*OTHERS, "llama-biased-tied", "qwen3"])
def test_reordered_weights_give_the_librarys_logits(name: str) -> None:
    model = build({**OTHERS, **COMPACT}[name], torch.float32)
    expected = readings(model)
    packed = speed_up(model, choose_engine(model, "packed"))
    assert sum(isinstance(m, PackedLinear) for m in packed.modules()) > 8
    for a, b in zip(expected, readings(packed), strict=True):
        torch.testing.assert_close(b, a, atol=NEAR, rtol=NEAR)


def test_the_fastest_engine_that_can_run_a_model_is_chosen() -> None:
    llama, gpt2 = build(COMPACT["llama"], torch.float32), build(OTHERS["gpt2"], torch.float32)
    assert [choose_engine(m) for m in (llama, gpt2)] == ["compact", "packed"]
    assert choose_engine(llama.double()) == "plain"


def test_an_engine_that_cannot_run_a_model_says_why() -> None:
    windowed = build(MistralConfig(**SMALL, sliding_window=8), torch.float32)
    for model, engine, reason in (
        (build(OTHERS["gpt2"], torch.float32), "compact", "exists for llama, mistral, qwen2, qwen3, not for gpt2"),
        (windowed, "compact", "no sliding windows"),
        (build(COMPACT["llama"], torch.float64), "packed", "float64"),
        (windowed, "turbo", "expected one of auto, plain, packed, compact, not 'turbo'"),
    ):
        with pytest.raises(InputError, match=reason):
            choose_engine(model, engine)


def test_pairs_of_every_engine_know_their_models_and_write_the_same_text(
    pair_folder: Path, prompt_ids: list[list[int]]
) -> None:
    pairs = [
        load_pair(pair_folder / "target", pair_folder / "draft", engine=engine)
        for engine in ("plain", "packed", "compact", "auto")
    ]
    assert [pair.engines[0] for pair in pairs] == ["plain", "packed", "compact", "compact"]
    assert len({tuple(pair.fingerprint.items()) for pair in pairs}) == 1
    for tree in (None, "2,2,1"):
        texts = [
            [Speculator(pair, FixedLength(3), Settings(0.0, 16, tree=tree)).generate(ids).tokens for ids in prompt_ids]
            for pair in pairs
        ]
        assert texts[1:] == texts[:1] * 3


def test_the_compact_forward_leaves_its_model_as_it_was() -> None:
    model = build_model()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    speed_up(model, "compact")
    speed_up(build_draft(model), "compact")
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name])
