"""Validation of the arguments of `generate`: each is supported, has no effect, or raises an error that names it.

The tables list every parameter of `generate` and every field of `GenerationConfig` in transformers 5.23. Setting fields,
parameters or model inputs that are not listed, such as those of a later version, raises an error.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL

from ...policies.errors import InputError
from ..verify.sampling import NEUTRAL


def _by_name(names_by_reason: Mapping[str, str]) -> dict[str, str]:
    return {name: reason for reason, names in names_by_reason.items() for name in names.split()}


SUPPORTED = {
    *(NEUTRAL.keys() - {"no_repeat_ngram"}), "no_repeat_ngram_size", "max_length", "max_new_tokens", "max_time", "do_sample",
    "temperature", "watermarking_config", "num_return_sequences", "return_dict_in_generate", "pad_token_id", "bos_token_id",
    "eos_token_id", "stop_strings", "token_healing", "disable_compile",
    # Without effect on sampling and greedy decoding, also in transformers.
    "early_stopping", "length_penalty", "decoder_start_token_id", "max_cache_len", "transformers_version",
}  # fmt: skip
"""Supported fields of `GenerationConfig`. transformers raises an error for stop strings and healing without a tokenizer."""

REFUSED = _by_name(
    {
        "beam search is not speculative; expected num_beams=1": (
            "num_beams num_beam_groups diversity_penalty constraints force_words_ids"
        ),
        "a round does not return outputs for each token; leave it out": (
            "output_scores output_logits output_attentions output_hidden_states"
        ),
        "this decoding method is not speculative; leave it out": (
            "penalty_alpha dola_layers low_memory continuous_batching_config assistant_ensemble_weight"
        ),
        "its processor keeps state between calls, which a tree of candidates does not support; leave it out": (
            "guidance_scale"
        ),
    }
)
"""Fields that must have their default value, with the reason and the remedy."""

REFUSED_IN_CALLS = _by_name(
    {
        "the loop manages its cache itself; leave it out": "use_cache cache_implementation cache_config",
        "a prompt is read in one call, which is not compiled; leave it out": "prefill_chunk_size compile_config",
        "policy= sets the draft length and drafter= selects the drafter; leave it out": (
            "is_assistant num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold "
            "assistant_early_exit assistant_lookbehind target_lookbehind prompt_lookup_num_tokens max_matching_ngram_size "
            "use_mtp speculation_type"
        ),
    }
)
"""The same for fields that do not change the text. The generation config of the model may set them."""

_ALLOWED = {"cache_implementation": ("dynamic", "static"), "penalty_alpha": (0,), "guidance_scale": (1,)}
"""Values that are accepted in addition to the default."""

PARAMETERS = {
    "self", "inputs", "generation_config", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn",
    "custom_generate", "kwargs", "negative_prompt_ids", "negative_prompt_attention_mask",
}  # fmt: skip
"""Parameters of `generate` that reach the loop or have no effect without `guidance_scale`."""

DROPPED = {
    "assistant_model": "expected draft_model= (assistant_model= does not reach a callable)",
    "streamer": "expected text_streamer= (streamer= does not reach a callable)",
    "synced_gpus": "the loop does not synchronize processes; leave it out",
}
"""Parameters that `generate` does not pass to a callable, and the remedy."""

READ = {
    *MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL, "attention_mask", "position_ids", "past_key_values", "inputs_embeds",
    "token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids", "feature_attention_mask", "image_grid_thw",
    "video_grid_thw", "second_per_grid_ts", "spatial_shapes", "use_cache", "logits_to_keep",
}  # fmt: skip
"""Model inputs that are supported in the prefill."""

_LATER = "the loop does not support it; leave it out, or call generate without custom_generate"


def refuse(name: str, reason: str) -> InputError:
    """Return the error for an argument of `generate`."""
    return InputError(f"specstop_generate: {name}: {reason}")


def check_arguments(model: PreTrainedModel, config: GenerationConfig, inputs: Mapping[str, Any], ids: Tensor) -> None:
    """Raise `InputError` for arguments of `generate` that are unknown or not supported, and if there are no token ids."""
    for name, value in generate_arguments().items():
        if name not in PARAMETERS and value is not None and value is not False:
            raise refuse(name, DROPPED.get(name, _LATER))
    defaults, fields = GenerationConfig._get_default_generation_params(), vars(GenerationConfig())
    for name, value in vars(config).items():
        accepted = (None, defaults.get(name, False), *_ALLOWED.get(name, ()))
        if name in SUPPORTED or name.startswith("_") or any(_equal(value, other) for other in accepted):
            continue
        # Entries of generation_config.json that are not fields are for custom code. transformers does not read them.
        may_be_set = name in REFUSED_IN_CALLS or (name not in fields and name not in REFUSED)
        if not (may_be_set and _equal(value, getattr(model.generation_config, name, None))):
            shown = " ".join(repr(value).split())[:40]
            raise refuse(f"{name}={shown}", REFUSED.get(name) or REFUSED_IN_CALLS.get(name, _LATER))
    _check_adapters(model)
    if model.config.is_encoder_decoder:  # `join` raises an error for these
        return
    if unknown := sorted(name for name, value in inputs.items() if value is not None and name not in READ):
        raise refuse(", ".join(unknown), _LATER)
    if ids.shape[1] == 0:
        raise refuse("inputs_embeds", "drafters read token ids; pass the input_ids of the prompt as well")


def _check_adapters(model: PreTrainedModel) -> None:
    """Raise an error for PEFT arguments that refer to the rows of a batch or to the end of a call.

    The loop may read several texts as one row, and several tokens in a call.
    """
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            keywords = getattr(hook, "keywords", None) or {}
            if len(keywords.get("adapter_names") or ()) > 1:
                raise refuse("adapter_names", "expected one adapter for all rows; call set_adapter(...)")
            if keywords.get("alora_offsets") is not None:
                raise refuse("alora_offsets", f"activated LoRA counts tokens from the end of a call; {_LATER}")


def generate_arguments() -> dict[str, Any]:
    """Return the parameters of the enclosing `generate` by name, read from its frame; empty if there is none."""
    frame, code = inspect.currentframe(), inspect.unwrap(GenerationMixin.generate).__code__
    for _ in range(8):  # this function and its callers, decorators, `generate`
        if frame is None or frame.f_code is code:
            break
        frame = frame.f_back
    if frame is None or frame.f_code is not code:
        return {}
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return {name: frame.f_locals.get(name) for name in names}


def _equal(value: Any, other: Any) -> bool:
    """Whether two values are equal; False for arrays."""
    return (value == other) is True
