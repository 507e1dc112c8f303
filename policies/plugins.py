"""Entry points of policies and drafters, and the specs `name:value?key=value` that name them."""

from __future__ import annotations

import inspect
import os
import re
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from .errors import PolicyError, SpecstopWarning
from .host import error_text, plugin_errors

SWITCH = "SPECSTOP_PLUGINS"
"""Environment variable; 0 turns the discovery of plugins off."""

NAME = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True)
class PluginInfo:
    """A row of `specstop policies`; `problem` is the reason why the entry cannot be used, "" if it can."""

    name: str
    where: str
    module: str
    what: str
    problem: str = ""


@dataclass(frozen=True)
class Plugins:
    """Entry points of one group; `kind` is its singular, for messages, and no plugin may have a name in `builtin`."""

    group: str
    kind: str
    builtin: Collection[str]

    def installed(self) -> dict[str, tuple[EntryPoint, str]]:
        """Return the entry points by name, not imported, each with the reason why it cannot be used, or ""."""
        out: dict[str, tuple[EntryPoint, str]] = {}
        if os.environ.get(SWITCH) == "0":
            return out
        plural = self.group.rpartition(".")[2]
        try:
            points = list(entry_points(group=self.group))
        except Exception as error:  # the metadata of any package may be damaged
            warnings.warn(f"installed {plural} cannot be listed: {error_text(error)}", SpecstopWarning, stacklevel=2)
            return out
        for point in points:
            problem, two = "", f"two {plural} are called {point.name!r}: {_origin(point)}"
            if not NAME.fullmatch(point.name):
                problem = f"the {self.kind} {point.name!r} of {_origin(point)} needs a name of letters, digits, - and _"
            elif point.name in self.builtin:
                problem = f"{two} and a built-in; rename that entry point"
            elif point.name in out:
                problem = f"{two} and {_origin(out[point.name][0])}; uninstall one"
            out[point.name] = point, problem
        return out

    def usable(self) -> dict[str, EntryPoint]:
        """Return the entry points that can be used by name, not imported."""
        return {name: point for name, (point, problem) in self.installed().items() if not problem}

    def find(self, name: str) -> EntryPoint | None:
        """Return the entry point of a name, not imported, or None; a `PolicyError` if the name is ambiguous."""
        point, problem = self.installed().get(name, (None, ""))
        if problem:
            raise PolicyError(f"--{self.kind}: {problem}")
        return point

    def load(self, point: EntryPoint) -> Callable[..., Any]:
        """Import the class or function of an entry point; a `PolicyError` if that fails."""
        with plugin_errors(f"--{self.kind}", f"loading the plugin {point.name!r} ({point.value})"):
            build: Callable[..., Any] = point.load()
            inspect.signature(build)  # raises an error if it is not callable
        return build

    def listed(self, builtin: Mapping[str, tuple[str, str]], usage: Callable[[EntryPoint], str]) -> list[PluginInfo]:
        """Return the built-ins and the plugins, which are imported.

        Args:
            builtin: module and usage by name.
            usage: returns the usage of a plugin, or raises `PolicyError`.
        """
        installed = self.installed()
        rows = [PluginInfo(name, "built in", *row, installed.get(name, ("", ""))[1]) for name, row in builtin.items()]
        for name in (name for name in installed if name not in builtin):
            point, problem = installed[name]
            what = f"{name}?key=value"
            try:
                what = what if problem else usage(point)
            except PolicyError as error:
                problem = " ".join(error.command_line.removeprefix(f"--{self.kind}: ").split())
            rows.append(PluginInfo(name, _package(point), point.value.partition(":")[0], what, problem))
        return rows


def _package(point: EntryPoint) -> str:
    try:
        return f"{point.dist.name} {point.dist.version}" if point.dist else "?"
    except Exception:  # its metadata may be damaged
        return "?"


def _origin(point: EntryPoint) -> str:
    package = _package(point)
    return point.value if package == "?" else f"{point.value} of {package}"


def split_spec(text: str, where: str) -> tuple[str, str | None, dict[str, Any]]:
    """Return name, value (None if there is no colon) and options of a spec; `where` begins the message of an error."""
    head, _, query = text.partition("?")
    name, colon, value = head.partition(":")
    options: dict[str, Any] = {}
    for part in filter(None, query.split("&")):
        key, equals, option = part.partition("=")
        if not equals or not key:
            raise PolicyError(f"{where}: expected key=value after the question mark, not {part!r}")
        set_option(options, key, read_number(option), where)
    return name, value if colon else None, options


def set_option(options: dict[str, Any], key: str, value: Any, where: str) -> None:
    """Add an option; a `PolicyError` if it is there already."""
    if key in options:
        raise PolicyError(f"{where}: {key} is given twice; give it once")
    options[key] = value


def read_number(value: str) -> int | float | str:
    """Return a value as a number if it is one."""
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


def check_options(build: Callable[..., Any], where: str, options: Mapping[str, Any], *positional: Any) -> None:
    """Raise `PolicyError` unless a class or function accepts these arguments."""
    accepted = inspect.signature(build).parameters
    try:  # before the call, so that a TypeError raised by the plugin is not taken for a wrong option
        inspect.Signature([*accepted.values()]).bind(*positional, **options)
    except TypeError as error:
        names = ", ".join([*accepted][len(positional) :]) or "nothing"
        raise PolicyError(f"{where}: {error}; it takes {names}") from None


DRAFTERS = ("model", "lookup", "suffix", "medusa", "hydra", "ctc", "ctc-released", "layer")
"""Built-in drafters, which `decode.drafters` builds; traces and profiles compare their specs."""

DRAFTER_PLUGINS = Plugins("specstop.drafters", "drafter", DRAFTERS)
"""Classes or functions that build a drafter for a pair; `needs_draft = True` on one says that it uses the draft model."""

_FIRST = re.compile(rf"({NAME.pattern})(?:[:?+]|$)")


def split_first(text: str) -> tuple[str, str | None]:
    """Return the first drafter of a spec such as `suffix:FILE?sure=0.6+hydra:PATH` and the rest, None if there is none."""
    known = {*DRAFTERS, *DRAFTER_PLUGINS.usable()} if "+" in text else set()
    for sign in re.finditer(r"\+", text):
        first, rest = text[: sign.start()], text[sign.end() :]
        start = _FIRST.match(rest)
        # Paths and values may contain plus signs: one counts after a bare name, or before a known one.
        if NAME.fullmatch(first) or (start and start[1] in known):
            return first, rest
    return text, None


def kinds_of(text: str) -> str:
    """Return the spec of a drafter without values and options, such as `suffix+hydra`."""
    first, rest = split_first(text)
    kind = re.split("[:?]", first, maxsplit=1)[0]
    return kind if rest is None else f"{kind}+{kinds_of(rest)}"
