"""How kernels are compiled: one signature each, serial, without the lock of the interpreter, kept between runs.

Serial, because a kernel with `parallel=True` adds up in another order than the same kernel on one thread, and its threads do
not survive a fork. One signature, because a call with other types would compile a second version in the middle of a round:
with the signature given, numba refuses it instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

_Function = TypeVar("_Function", bound=Callable[..., Any])

REASSOCIATE = {"reassoc", "nsz", "contract", "nnan"}
"""What lets the compiler add up a row in several lanes. Infinities keep their meaning: a masked logit is one."""


def kernel(signature: str, fastmath: set[str] | None = None) -> Callable[[_Function], _Function]:
    """Return a decorator that compiles a function for this signature, and keeps it in numba's cache folder if it can."""

    def build(function: _Function) -> _Function:
        options: dict[str, Any] = {"nogil": True, "fastmath": fastmath or False, "error_model": "numpy"}
        try:
            return cast(_Function, numba.njit(signature, cache=True, **options)(function))
        except (RuntimeError, OSError):  # no folder that can be written: compiled anew in each process
            return cast(_Function, numba.njit(signature, **options)(function))

    return build


def inlined(function: _Function) -> _Function:
    """Compile a part of kernels, for whatever types it is used with."""
    return cast(_Function, numba.njit(nogil=True, fastmath=REASSOCIATE, error_model="numpy")(function))


def exact(function: _Function) -> _Function:
    """Compile a part of kernels whose operations stay in the order in which they are written, and that may meet NaN."""
    return cast(_Function, numba.njit(nogil=True, error_model="numpy")(function))


@exact
def copy_row(source: Any, target: Any) -> None:
    """Write a row to another. `target[:] = source` would take numba a quarter of a second to compile at each place."""
    for i in range(source.shape[0]):
        target[i] = source[i]
