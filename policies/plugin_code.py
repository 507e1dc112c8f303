"""Running code of plugins: what it raises is a `PolicyError`, what it prints goes to standard error, and what it changes of
the settings that all code of the process shares is put back.

Classes of specstop itself are run as they are: their decisions take microseconds, and their errors are bugs to be seen.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from operator import attrgetter
from types import TracebackType
from typing import Any

import numpy as np

from .errors import PolicyFailure, SpecstopError

PACKAGE = __name__.partition(".")[0] + "."
LONGEST = 300
"""Characters of an error's own text that are shown."""

Setting = tuple[Callable[[], Any], Callable[[Any], Any]]


def _folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it is gone
        return None


def _set_folder(folder: str | None) -> None:
    if folder is not None:
        os.chdir(folder)


def _torch() -> Any:
    """Return torch if it was imported: the models use it, policies need not."""
    return sys.modules.get("torch")


def _settings() -> tuple[Any, ...]:
    """Return what is compared after every decision: other numbers, or an error, would follow for the models."""
    torch = _torch()
    if torch is None:
        return ()
    devices = sys.modules.get("torch.utils._device")  # which torch imports only once somebody asks for a default device
    device = devices.CURRENT_DEVICE if devices is not None else None
    return torch.get_default_dtype(), device, torch.is_grad_enabled(), torch.get_num_threads()


def _put_back(before: tuple[Any, ...]) -> None:
    """Set again what has changed. Where torch was imported meanwhile, that is what torch begins with."""
    torch = _torch()
    if torch is None:
        return
    now = _settings()
    setters = torch.set_default_dtype, torch.set_default_device, torch.set_grad_enabled, torch.set_num_threads
    # How many threads torch began with is not known by now, so their number counts as unchanged.
    for put_back, is_, was in zip(setters, now, before or (torch.float32, None, True, now[3]), strict=True):
        if is_ != was:
            put_back(was)


STATES: tuple[Setting, ...] = (
    (random.getstate, random.setstate),
    (np.random.get_state, np.random.set_state),
    (np.geterr, lambda kept: np.seterr(**kept)),
    (_folder, _set_folder),
)
"""How to read and set what is put back, besides, once a plugin is imported or made."""


def _states() -> tuple[Setting, ...]:
    """Return the same with what torch has of this sort."""
    torch = _torch()
    if torch is None:
        return STATES
    return (
        *STATES,
        (torch.get_rng_state, torch.set_rng_state),
        (lambda: torch.is_autocast_enabled("cpu"), lambda on: torch.set_autocast_enabled("cpu", on)),
        (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
        (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    )


FACTS = ("trims", "first", "max_depth")
"""What a policy says of itself, on which a round in progress relies."""

_facts = attrgetter(*FACTS)


def own(policy: object) -> bool:
    """Whether its class is part of specstop."""
    return type(policy).__module__.startswith(PACKAGE)


def reason(error: BaseException) -> str:
    """Return an error as one line; the kind is left out where specstop's own errors say it all."""
    try:
        text = error.command_line if isinstance(error, SpecstopError) else str(error)
    except Exception:  # its own code runs here too
        text = ""
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split())[:LONGEST]
    kind = type(error).__name__
    return text if isinstance(error, SpecstopError) and text else f"{kind}: {text}" if text else kind


def _passes(error: BaseException) -> bool:
    """Whether it is no failure of a plugin: Ctrl-C, or what specstop raises itself, errors and interruptions."""
    return isinstance(error, KeyboardInterrupt) or type(error).__module__.startswith(PACKAGE)


class Contained:
    """A block that runs code of a plugin.

    Any exception is its failure, a `SystemExit` as well. Standard output is for results, so what it prints goes elsewhere.

    Args:
        who: a policy, or text; and
        doing: what fails: they begin the message of the `PolicyFailure`.
    """

    __slots__ = ("_doing", "_facts", "_settings", "_streams", "_who")

    def __init__(self, who: Any, doing: str) -> None:
        self._who, self._doing = who, doing

    def __enter__(self) -> None:
        self._facts = None if self._who.__class__ is str else _facts(self._who)
        self._settings = _settings()
        self._streams = sys.stdout, sys.stderr
        sys.stdout = sys.stderr

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        out, sys.stderr = self._streams
        if out is not sys.stderr:  # else another thread is in such a block, and puts it back
            sys.stdout = out
        if _settings() != self._settings:
            _put_back(self._settings)
        why = "" if error is None or _passes(error) else f"failed: {reason(error)}"
        # Whoever runs the policy has asked for these once, and cannot go on by others in the middle of a round.
        if self._facts is not None and _facts(self._who) != self._facts:
            for name, before in zip(FACTS, self._facts, strict=True):
                setattr(self._who, name, before)
            why = why or f"must not change {', '.join(FACTS)} of its policy: what a policy remembers is its state"
        if why:
            who = self._who if self._facts is None else self._who.name
            raise PolicyFailure(f"{who}: {self._doing} {why}") from error


@contextlib.contextmanager
def loading(who: str, doing: str) -> Iterator[None]:
    """Run a block that imports or makes a plugin, which may take its time: more is put back, filters of warnings too."""
    kept = [(put_back, read()) for read, put_back in _states()]
    try:
        with warnings.catch_warnings(), Contained(who, doing):
            yield
    finally:
        for put_back, before in kept:
            put_back(before)
