"""Files: reading those that are not trusted, writing whole or not at all, and validation of output paths before any work.

Reading runs no code. The JSON file of a folder contains checksums of itself and of the other files, so a folder that was
damaged or edited by hand is refused.

A result folder is prepared under a temporary name next to its final path and renamed when it is complete. `.specstop.json`
lists its files. Replacing a result deletes only listed files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .errors import InputError, PolicyError

STAGE_PREFIX, MANIFEST = ".specstop-", ".specstop.json"
RUN_FILE = "run.yaml"
"""The resolved options of the command that wrote a result."""

WEIGHTS_FILE, CARD_FILE = "weights.safetensors", "README.md"
MAX_TEXT_BYTES = 16 << 20
MAX_DATA_BYTES = 256 << 20
SURROGATE = "half a surrogate pair, which is not valid text"

_UNREAD = frozenset({CARD_FILE, RUN_FILE, MANIFEST, ".cache", ".git", ".gitattributes", ".DS_Store"})
"""Files for people, and what the hub, git and file managers leave in a folder."""

_CHANGED = "was changed after it was written (its checksum differs); train or copy it again"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def strict_loads(text: str | bytes) -> Any:
    """Parse JSON. Raises `ValueError` for a duplicate key, because parsers disagree about which of the values is used."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            keys = [key for key, _ in pairs]
            raise ValueError(
                f"the key {next(key for key in keys if keys.count(key) > 1)!r} occurs twice; keep one of them"
            )
        return values

    return json.loads(text, object_pairs_hook=unique)


def read_json(path: Path, what: str) -> Any:
    """Read a JSON file, described in messages as `what`.

    Raises:
        InputError: the file does not exist, is not valid JSON, or has duplicate keys.
    """
    try:
        return strict_loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{what}: expected the file {path}, which does not exist") from None
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{what}: expected JSON in {path}, which cannot be read: {error}") from None


def is_text(value: Any) -> bool:
    """Whether the string form of a value, or of all items of a list, can be encoded as UTF-8 (no lone surrogates)."""
    if isinstance(value, (list, tuple)):
        return all(map(is_text, value))
    try:
        str(value).encode()
    except UnicodeEncodeError:
        return False
    return True


def check_values(value: Any, levels: int = 64) -> None:
    """Raise `ValueError` for deep nesting, numbers that are not finite, control characters and lone surrogates."""
    if isinstance(value, dict | list):
        if not levels:
            raise ValueError("it is nested too deeply")
        for inner in (*value, *value.values()) if isinstance(value, dict) else value:
            check_values(inner, levels - 1)
    elif isinstance(value, str) and _CONTROL.search(value):
        raise ValueError("a text contains control characters or lone surrogates")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError("a number is not finite")


def digest(raw: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a JSON object without its entry `sha256`, independent of spaces and order."""
    body = {key: value for key, value in raw.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(body, sort_keys=True, allow_nan=False).encode()).hexdigest()


def read_plain(path: Path, max_bytes: int) -> bytes:
    """Return the content of a regular file. Raises `PolicyError` for links, devices, pipes and large files."""
    # No link is followed, and a pipe does not wait for a writer. These flags do not exist on every system.
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        if path.is_symlink():
            raise PolicyError(f"{path.name} is a link; expected a regular file")
        handle = os.open(path, flags)
    except OSError as error:
        raise PolicyError(f"{path.name} cannot be read: {error.strerror}") from None
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(file.fileno())  # of the open file, because the path may have been replaced
        if not stat.S_ISREG(status.st_mode):
            raise PolicyError(f"{path.name} is not a regular file")
        if status.st_size > max_bytes:
            raise PolicyError(f"{path.name} has {status.st_size} bytes; expected at most {max_bytes}")
        return file.read(max_bytes)


def read_signed_json(path: Path, schema: int, keys: Callable[[Mapping[str, Any]], Collection[str]]) -> dict[str, Any]:
    """Return the JSON object in a file, with the entries `schema`, `sha256` and those that `keys` returns for it.

    Raises:
        PolicyError: the file is not such an object, or was changed after it was written.
    """
    data = read_plain(path, MAX_TEXT_BYTES)
    try:
        raw = strict_loads(data.decode())
        check_values(raw)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise PolicyError(f"{path.name}: expected JSON, which cannot be read: {reason}") from None
    if not isinstance(raw, dict):
        raise PolicyError(f"{path.name}: expected a JSON object, not {type(raw).__name__}")
    if type(raw.get("schema")) is not int or raw["schema"] != schema:
        raise PolicyError(f"it has schema {raw.get('schema')!r}, but this specstop reads {schema}; train it again")
    if unexpected := sorted(set(raw) ^ {"schema", "sha256", *keys(raw)}):
        raise PolicyError(f"{path.name} has keys missing or unknown: {', '.join(map(repr, unexpected))}")
    if digest(raw) != raw["sha256"]:
        raise PolicyError(f"{path.name} {_CHANGED}")
    return raw


def read_weights(folder: Path, index: str, digests: Mapping[str, str], max_bytes: int = MAX_DATA_BYTES) -> bytes:
    """Return the weights in a folder. Its JSON file `index` lists their SHA-256.

    Raises:
        PolicyError: they are missing, too large or changed, or the folder lists or contains another file.
    """
    if set(digests) != {WEIGHTS_FILE}:
        raise PolicyError(
            f"files: expected {WEIGHTS_FILE} alone, not {', '.join(map(repr, sorted(digests))) or 'nothing'}"
        )
    for entry in os.scandir(folder):
        if entry.name not in {index, WEIGHTS_FILE, *_UNREAD}:
            raise PolicyError(f"the file {entry.name!r} is not listed in {index}; remove it")
    data = read_plain(folder / WEIGHTS_FILE, max_bytes)
    if hashlib.sha256(data).hexdigest() != digests[WEIGHTS_FILE]:
        raise PolicyError(f"{WEIGHTS_FILE} {_CHANGED}")
    return data  # not read a second time, because the file could be replaced


StrPath = str | os.PathLike[str]
Input = StrPath | None
"""A file or folder that a command reads. None and paths that do not exist, such as hub names, are ignored."""


class _Uninterrupted(threading.local):
    """Blocks that signal handlers, which call `defer`, do not interrupt. Masked signals would reach other threads."""

    depth = 0
    deferred: Callable[[], None] | None = None

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1
        if not self.depth and (handler := self.deferred):
            self.deferred = None
            handler()

    def defer(self, handler: Callable[[], None]) -> bool:
        """Return whether the main thread is in a block. If so, `handler` is called at the end of the outermost one."""
        self.deferred = handler if self.depth else None
        return self.depth > 0


uninterrupted = _Uninterrupted()


def write_atomic(path: Path, data: str | bytes) -> None:
    """Write a file under a temporary name in the same folder, flush it to the disk, and rename it."""
    with uninterrupted:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=STAGE_PREFIX, dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data.encode() if isinstance(data, str) else data)
                file.flush()
                os.fsync(file.fileno())  # otherwise the renamed file could be empty after a power failure
            os.chmod(name, 0o644)  # mkstemp restricts access to the owner
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON with `write_atomic`. Raises `ValueError` for NaN and infinity."""
    write_atomic(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def sync(path: Path) -> None:
    """Flush a file or the entries of a folder to the disk."""
    if os.name == "posix" or path.is_file():  # elsewhere, folders cannot be opened
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def disk_text(error: OSError) -> str:
    """Return an error of the file system as one line with a remedy."""
    where = f"{os.fsdecode(error.filename)}: " if error.filename else ""
    return f"{where}{error.strerror}; check the path, its permissions and the free disk space"


def cache_folder() -> Path:
    """Return the cache folder: the environment variable `SPECSTOP_CACHE`, or the default of the user."""
    import platformdirs  # slow to import, and few commands need it

    return Path(os.environ.get("SPECSTOP_CACHE") or platformdirs.user_cache_dir("specstop"))


def prepare_output_dir(
    out: StrPath, *, overwrite: bool = False, resume: bool = False, inputs: Iterable[Input] = ()
) -> Path:
    """Validate `out` as the folder of a result before any work, and return it.

    The folder may contain an older result with `overwrite`, and anything with `resume`. `inputs` are not touched.

    Raises:
        InputError: `out` is a file, cannot be written or is not empty; it overlaps an input, the working folder or the home
            folder; or `overwrite` would delete files that specstop did not write.
    """
    with _writable_path(out, inputs) as path:
        if path.exists() and not path.is_dir():
            raise InputError(f"--out: expected a folder, but {out} is a file; choose another name")
        for place, what in ((Path.cwd(), "working folder"), (Path.home(), "home folder")):
            if place.resolve().is_relative_to(path):
                raise InputError(f"--out: {out} is the {what}, or contains it; name a new folder for the result")
        if not (resume or overwrite or is_empty_dir(path)):
            raise InputError(f"--out: the folder {out} is not empty; choose another, or pass --overwrite to replace it")
        if not resume:
            _check_replaceable(path)
        if os.path.ismount(path):  # cannot be renamed
            raise InputError(f"--out: {out} is a mount point; name a folder in it, such as {path / 'result'}")
    return Path(out)


def prepare_output_file(out: StrPath, mark: bytes, *, overwrite: bool = False, inputs: Iterable[Input] = ()) -> Path:
    """Validate `out` as the file of a result before any work, and return it.

    The file may exist with `overwrite` if it is empty or its first 4 KiB contain `mark`. `inputs` are not touched.

    Raises:
        InputError: `out` is a folder, exists, overlaps an input, cannot be written, or was not written by specstop.
    """
    with _writable_path(out, inputs) as path:
        if path.is_dir():
            raise InputError(f"--out: expected a file, but {out} is a folder; choose another name")
        if path.exists() and not overwrite:
            raise InputError(f"--out: {out} exists; choose another name, or pass --overwrite to replace it")
        if path.exists() and not (path.is_file() and (not (head := path.read_bytes()[:4096]) or mark in head)):
            raise InputError(f"--out: {out} was not written by specstop and is not replaced; choose another name")
    return Path(out)


@contextlib.contextmanager
def _writable_path(out: StrPath, inputs: Iterable[Input]) -> Iterator[Path]:
    """Yield the real path of an output for further checks. Check that it can be created and overlaps no input."""
    try:
        check_separate(out, inputs)
        path = Path(os.path.realpath(out))
        yield path
        folder = next(parent for parent in path.parents if os.path.lexists(parent))
        with contextlib.suppress(FileNotFoundError):
            os.lstat(folder / path.name)  # raises for a name that is too long
        with uninterrupted:
            os.rmdir(tempfile.mkdtemp(prefix=STAGE_PREFIX, dir=folder))
    except InputError:
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"--out: {os.fspath(out)!r} cannot be written: {reason}; choose another path") from None


def check_separate(out: StrPath, inputs: Iterable[Input]) -> None:
    """Raise `InputError` if an output is, contains or lies in an input, or contains a file that an input links to."""
    path = Path(os.path.realpath(out))
    for name in (os.path.expanduser(name) for name in inputs if name):
        source = Path(os.path.realpath(name))
        if source.exists() and (
            (path.exists() and path.samefile(source))  # also true for a hard link
            or path in (*source.parents, *Path(os.path.abspath(name)).parents)
            or source in path.parents
            or any(link.is_symlink() and link.resolve().is_relative_to(path) for link in source.rglob("*"))
        ):
            raise InputError(f"--out: {out} overlaps {name}, which the command reads; choose another path")


def is_empty_dir(folder: Path) -> bool:
    """Whether a folder does not exist or contains only temporary files of killed processes."""
    return not folder.exists() or all(e.name.startswith(STAGE_PREFIX) and e.is_file() for e in os.scandir(folder))


@contextlib.contextmanager
def staged_folder(out: StrPath) -> Iterator[Path]:
    """Yield a temporary folder that replaces `out` at the end (`replace_folder`), or is removed on an exception."""
    path, stage = Path(os.path.realpath(out)), None
    try:
        with uninterrupted:
            path.parent.mkdir(parents=True, exist_ok=True)
            stage = Path(tempfile.mkdtemp(prefix=STAGE_PREFIX, dir=path.parent))
        yield stage
        replace_folder(stage, path)
    except BaseException:
        with uninterrupted:
            if stage is not None:
                shutil.rmtree(stage, ignore_errors=True)
        raise


def staging_path(out: StrPath) -> Path:
    """Return the folder in which a resumable run collects the files that replace `out`."""
    path = Path(os.path.realpath(out))
    return path.with_name(f"{STAGE_PREFIX}{path.name}.new")


def replace_folder(stage: Path, out: StrPath) -> None:
    """Rename a complete folder to `out`, and delete the result there. Raises `InputError` if it has unlisted files."""
    path, old = Path(os.path.realpath(out)), stage.with_name(stage.name + ".old")
    write_manifest(stage, _files(stage))
    for name in _files(stage):
        sync(stage / name)  # before the folder is renamed: it must be complete after a power failure
    os.chmod(stage, 0o755)  # mkdtemp restricts access to the owner
    with uninterrupted:
        if replaces := os.path.lexists(path):
            _check_replaceable(path)  # again, because files may have been added during the run
            delete_result(old)  # of a process that was killed after the renaming
            os.rename(path, old)
        try:
            os.rename(stage, path)
        except BaseException:
            if replaces:
                os.rename(old, path)
            raise
        delete_result(old)
        sync(path.parent)


def write_manifest(folder: Path, names: Iterable[str]) -> None:
    """Write the list of the files of a result, by path relative to its folder."""
    write_json(folder / MANIFEST, {"schema": 1, "files": sorted({*names} - {MANIFEST})})


def delete_result(folder: Path) -> None:
    """Delete the listed files of a result and the folders that are empty then. Other files are kept."""
    for name in set(_files(folder)) - set(_unlisted(folder)):
        (folder / name).unlink(missing_ok=True)
    for parent, _, _ in os.walk(folder, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(parent)


def _check_replaceable(folder: Path) -> None:
    for name in _unlisted(folder):
        raise InputError(
            f"--out: {folder / name} is not among the files that specstop wrote there (those in {MANIFEST}), so nothing is "
            "replaced; move it away, or choose another folder"
        )


def _unlisted(folder: Path) -> list[str]:
    """Return the files in a folder that are neither listed in its manifest nor temporary files or run options."""
    listed = {MANIFEST, RUN_FILE}
    try:
        listed.update(map(str, json.loads((folder / MANIFEST).read_bytes())["files"]))
    except (OSError, ValueError, RecursionError, TypeError, LookupError):
        listed.clear()  # with an unreadable list, nothing is deleted
    return [name for name in _files(folder) if name not in listed and not Path(name).name.startswith(STAGE_PREFIX)]


def _files(folder: Path) -> list[str]:
    """Return the relative paths of all entries below a folder that are not folders, including links to folders."""
    paths = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return sorted(path.relative_to(folder).as_posix() for path in paths)
