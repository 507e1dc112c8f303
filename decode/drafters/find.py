"""Drafters by name: those that come with specstop, and those of installed packages."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from ...policies.errors import InputError, PolicyError, close_match
from ...policies.plugin_code import loading
from ...policies.storage.registry import SWITCH
from ..models.pair import Pair
from .base import Drafter
from .either import SURE, EitherDrafter
from .folder import TrainedDrafter, load_drafter
from .heads.ctc import CTCDrafter
from .heads.drafter import HeadsDrafter
from .heads.layer import LayerDrafter
from .lookup import LookupDrafter
from .model import ModelDrafter
from .suffix import SuffixDrafter

GROUP = "specstop.drafters"
"""The entry points of plugins: functions or classes that make a drafter of a pair."""

BUILTINS: dict[str, tuple[Callable[..., Drafter], str]] = {
    "model": (ModelDrafter, ""),
    "lookup": (LookupDrafter, "longest"),
    "suffix": (SuffixDrafter, "path"),
}
"""By name: what makes a drafter of a pair, and the parameter that is set after the colon."""

TRAINED: dict[str, Callable[[Pair, Any], Drafter]] = {
    "medusa": HeadsDrafter,
    "hydra": HeadsDrafter,
    "ctc": CTCDrafter,
    "layer": LayerDrafter,
}
"""By kind: what makes a drafter of a pair and the network in a folder, which is named after the colon."""

TWO = re.compile(r"(suffix|lookup)(?:\?([^+]*))?\+(.+)")
"""Two drafters at once: one that costs nothing, from when on it is sure, and another one."""


def find_drafter(name: str, pair: Pair) -> Drafter:
    """Return the drafter that a spec names.

    Args:
        name: `model`, `lookup`, `lookup:4` (looks for four tokens at most), `suffix`, `suffix:FILE`, a trained one by its
            folder, such as `medusa:PATH`, a plugin's: `name?key=value`, or two at once: `suffix+model`, `lookup+medusa:PATH`,
            `suffix?sure=0.6+model` (`EitherDrafter`).
        pair: that it drafts for.

    Raises:
        InputError: there is none of that name, or it cannot be made so.
    """
    if both := TWO.fullmatch(name):
        return EitherDrafter(pair, find_drafter(both[1], pair), find_drafter(both[3], pair), _sure(both))
    kind, _, query = name.partition("?")
    kind, colon, given = kind.partition(":")
    if kind in TRAINED and given and not query:
        return _trained(kind, given, pair)
    build, parameter = BUILTINS.get(kind, (None, ""))
    options: dict[str, Any] = {}
    if colon:
        options[parameter] = _value(name, parameter, given)
    for part in filter(None, query.split("&")):
        key, equals, value = part.partition("=")
        if not key or not equals:
            raise InputError(f"--drafter: {name!r}: expected key=value after the question mark, not {part!r}")
        options[key] = int(value) if value.isascii() and value.isdigit() else value
    if build is not None:
        _check_options(name, build, pair, options)
        return build(pair, **options)
    point = _plugin(kind)
    if point is None:
        raise _unknown(name)
    try:
        with loading("--drafter", f"loading {name!r} ({point.value})"):
            found: Callable[..., Drafter] = point.load()
        _check_options(name, found, pair, options)
        with loading("--drafter", f"making {name!r} ({point.value})"):
            return found(pair, **options)
    except PolicyError as error:  # what a plugin raised, told in a line
        raise InputError(str(error)) from None


def with_drafter(pair: Pair, name: str) -> Pair:
    """Return a pair whose candidates come from a drafter in the place of its draft model, wherever none is named.

    Raises:
        InputError: see `find_drafter`.
    """
    if name == "model":
        return pair
    find_drafter(name, pair)  # told now, not in the middle of a run
    hashes = pair.fingerprint["target"], _identity(name, pair)
    if needs_draft(name):
        return dataclasses.replace(pair, hashes=hashes, drafter=name)
    return dataclasses.replace(pair, draft=None, engines=(pair.engines[0], "plain"), hashes=hashes, drafter=name)


def needs_draft(name: str) -> bool:
    """Whether a spec takes the pair's draft model."""
    both = TWO.fullmatch(name)
    return needs_draft(both[3]) if both else name == "model"


def spec_parts(name: str) -> list[tuple[str, str]]:
    """Return (kind, what its parameter is set to) of each drafter that a spec names: one, or the two of `suffix+model`.

    Raises:
        InputError: there is none of that name.
    """
    if both := TWO.fullmatch(name):
        return [(both[1], ""), *spec_parts(both[3])]
    kind, _, query = name.partition("?")
    kind, _, given = kind.partition(":")
    if kind not in BUILTINS and not (kind in TRAINED and given and not query) and _plugin(kind) is None:
        raise _unknown(name)
    options = dict(part.partition("=")[::2] for part in query.split("&"))
    return [(kind, given or options.get(BUILTINS[kind][1], "") if kind in BUILTINS else given)]


def reads_states(name: str) -> bool:
    """Whether a spec names a trained drafter, which reads the target's hidden states; a plugin's tells by its `layers`."""
    both = TWO.fullmatch(name)
    return reads_states(both[3]) if both else name.partition(":")[0] in TRAINED


def _identity(name: str, pair: Pair) -> str:
    """Return what tells a drafter from others: a folder by what it holds, wherever it lies."""
    if both := TWO.fullmatch(name):
        return f"{both[1]}?sure={_sure(both):g}+{_identity(both[3], pair)}"
    kind, _, path = name.partition(":")
    if kind == "model":
        return pair.fingerprint["draft"]
    return load_drafter(path).identity if kind in TRAINED else name


def _sure(both: re.Match[str]) -> float:
    """Return the chance from which on the first of two drafters is sure."""
    try:
        sure = SURE if both[2] is None else float(both[2].removeprefix("sure="))
    except ValueError:
        sure = -1.0
    # A bare number passes `float` as well, hence the second test; NaN fails the first.
    if not 0.0 <= sure <= 1.0 or not (both[2] or "sure=").startswith("sure="):
        raise InputError(f"--drafter: {both[0]!r}: expected ?sure= and a chance between 0 and 1, not ?{both[2]}")
    return sure


def load_named(kind: str, path: str) -> TrainedDrafter:
    """Return what the folder of a spec such as `medusa:PATH` holds.

    Raises:
        InputError: see `load_drafter`, or it is of another kind.
    """
    trained = load_drafter(path)
    if trained.kind != kind:
        raise InputError(f"--drafter: {path} holds a drafter of the kind {trained.kind}: write {trained.kind}:{path}")
    return trained


def _trained(kind: str, path: str, pair: Pair) -> Drafter:
    trained = load_named(kind, path)
    try:
        network = trained.network_for(pair)
    except InputError as error:
        raise InputError(f"--drafter: {path}: {error}") from None
    return TRAINED[kind](pair, network)


def _value(name: str, parameter: str, given: str) -> int | str:
    """Return what was given after the colon."""
    if parameter == "longest" and given.isascii() and given.isdigit() and int(given) > 0:
        return int(given)
    if parameter == "path" and given:
        return given
    raise _unknown(name)


def _check_options(name: str, build: Callable[..., Drafter], pair: Pair, options: dict[str, Any]) -> None:
    try:
        inspect.signature(build).bind(pair, **options)
    except TypeError as error:
        raise InputError(f"--drafter: {name!r}: {error}") from None


def _installed() -> list[EntryPoint]:
    """Return the entry points of plugins; none where `SPECSTOP_PLUGINS=0` turns them off."""
    return [] if os.environ.get(SWITCH) == "0" else list(entry_points(group=GROUP))


def _plugin(name: str) -> EntryPoint | None:
    """Return the entry point of an installed plugin; None where there is none."""
    points = [point for point in _installed() if point.name == name]
    if len(points) > 1:
        raise InputError(f"--drafter: two drafters are called {name!r}; uninstall one")
    return points[0] if points else None


def _unknown(name: str) -> InputError:
    known = sorted({*BUILTINS, *TRAINED, *(point.name for point in _installed())})
    others = [kind for kind in known if kind not in (*BUILTINS, *TRAINED)]
    more = f", or a plugin's ({', '.join(others)})" if others else ""
    meant = "" if name in known else close_match(name, known)
    trained = ", ".join(f"{kind}:PATH" for kind in TRAINED)
    return InputError(
        f"--drafter: expected model, lookup, lookup:LENGTH, suffix, suffix:FILE, {trained}, two such as "
        f"suffix+model{more}, not {name!r}{meant}"
    )
