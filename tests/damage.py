"""Damage of JSON values and of the folders of policies and drafters, and a pickle that runs code."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
from pathlib import Path
from typing import Any

from specstop.policies.files import WEIGHTS_FILE, digest


class Evil:
    """Makes the folder `mark` when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def json_places(value: Any) -> list[tuple[Any, Any]]:
    """Return (container, key) of every entry of nested lists and dictionaries."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    return [place for key in keys for place in ((value, key), *json_places(value[key]))]


ODD_VALUES = (
    None, True, -1, 0, -0.0, 3.5, 5e-324, 1e7, 1e308, 10**400, float("nan"), float("inf"), "", "0.004", "top1", "learned",
    "os:system", "/etc/passwd", "\x1b[2J", "\ud800", [], {}, ["top1"], [[[]]], [1] * 5000, [1e-3, float("nan")],
    [[0, 1e-3], [0, 1e-3]], [[2**40, 1e-3]], {"each": -1, "opening": 0}, {"__reduce__": "os.system"},
)  # fmt: skip


def damage_json(value: Any, rng: random.Random) -> None:
    """Remove, add or replace an entry of nested lists and dictionaries."""
    holder, key = rng.choice(json_places(value))
    kind = rng.randrange(4)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[rng.choice(["code", "__class__", key + "x"])] = rng.choice(ODD_VALUES)
    else:
        holder[key] = rng.choice(ODD_VALUES)


def read_index(folder: Path, file: str) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads((folder / file).read_text())
    return raw


def seal(folder: Path, file: str, raw: Any) -> None:
    """Write the JSON file with valid checksums, as an attacker would."""
    if isinstance(raw, dict) and isinstance(raw.get("files"), dict) and WEIGHTS_FILE in raw["files"]:
        raw["files"][WEIGHTS_FILE] = hashlib.sha256((folder / WEIGHTS_FILE).read_bytes()).hexdigest()
    with contextlib.suppress(ValueError, TypeError):  # JSON has no word for some values
        raw = {**raw, "sha256": digest(raw)}
    (folder / file).write_text(json.dumps(raw))


def damage_bytes(folder: Path, file: str, rng: random.Random) -> None:
    """Flip bits, cut, insert, delete, swap or add files, without mending a checksum."""
    paths = sorted(folder.iterdir())
    path, kind = rng.choice(paths), rng.randrange(6)
    raw = bytearray(path.read_bytes())
    at = rng.randrange(len(raw))
    if kind == 0:
        raw[at] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del raw[at:]
    elif kind == 2:
        raw[at:at] = rng.randbytes(rng.randint(1, 40))
    elif kind == 3:
        raw = bytearray(rng.choice(paths).read_bytes())
    path.write_bytes(raw)
    if kind == 4:
        path.unlink()
    elif kind == 5:
        (folder / rng.choice(["model.pkl", "a.py", "accept.ubj", "weights.bin"])).write_bytes(b"\x80\x04K\x01.")


def forge_json(folder: Path, file: str, rng: random.Random) -> None:
    raw = read_index(folder, file)
    damage_json(raw, rng)
    seal(folder, file, raw)


def forge_weights(folder: Path, file: str, rng: random.Random) -> None:
    """Write random and odd numbers over part of the header or of the tensors."""
    raw = bytearray((folder / WEIGHTS_FILE).read_bytes())
    start = rng.choice([0, 8, 8 + int.from_bytes(raw[:8], "little")])
    for _ in range(rng.randint(1, 6)):
        at = start + 4 * rng.randrange((len(raw) - start) // 4)
        raw[at : at + 4] = rng.choice([b"\x00\x00\xc0\x7f", b"\xff\xff\x7f\x7f", b"\x00\x00\x00\x00", rng.randbytes(4)])
    (folder / WEIGHTS_FILE).write_bytes(raw)
    seal(folder, file, read_index(folder, file))


DAMAGES = (damage_bytes, forge_json, forge_weights)
