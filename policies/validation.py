"""Policies from plugins: their attributes are validated, and their exceptions become a `PolicyFailure`."""

from __future__ import annotations

import contextlib
import os
import reprlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from traceback import walk_tb
from typing import Any

from .contract import StopPolicy
from .errors import PolicyError, PolicyFailure, SpecstopError, close_match
from .features import FEATURES, HIDDEN_STATES
from .profile import Profile

_PACKAGE = __name__.partition(".")[0] + "."
_FOLDER = f"{Path(__file__).parents[1]}{os.sep}"
_MAX_REASON = 300  # characters of an error's own text


def is_trusted(policy: StopPolicy) -> bool:
    """Return whether a policy and all policies that it calls are part of specstop."""
    return type(policy).__module__.startswith(_PACKAGE) and all(map(is_trusted, policy.parts))


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
def plugin_errors(who: StopPolicy | str, doing: str) -> Iterator[None]:
    """Turn exceptions of a block that runs code of a plugin into `PolicyFailure`.

    `KeyboardInterrupt` and exceptions of specstop pass.

    Args:
        who: the policy, or text that begins the message.
        doing: what fails.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a `SystemExit` must not end the program either
        if type(error).__module__.startswith(_PACKAGE):
            if isinstance(error, PolicyFailure) and not error.file:
                error.file, error.line = _location(error, who, doing)
            raise
        name = who if isinstance(who, str) else who.name
        failure = PolicyFailure(f"{name}: {doing} failed: {error_text(error)}")
        failure.file, failure.line = _location(error, who, doing)
        raise failure from error


@dataclass(frozen=True)
class Failure:
    """The failure of a policy.

    Attributes:
        policy: its name.
        error: in one line.
        file, line: where the error was raised, or the method that violates the contract.
    """

    policy: str
    error: str
    file: str
    line: int

    @staticmethod
    def of(policy: StopPolicy, error: BaseException) -> Failure:
        """Return the failure of a policy that raised this error."""
        at = (error.file, error.line) if isinstance(error, PolicyFailure) else ("", 0)
        if not at[0]:
            at = _location(error, policy, "keep()")
        return Failure(policy.name, error_text(error).removeprefix(f"{policy.name}: "), *at)

    @property
    def text(self) -> str:
        """The error and where it was raised."""
        return f"{self.error}, at {self.file}:{self.line}" if self.file else self.error

    def to_dict(self) -> dict[str, Any]:
        """Return the failure as plain values."""
        return {"failed": True, **asdict(self)}

    def as_error(self, consequence: str) -> PolicyFailure:
        """Return the error to raise where results of a failed policy must not be reported."""
        return PolicyFailure(f"policy {self.policy} failed ({self.text}); {consequence}")


def _location(error: BaseException, who: StopPolicy | str, doing: str) -> tuple[str, int]:
    """Return the innermost file and line of the policy's own code, else those of the method that was called."""
    frames = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    policies = () if isinstance(who, str) else (who, *who.parts)
    files = {getattr(sys.modules.get(type(policy).__module__), "__file__", None) for policy in policies}
    outside = [at for at in frames if not at[0].startswith(_FOLDER)]
    if candidates := [at for at in frames if at[0] in files] or outside:
        return candidates[-1]
    code = getattr(getattr(type(who), doing.removesuffix("()"), None), "__code__", None)
    return (frames[-1] if frames else ("", 0)) if code is None else (code.co_filename, code.co_firstlineno)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_count_table(value: Any) -> bool:
    return isinstance(value, Mapping) and all(_is_count(number) for entry in value.items() for number in entry)


def _is_line(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable() and bool(value.strip())


_ATTRIBUTES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(("name", "cost_name"), ("one line of text", _is_line)),
    **dict.fromkeys(("first", "max_depth"), ("a whole number, 0 or more", _is_count)),
    **dict.fromkeys(
        ("trims", "carries", "reads_clock", "reads_seconds", "joint"),
        ("True or False", lambda value: isinstance(value, bool)),
    ),
    "unasked": ("whole numbers by whole numbers", _is_count_table),
    **dict.fromkeys(("start", "keep", "select", "observe", "limited"), ("a method", callable)),
}
"""By attribute of a policy: the expected value, and its test."""


def validate_policy(policy: Any) -> StopPolicy:
    """Return the policy.

    Raises:
        PolicyError: it is not a policy, or an attribute of a plugin's is wrong.
    """
    if isinstance(policy, type) and issubclass(policy, StopPolicy):
        raise PolicyError(f"expected a policy, not the class {policy.__name__}; write {policy.__name__}(...)")
    if not isinstance(policy, StopPolicy):
        raise PolicyError(f"expected a StopPolicy, not {_shown(policy)}")
    if is_trusted(policy):
        return policy
    who = type(policy).__name__
    # By its class's name: the attributes of the policy are not validated yet.
    with plugin_errors(who, "reading its attributes"):
        for name, (expected, is_valid) in _ATTRIBUTES.items():
            if not is_valid(value := getattr(policy, name)):
                raise PolicyError(f"{who}.{name}: expected {expected}, not {_shown(value)}")
        _validate_names(f"{who}.features", "feature", policy.features, FEATURES)
        _validate_names(f"{who}.hidden", "hidden state", policy.hidden, HIDDEN_STATES)
        sizes = getattr(policy, "sizes", {})  # only of policies whose hidden states have one size
        if not isinstance(sizes, Mapping) or not all(n in HIDDEN_STATES and _is_count(sizes[n]) for n in sizes):
            raise PolicyError(f"{who}.sizes: expected whole numbers by name of a hidden state, not {_shown(sizes)}")
        depth = max(policy.max_depth - 1, 0)
        try:
            shorter = policy.limited(depth)
        except AttributeError as error:  # of a frozen dataclass, or a property
            raise PolicyError(f"{who}.max_depth: expected an attribute that can be set on a copy ({error})") from None
        if not isinstance(shorter, StopPolicy) or not _is_count(shorter.max_depth) or shorter.max_depth > depth:
            raise PolicyError(f"{who}.limited: expected limited({depth}) to draft no deeper than {depth}")
    return policy


def with_costs(policy: StopPolicy, profile: Profile | None) -> StopPolicy:
    """Return a policy that decides by the costs of a profile, if there is one and the policy uses costs.

    Raises:
        PolicyFailure: a plugin raised an error.
        PolicyError: it is not a policy, or it returned something else.
    """
    if profile is None:
        return policy
    if is_trusted(validate_policy(policy)):
        return policy.with_costs(profile)
    with plugin_errors(policy, "with_costs()"):
        priced = policy.with_costs(profile)
    return validate_policy(priced)


def _validate_names(where: str, what: str, names: Any, known: Mapping[str, Any]) -> None:
    """Require a tuple of known names without repetitions."""
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        hint = f"; write ({names!r},)" if isinstance(names, str) and names in known else ""
        raise PolicyError(f"{where}: expected a tuple of {what} names, not {_shown(names)}{hint}")
    for at, name in enumerate(names):
        if name not in known:
            raise PolicyError(
                f"{where}: unknown {what} {_shown(name)}{close_match(name, known)}; known: {', '.join(known)}"
            )
        if name in names[:at]:
            raise PolicyError(f"{where}: expected each {what} once, but {name!r} is there twice")


def _shown(value: Any) -> str:
    """Return a short representation of a value with its type."""
    text = "".join(c if c.isprintable() else "?" for c in reprlib.repr(value))
    return text if value is None or isinstance(value, bool) else f"the {type(value).__name__} {text}"
