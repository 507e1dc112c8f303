"""From raw logits to what is sampled: transformers' logits processors, each row with its own prefix, and the temperature."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
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
"""Those that leave tokens out by how likely they are: what draft and target leave out differs."""

_OF_ROWS = (*_TRUNCATING, TemperatureLogitsWarper)
"""Those that look at the logits alone, not at the tokens before."""


@dataclass(frozen=True)
class Shaping:
    """How the distribution that is sampled from differs from the target's softmax, beside the temperature.

    Attributes:
        top_k, top_p, min_p: which tokens stay; 0, 1 and 0 leave all.
        repetition_penalty: 1 = none.
        no_repeat_ngram: length of the n-grams that may not come twice; 0 = any may.
        min_new_tokens: no end of text before so many.
        processors: more of transformers' logits processors, or a `Grammar`, asked after these and before the temperature.
        others: further fields of transformers' `GenerationConfig` by name, such as `typical_p` or `bad_words_ids`; a value
            of None turns one off that the model sets.
        model_defaults: what is None or not among `others` is as the target's `generation_config` has it; without, off.
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
        if odd := sorted(set(self.others) - known):
            raise InputError(f"others: expected fields among {', '.join(sorted(known))}, not {', '.join(odd)}")

    @staticmethod
    def of(facts: Mapping[str, Any]) -> Shaping:
        """Return the shaping that `facts` describes, without the defaults of a model.

        Raises:
            InputError: an option is unknown or out of range, or there are further processors, of which names alone are known.
        """
        known = {*_OPTIONS, *APPLIED} - {*_OPTIONS.values()} | {*_OPTIONS}
        if odd := sorted(set(facts) - known):
            raise InputError(
                f"sampling options: {', '.join(odd)} cannot be restored; known: {', '.join(sorted(known))}"
            )
        others = {name: value for name, value in facts.items() if name not in _OPTIONS}
        own = {name: value for name, value in facts.items() if name in _OPTIONS}
        return Shaping(**own, others=others, model_defaults=False)

    def filled(self, defaults: Mapping[str, Any], max_new_tokens: int | None = None) -> Shaping:
        """Return the shaping with unset fields replaced by the defaults of a model.

        Args:
            defaults: of `model_defaults`, or `facts` of a trace.
            max_new_tokens: of the texts, at whose end a token may be forced.

        Raises:
            InputError: a default cannot be applied, and is not turned off.
        """
        if not self.model_defaults:
            return self
        fields = {**defaults, **self.others}
        fields |= {field: value for name, field in _OPTIONS.items() if (value := getattr(self, name)) is not None}
        fields = check_fields(fields)
        if self.min_new_tokens is not None:
            fields.pop("min_length", None)  # as `generate` has it
        own = {name: fields.pop(field, None) for name, field in _OPTIONS.items()}
        if "forced_eos_token_id" in fields and max_new_tokens is not None:
            fields[_LIMIT] = max_new_tokens
        try:
            filled = replace(self, **own, others=fields, model_defaults=False)
            filled.build(1.0, 1, (0,), torch.device("cpu"), (0,))
        except InputError as error:
            raise InputError(f"the target's generation_config: {error.command_line}") from None
        return filled

    def fields(self) -> dict[str, Any]:
        """Return what differs from plain sampling by the names of `GenerationConfig`, without `processors`."""
        own = {field: getattr(self, name) for name, field in _OPTIONS.items()}
        every = {**own, **{name: value for name, value in self.others.items() if name in APPLIED}}
        return {name: value for name, value in every.items() if not is_neutral(value, APPLIED[name])}

    @property
    def facts(self) -> dict[str, Any]:
        """What differs from plain sampling, as JSON has it: options by name, `processors` by their types' names."""
        own = {field: name for name, field in _OPTIONS.items()}
        names = list(map(processor_name, self.processors))
        options = {own.get(name, name): as_json(value) for name, value in self.fields().items()}
        return options | ({"processors": names} if names else {})

    @property
    def reads_prompt(self) -> bool:
        """Whether the tokens of the prompt matter, beside their number."""
        return any(name.startswith("encoder_") for name in self.others)

    def over(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Return the `facts` of a trace with what is set here in their place."""
        chosen = {name for name in _OPTIONS if getattr(self, name) is not None} | {*self.others}
        kept = {name: value for name, value in facts.items() if name not in chosen} if self.model_defaults else {}
        return kept | self.facts

    def build(
        self, temperature: float, prompt: int, eos: Sequence[int], device: torch.device, tokens: Sequence[int] = ()
    ) -> LogitsProcessorList:
        """Return the processors of one text as transformers' `generate` makes them; empty if there is nothing to do.

        Args:
            temperature: 0 = greedy, which the warpers do not change.
            prompt: its length.
            eos: ids that end a text.
            device: of the logits.
            tokens: of the prompt, which some processors read.
        """
        fields = self.fields()
        if not fields and not self.processors:
            return LogitsProcessorList()  # the temperature alone needs no processor: `Sampler` divides by it
        ids = torch.tensor(list(tokens), dtype=torch.int64, device=device) if len(tokens) else prompt
        ends = torch.tensor(list(eos), dtype=torch.int64, device=device) if eos else None
        limit = self.others.get(_LIMIT)
        others = LogitsProcessorList(
            one.for_text(prompt, eos) if isinstance(one, PerText) else one for one in self.processors
        )
        made = library_processors(fields, others, float(temperature), ids, limit, ends, device)
        alone = all(type(one) is TemperatureLogitsWarper and one not in self.processors for one in made)
        return LogitsProcessorList() if alone else made

    def checked(self, vocabulary: int, device: torch.device, batch: int = 1) -> Shaping:
        """Return the shaping with processors that can be called for any prefix (`check_processors`)."""
        return replace(self, processors=check_processors(self.processors, vocabulary, device, batch))


_OPTIONS = {
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "no_repeat_ngram": "no_repeat_ngram_size",
    "min_new_tokens": "min_new_tokens",
}
"""The options of `Shaping` by name, with the field of `GenerationConfig` that each stands for."""

_LIMIT = "max_new_tokens"
"""Among `others`: where a token is forced at the end of a text, how long that is."""

MODEL_DEFAULTS = Shaping()
"""What the target's `generation_config` says, and nothing else."""

UNCHANGED = Shaping(model_defaults=False)
"""Nothing but the temperature, whatever the defaults of the model are."""


def told(shaping: Shaping, temperature: float) -> tuple[float, dict[str, Any]]:
    """Return temperature and `Shaping.facts`, with those of transformers' own processors as the options they stand for.

    `generate` hands its options over as processors, the temperature among them; a trace or a policy knows them by name.
    """
    handed, options, others = processor_options(shaping.processors)
    facts = shaping.facts | options
    facts.pop("processors", None)
    if "min_new_tokens" in facts:
        facts.pop("min_length", None)  # `generate` makes both of one option
    return temperature * handed, facts | ({"processors": others} if others else {})


class Sampler:
    """Turns raw logits into scores whose softmax is sampled from (or whose argmax is taken, when greedy).

    Args:
        processors: of one text, from `Shaping.build`; none = only the temperature.
        temperature: of the text; already part of `processors` if there are any.
        padding: tokens that stand left of every prefix.

    Attributes:
        reads_prefix: whether there are processors.
        constrained: whether a grammar is among them, so that a row may have no token left.
        untruncated: [R, V] the last scores before tokens were left out for being unlikely; None where none are.
    """

    def __init__(self, processors: LogitsProcessorList, temperature: float, padding: Sequence[int] = ()) -> None:
        self.padding = list(padding)
        self.reads_prefix = len(processors) > 0
        self.constrained = any(isinstance(processor, GrammarMask) for processor in processors)
        self.untruncated: Tensor | None = None
        # A grammar that comes first masks rows of any length at once.
        self._grammar = processors[0] if processors and isinstance(processors[0], GrammarMask) else None
        processors = LogitsProcessorList(processors[1:] if self._grammar is not None else processors)
        self._processors, self._temperature = processors, temperature
        truncating = [at for at, processor in enumerate(processors) if isinstance(processor, _TRUNCATING)]
        self._first_truncating = truncating[0] if truncating else len(processors)
        self._reads_tokens = not all(type(processor) in _OF_ROWS for processor in processors)  # exact types

    def __call__(self, logits: Tensor, prefixes: Callable[[], Sequence[Sequence[int] | None]]) -> Tensor:
        """Return [R, V] processed scores.

        Args:
            logits: [R, V] raw; left as they are.
            prefixes: called for the R token lists that the rows continue, only if a processor wants them. Rows of None stay
                as they are: `generate` asks no processor what comes after the end, of which a grammar knows nothing.
        """
        if not self.reads_prefix:
            return logits if self._temperature in (0.0, 1.0) else logits / self._temperature
        if self._grammar is not None:
            known = prefixes()
            logits = self._grammar.masked([None if one is None else [*self.padding, *one] for one in known], logits)
            prefixes = lambda: known  # noqa: E731
        if self._first_truncating < len(self._processors):
            self.untruncated = torch.empty_like(logits)  # filled in by `_processed`
        if not self._reads_tokens:
            nothing = torch.empty(len(logits), 0, dtype=torch.int64, device=logits.device)
            return self._processed(nothing, logits, list(range(len(logits))))
        lists = {row: [*self.padding, *prefix] for row, prefix in enumerate(prefixes()) if prefix is not None}
        out = logits.clone()
        # Processors take a rectangle of ids, so rows of one length go together.
        for length in sorted(set(map(len, lists.values()))):
            rows = [row for row, tokens in lists.items() if len(tokens) == length]
            ids = torch.tensor([lists[row] for row in rows], device=logits.device)
            out[rows] = self._processed(ids, logits[rows], rows)
        return out

    def _processed(self, ids: Tensor, logits: Tensor, rows: Sequence[int]) -> Tensor:
        for at, processor in enumerate(self._processors):
            if at == self._first_truncating and self.untruncated is not None:
                self.untruncated[rows] = logits
            if hasattr(processor, "_prefix_allowed_tokens_fn"):  # it numbers the rows: each stands for the one text
                logits = torch.cat([processor(i[None], row[None]) for i, row in zip(ids, logits, strict=True)])
            else:
                logits = processor(ids, logits)
        return logits


class BatchSampler:
    """The samplers of texts that are decoded side by side: rows whose texts are of one length are processed together.

    Args:
        shaping, temperature, eos, device: as of `Shaping.build`.
        prompts: token ids of each text's prompt.
    """

    def __init__(
        self,
        shaping: Shaping,
        temperature: float,
        prompts: Sequence[Sequence[int]],
        eos: Sequence[int],
        device: torch.device,
    ) -> None:
        # A processor may know the length of the prompt (`min_new_tokens`) or its tokens, or be made for one text: what is
        # not alike has a sampler of its own.
        for_texts = any(isinstance(processor, PerText) for processor in shaping.processors)
        alike: dict[tuple[int, ...], list[int]] = {}
        for row, prompt in enumerate(prompts):
            key = (row,) if for_texts else tuple(prompt) if shaping.reads_prompt else (len(prompt),)
            alike.setdefault(key, []).append(row)
        self._parts = [
            (rows, Sampler(shaping.build(temperature, len(own := prompts[rows[0]]), eos, device, own), temperature))
            for _, rows in sorted(alike.items())
        ]
        self.constrained = self._parts[0][1].constrained

    def __call__(self, logits: Tensor, prefixes: Callable[[], Sequence[Sequence[int] | None]]) -> Tensor:
        """Return [B, V] processed scores, a row for each text; see `Sampler`."""
        if not self._parts[0][1].reads_prefix:
            return self._parts[0][1](logits, prefixes)
        known: list[Sequence[int] | None] = []

        def of(rows: Sequence[int]) -> Sequence[Sequence[int] | None]:
            # Put together once, for all samplers that ask.
            known.extend([] if known else prefixes())
            return [known[row] for row in rows]

        out = torch.empty_like(logits)
        for rows, sampler in self._parts:
            out[rows] = sampler(logits[rows], partial(of, rows))
        return out


def check_processors(
    processors: Sequence[LogitsProcessor], vocabulary: int, device: torch.device, batch: int = 1
) -> tuple[LogitsProcessor, ...]:
    """Return processors in a form that can be called for any prefix in any order; see `processors.check_processor`.

    Raises:
        InputError: one depends on more than the tokens, or cannot be copied.
    """
    return tuple(
        XGrammarProcessor(one) if is_xgrammar(one) else check_processor(one, vocabulary, device, batch)
        for one in processors
    )


def require_token(scores: Tensor) -> None:
    """Refuse processed scores [..., V] that leave no token, as a grammar and other options may together.

    Raises:
        InputError: a row is -inf throughout.
    """
    if not bool((scores.amax(-1) > -torch.inf).all()):
        raise InputError(
            "the grammar and the other sampling options leave no token after a text: expected at least one; loosen the "
            "grammar, min_new_tokens, no_repeat_ngram or the logits processors"
        )
