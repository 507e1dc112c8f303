"""Files that are there whole or not at all: staged, fsynced, renamed."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .deferral import uninterrupted

STAGE_PREFIX = ".specstop-"
MANIFEST = ".specstop.json"
"""Lists the files of a result folder (`outputs`)."""


def write_atomic(path: Path, data: str | bytes) -> None:
    """Write `data` to `path` under a temporary name in the same folder, fsync, rename."""
    raw = data.encode() if isinstance(data, str) else data
    with uninterrupted, naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=STAGE_PREFIX, dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(raw)
                file.flush()
                os.fsync(file.fileno())  # else a power cut may leave the new name with nothing in it
            os.chmod(name, 0o644)  # mkstemp lets in its owner alone
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically; NaN and infinities are refused."""
    write_atomic(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name `path` in an error of the system: that of a full disk names nothing, that of a stage a name of nobody's."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


def disk_text(error: OSError) -> str:
    """Return an error of the system as one line that says what to do."""
    where = f"{os.fsdecode(error.filename)}: " if error.filename else ""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    advice = (
        "free some space, or write elsewhere" if full else "look whether the path is there and may be read and written"
    )
    return f"{where}{error.strerror}; {advice}"


def sync(path: Path) -> None:
    """Have the bytes of a file, or the names in a folder, outlast a power cut."""
    if os.name != "posix" and path.is_dir():  # no folder can be opened there
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cache_folder() -> Path:
    """Return the user's cache folder, or the one that the environment variable `SPECSTOP_CACHE` names."""
    import platformdirs  # brings much that few commands need

    return Path(os.environ.get("SPECSTOP_CACHE") or platformdirs.user_cache_dir("specstop"))


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
