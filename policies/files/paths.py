"""Which file a path means: through links, under other names of it, and where nothing is yet."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def links(folder: str) -> Iterator[str]:
    """Yield the links in a folder and the folders below it."""
    # `os.walk` names links to folders among the folders, and does not go through them.
    for parent, folders, names in os.walk(folder):
        yield from (path for name in (*folders, *names) if os.path.islink(path := os.path.join(parent, name)))


def file_key(path: str | os.PathLike[str]) -> tuple[int, int] | str:
    """Return what is the same for all names of a file: device and inode, or of one that is not there its path."""
    name = real(path)
    try:
        found = os.stat(name)
    except (OSError, ValueError):
        return str(name)
    return found.st_dev, found.st_ino


def chain(path: str | os.PathLike[str], *, follow: bool = True) -> list[tuple[int, int] | str]:
    """Return the keys of a file and of all folders that hold it."""
    name = real(path) if follow else Path(path)
    return [file_key(place) for place in (name, *name.parents)]


def real(path: str | os.PathLike[str]) -> Path:
    """Return the path with its links followed; one that nothing can have stays as it is."""
    try:
        return Path(os.path.realpath(path))
    except ValueError:
        return Path(path)


def is_there(path: Path) -> bool:
    """Whether something has that name; a name that nothing can have is an `OSError`."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    return True
