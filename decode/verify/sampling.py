"""Sampling parameters, their defaults from a model's `generation_config`, and the logits processors that apply them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedConfig
from transformers.generation import logits_process as library

from ...policies.arguments import check_limits
from ...policies.errors import InputError, SpecstopWarning
from .processors import PerText, check_processor, processor_name

NEUTRAL: Mapping[str, Any] = {
    **dict.fromkeys(("bad_words_ids", "begin_suppress_tokens", "exponential_decay_length_penalty"), None),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "sequence_bias", "suppress_tokens", "top_h"), None),
    **dict.fromkeys(("encoder_no_repeat_ngram_size", "min_length", "min_new_tokens", "no_repeat_ngram"), 0),
    **dict.fromkeys(("encoder_repetition_penalty", "repetition_penalty", "top_p", "typical_p"), 1.0),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "min_p", "top_k"), 0),
    **dict.fromkeys(("remove_invalid_values", "renormalize_logits"), False),
}
"""All options by name, with the values that have no effect. They are the fields of `GenerationConfig` for which transformers
creates logits processors, except that `no_repeat_ngram` is the field `no_repeat_ngram_size`."""

WARPERS: Mapping[str, type[LogitsProcessor]] = {
    "epsilon_cutoff": library.EpsilonLogitsWarper, "eta_cutoff": library.EtaLogitsWarper,
    "min_p": library.MinPLogitsWarper, "top_h": library.TopHLogitsWarper, "top_k": library.TopKLogitsWarper,
    "top_p": library.TopPLogitsWarper, "typical_p": library.TypicalLogitsWarper,
}  # fmt: skip
"""Options that remove unlikely tokens, with their processors. Greedy decoding ignores them."""

IGNORED = {**dict.fromkeys(("dola_layers", "max_time", "stop_strings"), None), "num_beams": 1, "penalty_alpha": 0.0}
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

STATELESS = (
    *WARPERS.values(), library.EncoderNoRepeatNGramLogitsProcessor, library.EncoderRepetitionPenaltyLogitsProcessor,
    library.ExponentialDecayLengthPenalty, library.ForcedBOSTokenLogitsProcessor, library.ForcedEOSTokenLogitsProcessor,
    library.InfNanRemoveLogitsProcessor, library.LogitNormalization, library.MinLengthLogitsProcessor,
    library.MinNewTokensLengthLogitsProcessor, library.NoBadWordsLogitsProcessor, library.NoRepeatNGramLogitsProcessor,
    library.RepetitionPenaltyLogitsProcessor, library.SequenceBiasLogitsProcessor,
    library.SuppressTokensAtBeginLogitsProcessor, library.SuppressTokensLogitsProcessor, library.TemperatureLogitsWarper,
    library.WatermarkLogitsProcessor,
)  # fmt: skip
"""Processors of transformers that are functions of (input_ids, scores)."""

_NEUTRAL_FIELDS = {**NEUTRAL, **IGNORED, "guidance_scale": 1.0, "token_healing": False}


class SamplingParams:
    """Sampling parameters other than the temperature.

    Args:
        processors: further logits processors of transformers, or a `Grammar`, applied after the options and before the
            temperature.
        model_defaults: whether options that are not set default to the target's `generation_config`.
        options: `top_k`, `top_p`, `min_p`, `repetition_penalty`, `no_repeat_ngram` (length of n-grams that must not repeat),
            `min_new_tokens` (before the end of text), and the other names in `NEUTRAL`. None = not set.

    Attributes:
        length_limit: number of new tokens at which `forced_eos_token_id` applies, set by `with_defaults`.

    Raises:
        InputError: an option is unknown or out of range.
    """

    def __init__(
        self,
        *,
        processors: tuple[LogitsProcessor, ...] = (),
        model_defaults: bool = True,
        **options: Any,
    ) -> None:
        if unknown := sorted(options.keys() - NEUTRAL.keys()):
            raise InputError(f"sampling options: expected {', '.join(sorted(NEUTRAL))}, not {', '.join(unknown)}")
        check_limits(**options)
        self.processors, self.model_defaults = processors, model_defaults
        self.length_limit: int | None = None
        self.options: dict[str, Any] = {name: _as_json(value) for name, value in options.items() if value is not None}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> SamplingParams:
        """Return the parameters that `to_dict` describes, without defaults of a model.

        Raises:
            InputError: an option is unknown or out of range, or there are processors, which cannot be restored by name.
        """
        if "processors" in values:
            raise InputError(f"sampling options: the processors {values['processors']} cannot be restored")
        return SamplingParams(**values, model_defaults=False)

    def to_dict(self) -> dict[str, Any]:
        """Return the options that have an effect as JSON values, and the names of `processors`."""
        values = {name: value for name, value in self.options.items() if not _is_neutral(name, value)}
        names = list(map(processor_name, self.processors))
        return values | ({"processors": names} if names else {})

    def with_defaults(self, config: GenerationConfig | None, max_new_tokens: int | None = None) -> SamplingParams:
        """Return the parameters with unset options replaced by those of a model's `generation_config`.

        Raises:
            InputError: a default is not supported, or transformers rejects its value.
        """
        if not self.model_defaults:
            params = copy.copy(self)
            params.length_limit = self.length_limit or max_new_tokens
            return params
        defaults = model_defaults(config)
        for name, value in defaults.items():
            if name not in NEUTRAL and name not in IGNORED:
                raise InputError(
                    f"the target's generation_config sets {name}={value!s:.60}, which is not supported; pass "
                    "--no-model-defaults to decode without the model's sampling defaults"
                )
        if ignored := [f"{name}={defaults.pop(name)!s:.60}" for name in IGNORED if name in defaults]:
            warnings.warn(
                f"the target's generation_config sets {', '.join(ignored)}, which is ignored: texts are decoded token by "
                "token until an end-of-text token or the length limit",
                SpecstopWarning,
                stacklevel=4,
            )
        if "min_new_tokens" in self.options:
            defaults.pop("min_length", None)  # same precedence as in `generate`
        options = {name: v for name, v in {**defaults, **self.options}.items() if not _is_neutral(name, v)}
        try:
            params = SamplingParams(processors=self.processors, model_defaults=False, **options)
            params.length_limit = max_new_tokens
            params.build(1.0, (0,), (0,), torch.device("cpu"))
        except InputError as error:
            raise InputError(f"the target's generation_config: {error.command_line}") from None
        return params

    def with_processors(self, processors: Iterable[LogitsProcessor]) -> SamplingParams:
        """Return the same options with other processors."""
        params = copy.copy(self)
        params.processors = tuple(processors)
        return params

    def checked(self, vocabulary: int, device: torch.device, batch: int = 1) -> SamplingParams:
        """Return the parameters with processors that can be called for any prefix in any order.

        Raises:
            InputError: a processor depends on more than the tokens, or cannot be copied.
        """
        return self.with_processors(
            one if type(one) in STATELESS else check_processor(one, vocabulary, device, batch)
            for one in self.processors
        )

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

        options = {name: value for name, value in self.options.items() if not _is_neutral(name, value)}
        if not options and not self.processors:
            return LogitsProcessorList()

        class Builder(GenerationMixin):
            """Minimal model with the attributes that `_get_logits_processor` reads."""

            config = PreTrainedConfig()

        config: Any = GenerationConfig()
        if not eos:
            options.pop("exponential_decay_length_penalty", None)  # applies only to end-of-text tokens
        if self.length_limit is None:
            options.pop("forced_eos_token_id", None)
        else:
            config.max_length = len(prompt) + self.length_limit
        for name, value in options.items():  # the constructor would log incompatible fields
            setattr(config, "no_repeat_ngram_size" if name == "no_repeat_ngram" else name, value)
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


MODEL_DEFAULTS = SamplingParams()
"""The defaults of the target's `generation_config`."""

UNCHANGED = SamplingParams(model_defaults=False)
"""The temperature alone, whatever the defaults of the model are."""


def model_defaults(config: GenerationConfig | None) -> dict[str, Any]:
    """Return the options that a model's `generation_config` sets, as JSON values by name.

    They include fields that are not options, as `with_defaults` ignores or rejects them.
    """
    fields = {} if config is None else {name: value for name, value in vars(config).items() if name[0] != "_"}
    fields["no_repeat_ngram"] = fields.pop("no_repeat_ngram_size", None)
    valid = {*vars(GenerationConfig()), "no_repeat_ngram"} - INERT
    options = {n: _as_json(value) for n, value in fields.items() if n in valid and not _is_neutral(n, value)}
    if options.get("min_new_tokens") is not None:
        options.pop("min_length", None)  # same precedence as in `generate`
    return options


def _is_neutral(name: str, value: Any) -> bool:
    """Whether the value of a field has no effect."""
    return value is None or value == _NEUTRAL_FIELDS.get(name) or (isinstance(value, list | tuple | dict) and not value)


def _as_json(value: Any) -> Any:
    """Convert a value to JSON types: tuples, tensors, arrays and a dictionary of `sequence_bias` become lists."""
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, dict):
        tuple_keys = any(isinstance(key, tuple) for key in value)
        return [[_as_json(key), _as_json(bias)] for key, bias in value.items()] if tuple_keys else dict(value)
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    return value
