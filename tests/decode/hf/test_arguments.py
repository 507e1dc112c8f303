"""Each argument that transformers' `generate` accepts is honoured, has no effect, or is refused by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import NEW
from specstop.decode import specstop_generate
from specstop.decode.hf import arguments
from specstop.decode.models.pair import Pair
from specstop.policies.errors import InputError, PairError
from stock_generate import inputs, stock
from torch import Tensor
from transformers import (
    CompileConfig,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    PreTrainedTokenizerFast,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
    TextStreamer,
    WatermarkingConfig,
)


@pytest.fixture(scope="session")
def pair(plain_pair: Pair) -> Pair:
    return plain_pair


def ours(pair: Pair, prompts: list[list[int]], **more: Any) -> Any:
    options = {"max_new_tokens": NEW, "do_sample": False, "policy": "fixed:3", "draft_model": pair.draft, **more}
    return pair.target.generate(**inputs(prompts), custom_generate=specstop_generate, **options)


def test_every_field_of_the_installed_generation_config_is_in_one_table() -> None:
    fields = [name for name in vars(GenerationConfig()) if not name.startswith("_") and name != "transformers_version"]
    tables = [arguments.SUPPORTED - {"transformers_version"}, arguments.REFUSED, arguments.REFUSED_IN_CALLS]
    assert sorted(fields) == sorted(name for table in tables for name in table)


def test_every_parameter_of_the_installed_generate_is_in_one_table() -> None:
    names = list(inspect.signature(GenerationMixin.generate).parameters)
    assert sorted(names) == sorted([*arguments.PARAMETERS, *arguments.DROPPED])


REFUSED: dict[str, Any] = {
    "num_beams": 2, "output_scores": True, "output_logits": True, "output_attentions": True, "output_hidden_states": True,
    "penalty_alpha": 0.6, "dola_layers": "high", "guidance_scale": 1.5,
    "prompt_lookup_num_tokens": 3, "num_assistant_tokens": 5,
    "assistant_confidence_threshold": 0.2, "use_cache": False, "cache_implementation": "offloaded",
    "prefill_chunk_size": 4, "compile_config": CompileConfig(), "use_mtp": True, "constraints": [1],
    "force_words_ids": [[3]], "diversity_penalty": 0.5, "low_memory": True, "assistant_ensemble_weight": 0.5,
    "assistant_early_exit": 1, "speculation_type": "dflash",
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_done_is_refused_by_name(pair: Pair, prompt_ids: list[list[int]], name: str) -> None:
    more = {"return_dict_in_generate": True} if name.startswith("output_") else {}
    with pytest.raises(InputError, match=rf"{name}\b.*(leave it out|expected|use )") as error:
        ours(pair, prompt_ids[:1], **{name: REFUSED[name]}, **more)
    assert "\n" not in str(error.value)


class _LaterConfig(GenerationConfig):  # type: ignore[misc]
    """The configuration of a later version."""

    def __init__(self, **kwargs: Any) -> None:
        self.later_field = kwargs.pop("later_field", None)
        super().__init__(**kwargs)


def test_a_field_of_a_later_version_is_refused_unless_it_has_no_value(
    pair: Pair, prompt_ids: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arguments, "GenerationConfig", _LaterConfig)
    config = _LaterConfig(max_new_tokens=NEW, do_sample=False, pad_token_id=0, later_field=0.5)
    with pytest.raises(InputError, match=r"later_field=0\.5"):
        ours(pair, prompt_ids[:1], generation_config=config)
    config.later_field = None
    assert torch.equal(ours(pair, prompt_ids[:1], generation_config=config), stock(pair, prompt_ids[:1]))


def test_what_a_models_file_carries_for_other_code_is_no_argument(
    pair: Pair, prompt_ids: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair.target.generation_config, "chat_format", "chatml", raising=False)
    monkeypatch.setattr(pair.target.generation_config, "num_assistant_tokens", 5)
    assert torch.equal(ours(pair, prompt_ids[:1]), stock(pair, prompt_ids[:1]))
    with pytest.raises(InputError, match="num_assistant_tokens=6"):
        ours(pair, prompt_ids[:1], num_assistant_tokens=6)
    with pytest.raises(InputError, match="my_field"):
        ours(pair, prompt_ids[:1], generation_config=GenerationConfig(max_new_tokens=4, my_field=1))


@pytest.mark.parametrize("name", ["num_items_in_batch", "is_causal", "seq_idx", "output_router_logits"])
def test_an_unknown_input_of_the_model_is_refused_by_name(pair: Pair, prompt_ids: list[list[int]], name: str) -> None:
    with pytest.raises(InputError, match=name):
        ours(pair, prompt_ids[:1], **{name: True})


DROPPED: dict[str, tuple[Callable[[Pair, PreTrainedTokenizerFast], Any], str]] = {
    "assistant_model": (lambda pair, tokenizer: pair.draft, "expected draft_model="),
    "streamer": (lambda pair, tokenizer: TextStreamer(tokenizer), "expected text_streamer="),
    "synced_gpus": (lambda pair, tokenizer: True, "leave it out"),
}


@pytest.mark.parametrize("name", DROPPED)
@pytest.mark.parametrize("drafter", ["model", "lookup"])
def test_what_generate_drops_is_refused_by_name(
    pair: Pair, tokenizer: PreTrainedTokenizerFast, prompt_ids: list[list[int]], name: str, drafter: str
) -> None:
    make, hint = DROPPED[name]
    draft = {"draft_model": pair.draft if drafter == "model" else None, "drafter": drafter}
    with pytest.raises(InputError, match=f"{name}.*{hint}|{hint}.*{name}"):
        ours(pair, prompt_ids[:1], **{name: make(pair, tokenizer)}, **draft)


def test_a_parameter_of_a_later_generate_is_refused(
    pair: Pair, prompt_ids: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arguments, "PARAMETERS", arguments.PARAMETERS - {"prefix_allowed_tokens_fn"})
    with pytest.raises(InputError, match="prefix_allowed_tokens_fn"):
        ours(pair, prompt_ids[:1], prefix_allowed_tokens_fn=lambda batch, ids: [3])


def test_an_encoder_decoder_is_refused_by_name(pair: Pair) -> None:
    config = T5Config(vocab_size=48, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config)
    with pytest.raises(PairError, match="T5ForConditionalGeneration"):
        model.generate(torch.ones(1, 3, dtype=torch.long), custom_generate=specstop_generate, drafter="lookup")


HONOURED: list[dict[str, Any]] = [
    {"cache_implementation": "static"}, {"cache_implementation": "dynamic"}, {"disable_compile": True}, {"max_time": 60.0},
    {"renormalize_logits": True}, {"remove_invalid_values": True}, {"forced_bos_token_id": 7}, {"forced_eos_token_id": 7},
    {"suppress_tokens": [9, 11]}, {"begin_suppress_tokens": [9, 11, 3]}, {"sequence_bias": [[[9], -5.0], [[30, 31], 2.0]]},
    {"exponential_decay_length_penalty": (3, 1.5)}, {"min_length": 20}, {"early_stopping": True, "length_penalty": 2.0},
    {"watermarking_config": WatermarkingConfig(bias=3.0, seeding_scheme="lefthash")}, {"logits_to_keep": 3},
]  # fmt: skip


@pytest.mark.parametrize("options", HONOURED, ids=lambda options: next(iter(options)))
def test_what_is_honoured_gives_the_text_of_generate(
    pair: Pair, prompt_ids: list[list[int]], options: dict[str, Any]
) -> None:
    for tree in (None, "3,2"):
        assert torch.equal(ours(pair, prompt_ids[4:7], tree=tree, **options), stock(pair, prompt_ids[4:7], **options))


def test_several_sequences_are_drawn_of_each_prompt(pair: Pair, prompt_ids: list[list[int]]) -> None:
    options = {"do_sample": True, "num_return_sequences": 3, "seed": 4}
    made: Tensor = ours(pair, prompt_ids[3:5], **options)
    assert len(made) == 6 and len({tuple(row) for row in made.tolist()}) > 2
    assert made[:3, 0].unique().numel() == 1


def static(pair: Pair) -> StaticCache:
    cache = StaticCache(config=pair.target.config, max_cache_len=64)
    pair.target(torch.tensor([[3, 4]]), past_key_values=cache)
    return cache


def offloaded(pair: Pair) -> DynamicCache:
    cache = DynamicCache(config=pair.target.config)
    pair.target(torch.tensor([[3, 4]]), past_key_values=cache)
    cache.offloading = True
    return cache


@pytest.mark.parametrize("make", [static, offloaded])
def test_a_cache_that_cannot_be_copied_is_refused(
    pair: Pair, prompt_ids: list[list[int]], make: Callable[[Pair], Any]
) -> None:
    with torch.no_grad(), pytest.raises(InputError, match="past_key_values: expected a DynamicCache"):
        ours(pair, prompt_ids[4:5], past_key_values=make(pair))
