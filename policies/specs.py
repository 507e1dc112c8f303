"""Policies by name: `fixed:4`, `confidence:0.4`, a folder, or `name?key=value` for built-ins and plugins."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from .baselines import Confidence, FixedLength
from .contract import StopPolicy
from .errors import PolicyError, close_match
from .folder import POLICY_FILE, load_policy_folder

GROUP = "specstop.policies"


@dataclass(frozen=True)
class Builtin:
    """A built-in policy: its class, the parameter that a bare value after the colon sets, and its use."""

    build: Callable[..., StopPolicy]
    value: str
    usage: str


BUILTINS = {
    "fixed": Builtin(FixedLength, "length", "fixed:4 drafts 4 tokens a round; fixed:0 is plain decoding"),
    "confidence": Builtin(Confidence, "threshold", "confidence:0.4 stops below that draft probability"),
}
"""The policies that come with specstop."""


def plugins() -> dict[str, EntryPoint]:
    """Return the installed plugins by name, without importing them; two of one name are a `PolicyError`."""
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=GROUP):
        if point.name in found or point.name in BUILTINS:
            other = found[point.name].value if point.name in found else "a built-in"
            raise PolicyError(f"two policies are called {point.name!r}: {point.value} and {other}; uninstall one")
        found[point.name] = point
    return found


def load_policy(spec: str | Path) -> StopPolicy:
    """Return the policy that `spec` names.

    Raises:
        PolicyError: no such policy (the message has the close match), a wrong value, or a broken folder.
    """
    text = str(spec)
    path = Path(text).expanduser()
    if (path / POLICY_FILE).is_file() or (path.is_dir() and ("/" in text or text.startswith("."))):
        return load_policy_folder(path)
    name, _, query = text.partition("?")
    name, colon, value = name.partition(":")
    known: dict[str, Any] = {**{key: builtin.build for key, builtin in BUILTINS.items()}, **plugins()}
    if name not in known:
        if "/" in text or text.startswith("."):
            raise PolicyError(f"--policy: the folder {text} does not exist")
        raise PolicyError(
            f"--policy: unknown policy {text!r}{close_match(name, known)}; expected a policy folder or one of "
            f"{', '.join(sorted(known))}"
        )
    arguments = _arguments(query, text)
    if colon:
        if name not in BUILTINS:
            raise PolicyError(f"--policy: {text!r}: write the plugin's options as {name}?key=value")
        arguments[BUILTINS[name].value] = number = _number(value)
        if isinstance(number, str):
            raise PolicyError(f"--policy: {text!r}: expected a number after the colon, not {value!r}")
    point = known[name]
    return _build(_load(point) if isinstance(point, EntryPoint) else point, arguments, text)


def _load(point: EntryPoint) -> Callable[..., Any]:
    try:
        build: Callable[..., Any] = point.load()
    except Exception as error:  # a plugin's import may raise anything
        raise PolicyError(
            f"--policy: the plugin {point.name!r} ({point.value}) cannot be loaded: {type(error).__name__}: {error}"
        ) from None
    return build


def _build(build: Callable[..., Any], arguments: dict[str, Any], text: str) -> StopPolicy:
    try:
        inspect.signature(build).bind(**arguments)
    except TypeError as error:
        takes = ", ".join(inspect.signature(build).parameters) or "nothing"
        raise PolicyError(f"--policy: {text!r}: {error}; it takes {takes}") from None
    try:
        policy = build(**arguments)
    except (TypeError, ValueError) as error:
        if isinstance(error, PolicyError):
            raise
        raise PolicyError(f"--policy: {text!r}: {error}") from None
    if not isinstance(policy, StopPolicy):
        raise PolicyError(f"--policy: {text!r} is a {type(policy).__name__}, not a StopPolicy")
    return policy


def _arguments(query: str, text: str) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for part in filter(None, query.split("&")):
        key, equals, value = part.partition("=")
        if not equals or not key:
            raise PolicyError(f"--policy: {text!r}: expected key=value after the question mark, not {part!r}")
        arguments[key] = _number(value)
    return arguments


def _number(value: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value
