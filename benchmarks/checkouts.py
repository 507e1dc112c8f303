"""States of the project side by side: each unpacked into a folder and installed into an environment of its own."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
UNNEEDED = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "venv")
PACKAGES = ("policies", "decode", "collect", "train", "cli")
WHERE = (
    "import importlib.util, sys\nfor room in sys.argv[1:]: print(importlib.util.find_spec(f'specstop.{room}').origin)"
)
"""A program that prints where the sub-packages of specstop would be imported from."""

TAIL = 20
"""Lines of the output of a script that failed."""


class CheckoutError(Exception):
    """A state that cannot be had, installed or measured; the message is for the reader of the console."""


@dataclass(frozen=True)
class Checkout:
    """One state of the project, ready to run.

    Attributes:
        name: as it was asked for.
        folder: of its files, a copy.
        python: of the environment that it is installed in.
    """

    name: str
    folder: Path
    python: Path

    def script(self, name: str, other: Checkout) -> Path:
        """Return a benchmark of this state, or where it has none that of the `other`.

        Raises:
            CheckoutError: neither has it.
        """
        for side in (self, other):
            path = side.folder / "benchmarks" / f"{Path(name).stem}.py"
            if path.is_file():
                return path
        raise CheckoutError(f"expected a script of benchmarks/ in {self.name} or {other.name}, got {name}")

    def run(self, script: Path, options: Sequence[str]) -> dict[str, Any]:
        """Run a script on this state in a process of its own and return the object of its last line.

        Raises:
            CheckoutError: it failed, or ended with something else.
        """
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        command = [str(self.python), str(script), *options]
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True)
        lines = done.stdout.splitlines()
        if done.returncode:
            last = [*done.stderr.splitlines()[-TAIL:], *lines[-TAIL:]]
            text = "\n    ".join(last)
            raise CheckoutError(f"{script.name} of {self.name} ended with exit code {done.returncode}:\n    {text}")
        try:
            found = json.loads(lines[-1])
        except (IndexError, ValueError):
            found = None
        if not isinstance(found, dict):
            raise CheckoutError(f"expected one JSON object in the last line of {script.name} of {self.name}")
        return found


def prepare(name: str, room: Path, repository: Path = ROOT) -> Checkout:
    """Return the state `name`, a folder or a git revision, installed below `room`; what it was taken from is not touched.

    Args:
        name: path of a checkout, or a revision of `repository`.
        room: an empty folder.
        repository: that knows the revision.

    Raises:
        CheckoutError: there is no such state, or it does not install.
    """
    folder = room / "checkout"
    if (Path(name) / "pyproject.toml").is_file():
        shutil.copytree(name, folder, ignore=UNNEEDED)
    else:
        _unpack(name, folder, repository)
    python = _environment(room / "env")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    _call([sys.executable, "-m", "pip", "--python", str(python), "install", *options, str(folder)], f"{name}: install")
    rooms = sorted(path.parent.name for path in folder.glob("*/__init__.py") if path.parent.name in PACKAGES)
    for path in _call([str(python), "-c", WHERE, *rooms], f"{name}: import").splitlines():
        if not Path(path).is_relative_to(room / "env"):
            raise CheckoutError(f"{name}: expected its own package, but {path} would be imported")
    return Checkout(name, folder, python)


def _unpack(revision: str, folder: Path, repository: Path) -> None:
    """Write the files of a revision."""
    what = f"expected the folder of a checkout or a git revision, got {revision}"
    commit = _call(["git", "-C", str(repository), "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}"], what)
    packed = subprocess.run(["git", "-C", str(repository), "archive", commit.strip()], capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")


def _environment(folder: Path) -> Path:
    """Make a virtual environment that shares what is installed here, and return its Python.

    Paths that a `.pth` file adds come after the environment's own packages, and `.pth` files behind them are not read: a
    package that is installed here as editable is not seen there.
    """
    _call([sys.executable, "-m", "venv", "--without-pip", str(folder)], "venv")
    own = next((folder / "lib").glob("python*/site-packages"))
    shared = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (own / "shared.pth").write_text("\n".join(shared) + "\n")
    return folder / "bin" / "python"


def _call(command: Sequence[str], what: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = (done.stderr or done.stdout).splitlines()
        raise CheckoutError("\n    ".join([f"{what} (exit code {done.returncode})", *lines[-TAIL:]]))
    return done.stdout
