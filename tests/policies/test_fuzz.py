"""A seeded sample of the damages of `tests/attacks`."""

from __future__ import annotations

import random
from pathlib import Path
from types import ModuleType

import pytest
from attack_families import family
from specstop.policies.storage import load_policy_folder, save_policy


@pytest.fixture(scope="module")
def fuzz() -> ModuleType:
    return family("policy_folders")


def test_damaged_folders_are_refused_or_decide_as_before(fuzz: ModuleType, tmp_path: Path) -> None:
    seen, faults = fuzz.attack(150, 7, tmp_path)
    assert faults == []
    assert sum(seen.values()) == 150
    assert {name.split(":")[0] for name in seen} == {d.__name__ for d in (*fuzz.ACCIDENTS, *fuzz.FORGERIES)}


def test_a_fault_would_be_seen(fuzz: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the checksums of the good folder believed blindly, some damage goes through unnoticed."""
    monkeypatch.setattr("specstop.policies.files.digest", lambda raw: raw["sha256"])
    monkeypatch.setattr(fuzz, "ACCIDENTS", (fuzz.edit_number,))
    monkeypatch.setattr(fuzz, "FORGERIES", ())
    _, faults = fuzz.attack(60, 7, tmp_path)
    assert any("decides otherwise" in fault for fault in faults)


def test_every_damage_changes_something(fuzz: ModuleType, tmp_path: Path) -> None:
    policy = fuzz.good_policies()[0]
    for damage in (*fuzz.ACCIDENTS, *fuzz.FORGERIES):
        folder = save_policy(policy, tmp_path / damage.__name__, {"accept.ubj": b"{L"})
        assert fuzz.decisions(load_policy_folder(folder)) == fuzz.decisions(policy)
        before = {p.name: p.read_bytes() for p in folder.iterdir()}
        damage(folder, random.Random(3))
        assert {p.name: p.read_bytes() if p.is_file() else None for p in folder.iterdir()} != before


@pytest.fixture(scope="module")
def profiles() -> ModuleType:
    return family("profiles")


def test_damaged_profiles_are_refused_or_sane(profiles: ModuleType, tmp_path: Path) -> None:
    seen, faults = profiles.attack(40, 7, tmp_path)
    assert faults == []
    assert sum(seen.values()) == 40
    assert {name.split(":")[0] for name in seen} == {d.__name__ for d in profiles.DAMAGES}


def test_a_time_that_is_none_would_be_seen(
    profiles: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With any number taken for seconds."""
    monkeypatch.setattr("specstop.policies.costs._check_range", lambda *limits: None)
    monkeypatch.setattr("specstop.policies.profile.check_values", lambda raw: None)
    monkeypatch.setattr(profiles, "DAMAGES", (profiles.scale,))
    _, faults = profiles.attack(20, 7, tmp_path)
    assert any("seconds of" in fault for fault in faults)
