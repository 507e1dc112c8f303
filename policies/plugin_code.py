"""Running code of plugins: what it raises is a `PolicyError`, and what it changes of the settings that all code of the
process shares is put back.

Classes of specstop itself are run as they are: their decisions take microseconds, and their errors are bugs to be seen.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from traceback import walk_tb
from types import TracebackType
from typing import Any

import numpy as np

from .errors import PolicyFailure, SpecstopError

PACKAGE = __name__.partition(".")[0] + "."
_FOLDER = f"{Path(__file__).parents[1]}{os.sep}"
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

    Any exception is its failure, a `SystemExit` as well.

    Args:
        who: a policy, or text; and
        doing: what fails: they begin the message of the `PolicyFailure`.
    """

    __slots__ = ("_doing", "_facts", "_settings", "_who")

    def __init__(self, who: Any, doing: str) -> None:
        self._who, self._doing = who, doing

    def __enter__(self) -> None:
        self._facts = None if self._who.__class__ is str else _facts(self._who)
        self._settings = _settings()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
            failure = PolicyFailure(f"{who}: {self._doing} {why}")
            failure.file, failure.line = _location(error, self._who, self._doing)
            raise failure from error
        if isinstance(error, PolicyFailure) and not error.file:  # the answer breaks the contract
            error.file, error.line = _location(error, self._who, self._doing)


@dataclass(frozen=True)
class Failure:
    """The failure of a policy, in place of which a fixed draft length was used.

    Attributes:
        policy: its name.
        error: in one line.
        file, line: where the error was raised, or of the method whose answer breaks the contract.
    """

    policy: str
    error: str
    file: str
    line: int

    @staticmethod
    def of(policy: Any, error: BaseException) -> Failure:
        """Return the failure of a policy that raised this error."""
        at = (error.file, error.line) if isinstance(error, PolicyFailure) else ("", 0)
        if not at[0]:
            at = _location(error, policy, "keep()")
        return Failure(policy.name, reason(error).removeprefix(f"{policy.name}: "), *at)

    @property
    def text(self) -> str:
        """The error and where it was raised."""
        return f"{self.error}, at {self.file}:{self.line}" if self.file else self.error

    def to_dict(self) -> dict[str, Any]:
        """Return the failure as plain values."""
        return {"failed": True, **asdict(self)}

    def as_error(self, consequence: str) -> PolicyFailure:
        """Return the error to raise if nothing may be reported of the policy."""
        return PolicyFailure(f"policy {self.policy} failed ({self.text}); {consequence}")


def _location(error: BaseException | None, who: Any, doing: str) -> tuple[str, int]:
    """Return the file and line at which the code of a policy failed, else those of the method that was called."""
    frames = [] if error is None else [(f.f_code.co_filename, at) for f, at in walk_tb(error.__traceback__)]
    policy = type(who)
    file = getattr(sys.modules.get(policy.__module__), "__file__", None)
    theirs = [at for at in frames if at[0] == file] or [at for at in frames if not at[0].startswith(_FOLDER)]
    if theirs:
        return theirs[-1]
    method = getattr(policy, doing.removesuffix("()"), None)
    code = getattr(method, "__code__", None)
    return (frames[-1] if frames else ("", 0)) if code is None else (code.co_filename, code.co_firstlineno)


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
