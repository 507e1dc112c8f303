"""Prompts as texts, token ids or records, and their token ids."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..policies.arguments import as_list
from ..policies.errors import InputError, SpecstopWarning
from .models.pair import Pair

Prompts = str | Sequence[Any]
"""One text, or prompts: texts, lists of token ids, or `collect.Prompt`s as `read_prompts` returns them."""


def encode_prompts(pair: Pair, prompts: Prompts, ids: Sequence[str] | None = None) -> list[tuple[str, list[int]]]:
    """Return (name, token ids) of prompts.

    Args:
        pair: with a tokenizer if a prompt is a text.
        prompts: see `Prompts`.
        ids: name of each prompt; default: the name of a `Prompt`, or the index.

    Raises:
        InputError: a prompt is neither a text nor token ids, or a text has no tokenizer to be read with.
    """
    items = [prompts] if isinstance(prompts, str) or hasattr(prompts, "text") else as_list(prompts)
    texts = [getattr(item, "text", item) for item in items]
    for text in texts:
        _check_prompt(text)
    default = [str(getattr(item, "stream_name", at)) for at, item in enumerate(items)]
    names = default if ids is None else as_list(ids)
    if len(names) != len(items):
        raise InputError(f"ids: expected one for each of {len(items)} prompts, not {len(names)}")
    tokenizer = pair.tokenizer
    if tokenizer is None and any(isinstance(text, str) for text in texts):
        raise InputError("prompts: expected token ids, because the pair has no tokenizer to read texts with")
    encoded = []
    for item, text in zip(items, texts, strict=True):
        special = not getattr(item, "templated", False)  # a chat template has written them
        encoded.append(
            list(tokenizer(text, add_special_tokens=special)["input_ids"])
            if tokenizer and isinstance(text, str)
            else list(text)
        )
    if tokenizer is not None:
        warn_two_bos([row for row, text in zip(encoded, texts, strict=True) if isinstance(text, str)], tokenizer)
    return list(zip(names, encoded, strict=True))


def _check_prompt(prompt: object) -> None:
    """Raise `InputError` unless a prompt is a text or a sequence of token ids; bytes would be read as ids."""
    is_sequence = isinstance(prompt, Iterable) and not isinstance(prompt, (bytes, bytearray, Mapping))
    if not isinstance(prompt, str) and not (is_sequence and getattr(prompt, "ndim", 1) == 1):
        raise InputError(
            f"prompts: expected texts or lists of token ids, not {prompt!r:.60}; pass [ids] for one prompt"
        )


def warn_two_bos(encoded: Sequence[list[int]], tokenizer: PreTrainedTokenizerBase) -> None:
    """Warn about prompts that begin with two BOS tokens."""
    bos = tokenizer.bos_token_id
    count = sum(bos is not None and ids[:2] == [bos, bos] for ids in encoded)
    if count:
        warnings.warn(
            f"{count} of {len(encoded)} prompts begin with two {tokenizer.bos_token} tokens, one of their text and one that "
            "the tokenizer adds; leave it out of the prompts, or give messages with --chat",
            SpecstopWarning,
            stacklevel=3,
        )
