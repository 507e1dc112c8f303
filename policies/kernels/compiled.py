"""Compile kernels with numba: one signature each, serial, without the GIL, cached on disk.

Kernels are serial because `parallel=True` changes the order of sums and its threads do not survive a fork. With one
signature numba refuses other types instead of compiling a second version in the middle of a round.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import llvmlite
import numba
import numpy as np
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.typeinfer import register_dispatcher

_Function = TypeVar("_Function", bound=Callable[..., Any])

CONSTANTS = ("counter_rng.py", "features.py")
"""Modules of `policies` with constants that are compiled into kernels."""

MAX_STALE = 4
"""Number of cache folders of other versions that are not removed."""

# numpy's rules of division: 1 / 0 is infinite and 0 / 0 is NaN. Python's need a branch per division, which prevents SIMD.
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}


@functools.cache
def _source_hash(folder: Path) -> str:
    """Return a hash of the compiler's version, of this package, and of the Python files in a folder."""
    package = Path(__file__).parent
    sources = {*package.glob("*.py"), *folder.glob("*.py"), *(package.parent / name for name in CONSTANTS)}
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__}".encode())
    for path in sorted(sources):
        digest.update(f"{path.name}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


class _KernelCache(FunctionCache):
    """Numba's cache of one function, in a subfolder with the hash of all sources as its name.

    Numba discards a cached kernel if its source file has changed, but not if a function or a constant of another file has.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)  # type: ignore[no-untyped-call]
        folder = Path(self._cache_path) / f"specstop-{_source_hash(Path(function.__code__.co_filename).parent)}"
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(OSError):  # another process may remove the same folders
                others = sorted({*folder.parent.glob("specstop-*")} - {folder}, key=lambda path: path.stat().st_mtime)
                for stale in others[:-MAX_STALE]:
                    shutil.rmtree(stale, ignore_errors=True)
        self._cache_path = str(folder)
        stamp = self._impl.locator.get_source_stamp()
        self._cache_file = IndexDataCacheFile(self._cache_path, self._impl.filename_base, stamp)


def kernel(signature: str) -> Callable[[_Function], _Function]:
    """Return a decorator that compiles a function for one signature and caches it on disk.

    The cache is discarded when this package or a Python file in the folder of the function changes.

    Args:
        signature: such as "void(boolean[::1], float64[:,::1])"; arrays are C-contiguous.
    """

    def build(function: _Function) -> _Function:
        try:
            dispatcher = numba.njit(**_OPTIONS)(function)
            dispatcher._cache = _KernelCache(function)
            with register_dispatcher(dispatcher):
                dispatcher.compile(signature)
            dispatcher.disable_compile()
            return cast(_Function, dispatcher)
        except (RuntimeError, OSError):  # the cache cannot be written: compile again in each process
            return cast(_Function, numba.njit(signature, **_OPTIONS)(function))

    return build


def kernel_part(function: _Function) -> _Function:
    """Compile a function that kernels call."""
    return cast(_Function, numba.njit(**_OPTIONS)(function))


def any_order(function: _Function) -> _Function:
    """Compile a part of kernels that only compares numbers, which may be reordered without changing the result."""
    # Without "ninf": infinities are masked logits.
    return cast(_Function, numba.njit(fastmath={"reassoc", "nsz", "nnan"}, **_OPTIONS)(function))


@kernel_part
def copy_row(source: Any, target: Any) -> None:
    """Copy a row. `target[:] = source` takes numba a quarter of a second to compile at each place."""
    for i in range(source.shape[0]):
        target[i] = source[i]


@kernel_part
def argsort_desc(values: Any, order: Any) -> None:
    """Write the indices [N] that sort `values` [N] in descending order, stable; insertion sort, fast if nearly sorted."""
    for i in range(values.shape[0]):
        at = i
        while at > 0 and values[order[at - 1]] < values[i]:
            order[at] = order[at - 1]
            at -= 1
        order[at] = i


@kernel_part
def insert_desc(values: Any, count: Any, value: Any) -> None:
    """Insert a value into the first `count` entries of `values`, which are in descending order."""
    at = count
    while at > 0 and values[at - 1] < value:
        values[at] = values[at - 1]
        at -= 1
    values[at] = value


@kernel_part
def sigmoid(odds: Any) -> Any:
    """Return 1 / (1 + e^-odds); large negative odds give 0."""
    return 1.0 / (1.0 + np.exp(-odds))


@kernel_part
def known_depths(active: Any, cut: Any, accepted: Any, verified: Any) -> Any:
    """Return at how many depths a round shows the outcome: the accepted ones and the first rejected one."""
    return min(accepted + 1, verified) if active and not cut else 0
