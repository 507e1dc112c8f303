"""How kernels are compiled: one signature each, serial, without the lock of the interpreter, kept between runs.

Serial, because a kernel with `parallel=True` adds up in another order than the same kernel on one thread, and its threads do
not survive a fork. Sums in the order that is written down: left to the compiler it is another one in each kernel that a part
is inlined into, and in the process that compiled it. One signature, because a call with other types would compile a second
version in the middle of a round: with the signature given, numba refuses it instead.
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
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.typeinfer import register_dispatcher

_Function = TypeVar("_Function", bound=Callable[..., Any])

CONSTANTS = ("splitmix.py", "features.py")
"""Modules outside this package, by their path in `policies`, whose constants are compiled into kernels."""

KEPT = 4
"""Cache folders of other versions that are kept beside that of this one."""

UNORDERED = {"reassoc", "nsz", "nnan"}
"""What lets the compiler compare the numbers of a row in several lanes; infinities keep their meaning, as masked logits."""


@functools.cache
def cache_key() -> str:
    """Return a hash of all kernel sources and of the compiler's version.

    Raises:
        OSError: a source file cannot be read.
    """
    package = Path(__file__).parent
    sources = [*package.rglob("*.py"), *(package.parent / name for name in CONSTANTS)]
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__}".encode())
    for path in sorted(sources):
        digest.update(f"{path.relative_to(package.parent)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


class KernelCache(FunctionCache):
    """Numba's cache of one function, in a subfolder of the folder that numba chooses.

    Numba discards a cached kernel if its own source file has changed, but not if a function or constant of another file that
    was compiled into it has. Subfolders are named by all sources, so that two versions do not share files either.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)  # type: ignore[no-untyped-call]
        folder = Path(self._cache_path) / f"specstop-{cache_key()}"
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
    """Return a decorator that compiles a function for this signature, and keeps it in numba's cache folder if it can."""

    def build(function: _Function) -> _Function:
        # numpy's rules of division: 1 / 0 is infinite and 0 / 0 NaN (`acceptance.note_odds` counts on it). By Python's rules
        # each division is a test that may raise, and such a loop is not worked out several numbers at a time.
        options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
        if getattr(numba.config, "DISABLE_JIT", False):
            return function
        try:
            dispatcher = numba.njit(**options)(function)
            dispatcher._cache = KernelCache(function)
            with register_dispatcher(dispatcher):
                dispatcher.compile(signature)
            dispatcher.disable_compile()
            return cast(_Function, dispatcher)
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
