"""Entries of a JSON object, each checked as it is read: what is wrong is named with its place and its limits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from .arguments import check_number, describe_value

_MOST_TEXT = 200
Default = TypeVar("Default", float, None)


class Entries:
    """A JSON object whose entries are numbers within limits, lists of them, or further objects.

    Args:
        values: the object.
        place: its name in messages; nothing = the outermost.

    Raises:
        KeyError: an entry is missing.
        ValueError: one is not what was asked for.
    """

    def __init__(self, values: Any, place: str = "") -> None:
        self.place = place
        if not isinstance(values, Mapping):
            raise ValueError(f"{place or 'it'}: expected a JSON object, not {describe_value(values)}")
        self.values = values

    def named(self, key: str) -> str:
        """Return the name of an entry in messages."""
        return f"{self.place}.{key}" if self.place else key

    def has(self, key: str) -> bool:
        """Whether there is an entry of that name, other than null."""
        return self.values.get(key) is not None

    def part(self, key: str) -> Entries:
        """Return the object called `key`."""
        return Entries(self.values[key], self.named(key))

    def number(self, key: str, most: float = math.inf) -> float:
        """Return the number called `key`."""
        return check_number(self.values[key], self.named(key), 0.0, most)

    def number_or(self, key: str, default: Default, most: float = math.inf) -> float | Default:
        """Return the number called `key`, or `default` where there is none."""
        return self.number(key, most) if self.has(key) else default

    def text(self, key: str) -> str:
        """Return the text called `key`, of at most 200 characters."""
        value = self.values[key]
        if not isinstance(value, str) or len(value) > _MOST_TEXT:
            raise ValueError(
                f"{self.named(key)}: expected a text of at most {_MOST_TEXT} characters, not {describe_value(value)}"
            )
        return value

    def numbers(
        self, key: str, count: tuple[int, int], least: float = 0.0, most: float = math.inf
    ) -> tuple[float, ...]:
        """Return the list called `key`, of so many numbers (at least, at most)."""
        values, name = self.values[key], self.named(key)
        _check_list(values, name, count)
        return tuple(check_number(value, f"{name}[{at}]", least, most) for at, value in enumerate(values))

    def points(
        self, key: str, count: tuple[int, int], first: int = 0, least: float = 0.0, most: float = math.inf
    ) -> tuple[tuple[int, float], ...]:
        """Return the list called `key`, of pairs (whole number, number); the whole ones rise from `first` or more."""
        values, name = self.values[key], self.named(key)
        _check_list(values, name, count)
        out: list[tuple[int, float]] = []
        for at, pair in enumerate(values):
            _check_list(pair, f"{name}[{at}]", (2, 2))
            if type(pair[0]) is not int or not first <= pair[0] < 2**31:
                raise ValueError(
                    f"{name}[{at}]: expected a whole number above the one before, not {describe_value(pair[0])}"
                )
            out.append((pair[0], check_number(pair[1], f"{name}[{at}]", least, most)))
            first = pair[0] + 1
        return tuple(out)


def _check_list(values: Any, name: str, count: tuple[int, int]) -> None:
    least, most = count
    if not isinstance(values, Sequence) or isinstance(values, str) or not least <= len(values) <= most:
        span = f"{least}" if least == most else f"{least} to {most}"
        raise ValueError(f"{name}: expected a list of {span}, not {describe_value(values)}")
