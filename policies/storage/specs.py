"""Specs such as `name?key=value`: their options, and the installed packages that bring what they name.

Policies (`registry`) and drafters (`decode.drafters.find`) are written and found alike. What is wrong is a `PolicyError`.
"""

from __future__ import annotations

import inspect
import os
import re
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from ..errors import PolicyError, SpecstopWarning
from ..validation import error_text, plugin_errors

SWITCH = "SPECSTOP_PLUGINS"
"""The environment variable that turns discovery off where it is 0."""

NAME = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True)
class Listed:
    """An entry of a list: its name, where it comes from, its module, its use, and why it does not load ("" if it does)."""

    name: str
    where: str
    module: str
    what: str
    problem: str = ""


@dataclass(frozen=True)
class Plugins:
    """What installed packages bring of one kind.

    Attributes:
        group: of their entry points.
        kind, kinds: what one is called, and several.
        taken: names of those that come with specstop.
    """

    group: str
    kind: str
    kinds: str
    taken: Collection[str]

    def installed(self) -> tuple[list[EntryPoint], dict[str, str]]:
        """Return all of them, not imported, and by name why one cannot be used: no other name is affected."""
        if os.environ.get(SWITCH) == "0":
            return [], {}
        try:
            points = list(entry_points(group=self.group))
        except Exception as error:  # the metadata of any package may be damaged
            text = f"installed {self.kinds} cannot be looked for: {error_text(error)}"
            warnings.warn(text, SpecstopWarning, stacklevel=2)
            return [], {}
        refused = {}
        for name in sorted({point.name for point in points}):
            claims = [_origin(point) for point in points if point.name == name]
            two = f"two {self.kinds} are called {name!r}: {claims[-1]}"
            if not NAME.fullmatch(name):
                refused[name] = f"the {self.kind} {name!r} of {claims[0]} needs a name of letters, digits, - and _"
            elif name in self.taken:
                refused[name] = f"{two} and a built-in; rename that entry point"
            elif len(claims) > 1:
                refused[name] = f"{two} and {claims[0]}; uninstall one"
        return points, refused

    def usable(self) -> dict[str, EntryPoint]:
        """Return by name those that can be named, not imported."""
        points, refused = self.installed()
        return {point.name: point for point in points if point.name not in refused}

    def find(self, name: str) -> EntryPoint | None:
        """Return the one of a name, not imported; None where there is none.

        Raises:
            PolicyError: several claim the name, or one does that comes with specstop: which one is meant?
        """
        points, refused = self.installed()
        if name in refused:
            raise PolicyError(f"--{self.kind}: {refused[name]}")
        return next((point for point in points if point.name == name), None)

    def load(self, point: EntryPoint) -> Callable[..., Any]:
        """Import one.

        Raises:
            PolicyError: that fails, or it is nothing that can be called.
        """
        with plugin_errors(f"--{self.kind}", f"loading the plugin {point.name!r} ({point.value})"):
            build: Callable[..., Any] = point.load()
        if not callable(build):
            raise PolicyError(
                f"--{self.kind}: {point.value} is a {type(build).__name__}, no class or function that makes a {self.kind}"
            )
        return build

    def listed(self, builtins: Mapping[str, tuple[str, str]], use: Callable[[EntryPoint], str]) -> list[Listed]:
        """Return those that come with specstop and the plugins, with whether they load: this imports them.

        Args:
            builtins: module and use by name.
            use: returns how a plugin is written, or raises `PolicyError`.
        """
        points, refused = self.installed()
        found = [Listed(name, "built in", *told, refused.get(name, "")) for name, told in builtins.items()]
        for point in points:
            usage, problem = f"{point.name}?key=value", refused.get(point.name, "")
            try:
                usage = usage if problem else use(point)
            except PolicyError as error:
                problem = " ".join(error.command_line.removeprefix(f"--{self.kind}: ").split())
            found.append(Listed(point.name, _package(point), point.value.partition(":")[0], usage, problem))
        return found


def _package(point: EntryPoint) -> str:
    """Return the distribution and its version, or "?"."""
    try:
        return f"{point.dist.name} {point.dist.version}" if point.dist else "?"
    except Exception:  # its metadata may be damaged, or gone
        return "?"


def _origin(point: EntryPoint) -> str:
    """Return `module:name`, and the distribution where it is known."""
    package = _package(point)
    return point.value if package == "?" else f"{point.value} of {package}"


def read_options(query: str, where: str) -> dict[str, Any]:
    """Return what stands after a question mark, numbers as numbers.

    Args:
        query: `key=value`, with `&` between several.
        where: begins the message of an error.
    """
    options: dict[str, Any] = {}
    for part in filter(None, query.split("&")):
        key, equals, value = part.partition("=")
        if not equals or not key:
            raise PolicyError(f"{where}: expected key=value after the question mark, not {part!r}")
        if key in options:
            raise PolicyError(f"{where}: {key} is given twice; give it once")
        options[key] = read_number(value)
    return options


def read_number(value: str) -> int | float | str:
    """Return a value as a number if it is one."""
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


def parameters(build: Callable[..., Any], where: str) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of what makes a thing."""
    with plugin_errors(where, "reading what it takes"):
        return inspect.signature(build).parameters


def check_options(
    takes: Mapping[str, inspect.Parameter], where: str, options: Mapping[str, Any], given: tuple[Any, ...] = ()
) -> None:
    """Raise `PolicyError` unless what has these parameters can be called with the options, after the arguments `given`.

    Asked before the call: a TypeError of a plugin's own code is no wrong option.
    """
    try:
        inspect.Signature([*takes.values()]).bind(*given, **options)
    except TypeError as error:
        raise PolicyError(f"{where}: {error}; it takes {', '.join([*takes][len(given) :]) or 'nothing'}") from None
