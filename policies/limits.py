"""How large the numbers of a run may be: one table, which commands and functions check alike."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import InputError, close_match

MOST_ROWS = 1024
"""Tokens of a round, the anchor included."""

_TOKENS = 1 << 20
_SEED = 2**31 - 1  # every library that is seeded takes it, with some more added


@dataclass(frozen=True)
class Limit:
    """What the number of an option may be.

    Attributes:
        least, most: both are allowed.
        unit: of the number, for messages.
    """

    least: int
    most: int
    unit: str = ""

    def wanted(self, value: Any, least: int) -> str:
        """Return what was expected in the place of `value`, or nothing where that is all right."""
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            return f"a whole number of {least}{self.unit} or more"
        if value < least:
            return f"{least}{self.unit} or more"
        return "" if value <= self.most else f"at most {self.most}{self.unit}"


@dataclass(frozen=True)
class Range:
    """What the number of an option may be that need not be whole.

    Attributes:
        least, most: both are allowed.
        words: what is expected.
        zero: 0 is allowed as well.
    """

    least: float
    most: float
    words: str
    zero: bool = False

    def wanted(self, value: Any, least: int) -> str:
        """Return what was expected in the place of `value`, or nothing where that is all right."""
        good = isinstance(value, numbers.Real) and not isinstance(value, bool)
        good = good and (self.least <= value <= self.most or (self.zero and value == 0))
        return "" if good else self.words


_TINY = 2.0**-53

LIMITS: Mapping[str, Limit | Range] = {
    "batch": Limit(1, 1 << 12),
    "batch-size": Limit(1, 1 << 24),
    "budget": Range(_TINY, 1e6, "seconds above 0"),
    "depth": Limit(0, MOST_ROWS - 1),
    "draws": Limit(1, 1024),
    "epochs": Limit(1, 100_000),
    "explore": Range(0, 1, "a share between 0 and 1"),
    "report-share": Range(0, 1, "a share between 0 and 1"),
    "fallback": Limit(0, MOST_ROWS - 1),
    "folds": Limit(2, 1000),
    "learning-rate": Range(1e-9, 10, "more than 0, from 1e-9 to 10"),
    "limit": Limit(1, _SEED),
    "max-batch": Limit(1, 1 << 16),
    "max-depth": Limit(0, MOST_ROWS - 1),
    "max-new-tokens": Limit(1, _TOKENS),
    "memory": Limit(1, 1 << 20, " MiB"),
    "min-new-tokens": Limit(0, _TOKENS),
    "min-p": Range(0, 1, "between 0 and 1"),
    "mix": Range(0, 1, "a share between 0 and 1"),
    "no-repeat-ngram": Limit(0, _TOKENS),
    "passes": Limit(1, 100),
    "rejection-weight": Range(1e-6, 1e6, "a number above 0, from 1e-6 to 1e6"),
    "repeats": Limit(1, 1000),
    "repetition-penalty": Range(0.01, 100, "above 0, from 0.01 to 100"),
    "seed": Limit(0, _SEED),
    "shards": Limit(1, 99_999),  # five digits in the names of the files
    "shuffle-seed": Limit(0, _SEED),
    "split-seed": Limit(0, _SEED),
    # Logits divided by less leave the range of half precision, and a float32 row turns into infinities.
    "temperature": Range(0.01, 100, "0 or more: 0 is greedy, others from 0.01 to 100", zero=True),
    "test-share": Range(_TINY, 1 - _TINY, "more than 0 and less than 1"),
    "threshold": Range(0, 1, "between 0 and 1"),
    "top-k": Limit(0, _SEED),
    "top-p": Range(_TINY, 1, "above 0 and at most 1"),
    "tune": Limit(1, 100_000, " trial"),
    "tune-folds": Limit(2, 1000),
}
"""By the name of the option."""

_SHARE = Range(_TINY, 1, "a share above 0, at most 1")

PARAMS: Mapping[str, Limit | Range] = {
    "C": Range(1e-9, 1e9, "from 1e-9 to 1e9"),
    "blocks": Limit(1, 32),
    "buckets": Limit(0, 65_521),
    "colsample_bytree": _SHARE,
    "dropout": Range(0, 0.99, "a share from 0 to 0.99"),
    "eta": Range(1e-6, 1, "above 0, from 1e-6 to 1"),
    "lambda": Range(0, 1e9, "from 0 to 1e9"),
    "layers": Limit(1, 32),
    "learning_rate": LIMITS["learning-rate"],
    "max_depth": Limit(1, 10),  # trees are kept complete
    "min_child_weight": Range(0, 1e9, "from 0 to 1e9"),
    "subsample": _SHARE,
    "trees": Limit(1, 2000),
    "weight_decay": Range(0, 100, "from 0 to 100"),
    "width": Limit(1, 1024),
}
"""The hyper-parameters of heads, by name."""


def check_params(params: Mapping[str, Any]) -> None:
    """Check hyper-parameters, as `--param` gives them.

    Raises:
        InputError: there is none of that name, or its value is no such number or out of range.
    """
    for name, value in params.items():
        if name not in PARAMS:
            raise InputError(
                f"--param: unknown hyper-parameter {name!r}{close_match(name, PARAMS)}; known: {', '.join(PARAMS)}"
            )
        if wanted := PARAMS[name].wanted(value, int(PARAMS[name].least)):
            raise InputError(f"--param {name}: expected {wanted}, not {_shown(value)}")


def check_limit(name: str, value: Any, least: int | None = None) -> None:
    """Check the number of an option.

    Args:
        name: a key of `LIMITS`.
        value: what was given.
        least: in the place of the table's, where one use of a whole number asks for more than others.

    Raises:
        InputError: it is no such number, or out of range.
    """
    limit = LIMITS[name]
    wanted = limit.wanted(value, int(limit.least) if least is None else least)
    if wanted:
        raise InputError(f"--{name}: expected {wanted}, not {_shown(value)}")


def is_within(name: str, value: Any) -> bool:
    """Whether `check_limit` accepts a number."""
    return not LIMITS[name].wanted(value, int(LIMITS[name].least))


def check_limits(**values: Any) -> None:
    """Check several, by their names with underscores; those that are None or have no limits are left out."""
    for key, value in values.items():
        name = key.replace("_", "-")
        if value is not None and name in LIMITS:
            check_limit(name, value)


def _shown(value: Any) -> str:
    if isinstance(value, int) and abs(value) >= 10**40:
        return "a number of more than 40 digits"
    return str(value) if isinstance(value, numbers.Number) else repr(value)[:40]
