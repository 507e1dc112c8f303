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

from ...policies.errors import InputError


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


HONOURED = _names(
    "max_length max_new_tokens min_length min_new_tokens max_time do_sample temperature top_k top_p min_p top_h typical_p "
    "epsilon_cutoff eta_cutoff repetition_penalty no_repeat_ngram_size bad_words_ids renormalize_logits forced_bos_token_id "
    "forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens "
    "sequence_bias watermarking_config num_return_sequences return_dict_in_generate pad_token_id bos_token_id eos_token_id "
    "stop_strings token_healing disable_compile encoder_repetition_penalty encoder_no_repeat_ngram_size"
)
"""Supported fields of `GenerationConfig`. They reach the loop as limits, logits processors, stopping criteria or input ids.

transformers raises an error for stop strings and token healing: they require a tokenizer, which it does not pass on."""

NO_EFFECT = _names("early_stopping length_penalty decoder_start_token_id max_cache_len")
"""Fields without effect on sampling and greedy decoding, also in transformers."""

_BEAMS = "beam search is not speculative; expected num_beams=1"
_CACHE = "the loop manages its cache itself; leave it out"
_POLICY = "policy= sets the draft length and drafter= selects the drafter; leave it out"
_ROUNDS = "a round does not return outputs for each token; leave it out"
_OTHER_METHOD = "this decoding method is not speculative; leave it out"

REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "diversity_penalty", "constraints", "force_words_ids"), _BEAMS),
    **dict.fromkeys(("output_scores", "output_logits", "output_attentions", "output_hidden_states"), _ROUNDS),
    **dict.fromkeys(("penalty_alpha", "dola_layers", "low_memory", "continuous_batching_config"), _OTHER_METHOD),
    "guidance_scale": "its processor keeps state between calls, which a tree of candidates does not support; leave it out",
    "assistant_ensemble_weight": "it changes the text; leave it out",
}
"""Fields that must have their default value, with the reason and the remedy."""

REFUSED_OF_THE_CALL: Mapping[str, str] = {
    **dict.fromkeys(("use_cache", "cache_implementation", "cache_config"), _CACHE),
    "prefill_chunk_size": "a prompt is read in one call; leave it out",
    "compile_config": "calls are recorded on a GPU, not compiled; leave it out",
    **dict.fromkeys(
        _names(
            "is_assistant num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold "
            "assistant_early_exit assistant_lookbehind target_lookbehind prompt_lookup_num_tokens max_matching_ngram_size "
            "use_mtp speculation_type"
        ),
        _POLICY,
    ),
}
"""The same for fields that do not change the text. The generation config of the model may set them."""

_ALLOWED = {
    "cache_implementation": (None, "dynamic", "static"),
    "penalty_alpha": (None, 0, 0.0),
    "guidance_scale": (None, 1),
}
"""Values that are accepted in addition to the default."""

PARAMETERS = _names(
    "self inputs generation_config logits_processor stopping_criteria prefix_allowed_tokens_fn custom_generate kwargs "
    "negative_prompt_ids negative_prompt_attention_mask"
)
"""Parameters of `generate` that reach the loop or have no effect without `guidance_scale`."""

DROPPED: Mapping[str, str] = {
    "assistant_model": "expected draft_model= (assistant_model= does not reach a callable)",
    "streamer": "expected text_streamer= (streamer= does not reach a callable)",
    "synced_gpus": "the loop does not synchronize processes; leave it out",
}
"""Parameters that `generate` does not pass to a callable, and the remedy."""

READ = _names(
    "attention_mask position_ids past_key_values token_type_ids mm_token_type_ids moe_mm_token_type_ids inputs_embeds "
    "mm_encoder_outputs pixel_values pixel_values_videos pixel_values_images pixel_values_local high_res_pixel_values "
    "pixel_mask pixel_attention_mask input_features input_features_mask input_features_mask feature_attention_mask "
    "input_values input_values_mask num_local_patches image_patches image_patches_indices image_sizes image_sizes_videos "
    "image_grid_thw video_grid_thw second_per_grid_ts patches_grid image_token_pooling image_grids video_token_pooling "
    "video_grids spatial_shapes use_cache logits_to_keep"
)
"""Model inputs that are supported in the prefill."""


def check_config(config: GenerationConfig, model_config: GenerationConfig | None) -> None:
    """Raise an error for fields of a generation config that the loop does not support.

    Args:
        config: Generation config of the call, completed by `generate`.
        model_config: Generation config of the model.

    Raises:
        InputError: An unsupported or unknown field does not have its default value.
    """
    defaults = GenerationConfig._get_default_generation_params()
    fields = vars(GenerationConfig())
    for name, value in vars(config).items():
        if name.startswith("_") or name == "transformers_version" or name in HONOURED | NO_EFFECT:
            continue
        if value is None or any(_is(value, other) for other in (*_ALLOWED.get(name, ()), defaults.get(name, False))):
            continue
        reason = REFUSED.get(name)
        # Entries of generation_config.json that are not fields are for custom code. transformers does not read them.
        if (
            reason is None
            and (name in REFUSED_OF_THE_CALL or name not in fields)
            and _is(value, getattr(model_config, name, None))
        ):
            continue
        reason = reason or REFUSED_OF_THE_CALL.get(
            name, "this argument of generate is unknown to the loop; leave it out"
        )
        raise InputError(f"specstop_generate: {name}={_shown(value)} is not supported: {reason}")


def check_inputs(inputs: Mapping[str, Any], ids: Tensor) -> None:
    """Raise an error for model inputs that the prefill does not support.

    Raises:
        InputError: An input is unknown, or there are no token ids.
    """
    unknown = sorted(name for name, value in inputs.items() if value is not None and name not in READ)
    if unknown:
        raise InputError(
            f"specstop_generate: {', '.join(unknown)}: model inputs that the loop does not support; leave them "
            "out, or call generate without custom_generate"
        )
    if ids.shape[1] == 0:
        raise InputError(
            "specstop_generate: inputs_embeds without input_ids: drafters read token ids; pass the input_ids of the prompt "
            "as well, or call generate without custom_generate"
        )


def check_adapters(model: PreTrainedModel) -> None:
    """Raise an error for PEFT arguments that refer to the rows of a batch: the loop may read several texts as one row.

    Raises:
        InputError: The call selects an adapter for each row or uses activated LoRA, which counts from the end of a call.
    """
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            keywords = getattr(hook, "keywords", None) or {}
            if len(keywords.get("adapter_names") or ()) > 1:
                raise InputError(
                    "specstop_generate: adapter_names: expected one row, or one adapter for all rows; call set_adapter(...)"
                )
            if keywords.get("alora_offsets") is not None:
                raise InputError(
                    "specstop_generate: alora_offsets: activated LoRA counts tokens from the end of a call, and the loop "
                    "reads several; call generate without custom_generate"
                )


def check_dropped() -> None:
    """Raise an error for parameters that the enclosing `generate` does not pass on.

    Raises:
        InputError: A parameter of `DROPPED` or an unknown parameter is set.
    """
    for name, value in generate_arguments().items():
        if name not in PARAMETERS and value is not None and value is not False:
            reason = DROPPED.get(name, "this parameter of generate is unknown to the loop; leave it out")
            raise InputError(f"specstop_generate: {name}: {reason}")


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


def _is(value: Any, other: Any) -> bool:
    """Whether two values are equal; False for arrays."""
    same = value == other
    return same if isinstance(same, bool) else False


def _shown(value: Any) -> str:
    """Return the representation of a value on one line, truncated for messages."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 40 else text[:37] + "..."
