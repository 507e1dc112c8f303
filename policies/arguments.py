"""Conversion and validation of arguments."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
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


def check_number(value: Any, name: str, least: float = 0.0, most: float = math.inf) -> float:
    """Return a finite number between `least` and `most`. Raises `ValueError` with `name` for anything else."""
    if isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most:
        try:
            number = float(value)
        except OverflowError:  # a larger integer than any float
            number = math.inf
        if math.isfinite(number):
            return number + 0.0  # not minus zero
    span = f"of {least:g} or more" if most == math.inf else f"between {least:g} and {most:g}"
    raise ValueError(f"{name}: expected a number {span}, not {describe_value(value)}")


def describe_value(value: Any) -> str:
    """Return a JSON value in at most 40 characters, for messages."""
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"a list of {len(value)}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) and abs(value) >= 10**40:  # Python does not convert integers with thousands of digits
        return "a number of more than 40 digits"
    return repr(value)[:40] if not isinstance(value, float) else f"{value:g}"
