"""The sampling defaults of a model: what its `generation_config` changes in the distribution of the next token."""

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
"""Fields of `GenerationConfig` that transformers turns into logits processors, with the value that changes nothing."""

SAMPLING = frozenset({"epsilon_cutoff", "eta_cutoff", "min_p", "top_h", "top_k", "top_p", "typical_p"})
"""Those of `APPLIED` that greedy decoding leaves aside."""

REFUSED: Mapping[str, Any] = {
    "constraints": None,
    "force_words_ids": None,
    "guidance_scale": 1.0,
    "token_healing": False,
    "watermarking_config": None,
}
"""Fields that change the text and cannot be applied to a tree of candidates, with the value that changes nothing."""

LEFT_OUT: Mapping[str, Any] = {
    "dola_layers": None,
    "max_time": None,
    "num_beams": 1,
    "penalty_alpha": 0.0,
    "stop_strings": None,
}
"""Fields that choose another way of decoding or end texts early: a run chooses these itself, and warns."""

INERT = frozenset(
    {
        # What a run chooses itself.
        "do_sample", "temperature", "max_length", "max_new_tokens", "num_return_sequences", "seed",
        # Of beam search alone.
        "diversity_penalty", "early_stopping", "length_penalty", "low_memory", "num_beam_groups",
        # How drafts are made and caches kept: the text does not depend on it.
        "assistant_confidence_threshold", "assistant_early_exit", "assistant_ensemble_weight", "assistant_lookbehind",
        "cache_config", "cache_implementation", "compile_config", "continuous_batching_config", "disable_compile",
        "is_assistant", "max_cache_len", "max_matching_ngram_size", "num_assistant_tokens",
        "num_assistant_tokens_schedule", "prefill_chunk_size", "prompt_lookup_num_tokens", "speculation_type",
        "target_lookbehind", "use_cache", "use_mtp",
        # What `generate` returns.
        "output_attentions", "output_hidden_states", "output_logits", "output_scores", "return_dict_in_generate",
        # Token ids; those that end a text are read with the pair.
        "bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id",
        "transformers_version",
    }
)  # fmt: skip
"""Fields that the text does not depend on here."""


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
"""The option of `Shaping` that each stands for, and where it keeps the value; "" = True."""


def model_defaults(config: GenerationConfig | None) -> dict[str, Any]:
    """Return the fields of a model's `generation_config` that change its text, by name, as JSON has them.

    Fields that the installed transformers has and this module does not know are among them, so that `check_fields` refuses
    them. The library's own default of `top_k=50` is no field of a model, and is left out.
    """
    if config is None:
        return {}
    neutral = {**APPLIED, **REFUSED, **LEFT_OUT}
    known = vars(GenerationConfig())
    fields = {
        name: as_json(value)
        for name, value in vars(config).items()
        if name in known and name not in INERT and not name.startswith("_") and not is_neutral(value, neutral.get(name))
    }
    if fields.get("min_new_tokens") is not None:
        fields.pop("min_length", None)  # as `generate` has it
    return fields


def is_neutral(value: Any, neutral: Any) -> bool:
    """Whether a field's value changes nothing."""
    return value is None or value == neutral or (isinstance(value, list | tuple | dict) and not value)


def check_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are applied; warn of those that are left out.

    Raises:
        InputError: a field cannot be applied.
    """
    for name, value in fields.items():
        if name not in APPLIED and name not in LEFT_OUT and value is not None:
            raise InputError(
                f"the target's generation_config sets {name}={value!s:.60}, which cannot be applied here; give "
                "--no-model-defaults to decode without the model's sampling defaults"
            )
    if left := [f"{name}={fields[name]!s:.60}" for name in LEFT_OUT if fields.get(name) is not None]:
        warnings.warn(
            f"the target's generation_config sets {', '.join(left)}, which is left out: texts are decoded token by token to "
            "their end",
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
    """Return the logits processors that `generate` makes of fields of `GenerationConfig`, in its order.

    Args:
        fields: of `APPLIED`.
        others: the caller's processors, which come before the temperature.
        temperature: 0 = greedy, without the processors of sampling.
        prompt: [n] its token ids, or their number if they are not known.
        limit: most new tokens of the text, if known.
        eos: ids that end a text; None = none.
        device: of the logits.

    Raises:
        InputError: a field has a value that transformers refuses.
    """
    from transformers import GenerationMixin

    class Builder(GenerationMixin):
        """What `_get_logits_processor` reads of a model."""

        config = PreTrainedConfig()

    config: Any = GenerationConfig()
    for name, value in fields.items():  # not through its constructor, which logs what does not go together
        setattr(config, name, value)
    config.do_sample, config.temperature, config._eos_token_tensor = temperature > 0, temperature, eos
    length = prompt if isinstance(prompt, int) else len(prompt)
    if eos is None:
        config.exponential_decay_length_penalty = None  # of the tokens that end a text
    if limit is None:
        config.forced_eos_token_id = None
    else:
        config.max_length = length + limit
    try:
        builder: Any = Builder()
        made: LogitsProcessorList = builder._get_logits_processor(
            config, length, None if isinstance(prompt, int) else prompt[None], None, others, str(device), {}
        )
    except (ValueError, TypeError) as error:
        raise InputError(f"{' '.join(str(error).split())}") from None
    return made


def processor_options(processors: Sequence[LogitsProcessor]) -> tuple[float, dict[str, Any], list[str]]:
    """Return what processors stand for: a temperature, options of `Shaping` by name, and the type names of the others."""
    temperature, options, others = 1.0, {}, []
    for processor in processors:
        if type(processor) is library.TemperatureLogitsWarper:
            temperature *= float(processor.temperature)
        elif type(processor) in _KNOWN:
            option, attribute = _KNOWN[type(processor)]
            value = as_json(getattr(processor, attribute)) if attribute else True
            options[option] = float(f"{value:.6g}") if isinstance(value, float) else value  # some are of float32
        else:
            others.append(processor_name(processor))
    return temperature, options, others


def as_json(value: Any) -> Any:
    """Return a value as JSON has it: lists for tuples and tensors, and for a `sequence_bias` that is a dictionary."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        odd = any(isinstance(key, tuple) for key in value)
        return [[list(key), bias] for key, bias in value.items()] if odd else dict(value)
    if isinstance(value, list | tuple):
        return [as_json(one) for one in value]
    return value
