"""Logits processors that keep state: which ones can follow candidates and roll-back, and how they are called there.

The loop asks for the scores after any prefix, in any order and repeatedly, so a processor must be a function of
(input_ids, scores). One that is not is called on copies, one per prefix, each after the calls that plain decoding makes.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import islice
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedTokenizerBase
from transformers.generation import logits_process as library
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor

from ...policies.errors import InputError

STATELESS: tuple[type[LogitsProcessor], ...] = (
    library.EncoderNoRepeatNGramLogitsProcessor,
    library.EncoderRepetitionPenaltyLogitsProcessor,
    library.EpsilonLogitsWarper,
    library.EtaLogitsWarper,
    library.ExponentialDecayLengthPenalty,
    library.ForcedBOSTokenLogitsProcessor,
    library.ForcedEOSTokenLogitsProcessor,
    library.InfNanRemoveLogitsProcessor,
    library.LogitNormalization,
    library.MinLengthLogitsProcessor,
    library.MinNewTokensLengthLogitsProcessor,
    library.MinPLogitsWarper,
    library.NoBadWordsLogitsProcessor,
    library.NoRepeatNGramLogitsProcessor,
    library.RepetitionPenaltyLogitsProcessor,
    library.SequenceBiasLogitsProcessor,
    library.SuppressTokensAtBeginLogitsProcessor,
    library.SuppressTokensLogitsProcessor,
    library.TemperatureLogitsWarper,
    library.TopHLogitsWarper,
    library.TopKLogitsWarper,
    library.TopPLogitsWarper,
    library.TypicalLogitsWarper,
    library.WatermarkLogitsProcessor,
)
"""Transformers' own functions of (input_ids, scores): they are not tried."""

_RUN_MODELS = ("UnbatchedClassifierFreeGuidanceLogitsProcessor",)
"""They call the target themselves, with a cache of their own."""

_PREFIX, _STEPS = 24, 4
"""Tokens of the text that a processor is tried on, and calls after it."""

_MOST_PARTS = 1024
"""Values among a processor's attributes that are looked at after each call."""

_VALUES = (bool, int, float, complex, str, bytes)

_MOST_COPIES = 256
"""Copies that are kept of one text; a prefix whose copy was dropped is stepped through again."""


class PerText(LogitsProcessor):
    """A constraint on texts: each text has a processor of its own.

    Attributes:
        name: as in headers and messages.
    """

    name: str

    def for_text(self, prompt: int, eos: Sequence[int]) -> LogitsProcessor:
        """Return the processor of one text: a function of (input_ids, scores).

        Args:
            prompt: its length, padding included.
            eos: ids that end the text.
        """
        raise NotImplementedError


def processor_name(processor: LogitsProcessor) -> str:
    """Return the name of a processor in headers and messages."""
    return processor.name if isinstance(processor, PerText) else type(processor).__name__


class Stepwise(PerText):
    """A processor with state that depends on the tokens alone: called on copies, step by step along each prefix.

    Args:
        processor: fresh; it is never called itself.
    """

    def __init__(self, processor: LogitsProcessor) -> None:
        self.name = type(processor).__name__
        self._fresh = copied(processor)

    def for_text(self, prompt: int, eos: Sequence[int]) -> LogitsProcessor:
        """See `PerText.for_text`."""
        return _Steps(self._fresh, prompt)


class _Steps(LogitsProcessor):
    """The copies of one text, by the tokens after the prompt that they were last called with."""

    def __init__(self, fresh: LogitsProcessor, prompt: int) -> None:
        self._fresh, self._prompt = fresh, prompt
        self._called: dict[tuple[int, ...], LogitsProcessor] = {}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return torch.cat([self._row(ids[None], row[None]) for ids, row in zip(input_ids, scores, strict=True)])

    def _row(self, ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores [1, V] after one text [1, n]."""
        generated = tuple(ids[0, self._prompt :].tolist())
        known = len(generated) - 1
        while known >= 0 and generated[:known] not in self._called:
            known -= 1
        processor = self._called[generated[:known]] if known >= 0 else self._fresh
        out = scores
        for length in range(known + 1, len(generated) + 1):
            processor = copied(processor)
            # The scores of earlier steps are no longer known; `check_processors` has seen that they do not matter.
            out = processor(ids[:, : self._prompt + length], scores.clone())
            self._called[generated[:length]] = processor
        while len(self._called) > _MOST_COPIES:
            del self._called[next(iter(self._called))]
        return out


class Watched(PerText):
    """A processor that showed no state when it was tried; one whose state changes later is followed as by `Stepwise`.

    Args:
        processor: fresh; it is never called itself.
        batch: rows of the `generate` call that it belongs to.
    """

    def __init__(self, processor: LogitsProcessor, batch: int = 1) -> None:
        self.name, self._batch = type(processor).__name__, batch
        self._fresh = copied(processor)

    def for_text(self, prompt: int, eos: Sequence[int]) -> LogitsProcessor:
        """See `PerText.for_text`."""
        return _Watch(self.name, self._fresh, prompt, self._batch)


class _Watch(_Steps):
    """Calls one copy until its state changes: the prefixes before had none, so that any can be stepped through again."""

    def __init__(self, name: str, fresh: LogitsProcessor, prompt: int, batch: int) -> None:
        super().__init__(fresh, prompt)
        self._name, self._batch = name, batch
        self._one: LogitsProcessor | None = copied(fresh)
        self._state = _parts(self._one)

    def _row(self, ids: Tensor, scores: Tensor) -> Tensor:
        if self._one is None:
            return super()._row(ids, scores)
        out: Tensor = self._one(ids, scores)
        if not _equal_parts(_parts(self._one), self._state):
            if self._batch > 1:
                raise InputError(
                    f"logits processor {self._name} keeps state between calls, which the rows of a batch share; generate "
                    "one text at a time"
                )
            self._called[tuple(ids[0, self._prompt :].tolist())], self._one = self._one, None
        return out


def _parts(processor: LogitsProcessor) -> list[Any]:
    """Return what a change of a processor's attributes changes, in a fixed order: values, sizes, versions of tensors."""
    parts: list[Any] = []
    seen: set[int] = set()
    waiting: list[Any] = [vars(processor)]
    while waiting and len(parts) < _MOST_PARTS:
        value = waiting.pop()
        parts.append(value)
        if id(value) in seen or isinstance(value, torch.nn.Module | PreTrainedTokenizerBase):
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            parts.append(0 if value.is_inference() else value._version)
        elif isinstance(value, dict | list | tuple | set | frozenset):
            parts.append(len(value))
            waiting.extend(islice(value.values() if isinstance(value, dict) else value, _MOST_PARTS))
        elif not isinstance(value, type | FunctionType | ModuleType) and hasattr(value, "__dict__"):
            waiting.append(vars(value))
    return parts


def _equal_parts(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(
        a is b or (type(a) is type(b) and isinstance(a, _VALUES) and a == b) for a, b in zip(some, others, strict=True)
    )


def copied(processor: LogitsProcessor) -> LogitsProcessor:
    """Return an independent copy that shares models, tokenizers and compiled grammars.

    Matchers of grammar libraries, which `copy.deepcopy` cannot copy, are copied by their own methods.
    """
    memo: dict[int, Any] = {}
    seen: set[int] = set()
    waiting: list[Any] = [processor]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, list | tuple):
            waiting.extend(value)
        elif isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, torch.nn.Module | PreTrainedTokenizerBase):
            memo[id(value)] = value
        elif type(value).__module__.startswith("xgrammar") or type(value).__name__ in ("LLMatcher", "LLTokenizer"):
            copying = getattr(value, "fork", None) or getattr(value, "deep_copy", None)
            memo[id(value)] = value if copying is None else copying()
        elif isinstance(value, MethodType):
            waiting.append(value.__self__)
        elif not isinstance(value, type | FunctionType | ModuleType | Tensor):
            waiting.extend(getattr(value, "__dict__", {}).values())
    return copy.deepcopy(processor, memo)


def check_processor(
    processor: LogitsProcessor, vocabulary: int, device: torch.device, batch: int = 1
) -> LogitsProcessor:
    """Return a processor in a form that can be called for any prefix in any order.

    One that is not known is tried on copies: what gives the scores of a function of (input_ids, scores) becomes `Watched`,
    since its state may begin with a token that the trial lacks; one whose state depends on the tokens alone `Stepwise`.

    Args:
        processor: as a user gives it; it is not changed.
        vocabulary: V.
        device: of the logits.
        batch: rows of the `generate` call that it belongs to.

    Raises:
        InputError: it depends on anything else, cannot be copied, or treats the rows of a batch differently.
    """
    if isinstance(processor, PerText) or type(processor) in STATELESS:
        return processor
    name = type(processor).__name__
    if name in _RUN_MODELS:
        raise InputError(
            f"logits processor {name} keeps state between calls, a cache of the target's, which candidates cannot follow; "
            "leave guidance_scale out"
        )
    try:
        copied(processor)
    except Exception as error:
        raise InputError(
            f"logits processor {name} cannot be copied ({type(error).__name__}), so its calls cannot follow candidates; "
            "give it a __deepcopy__ method"
        ) from None
    return _Trial(processor, vocabulary, device).result(batch)


class _Trial:
    """Calls copies of a processor along two texts of its own choice."""

    def __init__(self, processor: LogitsProcessor, vocabulary: int, device: torch.device) -> None:
        self._processor, self._name = processor, type(processor).__name__
        generator = torch.Generator().manual_seed(0)
        self._prefix = torch.randint(vocabulary, (1, _PREFIX), generator=generator, device="cpu").to(device)
        logits = torch.randn(2, _STEPS, 1, vocabulary, generator=generator, device="cpu", dtype=torch.float32)
        self._logits = logits.to(device)
        # Two texts, the second of which goes on with the second best tokens.
        self._texts = [self._text(0), self._text(1)]

    def _text(self, rank: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return ids, scores and result of each step, up to the first that raises."""
        one, ids, steps = copied(self._processor), self._prefix, []
        for logits in self._logits[rank]:
            try:
                out = one(ids, logits.clone())
            except Exception:  # it may need another text
                break
            steps.append((ids, logits, out))
            best = out[0].topk(2)
            token = best.indices[rank if best.values[rank] > -torch.inf else 0]
            ids = torch.cat([ids, token.view(1, 1)], -1)
        return steps

    def result(self, batch: int) -> LogitsProcessor:
        """See `check_processor`."""
        tried = min(map(len, self._texts))
        if tried and self._is_function():
            by_contract = isinstance(self._processor, PrefixConstrainedLogitsProcessor)
            return self._processor if by_contract else Watched(self._processor, batch)
        if tried and not self._is_restartable():
            raise InputError(
                f"logits processor {self._name} keeps state between calls that does not depend on the tokens alone (random "
                "numbers, earlier scores, or something that its copies share), so candidates cannot be scored; "
                "make it a function of (input_ids, scores)"
            )
        if batch > 1 and not self._treats_rows_alike():
            raise InputError(
                f"logits processor {self._name} treats the rows of a batch differently; generate one text at a time"
            )
        return Stepwise(self._processor)

    def _is_function(self) -> bool:
        """Whether copies give the same scores in another order, and with both texts as two rows, and stay as they were."""
        first, second = self._texts
        count = min(len(first), len(second))
        try:
            for order in ([*range(count)[::-1]], [count // 2, count - 1]):
                one = copied(self._processor)
                for at in order:
                    for ids, logits, out in (first[at], second[at]):
                        if not torch.equal(one(ids, logits.clone()), out):
                            return False
        except Exception:
            return False
        # Such a function is one of the prefix by contract, and told the row's number: `Sampler` calls it row by row.
        if isinstance(self._processor, PrefixConstrainedLogitsProcessor):
            return True
        # A counter may matter only after more calls than these.
        return _same(vars(one), vars(copied(self._processor)), set()) and self._treats_rows_alike()

    def _is_restartable(self) -> bool:
        """Whether copies that are called step by step, in turns and with other scores before, give the same scores."""
        try:
            return all(map(self._gives_the_same, range(min(map(len, self._texts)))))
        except Exception:
            return False

    def _gives_the_same(self, last: int) -> bool:
        """Whether copies called up to a step give its scores, whatever the scores of the steps before were."""
        both = [copied(self._processor) for _ in self._texts]
        for step in range(last):
            for one, text in zip(both, self._texts, strict=True):
                ids, logits, _ = text[step]
                one(ids, logits.flip(-1))
        results = [
            (one(text[last][0], text[last][1].clone()), text[last][2])
            for one, text in zip(both, self._texts, strict=True)
        ]
        return all(torch.equal(made, out) for made, out in results)

    def _treats_rows_alike(self) -> bool:
        """Whether two rows of one call get what each gets alone."""
        one = copied(self._processor)
        try:
            for steps in zip(*self._texts, strict=False):
                ids, logits, out = (torch.cat(parts) for parts in zip(*steps, strict=True))
                if not torch.equal(one(ids, logits), out):
                    return False
        except Exception:
            return False
        return True


def _same(one: Any, other: Any, compared: set[int]) -> bool:
    """Whether two attributes are equal, as far as can be told; what cannot be compared is not."""
    if one is other or id(one) in compared:
        return True
    compared.add(id(one))
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(value, other[key], compared) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(_same(a, b, compared) for a, b in zip(one, other, strict=True))
    if isinstance(one, torch.Generator):
        return torch.equal(one.get_state(), other.get_state())
    if hasattr(one, "__dict__"):
        return _same(vars(one), vars(other), compared)
    return bool(one == other)
