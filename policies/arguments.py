"""Conversion and validation of list arguments. A single text, path or object becomes a list with one item."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from .errors import InputError


def check_token_ids(prompts: Any) -> None:
    """Check that prompts are token ids instead of texts.

    Raises:
        InputError: `prompts` is a text or contains a text.
    """
    if isinstance(prompts, str) or any(isinstance(prompt, str) for prompt in prompts):
        raise InputError(
            "prompts: expected lists of token ids, not texts; call `decode` for texts, or encode them with a tokenizer"
        )


def as_list(value: Any, *kinds: type) -> list[Any]:
    """Return the items of `value` as a list. A text, a path, or an object of `kinds` becomes a list with one item."""
    if isinstance(value, (str, bytes, os.PathLike, *kinds)) or not isinstance(value, Iterable):
        return [value]
    return list(value)
