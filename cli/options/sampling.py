"""The options that say from what distribution tokens are drawn, beside the temperature: the same ones in every command."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from typing import Annotated, Any

import typer

_OPTIONS: tuple[tuple[str, Any, Any], ...] = (
    ("top_k", Annotated[int, typer.Option(help="Sample among this many most likely tokens; 0 = all.")], 0),
    (
        "top_p",
        Annotated[float, typer.Option(help="Sample among the most likely tokens that add up to this probability.")],
        1.0,
    ),
    (
        "min_p",
        Annotated[float, typer.Option(help="Leave out tokens less likely than this share of the most likely one.")],
        0.0,
    ),
    (
        "repetition_penalty",
        Annotated[float, typer.Option(help="Above 1: tokens that the text already has become less likely.")],
        1.0,
    ),
    (
        "no_repeat_ngram",
        Annotated[int, typer.Option(help="Let no n-gram of this length come twice; 0 = allow all.")],
        0,
    ),
    ("min_new_tokens", Annotated[int, typer.Option(help="Do not end a text before this many new tokens.")], 0),
)
"""Name, type with help, and default of each: the fields of `decode.Shaping`."""


UNUSED: Any = None
"""Stands as the default of the parameter `shaping`, which is always given."""


def with_shaping(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command these options in the place of its parameter `shaping`, which is made of them."""

    @functools.wraps(command)
    def run(**values: Any) -> None:
        from ...decode.verify.sampling import Shaping

        command(shaping=Shaping(**{name: values.pop(name) for name, _, _ in _OPTIONS}), **values)

    # Of the types that commands name, only that of `shaping` is not there to be looked up: it would cost seconds.
    hints = typing.get_type_hints(command, localns={"Shaping": object}, include_extras=True)
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters: list[inspect.Parameter] = []
    for own in inspect.signature(command).parameters.values():
        if own.name == "shaping":
            parameters += [inspect.Parameter(n, keyword, default=d, annotation=kind) for n, kind, d in _OPTIONS]
        else:
            parameters.append(own.replace(kind=keyword, annotation=hints[own.name]))
    setattr(run, "__signature__", inspect.Signature(parameters))  # noqa: B010 - the type checker knows no other way
    run.__annotations__ = {own.name: own.annotation for own in parameters}
    return run
