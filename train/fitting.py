"""Kinds of head by name, each fitted by a module that is imported only when it is wanted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import cast

from ..policies.heads import Head
from ..policies.progress import Progress, silent
from .rows import FitRows


@dataclass(frozen=True)
class FitTask:
    """What every fitter is given.

    Attributes:
        rows, held_out: to fit on, and to stop early on.
        names: of the scalar features, in the order of the rows' columns.
        seed: of everything random.
        progress: see `Progress`.
    """

    rows: FitRows
    held_out: FitRows
    names: Sequence[str]
    seed: int = 0
    progress: Progress = silent


Fitter = Callable[[FitTask], tuple[Head, dict[str, bytes]]]
"""Returns the head, and files for retraining that the policy folder keeps beside it."""

FITTERS = {
    "logistic": "linear:fit_logistic",
    "mlp": "mlp:fit_network",
    "xgboost": "boosted:fit_trees",
}
"""`module:function` of each kind."""

HEAD_KINDS = tuple(FITTERS)


def fitter(kind: str) -> Fitter:
    """Return the function that fits this kind of head."""
    module, _, name = FITTERS[kind].partition(":")
    return cast(Fitter, getattr(import_module(f".{module}", __package__), name))
