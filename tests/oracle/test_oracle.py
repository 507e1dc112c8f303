"""The recorder of the oracle: two runs of a few cases of some sections are equal."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from record import SECTIONS, Section, array_differences, differences, record

QUICK = ["trees", "decisions", "texts", "seen", "replay", "costs", "hf"]


def test_two_runs_record_the_same(tmp_path: Path) -> None:
    assert record(tmp_path / "one", only=QUICK, small=True) == []
    assert record(tmp_path / "two", tmp_path / "one", QUICK, small=True) == []
    for name in QUICK:
        assert (tmp_path / "one" / f"{name}.json").stat().st_size > 100


@pytest.mark.parametrize(
    ("one", "other", "count"),
    [
        ({"a": [1, 2]}, {"a": [1, 2]}, 0),
        ({"a": [1, 2]}, {"a": [1, 3]}, 1),
        ({"a": [1, 2]}, {"a": [1]}, 1),
        ({"a": 1}, {"b": 1}, 2),
        ({"a": 1.0}, {"a": 1.0 + 1e-12}, 0),
        ({"a": 1.0}, {"a": 1.1}, 1),
        ({"a": True}, {"a": 1}, 1),
        ({"a": None}, {"a": 0.0}, 1),
    ],
)
def test_differences_are_found(one: object, other: object, count: int) -> None:
    assert len([*differences(one, other, Section(SECTIONS["costs"].cases, 1e-9))]) == count


def test_differences_of_arrays_are_found() -> None:
    section, one = Section(SECTIONS["costs"].cases, 1e-9), np.array([1.0, 2.0])
    assert [*array_differences(one, one * (1 + 1e-12), section, "x")] == []
    assert len([*array_differences(one, one + 0.1, section, "x")]) == 1
    assert len([*array_differences(one, one[:1], section, "x")]) == 1
    assert len([*array_differences(one > 1, one > 0, section, "x")]) == 1
