"""Files that are there whole or not at all: staged, fsynced, renamed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import InputError

STAGE_PREFIX = ".specstop-"


def write_atomic(path: Path, data: str | bytes) -> None:
    """Write `data` to `path` under a temporary name in the same folder, fsync, rename."""
    raw = data.encode() if isinstance(data, str) else data
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=STAGE_PREFIX, dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically; NaN and infinities are refused."""
    write_atomic(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_json(path: Path, what: str) -> Any:
    """Read a JSON file; a missing or broken one is an `InputError` that names it as `what`."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{what}: expected the file {path}, which does not exist") from None
    except RecursionError:
        raise InputError(f"{what}: expected JSON in {path}, which is nested too deeply") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{what}: expected JSON in {path}, which cannot be read: {error}") from None


@contextlib.contextmanager
def staged_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary sibling of `path`; on success it takes the name `path`, on failure it is removed.

    An existing `path` is replaced only after the new folder is complete.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    stage = Path(tempfile.mkdtemp(prefix=STAGE_PREFIX, dir=path.parent))
    try:
        yield stage
        for file in stage.rglob("*"):
            if file.is_file():
                _sync(file)
        os.chmod(stage, 0o755)
        if path.exists():
            old = Path(tempfile.mkdtemp(prefix=STAGE_PREFIX, dir=path.parent))
            os.replace(path, old / "old")
            try:
                os.replace(stage, path)
            except BaseException:
                os.replace(old / "old", path)
                raise
            finally:
                shutil.rmtree(old)
        else:
            os.replace(stage, path)
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        raise


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def refuse_full(path: Path, *, overwrite: bool = False) -> Path:
    """Return `path`, a folder to write into later; nothing is changed yet.

    Raises:
        InputError: `path` is a file, or a folder with something in it and no `overwrite`.
    """
    if path.is_file():
        raise InputError(f"--out: expected a folder, but {path} is a file; choose another name")
    if path.exists() and any(path.iterdir()) and not overwrite:
        raise InputError(f"--out: the folder {path} is not empty; choose another, or pass --overwrite to replace it")
    return path


def claim_folder(path: Path, *, overwrite: bool = False, resume: bool = False) -> Path:
    """Return `path` as a folder to write into; refuse one that is not empty unless told what to do with it.

    With `overwrite` an existing folder is emptied; with `resume` it is left as it is.

    Raises:
        InputError: as `refuse_full`.
    """
    refuse_full(path, overwrite=overwrite or resume)
    if overwrite and not resume and path.exists():
        shutil.rmtree(path)
    path.mkdir(parents=True, exist_ok=True)
    return path


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
