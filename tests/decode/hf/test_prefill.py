"""Prompts that are more than token ids: the greedy text is that of plain `generate`, or the prompt is refused by name."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import peft
import pytest
import random_models as table
import torch
import transformers as hub
from small_drafters import small_network
from specstop.decode import specstop_generate
from specstop.decode.drafters import TrainedDrafter, save_drafter
from specstop.decode.models.pair import join
from specstop.policies.errors import InputError, PairError
from tape import record_calls
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

# peft warns that it ignores positions, the loop that it reads rows one at a time.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

OPTIONS: dict[str, Any] = {"do_sample": False, "max_new_tokens": 10, "pad_token_id": 0}
DRAFTING: list[dict[str, Any]] = [
    {"policy": "fixed:3"}, {"policy": "fixed:3", "tree": "3,2,1"}, {"policy": "fixed:0"},
    {"policy": "fixed:4", "drafter": "suffix", "tree": "2,2"},
    {"policy": "fixed:2", "verification": "rejection", "tree": "2,2"}, {"policy": "fixed:5", "draft": "target"},
]  # fmt: skip
VOCABULARY, IMAGE = table.VOCABULARY, 7


def qwen2_vl() -> PreTrainedModel:
    """Return a model with positions of three dimensions for tokens of images."""
    vision = {"depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    text = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2, "rope_parameters": rope}
    text |= {
        name: table.SMALL[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "initializer_range")
    }
    text |= {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0, "tie_word_embeddings": False}
    tokens = {"image_token_id": IMAGE, "video_token_id": 6, "vision_start_token_id": 5, "vision_end_token_id": 4}
    torch.manual_seed(0)
    config = hub.Qwen2VLConfig(vision_config=vision, text_config=text, **tokens)
    return hub.Qwen2VLForConditionalGeneration(config).double().eval()


@functools.cache
def small_model(kind: str) -> Any:
    """Return a small model in float64, such as "gpt2", or "gpt2+lora" under an adapter. Tests that change it copy it."""
    name, _, adapter = kind.partition("+")
    if not adapter:
        return qwen2_vl() if name == "qwen2-vl" else table.build_class(name, {})  # the window of Mistral has 8 tokens
    options: dict[str, Any] = {"task_type": peft.TaskType.CAUSAL_LM}
    config = {
        "prompt": lambda: peft.PromptTuningConfig(**options, num_virtual_tokens=4),
        "prefix": lambda: peft.PrefixTuningConfig(**options, num_virtual_tokens=4),
        "lora": lambda: peft.LoraConfig(**options, r=4),
    }[adapter]()
    wrapped = peft.get_peft_model(copy.deepcopy(small_model(name)), config).double().eval()
    torch.manual_seed(2)
    for key, parameter in wrapped.named_parameters():
        if "lora_B" in key or "prompt" in key:
            parameter.data.normal_(0, 0.4)
    return wrapped


@functools.cache
def draft() -> PreTrainedModel:
    return table.build_class("llama", {"num_hidden_layers": 1})


def ids(rows: int, length: int, seed: int = 3) -> Tensor:
    return torch.randint(8, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def mask(rows: int, length: int, *zeros: tuple[int, slice | int]) -> Tensor:
    ones = torch.ones(rows, length, dtype=torch.long)
    for row, columns in zeros:
        ones[row, columns] = 0
    return ones


def cached(target: PreTrainedModel, tokens: int, whole: bool, *zeros: tuple[int, slice | int]) -> dict[str, Any]:
    """Return the whole text of three rows or what follows a prefix, and the cache of the prefix."""
    prefix, cache = ids(3, tokens, 5), DynamicCache(config=target.config.get_text_config())
    with torch.no_grad():
        target(prefix, past_key_values=cache)
    text = torch.cat([prefix, ids(3, 11)], 1) if whole else ids(3, 11)
    return {"input_ids": text, "attention_mask": mask(3, tokens + 11, *zeros), "past_key_values": cache}


def embedded(target: PreTrainedModel) -> dict[str, Any]:
    embeddings = target.get_input_embeddings()(ids(3, 11, 9)).detach()
    return {"inputs_embeds": embeddings, "attention_mask": mask(3, 11, (1, 4))}


LEFT = (0, slice(3)), (2, 0)
PROMPTS: dict[str, Callable[[PreTrainedModel], dict[str, Any]]] = {
    "left": lambda target: {"attention_mask": mask(3, 11, *LEFT)},
    "right": lambda target: {"attention_mask": mask(3, 11, (0, slice(9, None)), (1, -1))},
    "gaps": lambda target: {"attention_mask": mask(3, 11, (0, 3), (1, slice(4, 7)))},
    "all of it": lambda target: {"attention_mask": mask(3, 11, (0, slice(2)), (0, 5), (1, 1), (2, -1))},
    "positions": lambda target: {"position_ids": torch.arange(40, 51).repeat(3, 1)},
    "positions apart": lambda target: {
        "attention_mask": mask(3, 11, *LEFT), "position_ids": 2 * torch.arange(11).repeat(3, 1),
    },
    "a cache and the whole text": lambda target: cached(target, 9, True),
    "a cache and the rest": lambda target: cached(target, 5, False),
    "a cache and the rest, masked": lambda target: cached(target, 9, False, (0, slice(2)), (1, 12), (2, -1)),
    "embeddings": embedded,
}  # fmt: skip


def prompt_of(name: str, target: PreTrainedModel) -> dict[str, Any]:
    """Return a prompt of three rows as arguments of `generate`, with a new cache each time."""
    return {"input_ids": ids(3, 11), **PROMPTS[name](target)}


def images() -> dict[str, Any]:
    """Return a prompt with images for `qwen2_vl`, with padding on the left."""
    tokens, grid = ids(2, 16), torch.tensor([[1, 4, 4], [1, 4, 8]])  # four patches to a token
    tokens[0, 2], tokens[0, 3:7], tokens[0, 7] = 5, IMAGE, 4
    tokens[1, 4], tokens[1, 5:13], tokens[1, 13] = 5, IMAGE, 4
    pixels = torch.randn(int(grid.prod(1).sum()), 96, generator=torch.Generator().manual_seed(2)).double()
    more = {"image_grid_thw": grid, "mm_token_type_ids": (tokens == IMAGE).long()}
    return {"input_ids": tokens, "attention_mask": mask(2, 16, LEFT[0]), "pixel_values": pixels, **more}


def one_row(arguments: dict[str, Any], row: int) -> dict[str, Any]:
    for value in arguments.values():
        if isinstance(value, DynamicCache):
            value.batch_select_indices(torch.tensor([row]))
    return {name: value[row : row + 1] if isinstance(value, Tensor) else value for name, value in arguments.items()}


def ours(model: Any, arguments: dict[str, Any], drafting: dict[str, Any] = DRAFTING[0]) -> Tensor:
    drafting = dict(drafting)
    if "drafter" not in drafting:
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        drafting["draft_model"] = copy.deepcopy(base) if drafting.pop("draft", "") == "target" else draft()
    out: Tensor = model.generate(**arguments, **OPTIONS, **drafting, custom_generate=specstop_generate)
    return out


def plain(model: Any, arguments: dict[str, Any]) -> Tensor:
    out: Tensor = model.generate(**arguments, **OPTIONS)
    return out


PROCESSORS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.5}, {"no_repeat_ngram_size": 2}, {"min_new_tokens": 9, "eos_token_id": [50, 51]},
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "name", "options"),
    [
        *(("llama", name, {}) for name in PROMPTS),
        *(("mistral", name, {}) for name in PROMPTS if name in ("gaps", "positions") or "cache" in name),
        ("gpt2", "a cache and the rest, masked", {}), ("gpt2", "embeddings", {}),
        ("llama+prompt", "left", {}), ("llama+prefix", "gaps", {}), ("gpt2+prefix", "right", {}), ("gpt2+lora", "gaps", {}),
        *((f"{kind}, recorded", name, {}) for kind in ("llama", "mistral") for name in ("gaps", "left")),
        *(("llama", "a cache and the rest, masked", options) for options in PROCESSORS),
    ],
)  # fmt: skip
def test_the_text_is_that_of_generate_and_a_cache_is_not_changed(kind, name, options, monkeypatch):
    """Processors receive the prompt that `generate` gives them. Recorded calls have no gaps and offsets."""
    kind, _, recorded = kind.partition(", ")
    model = small_model(kind)
    if recorded:
        record_calls(monkeypatch)
        model = copy.deepcopy(model)
        monkeypatch.setitem(globals(), "draft", draft.__wrapped__)  # a new draft, without calls that were not recorded
    expected, arguments = plain(model, prompt_of(name, model) | options), prompt_of(name, model) | options
    if "+" in kind:
        base = small_model(kind.partition("+")[0])
        assert not torch.equal(expected, plain(base, prompt_of(name, base))), "the adapter matters"
    for drafting in DRAFTING if kind == "llama" and name in ("gaps", "a cache and the rest") else DRAFTING[:2]:
        assert torch.equal(ours(model, arguments, drafting), expected), drafting
    expected = plain(model, one_row(prompt_of(name, model) | options, 1))
    assert torch.equal(ours(model, one_row(arguments, 1)), expected)


def test_a_prompt_with_images_is_read_by_the_target():
    model, other = small_model("qwen2-vl"), images()
    expected = plain(model, images())
    other["pixel_values"] = 3.0 - 2.0 * other["pixel_values"].flip(-1)
    assert not torch.equal(plain(model, other), expected), "the image matters"
    for drafting in DRAFTING[:2]:
        assert torch.equal(ours(model, images(), drafting), expected), drafting
    text = prompt_of("gaps", model)  # without an image
    assert torch.equal(ours(model, text), plain(model, text))


def test_a_model_that_computes_its_mask_is_padded_on_the_left_and_continues_from_a_cache():
    model = copy.deepcopy(small_model("bloom")).float()  # in float64 the library's mask of padding leaves NaN
    for name, row in (("left", 0), ("a cache and the rest", 1)):
        arguments = [one_row(prompt_of(name, model), row) for _ in range(2)]
        assert torch.equal(ours(model, arguments[0]), plain(model, arguments[1]))


def test_prompts_that_the_loop_cannot_continue_are_refused_by_name():
    llama, git = copy.deepcopy(small_model("llama")), copy.deepcopy(small_model("git")).float()
    embeddings = llama.get_input_embeddings()(ids(3, 11)).detach()
    far = {"input_ids": ids(1, 11), "position_ids": torch.arange(240, 251)[None]}
    types = {"input_ids": ids(3, 11), "token_type_ids": torch.full((3, 11), 7)}
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (small_model("gpt2"), types, "token_type_ids"),
        (llama, {"inputs_embeds": embeddings}, "inputs_embeds.*input_ids"),
        (git, one_row(prompt_of("left", git), 0), "attention_mask.*GitForCausalLM"),
        (small_model("bloom"), prompt_of("gaps", small_model("bloom")), "attention_mask.*BloomForCausalLM"),
        (small_model("gpt2"), far, "reads at most 256"),
    ]
    for model, arguments, message in cases:
        with pytest.raises((InputError, PairError), match=message) as error:
            ours(model, arguments)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(("kind", "name"), [("medusa", "gaps"), ("layer", "a cache and the rest")])
def test_drafters_that_read_the_targets_states_draft_after_such_a_prompt(kind, name, tmp_path):
    model = small_model("llama")
    network = small_network(kind, 32, VOCABULARY, model.lm_head.weight.float())
    folder = save_drafter(TrainedDrafter(kind, network, join(model, None).fingerprint["target"]), tmp_path / kind)
    expected = plain(model, prompt_of(name, model))
    for tree in (None, "2,2"):
        drafting = {"policy": "fixed:2", "drafter": f"{kind}:{folder}", "tree": tree}
        assert torch.equal(ours(model, prompt_of(name, model), drafting), expected)
