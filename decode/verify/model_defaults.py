"""Sampling defaults of a model: the fields of its `generation_config` that change the next-token distribution."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedConfig
from transformers.generation import logits_process as library

from ...policies.errors import InputError, SpecstopWarning
from .processors import processor_name

APPLIED: Mapping[str, Any] = {
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "exponential_decay_length_penalty": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "min_length": 0,
    "min_new_tokens": 0,
    "min_p": 0.0,
    "no_repeat_ngram_size": 0,
    "remove_invalid_values": False,
    "renormalize_logits": False,
    "repetition_penalty": 1.0,
    "sequence_bias": None,
    "suppress_tokens": None,
    "top_h": None,
    "top_k": 0,
    "top_p": 1.0,
    "typical_p": 1.0,
}
"""Fields of `GenerationConfig` for which transformers creates logits processors, with their neutral values."""

SAMPLING = frozenset({"epsilon_cutoff", "eta_cutoff", "min_p", "top_h", "top_k", "top_p", "typical_p"})
"""Fields of `APPLIED` that greedy decoding ignores."""

REFUSED: Mapping[str, Any] = {
    "constraints": None,
    "force_words_ids": None,
    "guidance_scale": 1.0,
    "token_healing": False,
    "watermarking_config": None,
}
"""Fields that change the text and cannot be applied to a tree of candidates, with their neutral values."""

LEFT_OUT: Mapping[str, Any] = {
    "dola_layers": None,
    "max_time": None,
    "num_beams": 1,
    "penalty_alpha": 0.0,
    "stop_strings": None,
}
"""Fields that select another decoding method or end texts early. They are ignored with a warning."""

INERT = frozenset(
    {
        # Set by the options of a run.
        "do_sample", "temperature", "max_length", "max_new_tokens", "num_return_sequences", "seed",
        # Used only by beam search.
        "diversity_penalty", "early_stopping", "length_penalty", "low_memory", "num_beam_groups",
        # Drafting and caching, which do not change the text.
        "assistant_confidence_threshold", "assistant_early_exit", "assistant_ensemble_weight", "assistant_lookbehind",
        "cache_config", "cache_implementation", "compile_config", "continuous_batching_config", "disable_compile",
        "is_assistant", "max_cache_len", "max_matching_ngram_size", "num_assistant_tokens",
        "num_assistant_tokens_schedule", "prefill_chunk_size", "prompt_lookup_num_tokens", "speculation_type",
        "target_lookbehind", "use_cache", "use_mtp",
        # Return values of `generate`.
        "output_attentions", "output_hidden_states", "output_logits", "output_scores", "return_dict_in_generate",
        # Token ids. The end-of-text ids are loaded with the pair.
        "bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id",
        "transformers_version",
    }
)  # fmt: skip
"""Fields that do not change the text of a run."""


_KNOWN: Mapping[type[LogitsProcessor], tuple[str, str]] = {
    library.RepetitionPenaltyLogitsProcessor: ("repetition_penalty", "penalty"),
    library.NoRepeatNGramLogitsProcessor: ("no_repeat_ngram", "ngram_size"),
    library.MinNewTokensLengthLogitsProcessor: ("min_new_tokens", "min_new_tokens"),
    library.TopKLogitsWarper: ("top_k", "top_k"),
    library.TopPLogitsWarper: ("top_p", "top_p"),
    library.MinPLogitsWarper: ("min_p", "min_p"),
    library.EncoderNoRepeatNGramLogitsProcessor: ("encoder_no_repeat_ngram_size", "ngram_size"),
    library.EpsilonLogitsWarper: ("epsilon_cutoff", "epsilon"),
    library.EtaLogitsWarper: ("eta_cutoff", "epsilon"),
    library.InfNanRemoveLogitsProcessor: ("remove_invalid_values", ""),
    library.LogitNormalization: ("renormalize_logits", ""),
    library.MinLengthLogitsProcessor: ("min_length", "min_length"),
    library.NoBadWordsLogitsProcessor: ("bad_words_ids", "bad_word_ids"),
    library.SequenceBiasLogitsProcessor: ("sequence_bias", "sequence_bias"),
    library.SuppressTokensAtBeginLogitsProcessor: ("begin_suppress_tokens", "begin_suppress_tokens"),
    library.SuppressTokensLogitsProcessor: ("suppress_tokens", "suppress_tokens"),
    library.TopHLogitsWarper: ("top_h", "top_h"),
    library.TypicalLogitsWarper: ("typical_p", "mass"),
}
"""Equivalent option of `Shaping` and attribute with its value for each type; an attribute of "" means True."""


def model_defaults(config: GenerationConfig | None) -> dict[str, Any]:
    """Return the fields of a model's `generation_config` that change its text, as JSON values by name.

    The result includes fields of the installed transformers that this module does not list, so that `check_fields` rejects
    them. It excludes transformers' default of `top_k=50`, which is not a setting of the model.
    """
    if config is None:
        return {}
    neutral = {**APPLIED, **REFUSED, **LEFT_OUT}
    valid = vars(GenerationConfig())
    fields = {
        name: as_json(value)
        for name, value in vars(config).items()
        if name in valid and name not in INERT and not name.startswith("_") and not is_neutral(value, neutral.get(name))
    }
    if fields.get("min_new_tokens") is not None:
        fields.pop("min_length", None)  # same precedence as in `generate`
    return fields


def is_neutral(value: Any, neutral: Any) -> bool:
    """Return whether the value of a field has no effect."""
    return value is None or value == neutral or (isinstance(value, list | tuple | dict) and not value)


def check_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields to apply, and warn about fields that are ignored.

    Raises:
        InputError: a field is not supported.
    """
    for name, value in fields.items():
        if name not in APPLIED and name not in LEFT_OUT and value is not None:
            raise InputError(
                f"the target's generation_config sets {name}={value!s:.60}, which is not supported; pass "
                "--no-model-defaults to decode without the model's sampling defaults"
            )
    if ignored := [f"{name}={fields[name]!s:.60}" for name in LEFT_OUT if fields.get(name) is not None]:
        warnings.warn(
            f"the target's generation_config sets {', '.join(ignored)}, which is ignored: texts are decoded token by token "
            "until an end-of-text token or the length limit",
            SpecstopWarning,
            stacklevel=4,
        )
    return {name: value for name, value in fields.items() if name in APPLIED and not is_neutral(value, APPLIED[name])}


def library_processors(
    fields: Mapping[str, Any],
    others: LogitsProcessorList,
    temperature: float,
    prompt: Tensor | int,
    limit: int | None,
    eos: Tensor | None,
    device: torch.device,
) -> LogitsProcessorList:
    """Return the logits processors that `generate` creates for fields of `GenerationConfig`, in the same order.

    Args:
        fields: fields of `APPLIED`.
        others: the caller's processors, placed before the temperature.
        temperature: 0 for greedy decoding, without sampling processors.
        prompt: [n] prompt token ids, or their number n if the ids are not known.
        limit: maximum number of new tokens, if known.
        eos: end-of-text token ids; None if there are none.
        device: device of the logits.

    Raises:
        InputError: transformers rejects the value of a field.
    """
    from transformers import GenerationMixin

    class Builder(GenerationMixin):
        """Minimal model with the attributes that `_get_logits_processor` reads."""

        config = PreTrainedConfig()

    config: Any = GenerationConfig()
    for name, value in fields.items():  # the constructor would log incompatible fields
        setattr(config, name, value)
    config.do_sample, config.temperature, config._eos_token_tensor = temperature > 0, temperature, eos
    length = prompt if isinstance(prompt, int) else len(prompt)
    if eos is None:
        config.exponential_decay_length_penalty = None  # applies only to end-of-text tokens
    if limit is None:
        config.forced_eos_token_id = None
    else:
        config.max_length = length + limit
    try:
        builder: Any = Builder()
        processors: LogitsProcessorList = builder._get_logits_processor(
            config, length, None if isinstance(prompt, int) else prompt[None], None, others, str(device), {}
        )
    except (ValueError, TypeError) as error:
        raise InputError(f"{' '.join(str(error).split())}") from None
    return processors


def processor_options(processors: Sequence[LogitsProcessor]) -> tuple[float, dict[str, Any], list[str]]:
    """Return the temperature, the options of `Shaping` by name, and the names of the remaining processors."""
    temperature, options, others = 1.0, {}, []
    for processor in processors:
        if type(processor) is library.TemperatureLogitsWarper:
            temperature *= float(processor.temperature)
        elif type(processor) in _KNOWN:
            option, attribute = _KNOWN[type(processor)]
            value = as_json(getattr(processor, attribute)) if attribute else True
            options[option] = float(f"{value:.6g}") if isinstance(value, float) else value  # may be a float32 value
        else:
            others.append(processor_name(processor))
    return temperature, options, others


def as_json(value: Any) -> Any:
    """Convert a value to JSON types: tuples, tensors and a dictionary of `sequence_bias` become lists."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        tuple_keys = any(isinstance(key, tuple) for key in value)
        return [[list(key), bias] for key, bias in value.items()] if tuple_keys else dict(value)
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    return value
