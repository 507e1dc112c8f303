"""The policies that come with specstop: each puts itself here, where it is defined."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from .contract import StopPolicy

Build = TypeVar("Build", bound=Callable[..., StopPolicy])


@dataclass(frozen=True)
class Builtin:
    """A built-in policy: its class, the parameter that a bare value after the colon sets, and its use."""

    build: Callable[..., StopPolicy]
    value: str
    usage: str


BUILTINS: dict[str, Builtin] = {}
"""By name, of the modules that have been imported; `registry` imports them all."""


def builtin(name: str, value: str, usage: str) -> Callable[[Build], Build]:
    """Return what enters a class, or a function that makes a policy, under a name; see `Builtin`."""

    def enter(build: Build) -> Build:
        BUILTINS[name] = Builtin(build, value, usage)
        return build

    return enter
