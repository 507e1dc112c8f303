"""Conversion and validation of arguments."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .errors import InputError, PolicyError


def check_token_ids(prompts: Any) -> None:
    """Raise `InputError` if prompts are or contain texts instead of token ids."""
    if isinstance(prompts, str) or any(isinstance(prompt, str) for prompt in prompts):
        raise InputError(
            "prompts: expected lists of token ids, not texts; call `decode` for texts, or encode them with a tokenizer"
        )


def as_list(value: Any, *kinds: type) -> list[Any]:
    """Return the items of `value` as a list. A text, a path, or an object of `kinds` becomes a list with one item."""
    if isinstance(value, (str, bytes, os.PathLike, *kinds)) or not isinstance(value, Iterable):
        return [value]
    return list(value)


def describe_value(value: Any) -> str:
    """Return a JSON value in at most 40 characters, for messages."""
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"a list of {len(value)}"
    if isinstance(value, int) and abs(value) >= 10**40:  # Python does not convert integers with thousands of digits
        return "a number of more than 40 digits"
    return repr(value)[:40]


def validate_number(owner: str, name: str, value: Any, low: float, high: float = math.inf) -> float:
    """Return a parameter of a policy as a float. Raises `PolicyError` unless it is a finite number from `low` to `high`."""
    if isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= min(high, sys.float_info.max):
        return float(value) + 0.0  # not minus zero
    span = f"of {low:g} or more" if high == math.inf else f"between {low:g} and {high:g}"
    raise PolicyError(f"{owner}: {name}: expected a number {span}, not {describe_value(value)}")


def validate_int(owner: str, name: str, value: Any, low: int = 1) -> int:
    """Return a parameter of a policy. Raises `PolicyError` unless it is a whole number of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise PolicyError(f"{owner}: {name}: expected a whole number of {low} or more, not {describe_value(value)}")
    return value
