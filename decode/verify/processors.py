"""Logits processors with state, called so that candidates and rollback are supported.

The decoding loop requests scores after any prefix, in any order and repeatedly. A processor whose state depends only on the
tokens is called on copies, one per prefix. Each copy receives the same calls as in plain decoding.
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
from transformers.generation.logits_process import (
    PrefixConstrainedLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from ...policies.errors import InputError

_PREFIX, _STEPS = 24, 4  # prefix tokens, and calls per text, when a processor is tested
_MAX_VALUES = 1024  # attribute values that are compared after each call
_MAX_COPIES = 256  # per text; a prefix without a copy is recomputed step by step

_SHARED = (type, FunctionType, ModuleType, torch.nn.Module, PreTrainedTokenizerBase)
"""Objects that copies of a processor share."""


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


class CopiedProcessor(PerText):
    """Calls copies of a processor, so that its state follows each prefix. `for_text` returns another one for each text.

    Args:
        processor: in its initial state.
        has_state: whether it has state from the first call on. Otherwise one copy is called until its attributes change.
        batch: number of rows in the `generate` call.
    """

    _prompt: int
    _copies: dict[tuple[int, ...], LogitsProcessor]  # by the generated tokens of their last call
    _stateless: LogitsProcessor
    _values: Any

    def __init__(self, processor: LogitsProcessor, has_state: bool, batch: int = 1) -> None:
        self.name, self._has_state, self._batch = type(processor).__name__, has_state, batch
        self._initial = copied(processor)

    def for_text(self, prompt: int, eos: Sequence[int]) -> LogitsProcessor:
        """See `PerText.for_text`."""
        text = copy.copy(self)
        text._prompt, text._copies, text._stateless = prompt, {}, copied(self._initial)
        text._values = _attribute_values(text._stateless)
        return text

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the processed scores [R, V]."""
        return torch.cat([self._row(ids[None], row[None]) for ids, row in zip(input_ids, scores, strict=True)])

    def _row(self, ids: Tensor, scores: Tensor) -> Tensor:
        if not self._has_state:
            out: Tensor = self._stateless(ids, scores.clone())
            if _equal_values(_attribute_values(self._stateless), self._values):
                return out
            if self._batch > 1:
                raise InputError(
                    f"logits processor {self.name} keeps state between calls that the rows of a batch share; generate one "
                    "text at a time"
                )
            self._has_state = True
        generated = tuple(ids[0, self._prompt :].tolist())
        cached = len(generated) - 1
        while cached >= 0 and generated[:cached] not in self._copies:
            cached -= 1
        processor = self._copies[generated[:cached]] if cached >= 0 else self._initial
        for length in range(cached + 1, len(generated) + 1):
            processor = copied(processor)
            # `scores` of the last step replace those of earlier steps, which have no effect (`check_processor`).
            out = processor(ids[:, : self._prompt + length], scores.clone())
            self._copies[generated[:length]] = processor
        while len(self._copies) > _MAX_COPIES:
            del self._copies[next(iter(self._copies))]
        return out


def _attribute_values(processor: LogitsProcessor) -> list[Any]:
    """Return the values, container sizes and tensor versions of a processor's attributes, in a fixed order."""
    values: list[Any] = []
    visited: set[int] = set()
    pending: list[Any] = [vars(processor)]
    while pending and len(values) < _MAX_VALUES:
        value = pending.pop()
        values.append(value)
        if id(value) in visited or isinstance(value, _SHARED):
            continue
        visited.add(id(value))
        if isinstance(value, Tensor):
            values.append(0 if value.is_inference() else value._version)
        elif isinstance(value, torch.Generator):
            values.append(value.get_state().numpy().tobytes())
        elif isinstance(value, dict | list | tuple | set | frozenset):
            values.append(len(value))
            pending.extend(islice(value.values() if isinstance(value, dict) else value, _MAX_VALUES))
        elif hasattr(value, "__dict__"):
            pending.append(vars(value))
    return values


def _equal_values(first: list[Any], second: list[Any]) -> bool:
    return len(first) == len(second) and all(
        a is b or (type(a) is type(b) and isinstance(a, bool | int | float | complex | str | bytes) and a == b)
        for a, b in zip(first, second, strict=True)
    )


def copied(processor: LogitsProcessor) -> LogitsProcessor:
    """Return an independent copy that shares models, tokenizers and compiled grammars.

    `copy.deepcopy` cannot copy the matchers of grammar libraries, so their `fork` or `deep_copy` methods are called.
    """
    memo: dict[int, Any] = {}
    visited: set[int] = set()
    pending: list[Any] = [processor]
    while pending:
        value = pending.pop()
        if id(value) in visited:
            continue
        visited.add(id(value))
        if isinstance(value, list | tuple):
            pending.extend(value)
        elif isinstance(value, dict):
            pending.extend(value.values())
        elif type(value).__module__.startswith("xgrammar") or type(value).__name__ in ("LLMatcher", "LLTokenizer"):
            copy_method = getattr(value, "fork", None) or getattr(value, "deep_copy", None)
            memo[id(value)] = value if copy_method is None else copy_method()
        elif isinstance(value, MethodType):
            pending.append(value.__self__)
        elif isinstance(value, _SHARED):
            memo[id(value)] = value
        elif not isinstance(value, Tensor):
            pending.extend(getattr(value, "__dict__", {}).values())
    return copy.deepcopy(processor, memo)


def check_processor(
    processor: LogitsProcessor, vocabulary: int, device: torch.device, batch: int = 1
) -> LogitsProcessor:
    """Return a processor that can be called for any prefix in any order. Copies of the processor are called to test it.

    Args:
        processor: the user's processor; it is not modified.
        vocabulary: vocabulary size V.
        device: device of the logits.
        batch: number of rows in the `generate` call.

    Raises:
        InputError: the processor depends on more than the tokens and scores, cannot be copied, or treats the rows of a batch
            differently.
    """
    if isinstance(processor, PerText):
        return processor
    name = f"logits processor {type(processor).__name__}"
    if type(processor) is UnbatchedClassifierFreeGuidanceLogitsProcessor:
        raise InputError(
            f"{name} keeps a cache of the target between calls, which is not supported; remove guidance_scale"
        )
    try:
        copied(processor)
    except Exception as error:
        raise InputError(
            f"{name} cannot be copied ({type(error).__name__}), so its state cannot be rolled back; define a __deepcopy__ "
            "method"
        ) from None
    generator = torch.Generator().manual_seed(0)
    prefix = torch.randint(vocabulary, (1, _PREFIX), generator=generator, device="cpu").to(device)
    logits = torch.randn(2, _STEPS, 1, vocabulary, generator=generator, device="cpu", dtype=torch.float32).to(device)
    # The first text continues with the best tokens, the second one with the second-best tokens.
    texts = [_run(processor, prefix, logits[rank], rank) for rank in range(2)]
    calls = min(map(len, texts))  # 0 if the processor requires a specific prefix
    # The function of `prefix_allowed_tokens_fn` may cache results. It receives the batch index, so rows differ.
    by_contract = isinstance(processor, PrefixConstrainedLogitsProcessor)
    rows_alike = _treats_rows_alike(processor, texts)
    if calls and _is_function(processor, texts, by_contract) and (by_contract or rows_alike):
        return processor if by_contract else CopiedProcessor(processor, False, batch)
    if not all(_is_restartable(processor, texts, last) for last in range(calls)):
        raise InputError(
            f"{name} keeps state between calls that does not depend only on the tokens (random numbers, earlier scores, or "
            "objects shared by its copies), so candidates cannot be scored; make it a function of (input_ids, scores)"
        )
    if batch > 1 and not rows_alike:
        raise InputError(f"{name} treats the rows of a batch differently; generate one text at a time")
    return CopiedProcessor(processor, True, batch)


_Call = tuple[Tensor, Tensor, Tensor]
"""Token ids, scores and result of one call of a processor."""


def _try_call(processor: LogitsProcessor, ids: Tensor, scores: Tensor) -> Tensor | None:
    """Return the processed scores, or None if the processor raises."""
    try:
        out: Tensor = processor(ids, scores.clone())
    except Exception:
        return None
    return out


def _gives(processor: LogitsProcessor, ids: Tensor, scores: Tensor, expected: Tensor) -> bool:
    out = _try_call(processor, ids, scores)
    return out is not None and torch.equal(out, expected)


def _run(processor: LogitsProcessor, ids: Tensor, logits: Tensor, rank: int) -> list[_Call]:
    """Return the calls of a processor along a text that it determines, up to the first call that raises."""
    processor, calls = copied(processor), []
    for scores in logits:
        out = _try_call(processor, ids, scores)
        if out is None:
            break
        calls.append((ids, scores, out))
        best = out[0].topk(2)
        token = best.indices[rank if best.values[rank] > -torch.inf else 0]
        ids = torch.cat([ids, token.view(1, 1)], -1)
    return calls


def _is_function(processor: LogitsProcessor, texts: Sequence[list[_Call]], may_cache: bool) -> bool:
    """Whether a copy gives the same scores in another order, without a change of its attributes."""
    processor, count = copied(processor), min(map(len, texts))
    values = _attribute_values(processor)
    order = [*range(count)[::-1], count // 2, count - 1]
    same = all(_gives(processor, *text[step]) for step in order for text in texts)
    # The effect of a counter may begin only after more calls, so attributes are compared too.
    return same and (may_cache or _equal_values(_attribute_values(processor), values))


def _is_restartable(processor: LogitsProcessor, texts: Sequence[list[_Call]], last: int) -> bool:
    """Whether copies give the same scores at a step after alternating calls with different scores before it."""
    copies = [copied(processor) for _ in texts]
    for step in range(last):
        for one, text in zip(copies, texts, strict=True):
            _try_call(one, text[step][0], text[step][1].flip(-1))
    return all([_gives(one, *text[last]) for one, text in zip(copies, texts, strict=True)])


def _treats_rows_alike(processor: LogitsProcessor, texts: Sequence[list[_Call]]) -> bool:
    """Whether calls with two rows give the same scores as separate calls."""
    processor = copied(processor)
    joined = ([torch.cat(parts) for parts in zip(*calls, strict=True)] for calls in zip(*texts, strict=False))
    return all(_gives(processor, *call) for call in joined)
