"""Kinds of models: the greedy text of a supported kind is that of `generate`; other kinds are refused by name."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import random_models as table
import torch
import transformers as hub
from conftest import build_model
from specstop.decode import Pair, Settings, Speculator, join, load_pair, plain_texts, with_engine
from specstop.decode.loop import Request
from specstop.policies import FixedLength, InputError, PairError, SpecstopWarning
from torch import Tensor, nn


def texts(
    pair: Pair, prompts: Sequence[list[int]], new: int, depth: int, tree: str | None, batch: int, verification: str
) -> list[list[int]]:
    settings = Settings(0.0, new, tree=tree, verification=verification)
    speculator = Speculator(pair, FixedLength(depth), settings, batch=batch)
    return [list(text.tokens) for text in speculator.run([Request(prompt) for prompt in prompts])]


SUPPORTED = (
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "opt", "gptj", "falcon", "llama4_text",
    "roberta", "hybrid of attention layers",
)  # fmt: skip
REFUSED = {
    **dict.fromkeys(("gpt_neo", "bloom", "falcon alibi"), ("tree",)),
    **dict.fromkeys(("mamba", "rwkv", "roberta encoder"), tuple(table.METHODS)),
}


@pytest.mark.parametrize("name", [*SUPPORTED, *REFUSED])
def test_a_class_gives_the_text_of_generate_or_is_refused_by_name(name, monkeypatch):
    """Alone, side by side, in chains and trees. Windows, attention in chunks, ALiBi, recurrent layers, encoders as decoders.

    `benchmarks/architectures.py` decodes with all classes of transformers, policies and trees.
    """
    hybrid = "granitemoehybrid", {"layer_types": ["full_attention"] * 2}
    monkeypatch.setitem(table.VARIANTS, "hybrid of attention layers", hybrid)
    row, refused = table.sweep_class(name), REFUSED.get(name, ())
    assert row.cells == {method: "refused" if method in refused else "equal" for method in table.METHODS}
    assert not refused or row.cls in row.note


def test_a_router_that_reads_the_weight_of_its_layer_is_not_packed():
    target = table.build_class("hunyuan_v1_moe", {"num_key_value_heads": 4, "head_dim": 4}).float()
    expected = table.expected_texts(target)
    pair = with_engine(join(target, None), "packed")
    assert plain_texts(pair, table.PROMPTS, [0, 0, 0], table.NEW, ignore_eos=True).tokens == expected


def test_a_draft_and_an_attention_that_are_not_supported_are_refused_by_name():
    flex, target = build_model(), build_model()
    flex.config._attn_implementation = "flex_attention"
    for models, message in (
        ((target, table.build_class("mamba", {})), "the draft .*linear_attention layers"),
        ((flex, target), "the target .*flex_attention attention; expected sdpa or eager"),
    ):
        with pytest.raises(PairError, match=message) as error:
            join(*models)
        assert "\n" not in str(error.value)


def test_a_model_without_sdpa_is_loaded_with_eager_attention(tmp_path, tokenizer):
    model = table.build("gemma2", torch.float32, "eager")
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    pair, prompt = load_pair(tmp_path, tmp_path), [5, 6, 7, 8]
    expected = [table.plain(model, prompt, 9)]
    assert texts(pair, [prompt], 9, 3, "2,2", 1, "auto") == expected


def round_inputs(module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    """Round the input of a layer to eight bits, with one scale for all tokens of a call."""
    scale = inputs[0].abs().amax() / 127
    return ((inputs[0] / scale).round() * scale,)


def test_logits_that_depend_on_the_tokens_of_a_call_are_warned_of_once():
    target = table.build_class("llama", {})
    for layer in target.model.layers:
        layer.mlp.down_proj.register_forward_pre_hook(round_inputs)
    with pytest.warns(SpecstopWarning, match="depend on how many tokens"):
        join(target, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        join(target, None)


ORIGINAL = 24
LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [2.0, 4.0, 6.0, 8.0],
    "original_max_position_embeddings": ORIGINAL,
}  # fmt: skip
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 160, "initializer_range": 0.4, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
AROUND = [[7, 7, 9, 41, 22, 60, 12, 30, 31, 5, 44, 18], [3 + at * at % 60 for at in range(27)]]
"""A prompt whose text reaches the length where the factors change, and one that is longer."""


def rotated(kind: str, seed: int = 0, **options: Any) -> hub.PreTrainedModel:
    torch.manual_seed(seed)
    if kind == "phi3":  # its `generate` reads a text again where the factors change
        config = hub.Phi3Config(**SIZES, original_max_position_embeddings=ORIGINAL, rope_parameters=LONG)
        return hub.Phi3ForCausalLM(config).double().eval()
    rope = {"rope_parameters": LONG} if kind == "llama-long" else {}
    return hub.LlamaForCausalLM(hub.LlamaConfig(**{**SIZES, **rope, **options})).double().eval()


@pytest.mark.parametrize(("kind", "draft_kind"), [("phi3", "llama-long"), ("llama-long", "same"), ("llama", "phi3")])
def test_position_encodings_that_change_with_the_length_give_the_text_of_generate(kind, draft_kind):
    target = rotated(kind)
    pair = join(target, table.noisy(target) if draft_kind == "same" else rotated(draft_kind, 1))
    expected = [table.plain(target, prompt, 20) for prompt in AROUND]
    assert plain_texts(pair, AROUND, [0] * 2, 20).tokens == expected
    for options in (
        (0, None, 2, "auto"),
        (4, None, 2, "rejection"),
        (2, "2,2", 2, "match"),
        (3, "3,2,1", 1, "rejection"),
    ):
        assert texts(pair, AROUND, 20, *options) == expected, options


def test_dynamic_factors_are_refused_beyond_the_length_where_they_change():
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    target = rotated("llama", max_position_embeddings=30, rope_parameters=rope)
    pair, prompts = join(target, table.noisy(target)), [[5, 9, 17, 33, 3, 8]]
    assert texts(pair, prompts, 24, 4, None, 1, "auto") == [table.plain(target, prompts[0], 24)]
    with pytest.raises(InputError, match="reads at most 30"):
        texts(pair, prompts, 25, 4, None, 1, "auto")
