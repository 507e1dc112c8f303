"""How kernels are compiled: one signature each, serial, without the GIL, cached on disk.

Serial: a kernel with `parallel=True` sums in another order than on one thread, and its threads do not survive a fork. One
signature: numba refuses a call with other types instead of compiling a second version in the middle of a round.
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

CONSTANTS = ("splitmix.py", "features.py")
"""Modules outside this package, by their path in `policies`, whose constants are compiled into kernels."""

KEPT = 4
"""Cache folders of other versions that are kept."""

UNORDERED = {"reassoc", "nsz", "nnan"}
"""Lets the compiler reorder comparisons of a row; infinities keep their meaning, as masked logits."""

# numpy's rules of division: 1 / 0 is infinite and 0 / 0 NaN. Python's need a branch per division, which prevents SIMD.
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}


@functools.cache
def cache_key(folder: Path = Path(__file__).parent) -> str:
    """Return a hash of the compiler's version, the sources of this package, and those in the folder of a kernel.

    Raises:
        OSError: a source file cannot be read.
    """
    package = Path(__file__).parent
    sources = {*package.glob("*.py"), *folder.glob("*.py"), *(package.parent / name for name in CONSTANTS)}
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__}".encode())
    for path in sorted(sources):
        digest.update(f"{path.name}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


class KernelCache(FunctionCache):
    """Numba's cache of one function, in a subfolder of the folder that numba chooses.

    Numba discards a cached kernel if its own source file has changed, but not if a function or constant of another file that
    was compiled into it has. The name of the subfolder is a hash of all of them.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)  # type: ignore[no-untyped-call]
        folder = Path(self._cache_path) / f"specstop-{cache_key(Path(function.__code__.co_filename).parent)}"
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            _remove_stale_folders(folder)
        self._cache_path = str(folder)
        stamp = self._impl.locator.get_source_stamp()
        self._cache_file = IndexDataCacheFile(self._cache_path, self._impl.filename_base, stamp)


def _remove_stale_folders(current: Path) -> None:
    """Remove the oldest cache folders of other versions, except the latest `KEPT`."""
    with contextlib.suppress(OSError):  # another process may remove the same ones
        others = sorted(set(current.parent.glob("specstop-*")) - {current}, key=lambda path: path.stat().st_mtime)
        for folder in others[:-KEPT]:
            shutil.rmtree(folder, ignore_errors=True)


def kernel(signature: str) -> Callable[[_Function], _Function]:
    """Return a decorator that compiles a function with numba for one signature, and caches it on disk if possible.

    The cache is discarded when this package or a Python file in the folder of the function changes.

    Args:
        signature: such as "void(boolean[::1], float64[:,::1])"; arrays are C-contiguous.
    """

    def build(function: _Function) -> _Function:
        if getattr(numba.config, "DISABLE_JIT", False):
            return function
        try:
            dispatcher = numba.njit(**_OPTIONS)(function)
            dispatcher._cache = KernelCache(function)
            with register_dispatcher(dispatcher):
                dispatcher.compile(signature)
            dispatcher.disable_compile()
            return cast(_Function, dispatcher)
        except (RuntimeError, OSError):  # no writable folder: compiled anew in each process
            return cast(_Function, numba.njit(signature, **_OPTIONS)(function))

    return build


def kernel_part(function: _Function) -> _Function:
    """Compile a function that kernels call, for the types it is called with; its operations keep their order."""
    return cast(_Function, numba.njit(**_OPTIONS)(function))


def any_order(function: _Function) -> _Function:
    """Compile a part of kernels that only compares, so that the order of its operations changes no result."""
    return cast(_Function, numba.njit(fastmath=UNORDERED, **_OPTIONS)(function))


@kernel_part
def copy_row(source: Any, target: Any) -> None:
    """Write a row to another. `target[:] = source` would take numba a quarter of a second to compile at each place."""
    for i in range(source.shape[0]):
        target[i] = source[i]


@kernel_part
def argsort_desc(values: Any, order: Any) -> None:
    """Write the indices [N] that sort `values` [N] in descending order, equal ones in theirs; fast if nearly sorted."""
    for i in range(values.shape[0]):
        at = i
        while at > 0 and values[order[at - 1]] < values[i]:
            order[at] = order[at - 1]
            at -= 1
        order[at] = i


@kernel_part
def sigmoid(odds: Any) -> Any:
    """Return 1 / (1 + e^-odds); large negative odds give 0."""
    return 1.0 / (1.0 + np.exp(-odds))


@kernel_part
def known_depths(active: Any, cut: Any, accepted: Any, verified: Any) -> Any:
    """Return at how many depths a round shows the outcome: those accepted and the first one rejected. 0 = at none."""
    return min(accepted + 1, verified) if active and not cut else 0


exact = kernel_part
