"""Policy folders: they load as they were saved or are refused in one line, and nothing in them is executed; the hub."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import safetensors.numpy
from head_tensors import NAMES
from hypothesis import given, settings, strategies as st
from joint_policies import batch_policy
from learned_policies import FACTS, learned
from random_heads import RANDOM_HEADS, random_policy
from specstop.policies import from_pretrained
from specstop.policies.contract import Array
from specstop.policies.errors import PolicyError
from specstop.policies.files import digest
from specstop.policies.learned import LearnedPolicy, SurvivalMaps, TrainingMetadata
from specstop.policies.registry import load_policy
from specstop.policies.rules import Derived
from specstop.policies.storage import POLICY_FILE, WEIGHTS_FILE, load_policy_folder, save_policy
from specstop.policies.testing import play, same
from steps import json_places
from trees import make_tree_policy


def with_survival_tables() -> LearnedPolicy:
    grid = np.linspace(0.0, 1.0, 33, dtype=np.float32)
    tables = np.broadcast_to(grid, (2, 5, 2, 33)).copy()
    tables[:, 2, 1] **= 2
    policy = random_policy("logistic", Derived([0.05, 0.2, 0.1], 1))
    maps = SurvivalMaps(tables)
    parts = policy.head, policy.accept, policy.next, policy.rule, 5, TrainingMetadata(temperature=(0.0, 0.7, 1.0))
    return LearnedPolicy("tables", NAMES, *parts, survival=maps)


POLICIES: dict[str, Callable[[], LearnedPolicy]] = {
    **{name: lambda name=name: random_policy(name) for name in RANDOM_HEADS},  # type: ignore[misc]
    "rule by batch size": lambda: learned(rule=Derived([0.3], 1, [(1, None), (4, 2)], [(1, 1.0), (4, 1.5)])),
    "every fact": learned, "survival tables": with_survival_tables, "tree": make_tree_policy, "batch": batch_policy,
}  # fmt: skip


def decisions(policy: LearnedPolicy) -> Any:
    """Return what determines a policy: its answers, names, limits and metadata."""
    answers, _ = play(policy, range(6), 1, batch=np.zeros(6, dtype=np.int64))
    return answers, policy.name, policy.features, policy.max_depth, policy.first, policy.rule.to_dict(), policy.metadata


@pytest.mark.parametrize("name", POLICIES)
def test_a_folder_returns_the_same_policy(tmp_path: Path, name: str) -> None:
    policy = POLICIES[name]()
    folder = save_policy(policy, tmp_path / "p", {"booster.ubj": b"{xyz"})
    again = load_policy_folder(folder)
    assert type(again) is type(policy) and same(decisions(again), decisions(policy))
    assert (again.hidden, again.sizes) == (policy.hidden, policy.sizes)
    assert (folder / "booster.ubj").read_bytes() == b"{xyz"


def test_the_card_names_what_a_reader_needs(tmp_path: Path) -> None:
    text = (save_policy(learned(), tmp_path / "p") / "README.md").read_text()
    for word in ("mine", "logistic", "derived", "temperature 0.7", "52.5 tokens/s", "0.2500", *NAMES):
        assert word in text
    tables = (save_policy(with_survival_tables(), tmp_path / "q") / "README.md").read_text()
    assert "| survival recalibrated at depths | 3 |" in tables


def test_files_of_git_and_the_hub_and_the_layout_of_the_json_do_not_matter(tmp_path: Path) -> None:
    folder = save_policy(learned(), tmp_path / "p")
    (folder / ".gitattributes").write_text("*.safetensors filter=lfs")
    (folder / ".cache").mkdir()
    (folder / "README.md").unlink()
    raw = json.loads((folder / POLICY_FILE).read_text())
    (folder / POLICY_FILE).write_text(json.dumps(dict(sorted(raw.items(), reverse=True))))
    assert from_pretrained(folder).metadata == FACTS


class Unwritable(Derived):
    """Fails when it is written, after the weights."""

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "derived", "thresholds": [float("inf")]}


def test_a_failed_save_keeps_the_old_policy_and_a_good_one_replaces_it_whole(tmp_path: Path) -> None:
    for content in ([], ["p"]):
        with pytest.raises(ValueError, match="JSON"):
            save_policy(learned(rule=Unwritable([0.1])), tmp_path / "p")
        assert [p.name for p in tmp_path.iterdir()] == content
        save_policy(learned(), tmp_path / "p", {"old.ubj": b"x"})
    save_policy(learned("mlp"), tmp_path / "p")
    assert load_policy_folder(tmp_path / "p").head.kind == "mlp" and not (tmp_path / "p" / "old.ubj").exists()
    for name in ("../x.ubj", "model.pkl", ".ubj"):
        with pytest.raises(PolicyError, match="ubj"):
            save_policy(learned(), tmp_path / "q", {name: b"{"})
    assert [p.name for p in tmp_path.iterdir()] == ["p"]


# Damaged folders


def seal(folder: Path, raw: Any) -> None:
    """Write `policy.json` as an attacker would: with valid checksums."""
    if isinstance(raw, dict) and isinstance(raw.get("files"), dict) and WEIGHTS_FILE in raw["files"]:
        raw["files"][WEIGHTS_FILE] = hashlib.sha256((folder / WEIGHTS_FILE).read_bytes()).hexdigest()
    with contextlib.suppress(ValueError, TypeError):  # JSON has no word for some values
        raw = {**raw, "sha256": digest(raw)}
    (folder / POLICY_FILE).write_text(json.dumps(raw))


def read_index(folder: Path) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads((folder / POLICY_FILE).read_text())
    return raw


def edit(**changes: Any) -> Callable[[Path], None]:
    """Return a forgery of entries of `policy.json`; None removes an entry."""

    def forge(folder: Path) -> None:
        raw = {**read_index(folder), **changes}
        seal(folder, {k: v for k, v in raw.items() if v is not None})

    return forge


def write_weights(folder: Path, raw: bytes) -> None:
    (folder / WEIGHTS_FILE).write_bytes(raw)
    seal(folder, read_index(folder))


def header(length: int | None = None, **changes: Any) -> Callable[[Path], None]:
    """Return a forgery of the header of the weights: entries of one tensor, or the length of the header."""

    def forge(folder: Path) -> None:
        raw = (folder / WEIGHTS_FILE).read_bytes()
        size = int.from_bytes(raw[:8], "little")
        entries = json.loads(raw[8 : 8 + size])
        entries["head.bias"].update(changes)
        packed = json.dumps(entries).encode()
        write_weights(
            folder, (len(packed) if length is None else length).to_bytes(8, "little") + packed + raw[8 + size :]
        )

    return forge


def tensors(change: Callable[[dict[str, Array]], object]) -> Callable[[Path], None]:
    def forge(folder: Path) -> None:
        arrays = safetensors.numpy.load_file(folder / WEIGHTS_FILE)
        change(arrays)
        write_weights(folder, safetensors.numpy.save(arrays))

    return forge


def extra(name: str, raw: bytes) -> Callable[[Path], None]:
    def forge(folder: Path) -> None:
        (folder / name).write_bytes(raw)
        edit(files={**read_index(folder)["files"], name: hashlib.sha256(raw).hexdigest()})(folder)

    return forge


def linked(path: Path) -> None:
    outside = path.parent.parent / f"outside-{path.name}"
    shutil.move(path, outside)
    path.symlink_to(outside)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def overwrite(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / POLICY_FILE).write_text(text)


class Evil:
    """Creates a file when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("/tmp/specstop-was-unpickled"),))


BAD = pickle.dumps(Evil())
IDENTITY = {"kind": "identity", "temperature": 1.0}
ATTACKS: dict[str, tuple[Callable[[Path], object], str]] = {
    "pickle as weights": (lambda f: write_weights(f, BAD), "invalid"),
    "pickle as json": (lambda f: (f / POLICY_FILE).write_bytes(BAD), "JSON"),
    "pickle as booster": (extra("accept.ubj", BAD), "UBJSON"),
    "pickle beside": (lambda f: (f / "model.pkl").write_bytes(BAD), "model.pkl"),
    "code beside": (lambda f: (f / "modeling.py").write_text("1/0"), "modeling.py"),
    "a code path": (edit(auto_map={"AutoModel": "modeling.X"}), "auto_map"),
    "a code path for a kind": (edit(kind="os:system"), "kind"),
    "a code path for a rule": (edit(rule={"kind": "os:system"}), "unknown rule"),
    "an absolute path": (edit(files={WEIGHTS_FILE: "", "/etc/passwd": ""}), "/etc/passwd"),
    "a parent path": (edit(files={WEIGHTS_FILE: "", "../x.ubj": ""}), r"\.\./x\.ubj"),
    "a lost booster": (edit(files={WEIGHTS_FILE: "", "accept.ubj": ""}), "accept.ubj"),
    "weights behind a link": (lambda f: linked(f / WEIGHTS_FILE), "link"),
    "a pipe for weights": (lambda f: pipe(f / WEIGHTS_FILE), "regular file"),
    "a folder within": (lambda f: (f / "sub").mkdir(), "sub"),
    "a shape of 10^12": (header(shape=[10**12]), "invalid"),
    "overlapping tensors": (header(data_offsets=[0, 12]), "invalid"),
    "a header of 10 GB": (header(10 * 2**30), "invalid"),
    "weights of 10 GB": (lambda f: os.truncate(f / WEIGHTS_FILE, 10 * 2**30), "10737418240 bytes"),
    "no weights": (lambda f: (f / WEIGHTS_FILE).unlink(), WEIGHTS_FILE),
    "no json": (lambda f: (f / POLICY_FILE).unlink(), POLICY_FILE),
    "nested json": (overwrite("[" * 200_000), "nested"),
    "a number of 5,000 digits": (overwrite('{"schema": ' + "9" * 5000 + "}"), "JSON"),
    "NaN": (overwrite('{"schema": NaN}'), "finite"),
    "a key twice": (overwrite('{"schema": 1, "schema": 1}'), "twice"),
    "an edit without a checksum": (
        lambda f: (f / POLICY_FILE).write_text((f / POLICY_FILE).read_text().replace("52.5", "99.5")), "checksum"),
    "terminal control codes": (edit(name="\x1b[2J"), "control characters"),
    "another schema": (edit(schema=3), "schema 3"),
    "no head": (edit(head=None), "head"),
    "unknown feature": (edit(features=["top1", "tpo2"]), "tpo2"),
    "fewer features": (edit(features=list(NAMES[:4])), "mean"),
    "features that are lists": (edit(features=[[], []]), "features"),
    "unknown calibration": (edit(calibration=[{**IDENTITY, "kind": "x"}] * 2), "not x"),
    "an infinite temperature": (edit(calibration=[{**IDENTITY, "temperature": "inf"}] * 2), "temperature"),
    "depth 0": (edit(max_depth=0), "max_depth"),
    "a depth of 10^9": (edit(max_depth=10**9), "max_depth"),
    "no pair": (edit(pair=None), "pair"),
    "a truth for a rate": (edit(rho=True), "rho"),
    "a missing tensor": (tensors(lambda t: t.pop("head.scale")), "scale"),
    "an extra tensor": (tensors(lambda t: t.update({"head.more": np.zeros(1, dtype=np.float32)})), "more"),
    "NaN weights": (tensors(lambda t: t["head.bias"].fill(np.nan)), "bias"),
    "no knots": (tensors(lambda t: t.pop("calibration.next")), "calibration.next"),
    "tables of another depth": (
        tensors(lambda t: t.update({"calibration.survival": np.tile(np.float32([0, 1]), (1, 5, 2, 1))})), "4 depths, got 5"),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attackers_folder_is_refused_and_nothing_is_unpickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    attack, noun = ATTACKS[name]
    folder = save_policy(learned(), tmp_path / "p")
    attack(folder)
    monkeypatch.setattr(pickle, "loads", lambda *args: pytest.fail("unpickled"))
    with pytest.raises(PolicyError, match=noun) as error:
        load_policy(folder)
    assert str(error.value).startswith("policy: ") and "\n" not in str(error.value) and len(str(error.value)) < 600
    assert not Path("/tmp/specstop-was-unpickled").exists()


ODD_VALUES = (
    None, True, -1, 0, 10**400, 1e308, "", "os:system", "/etc/passwd", "\x1b[2J", [], {}, [[[]]], [1] * 5000,
    {"__reduce__": "os.system"}, float("nan"), float("inf"), "learned", ["top1"], "top1", -0.0, 3.5,
)  # fmt: skip


def damage_bytes(folder: Path, rng: random.Random) -> None:
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


def forge_json(folder: Path, rng: random.Random) -> None:
    """Replace, remove or add an entry anywhere in the JSON file."""
    raw = read_index(folder)
    holder, key = rng.choice(json_places(raw))
    kind = rng.randrange(4)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[rng.choice(["code", "__class__", key + "x"])] = rng.choice(ODD_VALUES)
    else:
        holder[key] = rng.choice(ODD_VALUES)
    seal(folder, raw)


def forge_weights(folder: Path, rng: random.Random) -> None:
    """Write random and odd numbers over part of the tensors."""
    raw = bytearray((folder / WEIGHTS_FILE).read_bytes())
    start = 8 + int.from_bytes(raw[:8], "little")
    for _ in range(rng.randint(1, 6)):
        at = start + 4 * rng.randrange((len(raw) - start) // 4)
        raw[at : at + 4] = rng.choice([b"\x00\x00\xc0\x7f", b"\xff\xff\x7f\x7f", b"\x00\x00\x00\x00", rng.randbytes(4)])
    write_weights(folder, bytes(raw))


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """Folders and decisions of all policies."""
    root = tmp_path_factory.mktemp("originals")
    folders = {name: save_policy(make(), root / name, {"accept.ubj": b"{L"}) for name, make in POLICIES.items()}
    return {name: (folder, decisions(load_policy_folder(folder))) for name, folder in folders.items()}


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(sorted(POLICIES)),
    damage=st.sampled_from([damage_bytes, forge_json, forge_weights]),
    seed=st.integers(0, 2**32),
)
def test_a_damaged_folder_is_refused_or_decides(
    originals: dict[str, tuple[Path, Any]], name: str, damage: Callable[[Path, random.Random], None], seed: int
) -> None:
    """No checksum distinguishes a forgery from another policy: it may load, but it must not fail later."""
    original, before = originals[name]
    with tempfile.TemporaryDirectory() as root:
        folder = Path(shutil.copytree(original, Path(root) / "p"))
        damage(folder, random.Random(seed))
        try:
            with np.errstate(all="ignore"):
                after = decisions(load_policy_folder(folder))
        except PolicyError as error:
            assert "\n" not in str(error) and len(str(error)) < 1000
        else:
            assert damage is not damage_bytes or same(before, after)


def test_a_policy_comes_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, calls = save_policy(learned(), tmp_path / "p"), []

    def fetch(name: str, **options: Any) -> str:
        assert not {"*.py", "*.bin"} & set(options["allow_patterns"])
        calls.append((name, options["revision"]))
        shutil.copytree(source, options["local_dir"], dirs_exist_ok=True)
        return str(options["local_dir"])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert from_pretrained("owner/policy", revision="abc").name == load_policy("hub:owner/policy").name == "mine"
    assert calls == [("owner/policy", "abc"), ("owner/policy", None)]

    def fail(*args: Any, **options: Any) -> str:
        raise ConnectionError("no\nroute")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(PolicyError, match=r"fetched \(ConnectionError\)") as error:
        load_policy("hub:owner/policy")
    assert "\n" not in str(error.value)
    for name in ("nowhere", "../up/x", "a/b/c"):
        with pytest.raises(PolicyError, match="hub repository"):
            from_pretrained(name)
