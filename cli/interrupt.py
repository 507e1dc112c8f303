"""Ctrl-C once: finish what is begun, then stop. Twice: stop at once."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from .console import say


@contextlib.contextmanager
def finish_first(what: str) -> Iterator[Callable[[], bool]]:
    """Yield a question, "shall I stop?", that an interruption answers with yes.

    A request to terminate, which schedulers send before they kill, counts as an interruption too.

    Args:
        what: is finished first, for the message.
    """
    asked = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not asked:
            say(f"specstop: finishing {what}; Ctrl-C again stops at once")
        asked = True

    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield lambda: False
        return
    kept = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
