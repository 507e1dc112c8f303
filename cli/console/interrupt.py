"""Signals: wherever Ctrl-C or a request to terminate falls, the command ends with one line and the exit code 128 + number.

Both arrive as an exception, so that what is half-written is removed on the way out.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

from ...policies.files import uninterrupted
from .streams import say

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_AGAIN_S = 0.25
"""Whoever swallows the exception meets it again after so long."""


class Interrupted(BaseException):
    """A signal asks the command to end; no KeyboardInterrupt, since libraries catch that one and answer it themselves.

    Args:
        number: of the signal.
        line: what the user is told, in the place of what the signal is called.
    """

    def __init__(self, number: int, line: str = "") -> None:
        super().__init__(number)
        self.code = 128 + number
        self.line = line or ("interrupted" if number == signal.SIGINT else "terminated")


class Signals:
    """The handler of both signals, from the first line of a command to its last.

    An exception raised between any two instructions may be lost: in a destructor, in a callback from C, in an `except`
    that catches everything. So it is raised again until it arrives; clean-up that runs because of it is left alone, and so is
    what must not be cut in two (`policies.files.uninterrupted`).

    Attributes:
        asked: number of the first signal that came.
        over: the command has ended; what comes now comes too late.
    """

    def __init__(self) -> None:
        self.asked: int | None = None
        self.over = False
        self._unraisable = sys.unraisablehook

    def take(self) -> None:
        """Answer both signals from now on, unless the process was started to ignore them."""
        if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
            return
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._interrupt)
        sys.unraisablehook = self._unraised

    def end(self) -> None:
        """Ignore them from now on: the command has done what it does, and its exit code is known."""
        self.over = True
        sys.unraisablehook = self._unraisable
        if threading.current_thread() is not threading.main_thread():
            return
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.over:
            return
        if self.asked is None:
            self.asked = number
            if hasattr(signal, "setitimer"):
                signal.signal(signal.SIGALRM, self._interrupt)
                signal.setitimer(signal.ITIMER_REAL, _AGAIN_S, _AGAIN_S)  # its SIGALRM comes back here
        if not uninterrupted.defer(lambda: self._interrupt(number, None)) and not _handled(sys.exc_info()[1]):
            raise Interrupted(self.asked)  # `number` may be the timer's

    def _unraised(self, unraisable: sys.UnraisableHookArgs) -> None:
        """Say nothing of an interruption that was raised where exceptions are lost."""
        if not _handled(unraisable.exc_value):
            self._unraisable(unraisable)


def _handled(error: BaseException | None) -> bool:
    """Whether an interruption is what is being handled, perhaps by code that has met another error meanwhile."""
    while error is not None and not isinstance(error, Interrupted):
        error = error.__context__
    return error is not None


class Request:
    """Whether, and by which signal, a command was asked to stop once it has finished what is begun."""

    def __init__(self) -> None:
        self.number: int | None = None

    def __call__(self) -> bool:
        """Whether to stop."""
        return self.number is not None


@contextlib.contextmanager
def finish_first(what: str) -> Iterator[Request]:
    """Yield a question, "shall I stop?", that a signal answers with yes; Ctrl-C after that stops at once.

    Args:
        what: is finished first, for whoever waits at a terminal.
    """
    request = Request()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    kept = {n: handler for n in SIGNALS if (handler := signal.getsignal(n)) is not signal.SIG_IGN}

    def interrupt(number: int, frame: FrameType | None) -> None:
        before = kept[signal.Signals(number)]
        if request() and number == signal.SIGINT and callable(before):
            before(number, frame)
        if not request() and sys.stderr.isatty():
            say(f"specstop: finishing {what}; Ctrl-C again stops at once")
        request.number = request.number or number  # the first one decides on the exit code

    for number in kept:
        signal.signal(number, interrupt)
    try:
        yield request
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
