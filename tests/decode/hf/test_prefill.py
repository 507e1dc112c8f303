"""Prompts that are more than token ids: the greedy text is that of plain `generate`, or the prompt is refused by name."""

from __future__ import annotations

import copy
import functools
import warnings
from pathlib import Path
from typing import Any

import prompts
import pytest
import torch
from small_drafters import small_network
from specstop.decode import model_source, specstop_generate
from specstop.decode.drafters import TrainedDrafter, model as drafters_module, save_drafter
from specstop.decode.models.cuda import CudaGraphModel
from specstop.decode.models.pair import join
from specstop.policies.errors import InputError, PairError
from tape import recorder, simulate_graphs
from torch import Tensor
from transformers import DynamicCache

OPTIONS: dict[str, Any] = {"do_sample": False, "max_new_tokens": 10, "pad_token_id": 0}
DRAFTING: list[dict[str, Any]] = [
    {"policy": "fixed:3"}, {"policy": "fixed:3", "tree": "3,2,1"}, {"policy": "fixed:0"},
    {"policy": "fixed:4", "drafter": "lookup"}, {"policy": "fixed:4", "drafter": "suffix", "tree": "2,2"},
    {"policy": "fixed:2", "verification": "rejection", "tree": "2,2"}, {"policy": "fixed:5", "draft": "target"},
]  # fmt: skip


def one_row(arguments: dict[str, Any], row: int) -> dict[str, Any]:
    for value in arguments.values():
        if isinstance(value, DynamicCache):
            value.batch_select_indices(torch.tensor([row]))
    return {name: value[row : row + 1] if isinstance(value, Tensor) else value for name, value in arguments.items()}


def ours(model: Any, arguments: dict[str, Any], drafting: dict[str, Any] = DRAFTING[0]) -> Tensor:
    drafting = dict(drafting)
    if "drafter" not in drafting:
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        drafting["draft_model"] = copy.deepcopy(base) if drafting.pop("draft", "") == "target" else prompts.draft()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of peft, which ignores positions, and of rows read one at a time
        out: Tensor = model.generate(**arguments, **OPTIONS, **drafting, custom_generate=specstop_generate)
    return out


def plain(model: Any, arguments: dict[str, Any]) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        out: Tensor = model.generate(**arguments, **OPTIONS)
    return out


@pytest.mark.parametrize(
    ("kind", "name"),
    [*(("llama", name) for name in prompts.PROMPTS), *(("mistral", name) for name in list(prompts.PROMPTS)[:-1]),
     ("gpt2", "gaps"), ("gpt2", "a cache and the rest, masked"), ("gpt2", "embeddings"), ("gemma3", "all of it"),
     ("gemma3", "a cache and the whole text")],
)  # fmt: skip
def test_the_text_is_that_of_generate(kind: str, name: str) -> None:
    model = prompts.model(kind)
    expected = plain(model, prompts.prompt(name, model))
    for drafting in DRAFTING if kind == "llama" else DRAFTING[:2]:
        assert torch.equal(ours(model, prompts.prompt(name, model), drafting), expected), drafting
    expected = plain(model, one_row(prompts.prompt(name, model), 1))
    assert torch.equal(ours(model, one_row(prompts.prompt(name, model), 1)), expected)


@pytest.mark.parametrize(
    "options", [{"repetition_penalty": 1.5}, {"no_repeat_ngram_size": 2}, {"min_new_tokens": 9, "eos_token_id": [50, 51]}],
    ids=lambda options: next(iter(options)),
)  # fmt: skip
@pytest.mark.parametrize("name", ["all of it", "a cache and the rest, masked"])
def test_processors_receive_the_prompt_that_generate_gives_them(name: str, options: dict[str, Any]) -> None:
    model = prompts.model("llama")
    expected = plain(model, prompts.prompt(name, model) | options)
    for drafting in DRAFTING[:2]:
        assert torch.equal(ours(model, prompts.prompt(name, model) | options, drafting), expected), drafting


@pytest.mark.parametrize("kind", ["llava", "qwen2-vl", "gemma3"])
def test_a_prompt_with_images_is_read_by_the_target(kind: str) -> None:
    model, other = prompts.model(kind), prompts.images(kind)
    expected = plain(model, prompts.images(kind))
    other["pixel_values"] = 3.0 - 2.0 * other["pixel_values"].flip(-1)
    assert not torch.equal(plain(model, other), expected), "the image matters"
    for drafting in DRAFTING:
        assert torch.equal(ours(model, prompts.images(kind), drafting), expected), drafting
    text = prompts.prompt("gaps", model)  # without an image
    assert torch.equal(ours(model, text), plain(model, text))


@pytest.mark.parametrize(
    ("kind", "adapter", "name"),
    [("llama", "prompt", "left"), ("llama", "prefix", "gaps"), ("llama", "p", "right"), ("llama", "lora", "gaps"),
     ("gpt2", "prompt", "gaps"), ("gpt2", "prefix", "right"), ("gpt2", "lora", "left")],
)  # fmt: skip
def test_an_adapter_is_applied(kind: str, adapter: str, name: str) -> None:
    model = prompts.adapted(kind, adapter)
    expected = plain(model, prompts.prompt(name, model))
    assert not torch.equal(expected, plain(prompts.model(kind), prompts.prompt(name, model))), "the adapter matters"
    for drafting in DRAFTING[:4]:
        assert torch.equal(ours(model, prompts.prompt(name, model), drafting), expected), drafting


def test_adapters_of_single_rows_are_refused_by_name() -> None:
    peft = pytest.importorskip("peft")
    arguments = {"input_ids": prompts.ids(2, 11)}
    with pytest.raises(InputError, match=r"adapter_names.*set_adapter"):
        ours(prompts.adapted("llama", "lora"), {**arguments, "adapter_names": ["default", "__base__"]})
    row, model = one_row(arguments, 0), prompts.adapted("llama", "lora")  # peft leaves its hooks behind an error
    assert torch.equal(ours(model, {**row, "adapter_names": ["default"]}), plain(model, row))
    invocation = arguments["input_ids"][0, 5:7].tolist()
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, alora_invocation_tokens=invocation)
    activated = peft.get_peft_model(copy.deepcopy(prompts.model("llama")), config).double().eval()
    with pytest.raises(InputError, match="alora_offsets"):
        ours(activated, arguments)


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_a_cache_in_the_arguments_is_not_changed(kind: str) -> None:
    model = prompts.model(kind)
    arguments = prompts.prompt("a cache and the rest", model)
    cache = arguments["past_key_values"]
    before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    first = ours(model, arguments)
    assert cache.get_seq_length() == 5
    for layer, (keys, values) in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values)
    assert torch.equal(ours(model, arguments, DRAFTING[1]), first), "it can be used again"


@pytest.mark.parametrize("kind", ["bart", "bloom"])
def test_a_model_without_positions_is_padded_on_the_left_as_in_generate(kind: str) -> None:
    model = copy.deepcopy(prompts.model(kind)).float()  # in float64 the library's mask of padding leaves NaN
    for row in range(3):
        arguments = one_row(prompts.prompt("left", model), row)
        assert torch.equal(ours(model, arguments), plain(model, arguments))


@pytest.mark.parametrize("rows", [1, 3])
def test_a_model_that_computes_its_own_mask_continues_from_a_cache_alone(rows: int) -> None:
    model = prompts.model("bloom")

    def arguments() -> dict[str, Any]:
        prompt = prompts.prompt("a cache and the rest", model)
        return prompt if rows == 3 else one_row(prompt, 1)

    assert torch.equal(ours(model, arguments()), plain(model, arguments()))


def test_prompts_that_the_loop_cannot_continue_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    llama, git = copy.deepcopy(prompts.model("llama")), copy.deepcopy(prompts.model("git")).float()
    embeddings = llama.get_input_embeddings()(prompts.ids(3, 11)).detach()
    far = {"input_ids": prompts.ids(1, 11), "position_ids": torch.arange(110, 121)[None]}
    types = {"input_ids": prompts.ids(3, 11), "token_type_ids": torch.full((3, 11), 7)}
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (prompts.model("gpt2"), types, "token_type_ids"),
        (llama, {"inputs_embeds": embeddings}, "inputs_embeds.*input_ids"),
        (git, one_row(prompts.prompt("left", git), 0), "attention_mask.*GitForCausalLM"),
        (prompts.model("bloom"), prompts.prompt("gaps", prompts.model("bloom")), "attention_mask.*BloomForCausalLM"),
        (prompts.model("gpt2"), far, "reads at most 128"),
        (prompts.model("paligemma"), prompts.images("paligemma"), "PaliGemmaForConditionalGeneration.*tokens after it"),
    ]
    for model, arguments, message in cases:
        with pytest.raises((InputError, PairError), match=message) as error:
            ours(model, arguments)
        assert "\n" not in str(error.value)
    whole = {"input_ids": prompts.ids(1, 11)}
    assert torch.equal(ours(git, whole), plain(git, whole)), "without padding"

    # A model of a later version may prepare its later steps differently.
    stock = llama.prepare_inputs_for_generation

    def prepare(*args: Any, is_first_iteration: bool = False, **kwargs: Any) -> dict[str, Any]:
        inputs: dict[str, Any] = stock(*args, is_first_iteration=is_first_iteration, **kwargs)
        if not is_first_iteration:
            inputs["inputs_embeds"] = 2 * llama.get_input_embeddings()(inputs.pop("input_ids"))
        return inputs

    monkeypatch.setattr(llama, "prepare_inputs_for_generation", prepare)
    with pytest.raises(InputError, match="inputs_embeds.*LlamaForCausalLM"):
        ours(llama, prompts.prompt("gaps", llama))


@pytest.mark.parametrize(
    ("kind", "name", "calls"), [("llama", "left", 1), ("llava", "left", 1), ("llama", "gaps", 3), ("lora", "left", 1)]
)
def test_padding_on_the_left_takes_no_further_calls(kind: str, name: str, calls: int) -> None:
    """Other prompts take a second step and a comparison with it."""
    model = prompts.adapted("llama", "lora") if kind == "lora" else prompts.model(kind)
    arguments, count = one_row(prompts.prompt(name, model), 0), list[int]()
    base = model.get_base_model() if kind == "lora" else model
    handle = base.register_forward_hook(lambda *_: count.append(1))
    try:
        options = {**OPTIONS, "max_new_tokens": 1, "policy": "fixed:0", "draft_model": prompts.draft()}
        model.generate(**arguments, **options, custom_generate=specstop_generate)  # checks the models, once
        count.clear()
        model.generate(**arguments, **options, custom_generate=specstop_generate)
    finally:
        handle.remove()
    assert len(count) == calls


@pytest.mark.parametrize("rows", [1, 3])
def test_prompts_with_gaps_are_not_recorded(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded calls have no gaps and offsets."""
    simulate_graphs(monkeypatch)
    for module in (model_source, drafters_module):
        monkeypatch.setattr(module, "open_cache", functools.partial(CudaGraphModel, recorder=recorder))
    for kind in ("llama", "mistral"):
        model = copy.deepcopy(prompts.model(kind))
        for name in ("gaps", "left", "a cache and the rest, masked", "left"):
            arguments = prompts.prompt(name, model) if rows > 1 else one_row(prompts.prompt(name, model), 1)
            expected = plain(model, copy.deepcopy(arguments))
            for drafting in DRAFTING[:2]:
                assert torch.equal(ours(model, arguments, drafting), expected), name


@pytest.mark.parametrize("name", ["gaps", "right", "a cache and the rest"])
@pytest.mark.parametrize("kind", ["medusa", "layer"])
def test_drafters_that_read_the_targets_states_draft_after_such_a_prompt(kind: str, name: str, tmp_path: Path) -> None:
    model = prompts.model("llama")
    network = small_network(kind, 32, prompts.VOCABULARY, model.lm_head.weight.float())
    folder = save_drafter(TrainedDrafter(kind, network, join(model, None).fingerprint["target"]), tmp_path / kind)
    expected = plain(model, prompts.prompt(name, model))
    for tree in (None, "2,2"):
        drafting = {"policy": "fixed:2", "drafter": f"{kind}:{folder}", "tree": tree}
        assert torch.equal(ours(model, prompts.prompt(name, model), drafting), expected)
