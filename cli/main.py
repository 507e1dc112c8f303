"""The `specstop` command. Commands import what they need when they run, so that `--help` answers at once."""

from __future__ import annotations

import importlib
import os
import sys

import click
import typer

from ..policies.errors import SpecstopError
from .console import one_line_warnings, say

COMMANDS = ("demo", "collect", "train", "profile", "evaluate", "decode", "policies", "info")

app = typer.Typer(
    help="Learn when to stop drafting in speculative decoding: collect, train, evaluate, decode.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", help="Print the version.")) -> None:
    if version:
        from importlib.metadata import version as installed

        typer.echo(f"specstop {installed('specstop')}")
        raise typer.Exit


for _name in COMMANDS:
    _module = importlib.import_module(f".{_name}", __package__)
    app.command(_name)(getattr(_module, _name))


def run() -> None:
    """Run the command line: an error that a user can mend is one line and exit code 2."""
    one_line_warnings()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        app()
    except SpecstopError as error:
        say(f"specstop: {' '.join(str(error).split())}")
        sys.exit(2)
    except (KeyboardInterrupt, click.Abort):
        say("specstop: interrupted")
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
