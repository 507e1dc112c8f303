"""Small models with prompts of every kind, in float64: their greedy texts have no ties."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    BartConfig,
    BartForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    CLIPVisionConfig,
    DynamicCache,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GemmaConfig,
    GitConfig,
    GitForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MistralConfig,
    MistralForCausalLM,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    PreTrainedModel,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    SiglipVisionConfig,
)

VOCABULARY, IMAGE = 120, 7
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 128, "initializer_range": 0.4, "eos_token_id": None,
    "bos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
WINDOW = 6
IMAGES = {"image_token_id": IMAGE, "video_token_id": 6, "vision_start_token_id": 5, "vision_end_token_id": 4}


def gpt2() -> PreTrainedModel:
    config = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128}
    ends = {"eos_token_id": None, "bos_token_id": 1, "tie_word_embeddings": False}
    return GPT2LMHeadModel(GPT2Config(**config, **ends, initializer_range=0.4))


def git() -> PreTrainedModel:
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = GitConfig(
        vision_config={**vision, "image_size": 8, "patch_size": 4}, vocab_size=120, hidden_size=32, num_hidden_layers=2,
        num_attention_heads=4, intermediate_size=48, max_position_embeddings=64, initializer_range=0.4, bos_token_id=1,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return GitForCausalLM(config)


def bart() -> PreTrainedModel:
    """A model that takes no positions and counts padding as well."""
    config = {
        "vocab_size": VOCABULARY,
        "d_model": 32,
        "decoder_layers": 2,
        "decoder_attention_heads": 2,
        "init_std": 0.4,
    }
    ends = {"eos_token_id": None, "bos_token_id": 1, "pad_token_id": 0, "forced_eos_token_id": None}
    return BartForCausalLM(BartConfig(**config, **ends, decoder_ffn_dim=64, max_position_embeddings=128))


def bloom() -> PreTrainedModel:
    """A model that makes its mask and the biases of positions itself."""
    config = {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 2, "initializer_range": 0.4}
    return BloomForCausalLM(BloomConfig(**config, eos_token_id=None, bos_token_id=1, pad_token_id=0))


def gemma3() -> PreTrainedModel:
    text = Gemma3TextConfig(**TEXT, head_dim=16, sliding_window=WINDOW)
    tokens = {"mm_tokens_per_image": 4, "image_token_index": IMAGE, "boi_token_index": 5, "eoi_token_index": 4}
    model = Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=text, vision_config=SiglipVisionConfig(**VISION), **tokens)
    )
    # Its weights start at zero; and embeddings are scaled up: without this a text hardly reads the prompt.
    model.model.multi_modal_projector.mm_input_projection_weight.data.normal_()
    for layer in model.model.language_model.layers:
        layer.post_attention_layernorm.weight.data.fill_(8.0)
    return model


def qwen2_vl() -> PreTrainedModel:
    vision = {"depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
    text = {**TEXT, "rope_parameters": MROPE}
    return Qwen2VLForConditionalGeneration(Qwen2VLConfig(vision_config=vision, text_config=text, **IMAGES))


def llava() -> PreTrainedModel:
    parts = {"vision_config": CLIPVisionConfig(**VISION, initializer_range=0.4), "text_config": LlamaConfig(**TEXT)}
    return LlavaForConditionalGeneration(LlavaConfig(**parts, image_token_index=IMAGE, image_seq_length=4))


def paligemma() -> PreTrainedModel:
    parts = {"vision_config": SiglipVisionConfig(**VISION), "text_config": GemmaConfig(**TEXT, head_dim=16)}
    config = PaliGemmaConfig(**parts, image_token_index=IMAGE, projection_dim=32)
    return PaliGemmaForConditionalGeneration(config)


BUILDERS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**TEXT)),
    "gpt2": gpt2,
    "bart": bart,
    "git": git,
    "bloom": bloom,
    "mistral": lambda: MistralForCausalLM(MistralConfig(**TEXT, sliding_window=WINDOW)),
    "gemma3": gemma3,
    "qwen2-vl": qwen2_vl,
    "llava": llava,
    "paligemma": paligemma,
}
_BUILT: dict[str, PreTrainedModel] = {}


def model(name: str) -> PreTrainedModel:
    """Return a small model of this kind; callers copy it if they change it."""
    if name not in _BUILT:
        torch.manual_seed(0)
        _BUILT[name] = BUILDERS[name]().double().eval()
    return _BUILT[name]


def draft() -> PreTrainedModel:
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**{**TEXT, "num_hidden_layers": 1})).double().eval()


def ids(rows: int, length: int, seed: int = 3) -> Tensor:
    return torch.randint(8, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def mask(rows: int, length: int, *zeros: tuple[int, slice | int]) -> Tensor:
    ones = torch.ones(rows, length, dtype=torch.long)
    for row, columns in zeros:
        ones[row, columns] = 0
    return ones


def cached(target: PreTrainedModel, tokens: int) -> tuple[Tensor, DynamicCache]:
    """Return a prefix of three rows, and what the target has cached of it."""
    prefix, cache = ids(3, tokens, 5), DynamicCache(config=target.config.get_text_config())
    with torch.no_grad():
        target(prefix, past_key_values=cache)
    return prefix, cache


def whole(target: PreTrainedModel, tokens: int) -> dict[str, Any]:
    prefix, cache = cached(target, tokens)
    text = torch.cat([prefix, ids(3, 11)], 1)
    return {"input_ids": text, "attention_mask": torch.ones_like(text), "past_key_values": cache}


def rest(target: PreTrainedModel, tokens: int, *zeros: tuple[int, slice | int]) -> dict[str, Any]:
    _, cache = cached(target, tokens)
    return {"input_ids": ids(3, 11), "attention_mask": mask(3, tokens + 11, *zeros), "past_key_values": cache}


def embedded(target: PreTrainedModel) -> dict[str, Any]:
    embeddings = target.get_input_embeddings()(ids(3, 11, 9)).detach()
    return {"input_ids": ids(3, 11), "inputs_embeds": embeddings, "attention_mask": mask(3, 11, (1, 4))}


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
    "a cache and the whole text": lambda target: whole(target, 9),
    "a cache and the rest": lambda target: rest(target, 5),
    "a cache and the rest, masked": lambda target: rest(target, 9, (0, slice(2)), (1, 12), (2, -1)),
    "embeddings": embedded,
}  # fmt: skip


def prompt(name: str, target: PreTrainedModel) -> dict[str, Any]:
    """Return a prompt of three rows as arguments of `generate`; a cache is made anew each time."""
    return {"input_ids": ids(3, 11), **PROMPTS[name](target)}


def images(name: str) -> dict[str, Any]:
    """Return a prompt with images for a model, with padding on the left."""
    if name.startswith("qwen"):
        tokens, grid = ids(2, 16), torch.tensor([[1, 4, 4], [1, 4, 8]])  # four patches to a token
        tokens[0, 2], tokens[0, 3:7], tokens[0, 7] = 5, IMAGE, 4
        tokens[1, 4], tokens[1, 5:13], tokens[1, 13] = 5, IMAGE, 4
        pixels = torch.randn(int(grid.prod(1).sum()), 96, generator=torch.Generator().manual_seed(2))
        kinds = (tokens == IMAGE).long()
        extra: dict[str, Any] = {"image_grid_thw": grid, "mm_token_type_ids": kinds}
        return {"input_ids": tokens, "attention_mask": mask(2, 16, LEFT[0]), "pixel_values": pixels.double(), **extra}
    tokens = ids(3, 14)
    tokens[:, 3:7] = IMAGE
    pixels = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(2)).double()
    extra = {"token_type_ids": (tokens == IMAGE).long()} if name == "gemma3" else {}
    zeros = [] if name == "paligemma" else [(0, slice(2))]
    return {"input_ids": tokens, "attention_mask": mask(3, 14, *zeros), "pixel_values": pixels, **extra}


def adapted(name: str, kind: str) -> Any:
    """Return a model under a PEFT adapter that changes its text."""
    import peft

    virtual = {"task_type": peft.TaskType.CAUSAL_LM, "num_virtual_tokens": 4}
    config = {
        "prompt": lambda: peft.PromptTuningConfig(**virtual),
        "prefix": lambda: peft.PrefixTuningConfig(**virtual),
        "p": lambda: peft.PromptEncoderConfig(**virtual, encoder_hidden_size=16),
        "lora": lambda: peft.LoraConfig(task_type=peft.TaskType.CAUSAL_LM, r=4),
    }[kind]()
    wrapped = peft.get_peft_model(copy.deepcopy(model(name)), config).double().eval()
    torch.manual_seed(2)
    for key, parameter in wrapped.named_parameters():
        if "lora_B" in key or "prompt" in key:
            parameter.data.normal_(0, 0.4)
    return wrapped
