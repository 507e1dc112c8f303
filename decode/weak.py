"""Methods that do not keep their object alive."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any


def weak_method(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return what calls a method of an object without keeping the object alive; what is no method as it is.

    An object that holds its own methods, wrapped, is freed only when Python next looks for cycles, and so are its caches: a
    loop that is made anew for each text would hold several times their memory.
    """
    if not inspect.ismethod(call):
        return call
    function, own = call.__func__, weakref.ref(call.__self__)

    def called(*given: Any) -> Any:
        return function(own(), *given)

    return called
