"""How drafters are written: `kind:value?key=value`, and several of them with plus signs between them."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...policies.errors import InputError, PolicyError
from ...policies.plugins import read_options, split_first
from .either import SURE


@contextlib.contextmanager
def as_input() -> Iterator[None]:
    """Make what is wrong with a spec or a plugin an `InputError`, as everything else is that an option names."""
    try:
        yield
    except PolicyError as error:
        raise InputError(error.command_line) from None


@dataclass(frozen=True)
class Named:
    """A drafter as it was written.

    Attributes:
        text: all of it.
        kind: its name.
        value: what stands after the colon; None where there is none.
        options: what stands after the question mark, but for `sure`, where another one follows.
        sure: from which chance on it drafts, where another one follows.
        other: the one that drafts elsewhere; None where it stands alone.
    """

    text: str
    kind: str
    value: str | None
    options: Mapping[str, Any]
    sure: float = SURE
    other: Named | None = None

    def parts(self) -> Iterator[Named]:
        """Return it, and those that follow."""
        yield self
        if self.other is not None:
            yield from self.other.parts()


def read_name(text: str, known: Collection[str]) -> Named:
    """Return what a drafter's spec says; whether there is one of that name is not asked.

    Args:
        text: the spec.
        known: names of drafters.

    Raises:
        PolicyError: an option is not `key=value` or is given twice, or `sure` is no chance.
    """
    own, rest = split_first(text, known)
    head, _, query = own.partition("?")
    kind, colon, value = head.partition(":")
    where = f"--drafter: {text!r}"
    options, given = read_options(query, where), value if colon else None
    if rest is None:
        return Named(text, kind, given, options)
    sure = options.pop("sure", SURE)
    if not isinstance(sure, int | float) or not 0.0 <= sure <= 1.0:
        raise PolicyError(f"{where}: expected for sure a chance between 0 and 1, not {sure!r}")
    return Named(text, kind, given, options, float(sure), read_name(rest, known))
