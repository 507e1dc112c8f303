"""Compile kernels with numba: one signature each, serial, without the GIL, cached on disk.

Kernels are serial because `parallel=True` changes the order of sums and its threads do not survive a fork. With one
signature numba refuses other types instead of compiling a second version in the middle of a round.

A kernel is compiled when it is first called or when `kernels.load` compiles it, because importing numba takes 0.4 s.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any, TypeVar, cast

import numpy as np

_Function = TypeVar("_Function", bound=Callable[..., Any])

CONSTANTS = ("counter_rng.py", "features.py")
"""Modules of `policies` with constants that are compiled into kernels."""

MAX_STALE = 4
"""Number of cache folders of other versions that are not removed."""

# numpy's rules of division: 1 / 0 is infinite and 0 / 0 is NaN. Python's need a branch per division, which prevents SIMD.
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}


class Kernel:
    """A function that is compiled when it is first called. The result replaces it in the module of the function.

    Args:
        function: calls only functions of numba and other kernels, which are global names of its module.
        build: compiles the function.
    """

    def __init__(self, function: Callable[..., Any], build: Callable[[Callable[..., Any]], Any]) -> None:
        functools.update_wrapper(self, function)
        self._function, self._build = function, build

    def __call__(self, *args: Any) -> Any:
        """Call the compiled function."""
        return self.compiled(*args)

    @functools.cached_property
    def compiled(self) -> Any:
        """The compiled function, a dispatcher of numba."""
        names = self._function.__globals__
        for name in _global_names(self._function.__code__):  # numba reads the functions that this one calls from there
            if isinstance(names.get(name), Kernel):
                names[name] = names[name].compiled
        compiled = self._build(self._function)
        if names.get(self._function.__name__) is self:
            names[self._function.__name__] = compiled
        return compiled


def _global_names(code: CodeType) -> Iterator[str]:
    """Yield the names that a function and its nested functions read."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _global_names(constant)


@functools.cache
def _source_hash(folder: Path) -> str:
    """Return a hash of the compiler's version, of this package, and of the Python files in a folder."""
    import llvmlite
    import numba

    package = Path(__file__).parent
    sources = {*package.glob("*.py"), *folder.glob("*.py"), *(package.parent / name for name in CONSTANTS)}
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__}".encode())
    for path in sorted(sources):
        digest.update(f"{path.name}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def _kernel_cache(function: Callable[..., Any]) -> Any:
    """Return numba's cache of one function, in a subfolder with the hash of all sources as its name.

    Numba discards a cached kernel if its source file has changed, but not if a function or a constant of another file has.
    """
    from numba.core.caching import FunctionCache, IndexDataCacheFile

    cache: Any = FunctionCache(function)
    folder = Path(cache._cache_path) / f"specstop-{_source_hash(Path(function.__code__.co_filename).parent)}"
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):  # another process may remove the same folders
            others = sorted({*folder.parent.glob("specstop-*")} - {folder}, key=lambda path: path.stat().st_mtime)
            for stale in others[:-MAX_STALE]:
                shutil.rmtree(stale, ignore_errors=True)
    cache._cache_path = str(folder)
    stamp = cache._impl.locator.get_source_stamp()
    cache._cache_file = IndexDataCacheFile(cache._cache_path, cache._impl.filename_base, stamp)
    return cache


def kernel(signature: str) -> Callable[[_Function], _Function]:
    """Return a decorator that compiles a function for one signature and caches it on disk.

    The cache is discarded when this package or a Python file in the folder of the function changes.

    Args:
        signature: such as "void(boolean[::1], float64[:,::1])"; arrays are C-contiguous.
    """

    def build(function: Callable[..., Any]) -> Any:
        import numba
        from numba.core.typeinfer import register_dispatcher

        try:
            dispatcher = numba.njit(**_OPTIONS)(function)
            dispatcher._cache = _kernel_cache(function)
            with register_dispatcher(dispatcher):
                dispatcher.compile(signature)
            dispatcher.disable_compile()
            return dispatcher
        except (RuntimeError, OSError):  # the cache cannot be written: compile again in each process
            return numba.njit(signature, **_OPTIONS)(function)

    def decorate(function: _Function) -> _Function:
        return cast(_Function, Kernel(function, build))

    return decorate


def _build_part(function: Callable[..., Any], **options: Any) -> Any:
    import numba

    return numba.njit(**options, **_OPTIONS)(function)


def kernel_part(function: _Function) -> _Function:
    """Compile a function that kernels call."""
    return cast(_Function, Kernel(function, _build_part))


def any_order(function: _Function) -> _Function:
    """Compile a part of kernels that only compares numbers, which may be reordered without changing the result."""
    # Without "ninf": infinities are masked logits.
    return cast(_Function, Kernel(function, functools.partial(_build_part, fastmath={"reassoc", "nsz", "nnan"})))


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
