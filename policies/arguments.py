"""Conversion and validation of arguments, and the bounds of the numbers of a run."""

from __future__ import annotations

import math
import numbers
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from .errors import InputError, PolicyError

MAX_ROWS = 1024
"""Maximum number of tokens of a round, the anchor included."""

_MAX_TOKENS = 1 << 20
_MAX_SEED = 2**31 - 1  # seeds of all libraries, some of which get a small number added
_TINY = 2.0**-53  # exclusive bounds of shares


def as_list(value: Any, *kinds: type) -> list[Any]:
    """Return the items of `value` as a list. A text, a path, or an object of `kinds` becomes a list with one item."""
    is_scalar = getattr(value, "ndim", None) == 0  # such a tensor or array has `__iter__`, which raises
    if isinstance(value, (str, bytes, os.PathLike, *kinds)) or is_scalar or not isinstance(value, Iterable):
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
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if is_number and low <= value <= min(high, sys.float_info.max):
        return float(value) + 0.0  # not minus zero
    span = f"of {low:g} or more" if high == math.inf else f"between {low:g} and {high:g}"
    raise PolicyError(f"{owner}: {name}: expected a number {span}, not {describe_value(value)}")


def validate_int(owner: str, name: str, value: Any, low: int = 1) -> int:
    """Return a parameter of a policy as an int. Raises `PolicyError` unless it is a whole number of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < low:
        raise PolicyError(f"{owner}: {name}: expected a whole number of {low} or more, not {describe_value(value)}")
    return int(value)


class Limit(NamedTuple):
    """Inclusive bounds of a number, which is whole if they are `int`.

    `text` replaces the description in messages, and `zero` allows 0 too.
    """

    low: float
    high: float
    text: str = ""
    zero: bool = False

    def requirement(self, value: Any) -> str:
        """Return a description of valid numbers, or "" if `value` is one."""
        is_whole = isinstance(self.low, int)
        is_number = isinstance(value, numbers.Integral if is_whole else numbers.Real) and not isinstance(value, bool)
        if is_number and (self.low <= value <= self.high or (self.zero and value == 0)):
            return ""
        kind = "a whole number" if is_whole else "a number"
        return self.text or f"{kind} from {self.low:.12g} to {self.high:.12g}"

    def check(self, option: str, value: Any) -> None:
        """Raise `InputError` if the value of an option is out of range."""
        if requirement := self.requirement(value):
            raise InputError(f"{option}: expected {requirement}, not {describe_value(value)}")


_SEED, _LENGTH, _SHARE = Limit(0, _MAX_SEED), Limit(0, MAX_ROWS - 1), Limit(0.0, 1.0)
_POSITIVE_SHARE = Limit(_TINY, 1.0, "a number above 0 and at most 1")

LIMITS: Mapping[str, Limit] = {
    "batch": Limit(1, 1 << 12),
    "batch-size": Limit(1, 1 << 24),
    "budget": Limit(_TINY, 1e6, "seconds above 0"),
    "depth": _LENGTH,
    "draws": Limit(1, 1024),
    "epochs": Limit(1, 100_000),
    "explore": _SHARE,
    "fallback": _LENGTH,
    "folds": Limit(2, 1000),
    "learning-rate": Limit(1e-9, 10.0),
    "limit": Limit(1, _MAX_SEED),
    "max-depth": _LENGTH,
    "max-new-tokens": Limit(1, _MAX_TOKENS),
    "memory": Limit(1, 1 << 20, "a whole number from 1 to 1048576 MiB"),
    "min-new-tokens": Limit(0, _MAX_TOKENS),
    "min-p": _SHARE,
    "mix": _SHARE,
    "no-repeat-ngram": Limit(0, _MAX_TOKENS),
    "passes": Limit(1, 100),
    "rejection-weight": Limit(1e-6, 1e6),
    "repeats": Limit(1, 1000),
    "repetition-penalty": Limit(0.01, 100.0),
    "report-share": _SHARE,
    "seed": _SEED,
    "shards": Limit(1, 99_999),  # five digits in the names of the files
    # Logits divided by less leave the range of half precision, and a float32 row turns into infinities.
    "temperature": Limit(0.01, 100.0, "0 or more: 0 is greedy, others from 0.01 to 100", zero=True),
    "threshold": _SHARE,
    "top-k": Limit(0, _MAX_SEED),
    "top-p": _POSITIVE_SHARE,
    "tune": Limit(1, 100_000, "a whole number from 1 to 100000 trials"),
}
"""Limits of options, by name."""

PARAMS: Mapping[str, Limit] = {
    "C": Limit(1e-9, 1e9),
    "batch_size": LIMITS["batch-size"],
    "blocks": Limit(1, 32),
    "buckets": Limit(0, 65_521),
    "colsample_bytree": _POSITIVE_SHARE,
    "dropout": Limit(0.0, 0.99),
    "eta": Limit(1e-6, 1.0),
    "epochs": LIMITS["epochs"],
    "layers": Limit(1, 32),
    "learning_rate": LIMITS["learning-rate"],
    "max_depth": Limit(1, 10),  # trees are stored complete
    "min_child_weight": Limit(0.0, 1e9),
    "reg_lambda": Limit(0.0, 1e9),
    "subsample": _POSITIVE_SHARE,
    "trees": Limit(1, 2000),
    "weight_decay": Limit(0.0, 100.0),
    "width": Limit(1, 1024),
}
"""Limits of hyper-parameters of heads, by name."""


def check_params(params: Mapping[str, Any]) -> None:
    """Raise `InputError` if a hyper-parameter is out of range; those without limits are ignored."""
    for name, value in params.items():
        if name in PARAMS:
            PARAMS[name].check(f"--param {name}", value)


def check_limits(low: Mapping[str, int] = MappingProxyType({}), /, **values: Any) -> None:
    """Raise `InputError` if an option is out of range; those that are None or have no limits are ignored.

    Args:
        low: lower bounds that replace those of `LIMITS`, by the names in `values`.
        values: of options, by their names with underscores.
    """
    for key, value in values.items():
        name = key.replace("_", "-")
        if value is not None and name in LIMITS:
            limit = LIMITS[name]
            limit._replace(low=low.get(key, limit.low)).check(f"--{name}", value)
