"""The `specstop` command: its application, its exit codes and its error messages."""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import keyword
import os
import re
import signal
import sys
import threading
import warnings
from types import FrameType
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand

from ..policies.arguments import check_limits
from ..policies.errors import InputError, PolicyFailure, SpecstopError, SpecstopWarning, close_match
from ..policies.files import disk_text, is_text, uninterrupted
from .options import COLLECT_KEYS, SAMPLING_KEYS, VERIFICATIONS, running, save_config, with_options
from .output import print_stderr, prints_on_stderr

COMMANDS = (
    "demo", "collect", "profile", "train", "evaluate", "decode", "bench", "deploy", "train-drafter", "import", "info",
    "policies",
)  # fmt: skip

_KEYS = {
    key.replace("_", "-"): f"{option} {key}"
    for option, keys in (("--extra", COLLECT_KEYS), ("--sampling", SAMPLING_KEYS))
    for key in keys
}
"""Options that set the parameters without an option of the same name."""

_KEY = re.compile(rf"--(no-)?({'|'.join(_KEYS)})(?![\w-])")


class Command(TyperCommand):
    """A command that validates its options before it imports large libraries, and saves them in its result."""

    def invoke(self, ctx: Any) -> Any:
        """Validate the options and run the command.

        Raises:
            InputError: a number is out of range, or a value is not text.
        """
        running.set(ctx)
        _validate(ctx.params)
        out = ctx.params.get("out")
        saves = out is not None and not out.exists()
        try:
            with prints_on_stderr():
                result = super().invoke(ctx)
            saves = True
        finally:
            if saves:  # also after Ctrl-C and if a policy failed, if there is a result
                save_config(ctx)
        return result


def _validate(values: dict[str, Any]) -> None:
    """Raise `InputError` for values that can be refused without reading anything."""
    for name, value in values.items():
        if not is_text(value):
            option = f"--{name.replace('_', '-')}"
            raise InputError(f"{option}: expected text in the encoding of this locale, not {value!a}")
    check_limits(**{name: value for name, value in values.items() if not isinstance(value, str)})
    if (mode := values.get("verification", "auto")) not in VERIFICATIONS:
        names = ", ".join(VERIFICATIONS)
        raise InputError(f"--verification: expected one of {names}, not {mode!r}{close_match(mode, VERIFICATIONS)}")


app = typer.Typer(
    help="Learn when to stop drafting in speculative decoding: collect, train, evaluate, decode.",
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version."),
    no_plugins: bool = typer.Option(False, "--no-plugins", help="Ignore installed policies and drafters."),
) -> None:
    if no_plugins:
        os.environ["SPECSTOP_PLUGINS"] = "0"
    if version:
        from importlib.metadata import version as installed

        typer.echo(f"specstop {installed('specstop')}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


for _name in COMMANDS:
    _function = _name.replace("-", "_") + "_" * keyword.iskeyword(_name)  # `import_`
    _module = importlib.import_module(f".commands.{_function}", __package__)
    app.command(_name, cls=Command)(
        with_options(_name, getattr(_module, _function), config=_name not in ("info", "policies"))
    )


def run() -> NoReturn:
    """Run the command line and exit.

    Exit codes: 0; 1 if results differ or cannot be printed; 2 for errors that a user can correct; 130 after Ctrl-C.
    """
    # Collecting garbage during imports takes a tenth of the CPU time of a short `collect`.
    gc.set_threshold(100_000, 20, 100)
    interrupts: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)
        if not uninterrupted.defer(lambda: signal.default_int_handler(number, None)):
            signal.default_int_handler(number, frame)

    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    try:
        code, line = _run()
    except BaseException:
        if not interrupts:  # otherwise a library, such as lightning, has replaced the KeyboardInterrupt
            raise
        code, line = 130, ""
    if code == 130:
        line = "interrupted" + _advice()
    if line:
        print_stderr(f"specstop: {' '.join(line.split())}")
    try:
        if sys.stdout is not None:  # closed by the shell
            sys.stdout.flush()
    except OSError:  # a closed pipe or a full disk, which `_run` has reported; the interpreter would flush again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def main() -> NoReturn:
    """Run the command line as a process, and end it without tearing the interpreter down.

    Freeing the modules of torch and transformers one by one takes a CPU second.
    """
    try:
        run()
    except SystemExit as end:
        atexit._run_exitfuncs()
        with contextlib.suppress(OSError, AttributeError, ValueError):
            sys.stderr.flush()
        os._exit(end.code if isinstance(end.code, int) else 1)


def _advice() -> str:
    """Return how to continue the interrupted command."""
    context = running.get()
    values = context.params if context else {}
    if values.get("checkpoints") is not None:
        return "; completed work is kept; the same command continues"
    return "; completed work is kept; continue with the same command and --resume" if "resume" in values else ""


def _run() -> tuple[int, str]:
    """Run the command. Return the exit code and an error message."""
    # Some libraries read these variables only when they are imported.
    for name, value in (
        ("TRANSFORMERS_VERBOSITY", "error"),
        ("TOKENIZERS_PARALLELISM", "false"),
        ("HF_HUB_DISABLE_PROGRESS_BARS", "1"),
        ("ORT_DISABLE_TELEMETRY", "1"),
    ):
        os.environ.setdefault(name, value)
    warnings.showwarning = _show_warning
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # characters that the terminal cannot show
    try:
        code = app(prog_name="specstop", standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
    except PolicyFailure as error:
        return 2, with_keys(error.text)
    except SpecstopError as error:
        return 2, with_keys(error.command_line)
    except BrokenPipeError:  # the reader, such as `head`, has ended
        return 1, ""
    except OSError as error:
        return 2, disk_text(error)
    except Exception as error:
        if not hasattr(error, "format_message"):  # of usage errors, which have no public class
            raise
        causes = getattr(error.__cause__, "errors", None)  # of pydantic: its messages do not contain the value
        value = f", not {str(causes()[0]['input'])[:40]!r}" if causes else ""
        return int(getattr(error, "exit_code", 2)), f"{error.format_message().rstrip('.')}{value}. Try --help."
    return (code if isinstance(code, int) else 0), ""  # 130 if typer has converted a KeyboardInterrupt


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: str | None = None
) -> None:  # fmt: skip
    """Replace `warnings.showwarning`: write a warning as one line."""
    print_stderr(f"warning: {with_keys(message.command_line) if isinstance(message, SpecstopWarning) else message}")


def with_keys(message: str) -> str:
    """Return a message in which parameters without an option of the running command have the option that sets them.

    For example, `--top-p` becomes `--sampling top_p`, and `--no-model-defaults` becomes `--sampling model_defaults=false`.
    """
    context = running.get()
    options = {parameter.name for parameter in context.command.params} if context else set()

    def replace(match: re.Match[str]) -> str:
        if match[2].replace("-", "_") in options:
            return match[0]
        return f"{_KEYS[match[2]]}=false" if match[1] else _KEYS[match[2]]

    return _KEY.sub(replace, message)
