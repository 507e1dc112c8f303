"""Where results go: what an `--out` is refused for before any work, and how a complete result replaces an old one.

A result folder is made beside its place and takes its name when it is complete. It lists its files in `.specstop.json`, and
only what is listed there is ever deleted.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path

from ..errors import InputError
from .atomic import MANIFEST, STAGE_PREFIX, naming, sync, write_atomic, write_json
from .deferral import uninterrupted
from .json_text import strict_loads
from .paths import chain, file_key, is_there, links, real

RUN_FILE = "run.yaml"
"""The resolved options of the command that made a result."""

Input = str | os.PathLike[str] | None
"""A file or folder that a command reads; None, and a name that is no path such as a hub's, are no input."""

_added: ContextVar[tuple[Path | None, str, str]] = ContextVar("added", default=(None, "", ""))
"""A result's place, and a file that is to be in it."""


def claim_folder(
    out: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    resume: bool = False,
    in_place: bool = False,
    inputs: Iterable[Input] = (),
) -> Path:
    """Return `out` as a folder that a result may go to; nothing is changed yet.

    Args:
        out: the folder.
        overwrite: it may hold an older result.
        resume: it may hold anything, which stays.
        in_place: files are added to it one by one; else it is made beside and put in place whole.
        inputs: what the result is made from.

    Raises:
        InputError: `out` is a file, cannot be written, or is not empty; it is, holds or lies in an input; it is or holds the
            working folder or the home folder; or it holds what specstop did not write and `overwrite` would delete.
    """
    path = real(out)
    try:
        there = is_there(path)
        if there and not path.is_dir():
            raise InputError(f"--out: expected a folder, but {out} is a file; choose another name")
        refuse_inputs(out, inputs)
        for place, what in ((Path.cwd(), "working folder"), (Path(os.path.expanduser("~")), "home folder")):
            if file_key(path) in chain(place):
                raise InputError(f"--out: {out} is the {what}, or holds it; name a folder of its own for the result")
        full = not resume and not is_empty(path)
        if full and not overwrite:
            raise InputError(f"--out: the folder {out} is not empty; choose another, or pass --overwrite to replace it")
        if full:
            refuse_foreign(path)
        if os.path.ismount(path) and (full or not in_place):  # it can be neither renamed nor removed
            raise InputError(f"--out: {out} is where a disk is mounted; name a folder in it, such as {path / 'result'}")
        if not (there and in_place):
            _try_writing(path)
    except (OSError, ValueError) as error:
        raise _unusable(out, error) from None
    return Path(out)


def claim_file(
    out: str | os.PathLike[str], mark: bytes, *, overwrite: bool = False, inputs: Iterable[Input] = ()
) -> Path:
    """Return `out` as a file that a result may go to; nothing is changed yet.

    Args:
        out: the file.
        mark: what the first 4 KiB of such a file hold when specstop wrote it; another one is not replaced.
        overwrite: an older result may be there.
        inputs: what the result is made from.

    Raises:
        InputError: `out` is a folder, cannot be written, or exists; it is an input or lies in one; or it is there and
            specstop did not write it.
    """
    path = real(out)
    try:
        there = is_there(path)
        if path.is_dir():
            raise InputError(f"--out: expected a file, but {out} is a folder; choose another name")
        if there and not overwrite:
            raise InputError(f"--out: {out} exists; choose another name, or pass --overwrite to replace it")
        refuse_inputs(out, inputs)
        if there and not (path.is_file() and _holds(path, mark)):
            raise InputError(f"--out: {out} is no such file that specstop wrote, and is kept; choose another name")
        _try_writing(path)
    except (OSError, ValueError) as error:
        raise _unusable(out, error) from None
    return Path(out)


def refuse_inputs(out: str | os.PathLike[str], inputs: Iterable[Input], option: str = "--out") -> None:
    """Refuse an `out` that is, holds or lies in an input, whatever names, links and mounts lead to it.

    Raises:
        InputError: it does.
    """
    written = f"{option}: {out}"
    mine, above = file_key(out), set(chain(out))
    there = [os.path.expanduser(given) for given in inputs if given is not None]
    there = [given for given in there if os.path.lexists(given)]
    for given in there:
        if mine == file_key(given):
            raise InputError(f"{written} is a file or folder which the command reads ({given}); choose another name")
        # Also by the name as it was given: the link to an input is lost with the folder that it lies in.
        if mine in {*chain(given), *chain(os.path.abspath(given), follow=False)}:
            raise InputError(f"{written} holds {given}, which the command reads; choose another folder")
        if file_key(given) in above:
            raise InputError(f"{written} lies in {given}, which the command reads; choose another folder")
    if os.path.isdir(out):
        for link in (link for given in there for link in links(given)):
            if mine in chain(link):
                raise InputError(
                    f"{written} holds what {link} links to, which the command reads; choose another folder"
                )


def refuse_foreign(folder: Path) -> None:
    """Refuse a folder that holds anything but files that its manifest lists.

    Raises:
        InputError: it names the first of them.
    """
    listed = _listed(folder)
    for name in _files(folder):
        if name not in listed and not Path(name).name.startswith(STAGE_PREFIX):
            raise InputError(
                f"--out: {folder / name} is not among the files that specstop wrote there (those in {MANIFEST}), so nothing "
                "is replaced; move it away, or choose another folder"
            )


def is_empty(folder: Path) -> bool:
    """Whether a folder is not there, or there is nothing in it but what a killed writer left."""
    return not folder.exists() or all(
        entry.name.startswith(STAGE_PREFIX) and entry.is_file() for entry in os.scandir(folder)
    )


@contextlib.contextmanager
def staged_folder(out: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary folder beside `out`; on success it takes that name, on failure it is removed.

    Raises:
        InputError: there is something at `out` by then that specstop did not write.
    """
    path = real(out)
    stage = made = None
    try:
        with uninterrupted, naming(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            stage = Path(tempfile.mkdtemp(prefix=STAGE_PREFIX, dir=path.parent))
            made = file_key(stage)
        yield stage
        put_in_place(stage, path)
    except BaseException:
        with uninterrupted:
            if (
                stage is not None and file_key(stage) == made
            ):  # else it is in place, and what has its name is not to be lost
                shutil.rmtree(stage, ignore_errors=True)
        raise


@contextlib.contextmanager
def adding(out: str | os.PathLike[str], name: str, text: str) -> Iterator[None]:
    """Within the block, add a file that it lacks to a result that takes the name `out`: both are there, or neither is."""
    token = _added.set((real(out), name, text))
    try:
        yield
    finally:
        _added.reset(token)


def beside(out: str | os.PathLike[str]) -> Path:
    """Return where what is to replace `out` grows file by file: always the same folder, so that the run can be resumed."""
    path = real(out)
    return path.with_name(f"{STAGE_PREFIX}{path.name}.new")


def put_in_place(stage: Path, out: str | os.PathLike[str]) -> None:
    """Give the complete folder `stage` the name `out`; of what was there the files that specstop wrote are deleted.

    Raises:
        InputError: specstop did not write all of what is there; nothing is changed.
    """
    path = real(out)
    place, name, text = _added.get()
    with naming(path):
        if place == path and not (stage / name).exists():
            write_atomic(stage / name, text)
        write_manifest(stage, _files(stage))
        # Before the rename: after a power cut the name must not lead to half a result.
        for name in _files(stage):
            sync(stage / name)
        os.chmod(stage, 0o755)  # mkdtemp lets in its owner alone
        with uninterrupted:
            if not os.path.lexists(path):
                os.rename(stage, path)
            else:
                refuse_foreign(path)  # once more: files may have come since `claim_folder`
                old = stage if _exchange(stage, path) else _rename_both(stage, path)
                _delete_listed(old)
            sync(path.parent)


def write_manifest(folder: Path, names: Iterable[str]) -> None:
    """List the files of a result, by their names below its folder: those that replacing it may delete."""
    write_json(folder / MANIFEST, {"schema": 1, "files": sorted({*names} - {MANIFEST})})


def list_also(folder: Path, name: str) -> None:
    """List one more file of a result, before it is written."""
    if name not in (listed := _listed(folder)):
        write_manifest(folder, listed | {name})


def missing_folders(out: str | os.PathLike[str]) -> list[Path]:
    """Return the folders that a result at `out` makes: itself and those above it that are not there, the innermost first."""
    path = real(out)
    return [place for place in (path, *path.parents) if not os.path.lexists(place)]


def take_back(folder: Path, made: Iterable[Path]) -> None:
    """Delete a result, and the folders made for it (`missing_folders`); what specstop did not write stays."""
    there = folder.exists() and real(folder) not in (made := list(made))
    with uninterrupted:
        _delete_listed(folder)
        if there:
            folder.mkdir(exist_ok=True)
        for place in made:
            with contextlib.suppress(OSError):
                place.rmdir()


def _delete_listed(folder: Path) -> None:
    """Delete the listed files and the folders that are empty then; what else came meanwhile stays where it is."""
    listed = _listed(folder)
    for name in list(_files(folder)):  # before the first is gone: the walk is lazy
        if name in listed or Path(name).name.startswith(STAGE_PREFIX):
            (folder / name).unlink(missing_ok=True)
    for parent, _, _ in os.walk(folder, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(parent)


def _listed(folder: Path) -> set[str]:
    path = folder / MANIFEST
    try:
        raw = strict_loads(path.read_bytes()) if path.is_file() else None
    except (OSError, ValueError, RecursionError):
        raw = None  # an unreadable list lets nothing be deleted
    names = raw.get("files") if isinstance(raw, dict) else None
    return {MANIFEST, *(name for name in names if isinstance(name, str))} if isinstance(names, list) else set()


def _files(folder: Path) -> Iterator[str]:
    """Yield everything below a folder that is no folder, links included, by its name from there."""

    def fail(error: OSError) -> None:
        raise error

    for parent, folders, names in os.walk(folder, onerror=fail):
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        for name in sorted([*names, *links]):
            yield Path(parent, name).relative_to(folder).as_posix()


def _holds(path: Path, mark: bytes) -> bool:
    with path.open("rb") as file:
        head = file.read(4096)
    return mark in head or not head  # an empty file is nobody's work


def _try_writing(path: Path) -> None:
    """See that every missing name of the path is possible, and that the folder they are missing from can be written."""
    folder, names = path.parent, [path.name]
    while not is_there(folder):
        names.append(folder.name)
        folder = folder.parent
    for name in names:
        is_there(folder / name)  # a name too long, say, is an error of `lstat`
    with uninterrupted:
        os.rmdir(tempfile.mkdtemp(prefix=STAGE_PREFIX, dir=folder))


def _unusable(out: str | os.PathLike[str], error: OSError | ValueError) -> InputError:
    if isinstance(error, InputError):
        return error
    reason = getattr(error, "strerror", None) or str(error)
    return InputError(f"--out: {os.fspath(out)!r} cannot be written: {reason}; choose another place")


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step, so that a kill finds either; False where the system cannot."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):  # another system, or a C library without it
        return False
    here, swap = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux
    return bool(call(here, os.fsencode(one), here, os.fsencode(other), swap) == 0)


def _rename_both(stage: Path, path: Path) -> Path:
    """Do the same in two steps; return where the old folder went."""
    old = stage.with_name(stage.name + ".old")
    try:
        os.rename(path, old)
        os.rename(stage, path)
    except BaseException:
        if old.exists() and not path.exists():
            os.rename(old, path)
        raise
    return old
