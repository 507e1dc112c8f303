"""Files that several processes write into one trace folder: staged under a name of the writer's own, fsynced, renamed."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from ...policies.errors import TraceError
from ...policies.files import STAGE_PREFIX, sync, uninterrupted

_ABANDONED_S = 3600.0
"""After so long a stage whose writer cannot be asked after (another machine's) is nobody's."""

_FULL = (errno.ENOSPC, errno.EDQUOT)


def stage_of(path: Path) -> Path:
    """Return the name under which this process prepares `path`."""
    return path.with_name(f"{STAGE_PREFIX}{path.name}.{_host()}.{os.getpid()}")


def _host() -> str:
    # Stages are told apart at the dots of their names (`_abandoned`).
    return socket.gethostname().replace(".", "_") or "host"


@contextlib.contextmanager
def staged(path: Path, *, once: bool = False) -> Iterator[Path]:
    """Yield a name to write to; the file takes the name `path` when the block ends, and is removed where it fails.

    Args:
        path: of the file.
        once: leave a file that is already there as it is: whoever comes first has written it.
    """
    stage = stage_of(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield stage
        sync(stage)
        with uninterrupted:
            if once:
                _link(stage, path)
                stage.unlink(missing_ok=True)
            else:
                os.replace(stage, path)
        sync(path.parent)  # the name too survives a power cut
    except BaseException:
        stage.unlink(missing_ok=True)
        raise


def _link(stage: Path, path: Path) -> None:
    """Give the file a second name unless that is taken; where a file system has no links, look first."""
    try:
        os.link(stage, path)
    except FileExistsError:
        pass
    except OSError:
        if not path.exists():
            os.replace(stage, path)


def put(path: Path, text: str, *, once: bool = False) -> None:
    """Write a small file, whole or not at all."""
    with staged(path, once=once) as stage:
        stage.write_text(text, encoding="utf-8")


def sweep(folder: Path) -> None:
    """Remove what killed writers left; stages of processes that may still run stay."""
    for left in folder.glob(f"{STAGE_PREFIX}*"):
        with contextlib.suppress(FileNotFoundError):  # another process may sweep too
            if left.is_file() and _abandoned(left):
                left.unlink()


def _abandoned(stage: Path) -> bool:
    # .specstop-NAME.HOST.PID. Stages of `files.atomic` name neither: they go by their age.
    host, number = stage.name.rsplit(".", 2)[-2:] if stage.name.count(".") > 2 else ("", "")
    if not (host == _host() and number.isdecimal() and os.name == "posix"):
        return time.time() - stage.stat().st_mtime > _ABANDONED_S
    try:
        os.kill(int(number), 0)  # signal 0 asks only whether the process is there
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        return False  # it is another user's
    # A process sweeps before it writes: a stage under its own number is of a dead process that had the same one.
    return int(number) == os.getpid()


@contextlib.contextmanager
def full_disk_advice(folder: Path, how: str) -> Iterator[None]:
    """Turn the error of a full disk into one that says how to go on.

    Raises:
        TraceError: the disk, or the user's share of it, is full.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise TraceError(f"--out: no space is left on the disk of {folder}; {how}") from None
