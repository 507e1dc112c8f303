"""The commands and what they share. They import what they need when they run, so that `--help` answers at once."""

from __future__ import annotations

import importlib
import keyword
import os

import typer

from .command import Command
from .options.groups import with_groups

COMMANDS = (
    "demo",
    "collect",
    "merge",
    "train",
    "train-drafter",
    "import",
    "profile",
    "combine",
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
REPORTS = frozenset({"combine", "evaluate", "compare", "transfer", "estimate"})  # those that answer by a report

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
    # `import` is a keyword: its module and function are `import_`.
    _python = _name.replace("-", "_") + "_" * keyword.iskeyword(_name)
    _folder = "reports" if _name in REPORTS else "commands"
    _module = importlib.import_module(f".{_folder}.{_python}", __package__)
    app.command(_name, cls=Command)(with_groups(getattr(_module, _python)))
