"""Exceptions and warnings that specstop raises on purpose.

Every message says what was expected, what came and what to do, on one line: the command line prints it as it is
and exits with code 2. Each class is also the standard type that a caller would catch.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SpecstopError(Exception):
    """Base of every error that a user can mend."""


class InputError(SpecstopError, ValueError):
    """A file, folder, option or prompt is not what a command needs."""


class PairError(SpecstopError, ValueError):
    """Target and draft cannot work together, or a model cannot be loaded."""


class PolicyError(SpecstopError, ValueError):
    """A policy, its folder or its specification is wrong."""


class PolicyFailure(PolicyError, TypeError):
    """A policy raised an error while it was loaded or asked, or its answer breaks the contract.

    Attributes:
        file, line: where the error was raised, or of the method whose answer breaks the contract; "" and 0 if unknown.
    """

    file: str = ""
    line: int = 0


class TraceError(SpecstopError, ValueError):
    """A trace or a shard of it cannot be read, or does not fit what is asked of it."""


class SpecstopWarning(UserWarning):
    """Something works, but not as the user may think."""


def close_match(name: str, known: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` for the known name nearest to `name`, or an empty string."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {near[0]!r}?)" if near else ""
