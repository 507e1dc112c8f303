"""The `specstop` command. Commands import what they need when they run, so that `--help` answers at once."""

from __future__ import annotations

import importlib
import keyword
import os
import sys
from typing import NoReturn

import typer

from ..policies.errors import SpecstopError
from .console import one_line_warnings, say

COMMANDS = (
    "demo",
    "collect",
    "merge",
    "train",
    "import",
    "profile",
    "evaluate",
    "compare",
    "transfer",
    "estimate",
    "decode",
    "bench",
    "deploy",
    "policies",
    "info",
)

INTERRUPTED = 130

app = typer.Typer(
    help="Learn when to stop drafting in speculative decoding: collect, train, evaluate, decode.",
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version."),
    no_plugins: bool = typer.Option(False, "--no-plugins", help="Do not look for installed policies."),
) -> None:
    if no_plugins:
        os.environ["SPECSTOP_PLUGINS"] = "0"
    if context.invoked_subcommand is None and not version:
        typer.echo(context.get_help())
    if version:
        from importlib.metadata import version as installed

        typer.echo(f"specstop {installed('specstop')}")
        raise typer.Exit


for _name in COMMANDS:
    _python = _name + "_" * keyword.iskeyword(_name)
    _module = importlib.import_module(f".{_python}", __package__)
    app.command(_name)(getattr(_module, _python))


def run() -> None:
    """Run the command line: an error that a user can mend is one line and exit code 2."""
    one_line_warnings()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        code = app(standalone_mode=False)
    except SpecstopError as error:
        fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        fail("interrupted", INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        # Usage errors are of a class that typer keeps to itself; they know their text and their exit code.
        if not hasattr(error, "format_message"):
            raise
        fail(f"{error.format_message()} Try --help.", int(getattr(error, "exit_code", 2)))
    if code == INTERRUPTED:  # typer turns Ctrl-C into an exit code
        fail("interrupted", INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)


def fail(text: str, code: int = 2) -> NoReturn:
    """Print one line on standard error and exit."""
    say(f"specstop: {' '.join(text.split())}")
    sys.exit(code)
