"""Sampling parameters, their defaults from a model's `generation_config`, and the logits processors that apply them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedConfig
from transformers.generation import logits_process as library

from ...policies.errors import InputError, SpecstopWarning
from ...policies.limits import check_limits
from .grammar import XGrammarProcessor, is_xgrammar
from .processors import PerText, check_processor, processor_name

NEUTRAL: Mapping[str, Any] = {
    **dict.fromkeys(("bad_words_ids", "begin_suppress_tokens", "exponential_decay_length_penalty"), None),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "sequence_bias", "suppress_tokens", "top_h"), None),
    **dict.fromkeys(("encoder_no_repeat_ngram_size", "min_length", "min_new_tokens", "no_repeat_ngram_size"), 0),
    **dict.fromkeys(("encoder_repetition_penalty", "repetition_penalty", "top_p", "typical_p"), 1.0),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "min_p", "top_k"), 0),
    **dict.fromkeys(("remove_invalid_values", "renormalize_logits"), False),
}
"""Fields of `GenerationConfig` for which transformers creates logits processors, with the values that have no effect."""

WARPERS = frozenset({"epsilon_cutoff", "eta_cutoff", "min_p", "top_h", "top_k", "top_p", "typical_p"})
"""Fields of `NEUTRAL` that greedy decoding ignores."""

UNSUPPORTED: Mapping[str, Any] = {
    **dict.fromkeys(("constraints", "force_words_ids", "watermarking_config"), None),
    "guidance_scale": 1.0,
    "token_healing": False,
}
"""Fields that change the text and cannot be applied to a tree of candidates, with their neutral values."""

IGNORED: Mapping[str, Any] = {
    **dict.fromkeys(("dola_layers", "max_time", "stop_strings"), None),
    "num_beams": 1,
    "penalty_alpha": 0.0,
}
"""Fields that select another decoding method or end texts early, with their neutral values. They cause a warning."""

INERT = frozenset(
    {
        # Options of a run, beam search, and drafting and caching, which do not change the text.
        "do_sample", "temperature", "max_length", "max_new_tokens", "num_return_sequences", "seed", "diversity_penalty",
        "early_stopping", "length_penalty", "low_memory", "num_beam_groups", "assistant_confidence_threshold",
        "assistant_early_exit", "assistant_ensemble_weight", "assistant_lookbehind", "cache_config", "cache_implementation",
        "compile_config", "continuous_batching_config", "disable_compile", "is_assistant", "max_cache_len",
        "max_matching_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule", "prefill_chunk_size",
        "prompt_lookup_num_tokens", "speculation_type", "target_lookbehind", "use_cache", "use_mtp",
        # Return values of `generate`, and token ids; the end-of-text ids are loaded with the pair.
        "output_attentions", "output_hidden_states", "output_logits", "output_scores", "return_dict_in_generate",
        "bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id", "transformers_version",
    }
)  # fmt: skip
"""Fields that do not change the text of a run."""

_FIELD = {
    name: name for name in ("top_k", "top_p", "min_p", "repetition_penalty", "no_repeat_ngram", "min_new_tokens")
} | {"no_repeat_ngram": "no_repeat_ngram_size"}
"""Options of `SamplingParams` that are attributes, with their fields of `GenerationConfig`."""

_OPTION = {name: name for name in NEUTRAL} | {field: option for option, field in _FIELD.items()}
"""Options of `SamplingParams` by field of `GenerationConfig`."""

_VALUE: Mapping[type[LogitsProcessor], tuple[str, str]] = {
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
"""Equivalent option of each processor, and the attribute with its value; "" = True."""

STATELESS = (
    *_VALUE,
    library.EncoderRepetitionPenaltyLogitsProcessor,
    library.ExponentialDecayLengthPenalty,
    library.ForcedBOSTokenLogitsProcessor,
    library.ForcedEOSTokenLogitsProcessor,
    library.TemperatureLogitsWarper,
    library.WatermarkLogitsProcessor,
)
"""Processors of transformers that are functions of (input_ids, scores)."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters other than the temperature.

    Attributes:
        top_k, top_p, min_p: truncation; 0, 1 and 0 disable it.
        repetition_penalty: 1 disables it.
        no_repeat_ngram: length of n-grams that must not repeat; 0 disables it.
        min_new_tokens: minimum number of tokens before the end of text.
        processors: further logits processors of transformers, or a `Grammar`, applied after these and before the temperature.
        others: further fields of `GenerationConfig` by name, such as `typical_p` or `bad_words_ids`; None disables a field
            that the model sets.
        model_defaults: whether options that are None or missing in `others` default to the target's `generation_config`.
        length_limit: number of new tokens at which `forced_eos_token_id` applies, set by the run.
    """

    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    no_repeat_ngram: int | None = None
    min_new_tokens: int | None = None
    processors: tuple[LogitsProcessor, ...] = ()
    others: Mapping[str, Any] = field(default_factory=dict)
    model_defaults: bool = True
    length_limit: int | None = None

    def __post_init__(self) -> None:
        check_limits(**vars(self))
        valid = {*NEUTRAL, *UNSUPPORTED, *IGNORED} - {*_FIELD.values()}
        if unknown := sorted(set(self.others) - valid):
            raise InputError(f"others: expected fields among {', '.join(sorted(valid))}, not {', '.join(unknown)}")

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> SamplingParams:
        """Return the parameters that `to_dict` describes, without defaults of a model.

        Raises:
            InputError: an option is unknown or out of range, or there are processors, which cannot be restored by name.
        """
        valid = sorted(_OPTION.values())
        if unknown := sorted(set(values) - set(valid)):
            raise InputError(f"sampling options: {', '.join(unknown)} cannot be restored; expected {', '.join(valid)}")
        options = {name: value for name, value in values.items() if name in _FIELD}
        others = {name: value for name, value in values.items() if name not in _FIELD}
        return SamplingParams(**options, others=others, model_defaults=False)

    def with_defaults(self, config: GenerationConfig | None, max_new_tokens: int | None = None) -> SamplingParams:
        """Return the parameters with unset options replaced by those of a model's `generation_config`.

        Raises:
            InputError: a default is not supported, or transformers rejects its value.
        """
        if not self.model_defaults:
            return self
        chosen = {field: getattr(self, name) for name, field in _FIELD.items() if getattr(self, name) is not None}
        fields = {**model_defaults(config), **self.others, **chosen}
        for name, value in fields.items():
            if name not in NEUTRAL and name not in IGNORED and value is not None:
                raise InputError(
                    f"the target's generation_config sets {name}={value!s:.60}, which is not supported; pass "
                    "--no-model-defaults to decode without the model's sampling defaults"
                )
        if ignored := [f"{name}={fields[name]!s:.60}" for name in IGNORED if fields.get(name) is not None]:
            warnings.warn(
                f"the target's generation_config sets {', '.join(ignored)}, which is ignored: texts are decoded token by "
                "token until an end-of-text token or the length limit",
                SpecstopWarning,
                stacklevel=4,
            )
        fields = {name: value for name, value in fields.items() if name in NEUTRAL and not _is_neutral(name, value)}
        if self.min_new_tokens is not None:
            fields.pop("min_length", None)  # same precedence as in `generate`
        options = {name: fields.pop(field, None) for name, field in _FIELD.items()}
        try:
            params = replace(self, **options, others=fields, model_defaults=False, length_limit=max_new_tokens)
            params.build(1.0, (0,), (0,), torch.device("cpu"))
        except InputError as error:
            raise InputError(f"the target's generation_config: {error.command_line}") from None
        return params

    def fields(self) -> dict[str, Any]:
        """Return the fields of `GenerationConfig` that have an effect, by name, without `processors`."""
        values = {field: getattr(self, name) for name, field in _FIELD.items()} | dict(self.others)
        return {name: value for name, value in values.items() if name in NEUTRAL and not _is_neutral(name, value)}

    def to_dict(self) -> dict[str, Any]:
        """Return the options that have an effect as JSON values, and the names of `processors`."""
        values = {_OPTION[name]: _as_json(value) for name, value in self.fields().items()}
        names = list(map(processor_name, self.processors))
        return values | ({"processors": names} if names else {})

    def override(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a trace (`to_dict`), replaced by those that are set in these parameters."""
        chosen = {name for name in _FIELD if getattr(self, name) is not None} | {*self.others}
        kept = {name: value for name, value in values.items() if name not in chosen} if self.model_defaults else {}
        return kept | self.to_dict()

    def build(
        self, temperature: float, prompt: Sequence[int], eos: Sequence[int], device: torch.device
    ) -> LogitsProcessorList:
        """Return the logits processors of one text, as `generate` creates them; empty if the temperature is all there is.

        Args:
            temperature: 0 = greedy decoding.
            prompt: token ids, including padding.
            eos: end-of-text ids.
            device: of the logits.

        Raises:
            InputError: transformers rejects the value of a field.
        """
        from transformers import GenerationMixin

        fields = self.fields()
        if not fields and not self.processors:
            return LogitsProcessorList()

        class Builder(GenerationMixin):
            """Minimal model with the attributes that `_get_logits_processor` reads."""

            config = PreTrainedConfig()

        config: Any = GenerationConfig()
        if not eos:
            fields.pop("exponential_decay_length_penalty", None)  # applies only to end-of-text tokens
        if self.length_limit is None:
            fields.pop("forced_eos_token_id", None)
        else:
            config.max_length = len(prompt) + self.length_limit
        for name, value in fields.items():  # the constructor would log incompatible fields
            setattr(config, name, value)
        config.do_sample, config.temperature = temperature > 0, float(temperature)
        ids, ends = (torch.tensor(list(values), dtype=torch.int64, device=device) for values in (prompt, eos))
        config._eos_token_tensor = ends if eos else None
        others = LogitsProcessorList(
            one.for_text(len(prompt), eos) if isinstance(one, PerText) else one for one in self.processors
        )
        builder: Any = Builder()
        try:
            processors: LogitsProcessorList = builder._get_logits_processor(
                config, len(prompt), ids[None], None, others, str(device), {}
            )
        except (ValueError, TypeError) as error:
            raise InputError(f"{' '.join(str(error).split())}") from None
        only_temperature = not others and all(type(one) is library.TemperatureLogitsWarper for one in processors)
        return LogitsProcessorList() if only_temperature else processors

    def checked(self, vocabulary: int, device: torch.device, batch: int = 1) -> SamplingParams:
        """Return the parameters with processors that can be called for any prefix in any order.

        Raises:
            InputError: a processor depends on more than the tokens, or cannot be copied.
        """
        processors = tuple(
            one if type(one) in STATELESS
            else XGrammarProcessor(one) if is_xgrammar(one)
            else check_processor(one, vocabulary, device, batch)
            for one in self.processors
        )  # fmt: skip
        return replace(self, processors=processors)


MODEL_DEFAULTS = SamplingParams()
"""The defaults of the target's `generation_config`."""

UNCHANGED = SamplingParams(model_defaults=False)
"""The temperature alone, whatever the defaults of the model are."""


def effective_sampling(params: SamplingParams, temperature: float) -> tuple[float, dict[str, Any]]:
    """Return the temperature and `to_dict`, with processors of transformers replaced by their equivalent options.

    `generate` converts its options, including the temperature, to processors. Traces and policies use the options.
    """
    values, others = params.to_dict(), []
    values.pop("processors", None)
    for processor in params.processors:
        if type(processor) is library.TemperatureLogitsWarper:
            temperature *= float(processor.temperature)
        elif type(processor) in _VALUE:
            option, attribute = _VALUE[type(processor)]
            value = _as_json(getattr(processor, attribute)) if attribute else True
            values[option] = float(f"{value:.6g}") if isinstance(value, float) else value  # may be a float32 value
        else:
            others.append(processor_name(processor))
    if "min_new_tokens" in values:
        values.pop("min_length", None)  # `generate` creates both from one option
    return temperature, values | ({"processors": others} if others else {})


def model_defaults(config: GenerationConfig | None) -> dict[str, Any]:
    """Return the fields of a model's `generation_config` that change its text, as JSON values by name.

    They include fields of the installed transformers that this module does not list, so that `with_defaults` rejects them.
    """
    valid = vars(GenerationConfig()).keys() - INERT
    fields = {
        name: _as_json(value)
        for name, value in ({} if config is None else vars(config)).items()
        if name in valid and not name.startswith("_") and not _is_neutral(name, value)
    }
    if fields.get("min_new_tokens") is not None:
        fields.pop("min_length", None)  # same precedence as in `generate`
    return fields


def _is_neutral(name: str, value: Any) -> bool:
    """Whether the value of a field has no effect."""
    neutral = {**NEUTRAL, **UNSUPPORTED, **IGNORED}.get(name)
    return value is None or value == neutral or (isinstance(value, list | tuple | dict) and not value)


def _as_json(value: Any) -> Any:
    """Convert a value to JSON types: tuples, tensors and a dictionary of `sequence_bias` become lists."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        tuple_keys = any(isinstance(key, tuple) for key in value)
        return [[list(key), bias] for key, bias in value.items()] if tuple_keys else dict(value)
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    return value
