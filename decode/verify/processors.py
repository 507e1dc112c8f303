"""Stateful logits processors: detection, and calls that support candidates and rollback.

The decoding loop requests scores after any prefix, in any order and repeatedly, so a processor must be a function of
(input_ids, scores). A stateful processor is called on copies instead, one copy per prefix. Each copy has received the same
sequence of calls as in plain decoding.
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
"""Processors of transformers that are functions of (input_ids, scores); `check_processor` does not test them."""

_RUN_MODELS = ("UnbatchedClassifierFreeGuidanceLogitsProcessor",)
"""Processors that call the target with a separate cache."""

_PREFIX, _STEPS = 24, 4
"""Number of prefix tokens and of calls per text when a processor is tested."""

_MOST_PARTS = 1024
"""Maximum number of attribute values that are compared after each call."""

_VALUES = (bool, int, float, complex, str, bytes)

_MOST_COPIES = 256
"""Maximum number of cached copies per text. A prefix without a cached copy is recomputed step by step."""


class PerText(LogitsProcessor):
    """Base class of constraints that create a separate processor for each text.

    Attributes:
        name: used in headers and messages.
    """

    name: str

    def for_text(self, prompt: int, eos: Sequence[int]) -> LogitsProcessor:
        """Return the processor for one text, a function of (input_ids, scores).

        Args:
            prompt: length of the prompt in tokens, including padding.
            eos: end-of-text token ids.
        """
        raise NotImplementedError


def processor_name(processor: LogitsProcessor) -> str:
    """Return the name of a processor for headers and messages."""
    return processor.name if isinstance(processor, PerText) else type(processor).__name__


class Stepwise(PerText):
    """Wrapper for a processor with state that depends only on the tokens. Calls copies step by step along each prefix.

    Args:
        processor: in its initial state. Only copies of it are called.
    """

    def __init__(self, processor: LogitsProcessor) -> None:
        self.name = type(processor).__name__
        self._fresh = copied(processor)

    def for_text(self, prompt: int, eos: Sequence[int]) -> LogitsProcessor:
        """See `PerText.for_text`."""
        return _Steps(self._fresh, prompt)


class _Steps(LogitsProcessor):
    """Copies for one text, keyed by the generated tokens of their last call."""

    def __init__(self, fresh: LogitsProcessor, prompt: int) -> None:
        self._fresh, self._prompt = fresh, prompt
        self._called: dict[tuple[int, ...], LogitsProcessor] = {}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return torch.cat([self._row(ids[None], row[None]) for ids, row in zip(input_ids, scores, strict=True)])

    def _row(self, ids: Tensor, scores: Tensor) -> Tensor:
        """Return the processed scores [1, V] for one prefix [1, n]."""
        generated = tuple(ids[0, self._prompt :].tolist())
        cached = len(generated) - 1
        while cached >= 0 and generated[:cached] not in self._called:
            cached -= 1
        processor = self._called[generated[:cached]] if cached >= 0 else self._fresh
        out = scores
        for length in range(cached + 1, len(generated) + 1):
            processor = copied(processor)
            # The scores of earlier steps are not stored; `check_processor` has verified that they have no effect.
            out = processor(ids[:, : self._prompt + length], scores.clone())
            self._called[generated[:length]] = processor
        while len(self._called) > _MOST_COPIES:
            del self._called[next(iter(self._called))]
        return out


class Watched(PerText):
    """Wrapper for a processor that was stateless when tested. It switches to `Stepwise` calls if the state changes later.

    Args:
        processor: in its initial state. Only copies of it are called.
        batch: number of rows in the `generate` call.
    """

    def __init__(self, processor: LogitsProcessor, batch: int = 1) -> None:
        self.name, self._batch = type(processor).__name__, batch
        self._fresh = copied(processor)

    def for_text(self, prompt: int, eos: Sequence[int]) -> LogitsProcessor:
        """See `PerText.for_text`."""
        return _Watch(self.name, self._fresh, prompt, self._batch)


class _Watch(_Steps):
    """Call a single copy until its state changes. Earlier prefixes had no state, so they can be recomputed from the start."""

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
                    f"logits processor {self._name} keeps state between calls that the rows of a batch share; generate "
                    "one text at a time"
                )
            self._called[tuple(ids[0, self._prompt :].tolist())], self._one = self._one, None
        return out


def _parts(processor: LogitsProcessor) -> list[Any]:
    """Return the values, container sizes and tensor versions of a processor's attributes, in a fixed order."""
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
        elif isinstance(value, torch.Generator):
            parts.append(value.get_state().numpy().tobytes())
        elif isinstance(value, dict | list | tuple | set | frozenset):
            parts.append(len(value))
            waiting.extend(islice(value.values() if isinstance(value, dict) else value, _MOST_PARTS))
        elif not isinstance(value, type | FunctionType | ModuleType) and hasattr(value, "__dict__"):
            waiting.append(vars(value))
    return parts


def _equal_parts(first: list[Any], second: list[Any]) -> bool:
    return len(first) == len(second) and all(
        a is b or (type(a) is type(b) and isinstance(a, _VALUES) and a == b) for a, b in zip(first, second, strict=True)
    )


def copied(processor: LogitsProcessor) -> LogitsProcessor:
    """Return an independent copy that shares models, tokenizers and compiled grammars.

    `copy.deepcopy` cannot copy the matchers of grammar libraries, so their `fork` or `deep_copy` methods are called.
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
            copy_method = getattr(value, "fork", None) or getattr(value, "deep_copy", None)
            memo[id(value)] = value if copy_method is None else copy_method()
        elif isinstance(value, MethodType):
            waiting.append(value.__self__)
        elif not isinstance(value, type | FunctionType | ModuleType | Tensor):
            waiting.extend(getattr(value, "__dict__", {}).values())
    return copy.deepcopy(processor, memo)


def check_processor(
    processor: LogitsProcessor, vocabulary: int, device: torch.device, batch: int = 1
) -> LogitsProcessor:
    """Return a processor that can be called for any prefix in any order.

    Processors that are not listed in `STATELESS` are tested on copies. A processor that behaves as a function of
    (input_ids, scores) is wrapped in `Watched`, because a token that the test does not contain may start its state. A
    processor with state that depends only on the tokens is wrapped in `Stepwise`.

    Args:
        processor: the user's processor; it is not modified.
        vocabulary: vocabulary size V.
        device: device of the logits.
        batch: number of rows in the `generate` call.

    Raises:
        InputError: the processor depends on anything else, cannot be copied, or treats the rows of a batch differently.
    """
    if isinstance(processor, PerText) or type(processor) in STATELESS:
        return processor
    name = type(processor).__name__
    if name in _RUN_MODELS:
        raise InputError(
            f"logits processor {name} keeps state between calls (a cache of the target), which speculative decoding does "
            "not support; remove guidance_scale"
        )
    try:
        copied(processor)
    except Exception as error:
        raise InputError(
            f"logits processor {name} cannot be copied ({type(error).__name__}), so its state cannot be rolled back; "
            "define a __deepcopy__ method"
        ) from None
    return _Trial(processor, vocabulary, device).result(batch)


class _Trial:
    """Test of a processor: calls copies of it along two generated texts."""

    def __init__(self, processor: LogitsProcessor, vocabulary: int, device: torch.device) -> None:
        self._processor, self._name = processor, type(processor).__name__
        generator = torch.Generator().manual_seed(0)
        self._prefix = torch.randint(vocabulary, (1, _PREFIX), generator=generator, device="cpu").to(device)
        logits = torch.randn(2, _STEPS, 1, vocabulary, generator=generator, device="cpu", dtype=torch.float32)
        self._logits = logits.to(device)
        # The first text continues with the best tokens, the second text with the second-best tokens.
        self._texts = [self._text(0), self._text(1)]

    def _text(self, rank: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return ids, scores and result of each step, up to the first call that raises."""
        processor, ids, steps = copied(self._processor), self._prefix, []
        for logits in self._logits[rank]:
            try:
                out = processor(ids, logits.clone())
            except Exception:  # the processor may require a specific prefix
                break
            steps.append((ids, logits, out))
            best = out[0].topk(2)
            token = best.indices[rank if best.values[rank] > -torch.inf else 0]
            ids = torch.cat([ids, token.view(1, 1)], -1)
        return steps

    def result(self, batch: int) -> LogitsProcessor:
        """See `check_processor`."""
        completed = min(map(len, self._texts))
        if completed and self._is_function():
            by_contract = isinstance(self._processor, PrefixConstrainedLogitsProcessor)
            return self._processor if by_contract else Watched(self._processor, batch)
        if completed and not self._is_restartable():
            raise InputError(
                f"logits processor {self._name} keeps state between calls that does not depend only on the tokens (random "
                "numbers, earlier scores, or objects shared by its copies), so candidates cannot be scored; "
                "make it a function of (input_ids, scores)"
            )
        if batch > 1 and not self._treats_rows_alike():
            raise InputError(
                f"logits processor {self._name} treats the rows of a batch differently; generate one text at a time"
            )
        return Stepwise(self._processor)

    def _is_function(self) -> bool:
        """Return whether copies give the same scores in another order and for two rows, without a change of attributes."""
        first, second = self._texts
        count = min(len(first), len(second))
        try:
            for order in ([*range(count)[::-1]], [count // 2, count - 1]):
                processor = copied(self._processor)
                state = _parts(processor)
                for step in order:
                    for ids, logits, out in (first[step], second[step]):
                        if not torch.equal(processor(ids, logits.clone()), out):
                            return False
        except Exception:
            return False
        # By contract its function depends only on the prefix and the batch index. `Sampler` calls it row by row.
        if isinstance(self._processor, PrefixConstrainedLogitsProcessor):
            return True
        # The effect of a counter may begin only after more calls than the test makes, so attributes are compared too.
        return _equal_parts(_parts(processor), state) and self._treats_rows_alike()

    def _is_restartable(self) -> bool:
        """Return whether copies give the same scores when calls alternate and earlier calls had different scores."""
        try:
            return all(map(self._gives_the_same, range(min(map(len, self._texts)))))
        except Exception:
            return False

    def _gives_the_same(self, last: int) -> bool:
        """Return whether copies reproduce the scores of a step after earlier calls with different scores."""
        copies = [copied(self._processor) for _ in self._texts]
        for step in range(last):
            for processor, text in zip(copies, self._texts, strict=True):
                ids, logits, _ = text[step]
                processor(ids, logits.flip(-1))
        results = [
            (processor(text[last][0], text[last][1].clone()), text[last][2])
            for processor, text in zip(copies, self._texts, strict=True)
        ]
        return all(torch.equal(actual, expected) for actual, expected in results)

    def _treats_rows_alike(self) -> bool:
        """Return whether a call with two rows gives the same scores as separate calls."""
        processor = copied(self._processor)
        try:
            for steps in zip(*self._texts, strict=False):
                ids, logits, out = (torch.cat(parts) for parts in zip(*steps, strict=True))
                if not torch.equal(processor(ids, logits), out):
                    return False
        except Exception:
            return False
        return True
