"""Exceptions and warnings that specstop raises on purpose.

Every message says what was expected, what came and what to do, on one line: the command line prints it and exits with
code 2. Each class is also the standard type that a caller would catch.

Messages are written with the options of the command line, such as `--max-new-tokens`, which no other word looks like. As a
string an error or a warning names the parameters of Python in their place; `command_line` has the options.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_OPTION = re.compile(r"`[^`]*`|(?<![\w'/-])--(no-(?!repeat-))?([a-z][a-z0-9]*(?:-[a-z0-9]+)*)")
"""An option of the command line. Commands in backticks, quoted values and parts of paths stay as they are."""

_PARAMETERS = {"for": "host", "param": "params", "stop": "stops"}
"""Parameters that are not called as their options are."""


def with_parameters(text: str) -> str:
    """Return a message with the parameters of Python in the place of the options of the command line."""

    subject = text.find(": ") if text.startswith("--") else 0  # what the message is about needs no quotes

    def parameter(found: re.Match[str]) -> str:
        negated, option = found.groups()
        if option is None:
            return found[0]
        name = _PARAMETERS.get(option, option.replace("-", "_")) + ("=False" if negated else "")
        return name if found.start() < subject else f"`{name}`"

    return _OPTION.sub(parameter, text)


class _Message(Exception):
    """A message for Python and for the command line."""

    @property
    def command_line(self) -> str:
        """The message with the options of the command line."""
        return super().__str__()

    def __str__(self) -> str:
        return with_parameters(self.command_line)


class SpecstopError(_Message):
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


class SpecstopWarning(_Message, UserWarning):
    """Something works, but not as the user may think."""


def close_match(name: str, known: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` for the known name nearest to `name`, or an empty string."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {near[0]!r}?)" if near else ""
