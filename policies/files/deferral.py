"""Short stretches of work that a signal does not cut in two, such as a rename and the clean-up after it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType


class Deferral:
    """A block in which signals wait: `with uninterrupted:`. A block within another ends with the outer one.

    Blocking the signals in this thread would not do: a library's thread takes them then, and Python's handler runs all the
    same. So whoever sets a handler that raises (`cli.console.interrupt`) asks `waits` first. Handlers run in the main thread,
    so blocks of other threads have nothing to wait for.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._waiting: Callable[[], None] | None = None

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._depth -= 1
        if self._depth == 0 and self._waiting is not None:
            waiting, self._waiting = self._waiting, None  # forgotten before the call, which may raise
            waiting()

    def waits(self, answer: Callable[[], None]) -> bool:
        """Whether a signal has come within a block; its `answer` is called when that ends."""
        if self._depth > 0:
            self._waiting = answer
        return self._depth > 0


uninterrupted = Deferral()
"""The process's own: handlers and blocks meet here."""
