"""Untrusted folders: refused in one line before anything in them is used; and the hub."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import safetensors.numpy
from learned_policies import learned
from specstop.policies import from_pretrained, save_pretrained
from specstop.policies.errors import PolicyError
from specstop.policies.files import digest
from specstop.policies.registry import load_policy
from specstop.policies.storage import POLICY_FILE, WEIGHTS_FILE, load_policy_folder


class Evil:
    """Touches a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.mark,))


def forge(folder: Path, **changes: Any) -> None:
    """Change `policy.json` as an attacker would: with every checksum mended."""
    raw = json.loads((folder / POLICY_FILE).read_text())
    raw["files"] = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in raw["files"]}
    raw.update(changes)
    (folder / POLICY_FILE).write_text(json.dumps({**raw, "sha256": digest(raw)}))


def weights(folder: Path, raw: bytes) -> None:
    (folder / WEIGHTS_FILE).write_bytes(raw)
    forge(folder)


def header(folder: Path, change: Callable[[dict[str, Any]], object], length: int | None = None) -> None:
    raw = (folder / WEIGHTS_FILE).read_bytes()
    size = int.from_bytes(raw[:8], "little")
    entries = json.loads(raw[8 : 8 + size])
    change(entries)
    packed = json.dumps(entries).encode()
    weights(folder, (len(packed) if length is None else length).to_bytes(8, "little") + packed + raw[8 + size :])


def side(folder: Path, name: str, raw: bytes) -> None:
    (folder / name).write_bytes(raw)
    files = {**json.loads((folder / POLICY_FILE).read_text())["files"], name: hashlib.sha256(raw).hexdigest()}
    forge(folder, files=files)


def sparse(path: Path, size: int) -> None:
    with path.open("r+b") as file:
        file.truncate(size)


def linked(path: Path) -> None:
    """Replace a file by a link to a copy of it outside the folder."""
    outside = path.parent.parent / f"outside-{path.name}"
    shutil.move(path, outside)
    path.symlink_to(outside)


def piped(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


BAD = pickle.dumps(Evil(Path("/nonexistent")))
ATTACKS: dict[str, tuple[Callable[[Path], object], str]] = {
    "pickle as weights": (lambda f: weights(f, BAD), "is invalid"),
    "pickle as json": (lambda f: (f / POLICY_FILE).write_bytes(BAD), "expected JSON"),
    "pickle as booster": (lambda f: side(f, "accept.ubj", BAD), "accept.ubj is not UBJSON"),
    "pickle beside": (lambda f: (f / "model.pkl").write_bytes(BAD), "'model.pkl' is not listed"),
    "pickle beside, named": (lambda f: side(f, "model.bin", BAD), "'model.bin'"),
    "code beside": (lambda f: (f / "modeling.py").write_text("1/0"), "'modeling.py'"),
    "a code path": (lambda f: forge(f, auto_map={"AutoModel": "modeling.X"}), "'auto_map'"),
    "a code path for a head": (lambda f: forge(f, head="os:system"), "unknown head 'os:system'"),
    "a code path for a kind": (lambda f: forge(f, kind="os:system"), "kind: Input should be 'learned'"),
    "a code path for a rule": (lambda f: forge(f, rule={"kind": "os:system"}), "unknown rule"),
    "an absolute path": (lambda f: forge(f, files={WEIGHTS_FILE: "", "/etc/passwd": ""}), "'/etc/passwd'"),
    "a parent path": (lambda f: forge(f, files={WEIGHTS_FILE: "", "../x.ubj": ""}), r"'\.\./x\.ubj'"),
    "a path with a bar": (lambda f: forge(f, files={WEIGHTS_FILE: "", "a/b.ubj": ""}), "'a/b.ubj'"),
    "weights behind a link": (lambda f: linked(f / WEIGHTS_FILE), "link"),
    "json behind a link": (lambda f: linked(f / POLICY_FILE), "link"),
    "a dangling link": (lambda f: (f / "x.ubj").symlink_to("/nowhere"), "'x.ubj'"),
    "a pipe for weights": (lambda f: piped(f / WEIGHTS_FILE), "not a regular file"),
    "a pipe for json": (lambda f: piped(f / POLICY_FILE), "not a regular file"),
    "a folder within": (lambda f: (f / "sub").mkdir(), "'sub'"),
    "a shape of 10^12": (lambda f: header(f, lambda h: h["head.bias"].update(shape=[10**12])), "is invalid"),
    "a shape that overflows": (lambda f: header(f, lambda h: h["head.bias"].update(shape=[2**16] * 8)), "is invalid"),
    "forty dimensions": (lambda f: header(f, lambda h: h["head.bias"].update(shape=[1] * 40)), "is invalid"),
    "a negative shape": (lambda f: header(f, lambda h: h["head.bias"].update(shape=[-3])), "is invalid"),
    "a shape of truths": (lambda f: header(f, lambda h: h["head.bias"].update(shape=[True])), "is invalid"),
    "overlapping tensors": (
        lambda f: header(f, lambda h: h["head.bias"].update(data_offsets=[0, 12])), "is invalid"
    ),
    "another type": (lambda f: header(f, lambda h: h["head.bias"].update(dtype="F64")), "is invalid"),
    "whole numbers for weights": (lambda f: header(f, lambda h: h["head.bias"].update(dtype="I64")), "is invalid"),
    "a header of 10 GB": (lambda f: header(f, lambda h: None, 10 * 2**30), "is invalid"),
    "a header of 2^63": (lambda f: header(f, lambda h: None, 2**63), "is invalid"),
    "weights of 10 GB": (lambda f: sparse(f / WEIGHTS_FILE, 10 * 2**30), "10737418240 bytes; expected at most"),
    "json of 10 GB": (lambda f: sparse(f / POLICY_FILE, 10 * 2**30), "10737418240 bytes; expected at most"),
    "nested json": (lambda f: (f / POLICY_FILE).write_text("[" * 200_000), "nested too deeply"),
    "a number of 5,000 digits": (lambda f: (f / POLICY_FILE).write_text('{"schema": ' + "9" * 5000 + "}"), "expected JSON"),
    "NaN": (lambda f: (f / POLICY_FILE).write_text('{"schema": NaN}'), "a number is not finite"),
    "a key twice": (lambda f: (f / POLICY_FILE).write_text('{"schema": 1, "schema": 1}'), "occurs twice"),
    "a terminal's codes": (lambda f: forge(f, name="\x1b[2J"), "control characters"),
    "an edit by hand": (
        lambda f: (f / POLICY_FILE).write_text((f / POLICY_FILE).read_text().replace("52.5", "99.5")), "checksum differs"
    ),
    "a depth of 10^9": (lambda f: forge(f, max_depth=10**9), "max_depth: "),
    "a feature twice": (lambda f: forge(f, features=["top1", "top1"]), "each once"),
    "features that are lists": (lambda f: forge(f, features=[[], []]), "features.0: "),
    "a truth for a rate": (lambda f: forge(f, rho=True), "rho: .*'True'"),
    "a lost booster": (lambda f: forge(f, files={WEIGHTS_FILE: "", "accept.ubj": ""}), "accept.ubj cannot be read"),
    "an infinite temperature": (
        lambda f: forge(f, calibration=[{"kind": "identity", "temperature": "inf"}] * 2), "temperature: "
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attackers_folder_is_refused_before_anything_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    attack, message = ATTACKS[name]
    folder = save_pretrained(learned(), tmp_path / "p")
    load_policy_folder(folder)
    attack(folder)
    used: list[object] = []
    monkeypatch.setattr(pickle, "loads", lambda *args: used.append(args))
    with pytest.raises(PolicyError, match=message) as caught:
        load_policy(folder)
    assert str(caught.value).startswith("policy: ") and "\n" not in str(caught.value) and len(str(caught.value)) < 600
    assert used == []


def test_tensors_are_not_even_parsed_when_something_else_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_pretrained(learned(), tmp_path / "p")
    (folder / "more.pkl").write_bytes(BAD)
    monkeypatch.setattr(safetensors.numpy, "load", lambda raw: pytest.fail("the weights were read"))
    with pytest.raises(PolicyError, match=r"more\.pkl"):
        load_policy_folder(folder)


def test_what_git_and_the_hub_leave_behind_is_passed_over(tmp_path: Path) -> None:
    folder = save_pretrained(learned(), tmp_path / "p")
    (folder / ".gitattributes").write_text("*.safetensors filter=lfs")
    (folder / ".cache").mkdir()
    assert load_policy_folder(folder).name == "mine"
    (folder / "README.md").unlink()
    assert from_pretrained(folder).name == "mine"


def test_spaces_and_order_in_the_json_do_not_matter(tmp_path: Path) -> None:
    folder = save_pretrained(learned(), tmp_path / "p")
    raw = json.loads((folder / POLICY_FILE).read_text())
    (folder / POLICY_FILE).write_text(json.dumps(dict(sorted(raw.items(), reverse=True))))
    assert load_policy_folder(folder).metadata == learned().metadata


def test_a_further_file_needs_a_plain_name(tmp_path: Path) -> None:
    for name in ("../x.ubj", "model.pkl", ".ubj"):
        with pytest.raises(PolicyError, match="ubj"):
            save_pretrained(learned(), tmp_path / "p", {name: b"{"})
    assert list(tmp_path.iterdir()) == []


def test_a_policy_comes_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good, calls = save_pretrained(learned(), tmp_path / "p"), []

    def fetch(name: str, **options: Any) -> str:
        assert "*.py" not in options["allow_patterns"] and "*.bin" not in options["allow_patterns"]
        calls.append((name, options["revision"]))
        shutil.copytree(good, options["local_dir"], dirs_exist_ok=True)
        return str(options["local_dir"])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert from_pretrained("owner/policy", revision="abc").name == load_policy("hub:owner/policy").name == "mine"
    assert calls == [("owner/policy", "abc"), ("owner/policy", None)]


def test_offline_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> str:
        raise ConnectionError("no\nroute")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(PolicyError, match=r"cannot be fetched \(ConnectionError\); use a folder, or check") as caught:
        load_policy("hub:owner/policy")
    assert "\n" not in str(caught.value)
    for name in ("nowhere", "../up/x", "a/b/c"):
        with pytest.raises(PolicyError, match="it is no name of a hub repository"):
            from_pretrained(name)
