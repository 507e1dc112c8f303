"""Exceptions and warnings of specstop.

Every message is one line that states the expected value, the actual value and a remedy. The command line prints the message
and exits with code 2. Each class is also the standard type that a caller would catch.

Messages are written with command line options such as `--max-new-tokens`, because these are easy to recognize. `str(error)`
replaces the options with Python parameters; `error.command_line` contains the options.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any

_OPTION = re.compile(r"`[^`]*`|(?<![\w'/-])--(no-(?!repeat-))?([a-z][a-z0-9]*(?:-[a-z0-9]+)*)")
"""A command line option. Commands in backticks, quoted values and parts of paths are not changed."""

_PARAMETERS = {"for": "host", "param": "params", "stop": "stops"}
"""Parameter names that differ from the option names."""


class _Message(Exception):
    """Message with a form for Python and a form for the command line."""

    @property
    def command_line(self) -> str:
        """The message with command line options."""
        return super().__str__()

    def __str__(self) -> str:
        text = self.command_line
        prefix_end = text.find(": ") if text.startswith("--") else 0  # parameters in the prefix have no backticks

        def replace(match: re.Match[str]) -> str:
            negated, option = match.groups()
            if option is None:
                return match[0]
            name = _PARAMETERS.get(option, option.replace("-", "_")) + ("=False" if negated else "")
            return name if match.start() < prefix_end else f"`{name}`"

        return _OPTION.sub(replace, text)


class SpecstopError(_Message):
    """Base class of errors that a user can correct."""


class InputError(SpecstopError, ValueError):
    """A file, folder, option or prompt is invalid."""


class PairError(SpecstopError, ValueError):
    """Target and draft cannot work together, or a model cannot be loaded."""


class PolicyError(InputError):
    """A policy or its folder is invalid, or the specification of a policy or drafter is."""


class PolicyFailure(PolicyError, TypeError):
    """A policy or drafter raised an error while it was loaded or called, or its return value violates the contract.

    Attributes:
        policy: name of the policy, or "".
        file, line: location of the error, or of the method with the invalid return value; "" and 0 if unknown.
    """

    policy: str = ""
    file: str = ""
    line: int = 0

    @property
    def text(self) -> str:
        """The message with command line options, and the location."""
        return f"{self.command_line}, at {self.file}:{self.line}" if self.file else self.command_line

    @property
    def reason(self) -> str:
        """The message without the name of the policy and the location."""
        return self.command_line.removeprefix(f"{self.policy}: ")

    def to_dict(self) -> dict[str, Any]:
        """Return the failure as JSON values."""
        return {"failed": True, "policy": self.policy, "error": self.reason, "file": self.file, "line": self.line}


class TraceError(SpecstopError, ValueError):
    """A trace or one of its shards cannot be read, or is not suitable for the requested operation."""


class SpecstopWarning(_Message, UserWarning):
    """An operation succeeds, but may behave differently from what the user expects."""


def close_match(name: str, valid: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` for the valid name closest to `name`, or an empty string."""
    matches = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.5)
    return f" (did you mean {matches[0]!r}?)" if matches else ""
