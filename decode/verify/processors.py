"""Logits processors with state, called so that candidates and rollback are supported.

The decoding loop requests scores after any prefix, in any order and repeatedly. If the state of a processor depends
only on the tokens, it is called on copies, one per prefix. Each copy receives the same calls as in plain decoding.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
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
    """

    _prompt: int
    _copies: dict[tuple[int, ...], LogitsProcessor]  # by the generated tokens of their last call

    def __init__(self, processor: LogitsProcessor) -> None:
        self.name, self._initial = type(processor).__name__, copy_processor(processor)

    def for_text(self, prompt: int, eos: Sequence[int]) -> LogitsProcessor:
        """See `PerText.for_text`."""
        text = copy.copy(self)
        text._prompt, text._copies = prompt, {}
        return text

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the processed scores [R, V]."""
        return torch.cat([self._row(ids[None], row[None]) for ids, row in zip(input_ids, scores, strict=True)])

    def _row(self, ids: Tensor, scores: Tensor) -> Tensor:
        generated = tuple(ids[0, self._prompt :].tolist())
        cached = len(generated) - 1
        while cached >= 0 and generated[:cached] not in self._copies:
            cached -= 1
        processor = self._copies[generated[:cached]] if cached >= 0 else self._initial
        for length in range(cached + 1, len(generated) + 1):
            processor = copy_processor(processor)
            # `scores` of the last step replace those of earlier steps, which have no effect (`check_processor`).
            out: Tensor = processor(ids[:, : self._prompt + length], scores.clone())
            self._copies[generated[:length]] = processor
        while len(self._copies) > _MAX_COPIES:
            del self._copies[next(iter(self._copies))]
        return out


def copy_processor(processor: LogitsProcessor) -> LogitsProcessor:
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
        elif _is_grammar_object(value):
            copy_method = getattr(value, "fork", None) or getattr(value, "deep_copy", None)
            memo[id(value)] = value if copy_method is None else copy_method()
        elif isinstance(value, MethodType):
            pending.append(value.__self__)
        elif isinstance(value, _SHARED):
            memo[id(value)] = value
        elif not isinstance(value, Tensor):
            pending.extend(getattr(value, "__dict__", {}).values())
    return copy.deepcopy(processor, memo)


def _is_grammar_object(value: Any) -> bool:
    """Whether a value is an object of a grammar library: xgrammar, but not its logits processor, or llguidance."""
    cls = type(value)
    of_xgrammar = cls.__module__.startswith("xgrammar") and not isinstance(value, LogitsProcessor)
    return of_xgrammar or cls.__name__ in ("LLMatcher", "LLTokenizer")


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
        copy_processor(processor)
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
    # From the longest prefix on, so that the calls before it are made again, with other scores. There are no calls if the
    # processor requires a specific prefix.
    steps = list(zip(*texts, strict=False))[::-1]
    # By contract `prefix_allowed_tokens_fn` is a function. It may have large tables, which are slow to copy.
    if (
        isinstance(processor, PrefixConstrainedLogitsProcessor)
        and steps
        and _reproduces([copy_processor(processor)] * 2, steps)
    ):
        return processor
    if not _reproduces([CopiedProcessor(processor).for_text(_PREFIX, ()) for _ in texts], steps):
        raise InputError(
            f"{name} keeps state between calls that does not depend only on the tokens (random numbers, earlier scores, or "
            "objects shared by its copies), so candidates cannot be scored; make it a function of (input_ids, scores)"
        )
    if batch > 1:
        # Both texts in one call, in the order of a text.
        together = [[tuple(map(torch.cat, zip(*calls, strict=True)))] for calls in steps[::-1]]
        if not steps or not _reproduces([copy_processor(processor)], together):
            raise InputError(f"{name} treats the rows of a batch differently; generate one text at a time")
    return CopiedProcessor(processor)


_Call = tuple[Tensor, ...]
"""Token ids, scores and result of one call of a processor."""


def _run(processor: LogitsProcessor, ids: Tensor, logits: Tensor, rank: int) -> Sequence[_Call]:
    """Return the calls of a processor along a text that it determines, up to the first call that raises."""
    processor, calls = copy_processor(processor), []
    with contextlib.suppress(Exception):
        for scores in logits:
            out = processor(ids, scores.clone())
            calls.append((ids, scores, out))
            best = out[0].topk(2)
            token = best.indices[rank if best.values[rank] > -torch.inf else 0]
            ids = torch.cat([ids, token.view(1, 1)], -1)
    return calls


def _reproduces(processors: Sequence[LogitsProcessor], steps: Sequence[Sequence[_Call]]) -> bool:
    """Whether processors, one per text, return the same results for the calls of each step."""
    try:
        return all(
            torch.equal(processor(ids, scores.clone()), out)
            for calls in steps
            for processor, (ids, scores, out) in zip(processors, calls, strict=True)
        )
    except Exception:
        return False
