"""Conversion and validation of arguments."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable
from typing import Any

from .errors import InputError, PolicyError


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


def validate_number(owner: str, name: str, value: Any, low: float, high: float = math.inf) -> float:
    """Return a parameter of a policy as a float; a `PolicyError` unless it is a finite number from `low` to `high`."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not low <= value <= min(high, sys.float_info.max):
        limits = f"between {low:g} and {high:g}" if math.isfinite(high) else f"of {low:g} or more"
        raise PolicyError(f"{owner}: expected for {name} a number {limits}, not {value!r}")
    return float(value)


def validate_int(owner: str, name: str, value: Any, low: int = 1) -> int:
    """Return a parameter of a policy; a `PolicyError` unless it is a whole number of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise PolicyError(f"{owner}: expected for {name} a whole number of {low} or more, not {value!r}")
    return value
