"""How kernels are compiled: one signature each, serial, without the lock of the interpreter, kept between runs.

Serial, because a kernel with `parallel=True` adds up in another order than the same kernel on one thread, and its threads do
not survive a fork. Sums in the order that is written down: left to the compiler it is another one in each kernel that a part
is inlined into, and in the process that compiled it. One signature, because a call with other types would compile a second
version in the middle of a round: with the signature given, numba refuses it instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

_Function = TypeVar("_Function", bound=Callable[..., Any])

UNORDERED = {"reassoc", "nsz", "nnan"}
"""What lets the compiler compare the numbers of a row in several lanes; infinities keep their meaning, as masked logits."""


def kernel(signature: str) -> Callable[[_Function], _Function]:
    """Return a decorator that compiles a function for this signature, and keeps it in numba's cache folder if it can."""

    def build(function: _Function) -> _Function:
        # numpy's rules of division: 1 / 0 is infinite and 0 / 0 NaN (`acceptance.note_odds` counts on it). By Python's rules
        # each division is a test that may raise, and such a loop is not worked out several numbers at a time.
        options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
        try:
            return cast(_Function, numba.njit(signature, cache=True, **options)(function))
        except (RuntimeError, OSError):  # no folder that can be written: compiled anew in each process
            return cast(_Function, numba.njit(signature, **options)(function))

    return build


def any_order(function: _Function) -> _Function:
    """Compile a part of kernels that only compares, so that the order of its operations changes no result."""
    # No signature, here and in `exact`: a part is compiled into each kernel that calls it, for the types it is called with.
    return cast(_Function, numba.njit(nogil=True, fastmath=UNORDERED, error_model="numpy")(function))


def exact(function: _Function) -> _Function:
    """Compile a part of kernels whose operations stay in the order in which they are written, and that may meet NaN."""
    return cast(_Function, numba.njit(nogil=True, error_model="numpy")(function))


@exact
def copy_row(source: Any, target: Any) -> None:
    """Write a row to another. `target[:] = source` would take numba a quarter of a second to compile at each place."""
    for i in range(source.shape[0]):
        target[i] = source[i]
