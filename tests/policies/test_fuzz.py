"""A seeded sample of the damages of `benchmarks/fuzz.py`."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest
from specstop.policies.folder import load_policy_folder, save_policy

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def fuzz() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz", ROOT / "benchmarks" / "fuzz.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fuzz"] = module
    spec.loader.exec_module(module)
    return module


def test_damaged_folders_are_refused_or_decide_as_before(fuzz: ModuleType, tmp_path: Path) -> None:
    seen, faults = fuzz.run(150, 7, tmp_path)
    assert faults == []
    assert sum(seen.values()) == 150
    assert {name.split(":")[0] for name in seen} == {d.__name__ for d in (*fuzz.ACCIDENTS, *fuzz.FORGERIES)}


def test_a_fault_would_be_seen(fuzz: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the checksums of the good folder believed blindly, some damage goes through unnoticed."""
    monkeypatch.setattr("specstop.policies.folder.digest", lambda raw: raw.get("sha256", ""))
    monkeypatch.setattr(fuzz, "ACCIDENTS", (fuzz.edit_number,))
    monkeypatch.setattr(fuzz, "FORGERIES", ())
    _, faults = fuzz.run(60, 7, tmp_path)
    assert any("decides otherwise" in fault for fault in faults)


def test_every_damage_changes_something(fuzz: ModuleType, tmp_path: Path) -> None:
    policy = fuzz.good_policies()[0]
    for damage in (*fuzz.ACCIDENTS, *fuzz.FORGERIES):
        folder = save_policy(policy, tmp_path / damage.__name__, {"accept.ubj": b"{L"})
        assert fuzz.decisions(load_policy_folder(folder)) == fuzz.decisions(policy)
        before = {p.name: p.read_bytes() for p in folder.iterdir()}
        damage(folder, random.Random(3))
        assert {p.name: p.read_bytes() if p.is_file() else None for p in folder.iterdir()} != before
