"""What every benchmark is asked and how it answers: common options, figures, bars, and one JSON line at the end."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

PAIR = "folder of a pair made by make_pair.py; default: the shipped pair"
NO_PAIR = "not needed here"


def arguments(
    doc: str | None, pair: str = PAIR, pairs: bool = False, out: str = "file for the figures as JSON"
) -> argparse.ArgumentParser:
    """Return a parser with the options that every benchmark takes.

    Args:
        doc: of the module; what `--help` shows.
        pair: what `--pair` is for.
        pairs: whether it takes more than one.
        out: what `--out` is for.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if pairs:
        parser.add_argument("--pair", type=Path, nargs="+", action="extend", default=[], help=pair)
    else:
        parser.add_argument("--pair", type=Path, help=pair)
    parser.add_argument("--out", type=Path, help=out)
    parser.add_argument("--quick", action="store_true", help="a small part: shows that it runs, checks nothing")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bar falls short")
    return parser


class Bars:
    """Figures of one run, and which of them fall short.

    Attributes:
        figures: by name, as the last line gives them.
        missed: names and figures of the bars that fell short.
    """

    def __init__(self) -> None:
        self.figures: dict[str, Any] = {}
        self.missed: list[str] = []

    def add(self, name: str, value: Any, met: bool, text: str) -> None:
        """Note and print a figure with a bar; `text` says both."""
        self.figures[name] = value
        print(f"{'met ' if met else 'MISS'}  {name}: {text}", flush=True)
        if not met:
            self.missed.append(f"{name}: {text}")

    def finish(
        self, options: argparse.Namespace, compared: str, whole: bool = True, details: dict[str, Any] | None = None
    ) -> int:
        """Print what was compared and the JSON line, save it where `--out` says, and return the exit code.

        Args:
            options: of `arguments`; where `--out` is a folder, the line goes into its `figures.json`.
            compared: what, and how much of it.
            whole: whether the run was large enough to be a check; one with `--quick` never is.
            details: what is saved beside the line, and too long to be printed.
        """
        checked = whole and not options.quick
        if options.check and not checked:
            self.missed.append("this was no check: that takes a run without --quick, of everything")
        line = {"checked": checked, "missed": self.missed, **self.figures}
        if options.out is not None:
            path = options.out / "figures.json" if options.out.is_dir() else options.out
            path.write_text(json.dumps({**line, **(details or {})}, indent=1) + "\n", encoding="utf-8")
        print(f"compared: {compared}")
        print(json.dumps(line))
        return int(options.check and bool(self.missed))
