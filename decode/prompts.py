"""Prompts as texts, token ids or records, and their token ids."""

from __future__ import annotations

import contextlib
import operator
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..policies.arguments import as_list
from ..policies.errors import InputError, SpecstopWarning
from .models.pair import Pair

Prompts = str | Sequence[Any]
"""One text, or prompts: texts, token ids (lists, tensors or arrays), or `collect.Prompt`s as `read_prompts` returns them."""


def encode_prompts(pair: Pair, prompts: Prompts, ids: Sequence[str] | None = None) -> list[tuple[str, list[int]]]:
    """Return (name, token ids) of prompts.

    Args:
        pair: with a tokenizer if a prompt is a text.
        prompts: see `Prompts`.
        ids: name of each prompt; default: the name of a `Prompt`, or the index.

    Raises:
        InputError: a prompt is neither a text nor token ids, or the pair has no tokenizer for a text.
    """
    items = [prompts] if isinstance(prompts, str) or hasattr(prompts, "text") else as_list(prompts)
    names = [str(getattr(item, "stream_name", at)) for at, item in enumerate(items)] if ids is None else as_list(ids)
    if len(names) != len(items):
        raise InputError(f"ids: expected one for each of {len(items)} prompts, not {len(names)}")
    encoded, from_texts = [], []
    for item in items:
        text = getattr(item, "text", item)
        if not isinstance(text, str):
            encoded.append(as_token_ids(text))
            continue
        if pair.tokenizer is None:
            raise InputError("prompts: expected token ids, because the pair has no tokenizer to encode texts with")
        special = not getattr(item, "templated", False)  # a chat template has written them
        encoded.append(list(pair.tokenizer(text, add_special_tokens=special)["input_ids"]))
        from_texts.append(encoded[-1])
    if pair.tokenizer is not None:
        warn_two_bos(from_texts, pair.tokenizer)
    return list(zip(names, encoded, strict=True))


def as_token_ids(prompt: Any) -> list[int]:
    """Return the token ids of a prompt, a sequence, tensor or array, as Python integers.

    Drafters look tokens up in dictionaries, in which a 0-d tensor does not equal the integer that it holds.

    Raises:
        InputError: `prompt` is not a one-dimensional sequence of integers. Texts and bytes are refused too.
    """
    if not isinstance(prompt, (str, bytes, bytearray, Mapping)):
        with contextlib.suppress(TypeError):
            return [operator.index(token) for token in (prompt.tolist() if hasattr(prompt, "tolist") else prompt)]
    raise InputError(
        f"prompts: expected lists of token ids, not {prompt!r:.60}; `decode` also accepts texts, and [ids] for one prompt"
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
