"""Arguments that are lists: a text, a path or an object by itself is a list of one, and no text is read letter by letter."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from .errors import InputError


def check_token_ids(prompts: Any) -> None:
    """Refuse texts in the place of token ids.

    Raises:
        InputError: `prompts` is a text, or one of them is.
    """
    if isinstance(prompts, str) or any(isinstance(prompt, str) for prompt in prompts):
        raise InputError(
            "prompts: expected lists of token ids, not texts; `decode` takes texts, a tokenizer gives their ids"
        )


def as_list(value: Any, *kinds: type) -> list[Any]:
    """Return a list of what `value` holds; a text, a path, or an object of `kinds` by itself is a list of one."""
    if isinstance(value, (str, bytes, os.PathLike, *kinds)) or not isinstance(value, Iterable):
        return [value]
    return list(value)
