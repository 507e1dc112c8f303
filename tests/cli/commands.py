"""Running the command line within the test process."""

from __future__ import annotations

from pathlib import Path

from benchmark_scripts import family
from specstop.cli.app import COMMANDS

__all__ = ["COMMANDS", "Answer", "cli", "files"]

Answer, cli = family("in_process").Answer, family("in_process").cli


def files(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every file below a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
