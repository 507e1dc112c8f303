"""From raw logits to what is sampled: transformers' logits processors, each row with its own prefix, and the temperature."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from ...policies.errors import InputError
from ...policies.limits import check_limits
from .grammar import GrammarMask, XGrammarProcessor, is_xgrammar
from .processors import PerText, check_processor

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

_KNOWN: Mapping[type[LogitsProcessor], tuple[str, str]] = {
    RepetitionPenaltyLogitsProcessor: ("repetition_penalty", "penalty"),
    NoRepeatNGramLogitsProcessor: ("no_repeat_ngram", "ngram_size"),
    MinNewTokensLengthLogitsProcessor: ("min_new_tokens", "min_new_tokens"),
    TopKLogitsWarper: ("top_k", "top_k"),
    TopPLogitsWarper: ("top_p", "top_p"),
    MinPLogitsWarper: ("min_p", "min_p"),
}
"""The option of `Shaping` that each stands for, and where it keeps the value."""


@dataclass(frozen=True)
class Shaping:
    """How the distribution that is sampled from differs from the model's, beside the temperature.

    Attributes:
        top_k, top_p, min_p: which tokens stay; 0, 1 and 0 leave all.
        repetition_penalty: 1 = none.
        no_repeat_ngram: length of the n-grams that may not come twice; 0 = any may.
        min_new_tokens: no end of text before so many.
        processors: more of transformers' logits processors, or a `Grammar`, asked after these and before the temperature.
    """

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    no_repeat_ngram: int = 0
    min_new_tokens: int = 0
    processors: tuple[LogitsProcessor, ...] = ()

    def __post_init__(self) -> None:
        check_limits(**vars(self))

    @staticmethod
    def of(facts: Mapping[str, Any]) -> Shaping:
        """Return the shaping that `facts` tells of.

        Raises:
            InputError: an option is unknown or out of range, or there are further processors, of which names alone are known.
        """
        known = {field.name for field in fields(Shaping)} - {"processors"}
        if odd := sorted(set(facts) - known):
            raise InputError(
                f"sampling options: {', '.join(odd)} cannot be restored; known: {', '.join(sorted(known))}"
            )
        return Shaping(**facts)

    @property
    def facts(self) -> dict[str, Any]:
        """What differs from plain sampling, as JSON has it: options by name, `processors` by their types' names."""
        options = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "processors"}
        plain = {field.name: field.default for field in fields(self)}
        names = list(map(_name, self.processors))
        return {name: value for name, value in options.items() if value != plain[name]} | (
            {"processors": names} if names else {}
        )

    def build(self, temperature: float, prompt: int, eos: Sequence[int], device: torch.device) -> LogitsProcessorList:
        """Return the processors of one text in the order of transformers' `generate`; empty if there is nothing to do.

        Args:
            temperature: 0 = greedy, which the warpers do not change.
            prompt: its length.
            eos: ids that end a text.
            device: of the logits.
        """
        made: list[LogitsProcessor] = []
        if self.repetition_penalty != 1.0:
            made.append(RepetitionPenaltyLogitsProcessor(float(self.repetition_penalty)))
        if self.no_repeat_ngram:
            made.append(NoRepeatNGramLogitsProcessor(self.no_repeat_ngram))
        if self.min_new_tokens and eos:
            made.append(MinNewTokensLengthLogitsProcessor(prompt, self.min_new_tokens, list(eos), str(device)))
        made.extend(one.for_text(prompt, eos) if isinstance(one, PerText) else one for one in self.processors)
        if temperature > 0:
            warpers: list[LogitsProcessor] = []
            if self.top_k:
                warpers.append(TopKLogitsWarper(self.top_k))
            if self.top_p < 1.0:
                warpers.append(TopPLogitsWarper(float(self.top_p)))
            if self.min_p > 0.0:
                warpers.append(MinPLogitsWarper(float(self.min_p)))
            # The temperature alone needs no processor: `Sampler` divides by it.
            if (made or warpers) and temperature != 1.0:
                made.append(TemperatureLogitsWarper(float(temperature)))
            made.extend(warpers)
        return LogitsProcessorList(made)

    def checked(self, vocabulary: int, device: torch.device, batch: int = 1) -> Shaping:
        """Return the shaping with processors that can be called for any prefix (`check_processors`)."""
        return replace(self, processors=check_processors(self.processors, vocabulary, device, batch))


def _name(processor: LogitsProcessor) -> str:
    return processor.name if isinstance(processor, PerText) else type(processor).__name__


UNCHANGED = Shaping()
"""Nothing but the temperature."""


def told(shaping: Shaping, temperature: float) -> tuple[float, dict[str, Any]]:
    """Return temperature and `Shaping.facts`, with those of transformers' own processors as the options they stand for.

    `generate` hands its options over as processors, the temperature among them; a trace or a policy knows them by name.
    """
    facts = shaping.facts
    others = []
    for processor in shaping.processors:
        if type(processor) is TemperatureLogitsWarper:
            temperature = temperature * float(processor.temperature)  # beside it stands 1 (`hf.generate`)
        elif type(processor) in _KNOWN:
            option, attribute = _KNOWN[type(processor)]
            facts[option] = getattr(processor, attribute)
        else:
            others.append(_name(processor))
    facts.pop("processors", None)
    return temperature, facts | ({"processors": others} if others else {})


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
        prompts: length of each text's prompt.
    """

    def __init__(
        self, shaping: Shaping, temperature: float, prompts: Sequence[int], eos: Sequence[int], device: torch.device
    ) -> None:
        # A processor may know the length of the prompt (`min_new_tokens`), so each length has a sampler of its own.
        parts = [[row for row, own in enumerate(prompts) if own == length] for length in sorted(set(prompts))]
        if any(isinstance(processor, PerText) for processor in shaping.processors):
            parts = [[row] for row in range(len(prompts))]
        self._parts = [
            (rows, Sampler(shaping.build(temperature, prompts[rows[0]], eos, device), temperature)) for rows in parts
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
