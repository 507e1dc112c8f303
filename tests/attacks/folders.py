"""Damaged folders with checksums: each is refused in one line, or behaves exactly as the good one does.

Two sorts of damage, seeded. Accidents (bits, cuts, insertions, swapped entries, files lost or added) must be refused or
change no decision. Forgeries mend all checksums behind themselves: no checksum tells those from a folder that somebody meant,
so they must be refused or be used without failing. Nothing may raise anything but the expected error, or take
more than `SECONDS` of the processor, which a busy machine does not change.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from specstop.policies.files import digest
from specstop.policies.storage import WEIGHTS_FILE

COUNT, QUICK = 1000, 100
"""Damaged folders in a full run, and in a quick one."""

SECONDS = 5.0
ODD_VALUES = (
    None, True, -1, 0, 10**400, 1e308, "", "os:system", "../../etc/passwd", "/etc/passwd", "\x1b[2J", [], {}, [[[]]],
    [1] * 5000, {"__reduce__": "os.system"}, float("nan"), float("inf"), "learned", ["top1"], "top1", -0.0, 3.5,
)  # fmt: skip


# Damages: each changes a folder, with a random generator; forged ones mend the checksums behind themselves.


def _file(folder: Path, chance: random.Random) -> Path:
    return chance.choice(sorted(folder.iterdir()))


def flip_bits(folder: Path, chance: random.Random) -> None:
    """Flip 1 to 8 bits of one file."""
    path = _file(folder, chance)
    raw = bytearray(path.read_bytes())
    for _ in range(chance.randint(1, 8)):
        raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
    path.write_bytes(raw)


def cut(folder: Path, chance: random.Random) -> None:
    """Cut one file short."""
    path = _file(folder, chance)
    raw = path.read_bytes()
    path.write_bytes(raw[: chance.randrange(len(raw))])


def insert(folder: Path, chance: random.Random) -> None:
    """Put random bytes into one file."""
    path = _file(folder, chance)
    raw, at = path.read_bytes(), 0
    at = chance.randrange(len(raw) + 1)
    path.write_bytes(raw[:at] + chance.randbytes(chance.randint(1, 40)) + raw[at:])


def lose(folder: Path, chance: random.Random) -> None:
    """Remove one file."""
    _file(folder, chance).unlink()


def add(folder: Path, chance: random.Random) -> None:
    """Add a file, a folder or a link."""
    name = chance.choice(["model.pkl", "a.py", "pytorch_model.bin", "accept.ubj", "sub", "link.ubj", "weights.bin"])
    if name == "sub":
        (folder / name).mkdir()
    elif name.startswith("link"):
        (folder / name).symlink_to("/etc/hostname")
    else:
        (folder / name).write_bytes(b"\x80\x04K\x01.")


def swap_files(folder: Path, chance: random.Random) -> None:
    """Give one file the contents of another."""
    one, other = chance.sample(sorted(folder.iterdir()), 2)
    one.write_bytes(other.read_bytes())


def index(folder: Path) -> Path:
    """Return the JSON file of a folder, which says what the others are."""
    return next(path for path in sorted(folder.glob("*.json")) if not path.name.startswith("."))


def edit_number(folder: Path, chance: random.Random) -> None:
    """Change one digit in the JSON file."""
    text = list(index(folder).read_text())
    at = chance.choice([i for i, c in enumerate(text) if c.isdigit()])
    text[at] = chance.choice([d for d in "0123456789" if d != text[at]])
    index(folder).write_text("".join(text))


def forge_json(folder: Path, chance: random.Random) -> None:
    """Replace, drop or add an entry anywhere in the JSON file."""
    raw = json.loads(index(folder).read_text())
    places: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            places.append((value, key))
            if isinstance(value[key], (dict, list)):
                walk(value[key])

    walk(raw)
    holder, key = chance.choice(places)
    how = chance.randrange(4)
    if how == 0:
        del holder[key]
    elif how == 1 and isinstance(holder, dict):
        holder[chance.choice(["code", "auto_map", "__class__", "module", key + "x"])] = chance.choice(ODD_VALUES)
    else:
        holder[key] = chance.choice(ODD_VALUES)
    _seal(folder, raw)


def forge_header(folder: Path, chance: random.Random) -> None:
    """Change the header of the weights: shapes, types, offsets, its own length."""
    raw = (folder / WEIGHTS_FILE).read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header, body = json.loads(raw[8 : 8 + size]), raw[8 + size :]
    name = chance.choice(sorted(header))
    how = chance.randrange(5)
    if how == 0:
        header[name]["shape"] = chance.choice([[10**12], [2**40, 2**40], [-1], [], [0], ["2"], [1] * 40, 5])
    elif how == 1:
        header[name]["dtype"] = chance.choice(["F64", "F16", "I64", "U8", "BOOL", "PICKLE", 3])
    elif how == 2:
        header[name]["data_offsets"] = chance.choice([[0, 10**15], [-8, 0], [8, 0], [0], "x", [0, 0]])
    elif how == 3:
        header[chance.choice(["../x", "/abs", "head.code", ""])] = header.pop(name)
    packed = json.dumps(header).encode()
    length = chance.choice([10 * 2**30, 2**63, 0, len(packed) + 1]) if how == 4 else len(packed)
    (folder / WEIGHTS_FILE).write_bytes(length.to_bytes(8, "little") + packed + body)
    _seal(folder, json.loads(index(folder).read_text()))


def forge_weights(folder: Path, chance: random.Random) -> None:
    """Write random numbers, odd ones too, over part of the tensors."""
    raw = bytearray((folder / WEIGHTS_FILE).read_bytes())
    start = 8 + int.from_bytes(raw[:8], "little")
    odd = [b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x7f", b"\xff\xff\x7f\x7f", b"\x00\x00\x00\x00", chance.randbytes(4)]
    for _ in range(chance.randint(1, 6)):
        at = start + 4 * chance.randrange((len(raw) - start) // 4)
        raw[at : at + 4] = chance.choice(odd)
    (folder / WEIGHTS_FILE).write_bytes(raw)
    _seal(folder, json.loads(index(folder).read_text()))


def _seal(folder: Path, raw: Any) -> None:
    if isinstance(raw, dict) and isinstance(raw.get("files"), dict) and WEIGHTS_FILE in raw["files"]:
        raw["files"][WEIGHTS_FILE] = hashlib.sha256((folder / WEIGHTS_FILE).read_bytes()).hexdigest()
    with contextlib.suppress(ValueError, TypeError):  # what JSON has no word for stays unsealed
        raw["sha256"] = digest(raw)
    index(folder).write_text(json.dumps(raw))


ACCIDENTS: tuple[Callable[[Path, random.Random], None], ...] = (
    flip_bits, cut, insert, lose, add, swap_files, edit_number,
)  # fmt: skip
FORGERIES: tuple[Callable[[Path, random.Random], None], ...] = (forge_json, forge_header, forge_weights)


def damage_folders(
    folders: Sequence[Path],
    read: Callable[[Path], str],
    refusal: type[Exception],
    count: int,
    seed: int,
    room: Path,
) -> tuple[Counter[str], list[str]]:
    """Damage copies of good folders and read them.

    Args:
        folders: to choose from.
        read: returns a fingerprint of all that a folder decides, or raises `refusal`.
        refusal: the one error that a damaged folder may raise.
        count, seed: of the copies.
        room: for them.

    Returns:
        How often what happened, and the faults found.
    """
    prints = [read(folder) for folder in folders]
    seen: Counter[str] = Counter()
    faults = []
    for number in range(count):
        chance = random.Random(f"{seed}-{number}")
        which, damage = chance.randrange(len(folders)), chance.choice((*ACCIDENTS, *FORGERIES))
        folder = room / "bad"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(folders[which], folder)
        damage(folder, chance)
        began = time.process_time()
        try:
            same = read(folder) == prints[which]
            outcome = "as before" if same else "another one"
            if not same and damage in ACCIDENTS:
                faults.append(f"{number} {damage.__name__}: decides otherwise, without a word")
        except refusal as error:
            outcome = "refused"
            if "\n" in str(error) or len(str(error)) > 1000:
                faults.append(f"{number} {damage.__name__}: not one line: {str(error)[:100]!r}")
        except Exception as error:  # whatever it is, it is a fault
            outcome = "crashed"
            faults.append(f"{number} {damage.__name__}: {type(error).__name__}: {str(error)[:100]}")
        if time.process_time() - began > SECONDS:
            faults.append(f"{number} {damage.__name__}: took {time.process_time() - began:.1f} s")
        seen[f"{damage.__name__}: {outcome}"] += 1
    return seen, faults
