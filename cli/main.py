"""The process of the `specstop` command: its signals and streams, its exit code, and the one line that says why."""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

from ..policies.errors import PolicyFailure, SpecstopError
from ..policies.files import disk_text
from .console.interrupt import Interrupted, Signals
from .console.streams import failure, let_go, prepare, say

INTERRUPTED = 130


def run() -> NoReturn:
    """Run the command line.

    What a user can mend is one line on standard error and exit code 2; an interruption is one line and 130 or 143.
    """
    signals = Signals()
    signals.take()  # before anything large is imported
    code, line = 0, ""
    try:
        code, line = _answer()
        signals.over = True
    except BaseException as error:
        signals.over = True  # what cleans up on the way out is left alone; nothing may come before this line
        if isinstance(error, Interrupted):
            code, line = error.code, error.line
        elif signals.asked is None:
            raise
    if signals.asked is not None:  # whatever a library has made of it
        interruption = Interrupted(signals.asked)
        code, line = interruption.code, line if code == interruption.code else interruption.line
    signals.end()
    if line:
        say(f"specstop: {' '.join(line.split())}")
    for stream in (sys.stdout, sys.stderr):
        let_go(stream)
    sys.exit(code)


def _answer() -> tuple[int, str]:
    """Run the command; return its exit code and a line to say, if there is one."""
    try:
        prepare()
        # Before these libraries are imported, since some of them look only then.
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # onnxruntime would leave a device's id in the home folder
        from .app import app
        from .console.output import one_line_warnings

        one_line_warnings()
        code = app(standalone_mode=False)
        sys.stdout.flush()
    except PolicyFailure as error:
        return 2, error.text
    except SpecstopError as error:
        return 2, error.command_line
    except KeyboardInterrupt:
        return INTERRUPTED, "interrupted"
    except OSError as error:
        unwritten = failure(sys.stdout)
        if unwritten is None and error.errno is None:
            raise
        if unwritten is None:
            return 2, disk_text(error)
        # A reader that has seen enough, such as `head`, wants no word.
        quiet = isinstance(unwritten, BrokenPipeError)
        return 1, "" if quiet else f"standard output cannot be written to: {unwritten.strerror}; files are complete"
    except Exception as error:
        # Usage errors are of a class that typer keeps to itself; they know their text and their exit code.
        if not hasattr(error, "format_message"):
            raise
        _say_what_came(error)
        return int(getattr(error, "exit_code", 2)), f"{error.format_message()} Try --help."
    if code == INTERRUPTED:  # typer turns a KeyboardInterrupt into an exit code
        return INTERRUPTED, "interrupted"
    return (code if isinstance(code, int) else 0), ""


_WANTED = {"int": "a whole number", "float": "a number", "bool": "true or false"}


def _say_what_came(error: Any) -> None:
    """Put what came into the message of a usage error: typer leaves out what pydantic could not read."""
    causes = getattr(error.__cause__, "errors", None)
    if callable(causes) and (found := causes()):
        wanted = _WANTED.get(str(found[0]["type"]).partition("_")[0], found[0]["msg"])
        error.message = f"expected {wanted}, not {str(found[0]['input'])[:40]!r}."
