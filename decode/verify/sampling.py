"""Sampling parameters, and samplers that apply transformers' logits processors to rows of logits with their prefixes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from ...policies.errors import InputError
from ...policies.limits import check_limits
from .grammar import GrammarMask, XGrammarProcessor, is_xgrammar
from .model_defaults import (
    APPLIED,
    LEFT_OUT,
    REFUSED,
    as_json,
    check_fields,
    is_neutral,
    library_processors,
    processor_options,
)
from .processors import PerText, check_processor, processor_name

_TRUNCATING = (
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    MinPLogitsWarper,
    TypicalLogitsWarper,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
)
"""Processors that remove unlikely tokens. Draft and target remove different tokens."""

_TOKEN_INDEPENDENT = (*_TRUNCATING, TemperatureLogitsWarper)
"""Processors that do not read the tokens of the prefix."""

_OPTIONS = {
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "no_repeat_ngram": "no_repeat_ngram_size",
    "min_new_tokens": "min_new_tokens",
}
"""Options of `Shaping` by name, with their fields of `GenerationConfig`."""

_LIMIT = "max_new_tokens"
"""Key in `others` for the length at which `forced_eos_token_id` applies."""


@dataclass(frozen=True)
class Shaping:
    """Sampling parameters besides the temperature.

    Attributes:
        top_k, top_p, min_p: truncation; 0, 1 and 0 disable it.
        repetition_penalty: 1 disables it.
        no_repeat_ngram: length of n-grams that must not repeat; 0 disables it.
        min_new_tokens: minimum number of tokens before the end of text.
        processors: further logits processors of transformers, or a `Grammar`, applied after these and before the temperature.
        others: further fields of `GenerationConfig` by name, such as `typical_p` or `bad_words_ids`; None disables a field
            that the model sets.
        model_defaults: whether options that are None or missing in `others` default to the target's `generation_config`.
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

    def __post_init__(self) -> None:
        check_limits(**vars(self))
        known = {*APPLIED, *REFUSED, *LEFT_OUT, _LIMIT} - {*_OPTIONS.values()}
        if unknown := sorted(set(self.others) - known):
            raise InputError(f"others: expected fields among {', '.join(sorted(known))}, not {', '.join(unknown)}")

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Shaping:
        """Return the parameters that `to_dict` describes, without defaults of a model.

        Raises:
            InputError: an option is unknown or out of range, or there are processors, which cannot be restored by name.
        """
        known = {*_OPTIONS, *APPLIED} - {*_OPTIONS.values()} | {*_OPTIONS}
        if unknown := sorted(set(values) - known):
            raise InputError(
                f"sampling options: {', '.join(unknown)} cannot be restored; known: {', '.join(sorted(known))}"
            )
        options = {name: value for name, value in values.items() if name in _OPTIONS}
        others = {name: value for name, value in values.items() if name not in _OPTIONS}
        return Shaping(**options, others=others, model_defaults=False)

    def with_defaults(self, defaults: Mapping[str, Any], max_new_tokens: int | None = None) -> Shaping:
        """Return the parameters with unset options replaced by the defaults of a model.

        Args:
            defaults: result of `model_defaults`.
            max_new_tokens: length limit, at which a token may be forced.

        Raises:
            InputError: a default is not supported.
        """
        if not self.model_defaults:
            return self
        fields = {**defaults, **self.others}
        fields |= {field: value for name, field in _OPTIONS.items() if (value := getattr(self, name)) is not None}
        fields = check_fields(fields)
        if self.min_new_tokens is not None:
            fields.pop("min_length", None)  # same precedence as in `generate`
        options = {name: fields.pop(field, None) for name, field in _OPTIONS.items()}
        if "forced_eos_token_id" in fields and max_new_tokens is not None:
            fields[_LIMIT] = max_new_tokens
        try:
            complete = replace(self, **options, others=fields, model_defaults=False)
            complete.build(1.0, 1, (0,), torch.device("cpu"), (0,))
        except InputError as error:
            raise InputError(f"the target's generation_config: {error.command_line}") from None
        return complete

    def fields(self) -> dict[str, Any]:
        """Return the fields of `GenerationConfig` that are not neutral, by name, without `processors`."""
        values = {field: getattr(self, name) for name, field in _OPTIONS.items()}
        values |= {name: value for name, value in self.others.items() if name in APPLIED}
        return {name: value for name, value in values.items() if not is_neutral(value, APPLIED[name])}

    def to_dict(self) -> dict[str, Any]:
        """Return the options that are not neutral as JSON values, and the type names of `processors`."""
        option = {field: name for name, field in _OPTIONS.items()}
        values = {option.get(name, name): as_json(value) for name, value in self.fields().items()}
        names = list(map(processor_name, self.processors))
        return values | ({"processors": names} if names else {})

    @property
    def reads_prompt(self) -> bool:
        """Whether a processor reads the tokens of the prompt."""
        return any(name.startswith("encoder_") for name in self.others)

    def override(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return `to_dict` of a trace with the options that are set here replaced."""
        chosen = {name for name in _OPTIONS if getattr(self, name) is not None} | {*self.others}
        kept = {name: value for name, value in values.items() if name not in chosen} if self.model_defaults else {}
        return kept | self.to_dict()

    def build(
        self, temperature: float, prompt: int, eos: Sequence[int], device: torch.device, tokens: Sequence[int] = ()
    ) -> LogitsProcessorList:
        """Return the logits processors of one text, as `generate` creates them; empty if the temperature is all there is.

        Args:
            temperature: 0 = greedy decoding.
            prompt: length of the prompt.
            eos: end-of-text ids.
            device: of the logits.
            tokens: token ids of the prompt, which some processors read.
        """
        fields = self.fields()
        if not fields and not self.processors:
            return LogitsProcessorList()
        ids = torch.tensor(list(tokens), dtype=torch.int64, device=device) if len(tokens) else prompt
        ends = torch.tensor(list(eos), dtype=torch.int64, device=device) if eos else None
        others = LogitsProcessorList(
            one.for_text(prompt, eos) if isinstance(one, PerText) else one for one in self.processors
        )
        limit = self.others.get(_LIMIT)
        processors = library_processors(fields, others, float(temperature), ids, limit, ends, device)
        only_temperature = all(
            type(one) is TemperatureLogitsWarper and one not in self.processors for one in processors
        )
        return LogitsProcessorList() if only_temperature else processors

    def checked(self, vocabulary: int, device: torch.device, batch: int = 1) -> Shaping:
        """Return the parameters with processors that can be called for any prefix in any order.

        Raises:
            InputError: a processor depends on more than the tokens, or cannot be copied.
        """
        processors = tuple(
            XGrammarProcessor(one) if is_xgrammar(one) else check_processor(one, vocabulary, device, batch)
            for one in self.processors
        )
        return replace(self, processors=processors)


MODEL_DEFAULTS = Shaping()
"""The defaults of the target's `generation_config`."""

UNCHANGED = Shaping(model_defaults=False)
"""The temperature alone, whatever the defaults of the model are."""


def effective_sampling(shaping: Shaping, temperature: float) -> tuple[float, dict[str, Any]]:
    """Return the temperature and `to_dict`, with processors of transformers replaced by their equivalent options.

    `generate` converts its options, including the temperature, to processors. Traces and policies use the options.
    """
    factor, options, others = processor_options(shaping.processors)
    values = shaping.to_dict() | options
    values.pop("processors", None)
    if "min_new_tokens" in values:
        values.pop("min_length", None)  # `generate` creates both from one option
    return temperature * factor, values | ({"processors": others} if others else {})


class Sampler:
    """Processes raw logits of one text; the result is the logits of the sampling distribution (or of the greedy choice).

    Args:
        processors: from `Shaping.build`; if empty, the logits are divided by the temperature.
        temperature: of the text.
        padding: tokens left of every prefix.

    Attributes:
        reads_prefix: whether there are processors.
        constrained: whether there is a grammar, so that no token may remain.
        untruncated: [R, V] the latest logits before truncation, if there is a truncating processor.
    """

    def __init__(self, processors: LogitsProcessorList, temperature: float, padding: Sequence[int] = ()) -> None:
        self.padding = list(padding)
        self.reads_prefix = len(processors) > 0
        self.constrained = any(isinstance(processor, GrammarMask) for processor in processors)
        self.untruncated: Tensor | None = None
        # A grammar that comes first masks rows of any length in one call.
        self._grammar = processors[0] if processors and isinstance(processors[0], GrammarMask) else None
        self._processors = LogitsProcessorList(processors[1:] if self._grammar is not None else processors)
        self._temperature = temperature
        truncating = [at for at, processor in enumerate(self._processors) if isinstance(processor, _TRUNCATING)]
        self._first_truncating = truncating[0] if truncating else len(self._processors)
        self._reads_tokens = not all(type(processor) in _TOKEN_INDEPENDENT for processor in self._processors)

    @property
    def reads_tokens(self) -> bool:
        """Whether a processor reads the tokens of prefixes."""
        return self._grammar is not None or self._reads_tokens

    def __call__(self, logits: Tensor, prefixes: Callable[[], Sequence[Sequence[int] | None]]) -> Tensor:
        """Return [R, V] processed logits.

        Args:
            logits: [R, V] raw; not modified.
            prefixes: returns the R token lists that the rows continue; called if a processor reads them. Rows of None, which
                follow an end of text, are not changed.
        """
        if not self.reads_prefix:
            return logits if self._temperature in (0.0, 1.0) else logits / self._temperature
        texts = None
        if self.reads_tokens:
            texts = [None if prefix is None else [*self.padding, *prefix] for prefix in prefixes()]
        if self._grammar is not None and texts is not None:
            logits = self._grammar.masked(texts, logits)
        if self._first_truncating < len(self._processors):
            self.untruncated = torch.empty_like(logits)  # filled by `_process`
        if not self._reads_tokens or texts is None:
            empty = torch.empty(len(logits), 0, dtype=torch.int64, device=logits.device)
            return self._process(empty, logits, list(range(len(logits))))
        out = logits.clone()
        # Processors take a rectangle of ids: rows of one length are processed together.
        for length in sorted({len(text) for text in texts if text is not None}):
            rows = [row for row, text in enumerate(texts) if text is not None and len(text) == length]
            ids = torch.tensor([texts[row] for row in rows], device=logits.device)
            out[rows] = self._process(ids, logits[rows], rows)
        return out

    def _process(self, ids: Tensor, logits: Tensor, rows: Sequence[int]) -> Tensor:
        for at, processor in enumerate(self._processors):
            if at == self._first_truncating and self.untruncated is not None:
                self.untruncated[rows] = logits
            if hasattr(processor, "_prefix_allowed_tokens_fn"):  # it counts rows as texts; here all are of one text
                logits = torch.cat([processor(i[None], row[None]) for i, row in zip(ids, logits, strict=True)])
            else:
                logits = processor(ids, logits)
        return logits


def require_token(scores: Tensor) -> None:
    """Check that processed logits [..., V] allow a token, which a grammar with other options may not.

    Raises:
        InputError: all logits of a row are -inf.
    """
    if not bool((scores.amax(-1) > -torch.inf).all()):
        raise InputError(
            "the grammar and the other sampling options leave no token after a text: expected at least one; loosen the "
            "grammar, min_new_tokens, no_repeat_ngram or the logits processors"
        )
