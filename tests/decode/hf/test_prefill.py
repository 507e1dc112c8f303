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

NEW = 14
OPTIONS: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0}
DRAFTING: list[dict[str, Any]] = [
    {"policy": "fixed:3"}, {"policy": "fixed:0"}, {"policy": "fixed:3", "tree": "3,2,1"},
    {"policy": "fixed:4", "drafter": "lookup"}, {"policy": "fixed:4", "drafter": "suffix", "tree": "2,2"},
    {"policy": "fixed:2", "verification": "rejection", "tree": "2,2"}, {"policy": "fixed:5", "draft": "target"},
]  # fmt: skip


def one_row(arguments: dict[str, Any], row: int) -> dict[str, Any]:
    for value in arguments.values():
        if isinstance(value, DynamicCache):
            value.batch_select_indices(torch.tensor([row]))
    return {name: value[row : row + 1] if isinstance(value, Tensor) else value for name, value in arguments.items()}


def ours(model: Any, arguments: dict[str, Any], drafting: dict[str, Any]) -> Tensor:
    drafting = dict(drafting)
    if "drafter" not in drafting:
        own = model.get_base_model() if hasattr(model, "get_base_model") else model
        drafting["draft_model"] = copy.deepcopy(own) if drafting.pop("draft", "") == "target" else prompts.draft()
    made: Tensor = model.generate(**arguments, **OPTIONS, **drafting, custom_generate=specstop_generate)
    return made


@pytest.mark.parametrize(
    ("kind", "name"),
    # Gemma3 with images takes no embeddings in `generate`.
    [(kind, name) for kind in ("llama", "gpt2", "mistral", "gemma3") for name in prompts.PROMPTS
     if (kind, name) != ("gemma3", "embeddings")],
)  # fmt: skip
def test_the_text_is_that_of_generate(kind: str, name: str) -> None:
    model = prompts.model(kind)
    plain = model.generate(**prompts.prompt(name, model), **OPTIONS)
    for drafting in DRAFTING if kind == "llama" else DRAFTING[:3]:
        assert torch.equal(ours(model, prompts.prompt(name, model), drafting), plain), drafting
    alone = one_row(prompts.prompt(name, model), 1)
    plain = model.generate(**one_row(prompts.prompt(name, model), 1), **OPTIONS)
    assert torch.equal(ours(model, alone, DRAFTING[0]), plain)


@pytest.mark.parametrize(
    "options", [{"repetition_penalty": 1.5}, {"no_repeat_ngram_size": 2}, {"min_new_tokens": 9, "eos_token_id": [50, 51]}],
    ids=lambda options: next(iter(options)),
)  # fmt: skip
@pytest.mark.parametrize("name", ["all of it", "a cache and the rest, masked"])
def test_processors_see_the_prompt_that_generate_gives_them(name: str, options: dict[str, Any]) -> None:
    model = prompts.model("llama")
    plain = model.generate(**prompts.prompt(name, model), **OPTIONS, **options)
    for drafting in DRAFTING[:3]:
        assert torch.equal(ours(model, {**prompts.prompt(name, model), **options}, drafting), plain), drafting


@pytest.mark.parametrize("kind", ["llava", "qwen2-vl", "qwen2.5-vl", "gemma3"])
def test_a_prompt_with_images_is_read_by_the_target(kind: str) -> None:
    model = prompts.model(kind)
    plain = model.generate(**prompts.images(kind), **OPTIONS)
    other = prompts.images(kind)
    other["pixel_values"] = 3.0 - 2.0 * other["pixel_values"].flip(-1)
    assert not torch.equal(model.generate(**other, **OPTIONS), plain), "the image is read"
    for drafting in DRAFTING:
        assert torch.equal(ours(model, prompts.images(kind), drafting), plain), drafting
    text = prompts.prompt("gaps", model)  # without an image
    assert torch.equal(ours(model, text, DRAFTING[0]), model.generate(**text, **OPTIONS))


@pytest.mark.parametrize("name", ["left", "gaps", "right"])
@pytest.mark.parametrize("adapter", ["prompt", "prefix", "p", "lora"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_an_adapter_is_applied(kind: str, adapter: str, name: str) -> None:
    pytest.importorskip("peft")
    model = prompts.adapted(kind, adapter)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of peft: it ignores positions
        plain = model.generate(**prompts.prompt(name, model), **OPTIONS)
        bare = prompts.model(kind).generate(**prompts.prompt(name, model), **OPTIONS)
        assert not torch.equal(plain, bare), "the adapter has an effect"
        for drafting in DRAFTING[:4]:
            assert torch.equal(ours(model, prompts.prompt(name, model), drafting), plain), drafting


def test_adapters_of_single_rows_are_refused_by_name() -> None:
    peft = pytest.importorskip("peft")
    arguments = {"input_ids": prompts.ids(2, 11)}
    model = prompts.adapted("llama", "lora")
    with pytest.raises(InputError, match=r"adapter_names.*set_adapter"):
        ours(model, {**arguments, "adapter_names": ["default", "__base__"]}, DRAFTING[0])
    row, model = one_row(arguments, 0), prompts.adapted("llama", "lora")  # peft leaves its hooks behind an error
    named = ours(model, {**row, "adapter_names": ["default"]}, DRAFTING[0])
    assert torch.equal(named, model.generate(**row, **OPTIONS))
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, alora_invocation_tokens=arguments["input_ids"][0, 5:7].tolist()
    )
    activated = peft.get_peft_model(copy.deepcopy(prompts.model("llama")), config).double().eval()
    with pytest.raises(InputError, match="alora_offsets"):
        ours(activated, arguments, DRAFTING[0])


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_the_given_cache_is_not_changed(kind: str) -> None:
    model = prompts.model(kind)
    arguments = prompts.prompt("a cache and the rest", model)
    cache = arguments["past_key_values"]
    before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    first = ours(model, arguments, DRAFTING[0])
    assert cache.get_seq_length() == 5
    for layer, (keys, values) in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values)
    assert torch.equal(ours(model, arguments, DRAFTING[2]), first), "it can be used again"


@pytest.mark.parametrize(
    ("kind", "name", "more"),
    [
        ("gpt2", "token_type_ids", lambda model: {"token_type_ids": torch.full((3, 11), 7)}),
        ("llama", "inputs_embeds", lambda model: {
            "input_ids": None, "inputs_embeds": model.get_input_embeddings()(prompts.ids(3, 11)).detach()}),
    ],
)  # fmt: skip
def test_what_cannot_be_gone_on_from_is_refused_by_name(kind: str, name: str, more: Any) -> None:
    model = prompts.model(kind)
    arguments = {"input_ids": prompts.ids(3, 11), **more(model)}
    with pytest.raises(InputError, match=rf"{name}.*(leave it out|pass the input_ids)") as error:
        ours(model, {key: value for key, value in arguments.items() if value is not None}, DRAFTING[0])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["bart", "bloom"])
def test_a_model_without_positions_is_padded_on_the_left_as_in_generate(kind: str) -> None:
    model = copy.deepcopy(prompts.model(kind)).float()  # in float64 the library's mask of padding leaves NaN
    for row in range(3):
        alone = one_row(prompts.prompt("left", model), row)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert torch.equal(ours(model, alone, DRAFTING[0]), model.generate(**alone, **OPTIONS))


def test_a_model_that_reads_masked_padding_is_refused_by_name() -> None:
    model = copy.deepcopy(prompts.model("git")).float()
    with pytest.raises(InputError, match=r"attention_mask.*GitForCausalLM"):
        ours(model, one_row(prompts.prompt("left", model), 0), DRAFTING[0])
    whole = {"input_ids": prompts.ids(1, 11)}
    assert torch.equal(ours(model, whole, DRAFTING[0]), model.generate(**whole, **OPTIONS))


@pytest.mark.parametrize("rows", [1, 3])
def test_a_model_that_takes_no_mask_of_ours_goes_on_from_a_cache_alone(rows: int) -> None:
    model = prompts.model("bloom")

    def arguments(name: str) -> dict[str, Any]:
        made = prompts.prompt(name, model)
        return made if rows == 3 else one_row(made, 1)

    plain = model.generate(**arguments("a cache and the rest"), **OPTIONS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rows are read one at a time
        assert torch.equal(ours(model, arguments("a cache and the rest"), DRAFTING[0]), plain)
        with pytest.raises(InputError, match="attention_mask: BloomForCausalLM continues"):
            ours(model, arguments("gaps"), DRAFTING[0])


def test_a_model_that_goes_on_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of a later version may prepare its later steps differently."""
    model = copy.deepcopy(prompts.model("llama"))
    stock = model.prepare_inputs_for_generation

    def prepare(*args: Any, is_first_iteration: bool = False, **kwargs: Any) -> dict[str, Any]:
        made: dict[str, Any] = stock(*args, is_first_iteration=is_first_iteration, **kwargs)
        if not is_first_iteration:
            made["inputs_embeds"] = 2 * model.get_input_embeddings()(made.pop("input_ids"))
        return made

    monkeypatch.setattr(model, "prepare_inputs_for_generation", prepare)
    arguments = prompts.prompt("gaps", model)
    with pytest.raises(InputError, match="inputs_embeds: LlamaForCausalLM continues"):
        ours(model, arguments, DRAFTING[0])


def test_positions_beyond_what_the_target_reads_are_refused() -> None:
    arguments = {"input_ids": prompts.ids(1, 11), "position_ids": torch.arange(110, 121)[None]}
    with pytest.raises(InputError, match="reads at most 128"):
        ours(prompts.model("gpt2"), arguments, DRAFTING[0])


@pytest.mark.parametrize(
    ("kind", "name", "calls"), [("llama", "left", 1), ("llava", "left", 1), ("llama", "gaps", 3), ("lora", "left", 1)]
)
def test_padding_on_the_left_takes_no_further_calls(kind: str, name: str, calls: int) -> None:
    """A row of ids after padding is read as ever, once; other prompts take a second step and a comparison with it."""
    if kind == "lora":
        pytest.importorskip("peft")
    model = prompts.adapted("llama", "lora") if kind == "lora" else prompts.model(kind)
    arguments = one_row(prompts.prompt(name, model), 0)
    made: list[int] = []
    inner = model.get_base_model() if kind == "lora" else model
    handle = inner.register_forward_hook(lambda *_: made.append(1))
    try:
        more = {**OPTIONS, "max_new_tokens": 1, "policy": "fixed:0", "draft_model": prompts.draft()}
        model.generate(**arguments, **more, custom_generate=specstop_generate)  # once, models are checked
        made.clear()
        model.generate(**arguments, **more, custom_generate=specstop_generate)
    finally:
        handle.remove()
    assert len(made) == calls


def test_a_model_whose_prompts_are_read_in_both_directions_is_refused_by_name() -> None:
    model = prompts.model("paligemma")
    with pytest.raises(PairError, match=r"PaliGemmaForConditionalGeneration.*tokens after it"):
        ours(model, prompts.images("paligemma"), DRAFTING[0])


@pytest.mark.parametrize("rows", [1, 3])
def test_recordings_for_a_gpu_step_aside(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recorded call knows of no gaps and offsets: texts that have them are read as they are."""
    simulate_graphs(monkeypatch)
    for module in (model_source, drafters_module):
        monkeypatch.setattr(module, "open_cache", functools.partial(CudaGraphModel, recorder=recorder))
    for kind in ("llama", "mistral"):
        model = copy.deepcopy(prompts.model(kind))
        for name in ("gaps", "left", "a cache and the rest, masked", "left"):
            arguments = prompts.prompt(name, model) if rows > 1 else one_row(prompts.prompt(name, model), 1)
            plain = model.generate(**copy.deepcopy(arguments), **OPTIONS)
            for drafting in (DRAFTING[0], DRAFTING[2]):
                assert torch.equal(ours(model, arguments, drafting), plain), name


@pytest.mark.parametrize("name", ["gaps", "right", "a cache and the rest"])
@pytest.mark.parametrize("kind", ["medusa", "layer"])
def test_drafters_on_the_targets_states_draft_after_such_a_prompt(kind: str, name: str, tmp_path: Path) -> None:
    """They read the target's hidden states of the tokens that it has read in this call."""
    model = prompts.model("llama")
    network = small_network(kind, 32, prompts.VOCABULARY, model.lm_head.weight.float())
    folder = save_drafter(TrainedDrafter(kind, network, join(model, None).fingerprint["target"]), tmp_path / kind)
    plain = model.generate(**prompts.prompt(name, model), **OPTIONS)
    for tree in (None, "2,2"):
        drafting = {"policy": "fixed:2", "drafter": f"{kind}:{folder}", "tree": tree}
        assert torch.equal(ours(model, prompts.prompt(name, model), drafting), plain)
