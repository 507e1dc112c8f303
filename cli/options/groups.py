"""Options in groups: a command names a group as one parameter, and is given it as one object."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, get_type_hints

from .shared import Config, Set

ALWAYS: dict[str, tuple[Any, Any]] = {"config": (Config, None), "set": (Set, [])}
"""Options of every command, which are read before it is called: type and default."""


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command with the options of each of its groups, and those that every command has.

    Args:
        command: a parameter whose type is a dataclass stands for the options that its fields are.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}

    @functools.wraps(command)
    def run(**values: Any) -> None:
        made = {name: kind(**{one.name: values.pop(one.name) for one in fields(kind)}) for name, kind in groups.items()}
        command(**made, **{name: value for name, value in values.items() if name not in ALWAYS})

    # typer makes its options of the signature and the annotations.
    parameters = list(_parameters(command, hints))
    setattr(run, "__signature__", inspect.Signature(parameters))  # noqa: B010 - the type checker knows no other way
    run.__annotations__ = {own.name: own.annotation for own in parameters}
    return run


def _parameters(command: Callable[..., None], hints: dict[str, Any]) -> Iterator[inspect.Parameter]:
    """Yield the options: those of a group in its place."""
    for own in inspect.signature(command).parameters.values():
        kind = hints[own.name]
        if is_dataclass(kind):
            types = get_type_hints(kind, include_extras=True)
            for one in fields(kind):
                yield _option(one.name, types[one.name], _default(one))
        else:
            yield _option(own.name, kind, own.default)
    for name, (kind, default) in ALWAYS.items():
        yield _option(name, kind, default)


def _default(one: Field[Any]) -> Any:
    if one.default_factory is not MISSING:
        return one.default_factory()
    return inspect.Parameter.empty if one.default is MISSING else one.default


def _option(name: str, kind: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
