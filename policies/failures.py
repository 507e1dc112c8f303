"""Errors of code of plugins, as failures with their location."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from traceback import walk_tb

from .contract import StopPolicy
from .errors import PolicyFailure, SpecstopError

PACKAGE = __name__.partition(".")[0] + "."
"""Prefix of the modules of specstop."""

_FOLDER = f"{Path(__file__).parents[1]}{os.sep}"
_MAX_REASON = 300  # characters of the text of an error


def error_text(error: BaseException) -> str:
    """Return an error as one line; the type is omitted for errors of specstop."""
    try:
        text = error.command_line if isinstance(error, SpecstopError) else str(error)
    except Exception:  # `__str__` of a plugin's error
        text = ""
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split())[:_MAX_REASON]
    kind = type(error).__name__
    return text if isinstance(error, SpecstopError) and text else f"{kind}: {text}" if text else kind


@contextlib.contextmanager
def plugin_errors(who: StopPolicy | str, action: str) -> Iterator[None]:
    """Turn exceptions of a block that runs code of a plugin into `PolicyFailure`.

    `KeyboardInterrupt` and exceptions of specstop pass.

    Args:
        who: the policy, or text that begins the message.
        action: what fails.
    """
    try:
        yield
    except BaseException as error:  # a `SystemExit` must not end the program either
        is_own = type(error).__module__.startswith(PACKAGE) and not isinstance(error, PolicyFailure)
        if is_own or isinstance(error, KeyboardInterrupt):
            raise
        failure = policy_failure(error, who, action)
        raise failure from (None if failure is error else error)


def policy_failure(error: BaseException, who: StopPolicy | str, action: str) -> PolicyFailure:
    """Return an error of a policy as a failure with its location; see `plugin_errors`."""
    name = who if isinstance(who, str) else who.name
    failure = (
        error if isinstance(error, PolicyFailure) else PolicyFailure(f"{name}: {action} failed: {error_text(error)}")
    )
    if not failure.file:
        failure.policy, (failure.file, failure.line) = name, _location(error, who, action)
    return failure


def _location(error: BaseException, who: StopPolicy | str, action: str) -> tuple[str, int]:
    """Return the innermost file and line of the policy's own code, otherwise those of the method that was called."""
    frames = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    policies = () if isinstance(who, str) else (who, *who.parts)
    files = {getattr(sys.modules.get(type(policy).__module__), "__file__", None) for policy in policies}
    outside = [at for at in frames if not at[0].startswith(_FOLDER)]
    if candidates := [at for at in frames if at[0] in files] or outside:
        return candidates[-1]
    code = getattr(getattr(type(who), action.removesuffix("()"), None), "__code__", None)
    return (frames[-1] if frames else ("", 0)) if code is None else (code.co_filename, code.co_firstlineno)
