"""Survival tables: what they do to the product, saved and loaded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from head_tensors import NAMES, TENSORS, features
from specstop.policies.contract import Array, DraftStep
from specstop.policies.errors import PolicyError
from specstop.policies.heads import build_head
from specstop.policies.learned import Calibrator, LearnedPolicy, SurvivalMaps, TrainingMetadata
from specstop.policies.rules import Derived, Rule, Threshold
from specstop.policies.storage import WEIGHTS_FILE, load_policy_folder, save_policy
from specstop.train.heads.calibration import KNOTS


def identity_tables(starts: int, depth: int) -> Array:
    """Return survival tables [L, K, 2, n] float32 that change nothing."""
    line = np.linspace(0.0, 1.0, KNOTS, dtype=np.float32)
    return np.broadcast_to(line, (starts, depth, 2, KNOTS)).copy()


DEPTH = 4
NEAR = 1e-6  # knots are float32


def tables(starts: int = 3) -> Array:
    """Return tables that differ by start and depth; none at depth 2."""
    out = identity_tables(starts, DEPTH)
    for start in range(starts):
        for depth in (1, 3, 4):
            out[start, depth - 1, 1] = out[start, depth - 1, 0] ** (1.0 + 0.2 * depth + 0.1 * start)
    return out


def policy(rule: Rule, maps: SurvivalMaps | None) -> LearnedPolicy:
    head = build_head("logistic", NAMES, TENSORS["logistic"]())
    return LearnedPolicy("mine", NAMES, head, Calibrator(), Calibrator(), rule, DEPTH, survival=maps)


def played(made: LearnedPolicy, x: Array) -> list[Array]:
    """Return S_j of chains at depths from the first one on; features [R, K + 1, F]."""
    alive, parent = np.ones((len(x), 1), dtype=bool), np.zeros((len(x), 1), dtype=np.int64)
    state, found = made.start(len(x), np.zeros(len(x), dtype=np.int64)), []
    for depth in range(made.first, DEPTH + 1):
        shown = np.ascontiguousarray(x[:, depth, None])
        _, state = made.keep(DraftStep(depth, alive, parent, shown, {}, np.arange(len(x))), state)
        found.append(state[:, 0])
    return found


@pytest.mark.parametrize("first", [0, 1, 2, 3])
def test_each_depth_goes_through_its_table_before_the_next_factor(first: int) -> None:
    made = policy(Derived([0.1] * DEPTH, first), SurvivalMaps(tables()))
    x = features(5, DEPTH + 1)
    found = played(made, x)
    start = max(first, 1)
    survival = np.ones(5)
    for depth in range(start, DEPTH + 1):
        survival = survival * made.probabilities(x[:, depth], depth)[0]
        if depth != 2:
            exponent = 1.0 + 0.2 * depth + 0.1 * (start - 1)
            grid = np.linspace(0, 1, KNOTS)
            at = np.minimum((survival * (KNOTS - 1)).astype(int), KNOTS - 2)
            low, high = grid[at] ** exponent, grid[at + 1] ** exponent
            survival = low + (high - low) * (survival - grid[at]) * (KNOTS - 1)
        np.testing.assert_allclose(found[depth - first], survival, atol=NEAR, rtol=NEAR)


def test_one_row_is_what_many_are() -> None:
    made = policy(Derived([0.05, 0.2, 0.1, 0.1], 1), SurvivalMaps(tables()))
    x = features(20, DEPTH + 1)
    many = np.stack(played(made, x), 1)
    for row in range(20):
        assert np.array_equal(np.stack(played(made, x[row : row + 1]), 1)[0], many[row])


def test_tables_that_change_nothing_are_the_bare_product() -> None:
    x = features(20, DEPTH + 1)
    maps = SurvivalMaps(identity_tables(2, DEPTH))
    assert maps.changed == []
    for with_maps, bare in zip(*(played(policy(Threshold("survival", 0.3), m), x) for m in (maps, None)), strict=True):
        assert np.array_equal(with_maps, bare)


def test_tables_survive_the_folder_and_another_rule(tmp_path: Path) -> None:
    made = policy(Derived([0.05, 0.2, 0.1, 0.1], 1), SurvivalMaps(tables()))
    again = load_policy_folder(save_policy(made, tmp_path / "p"))
    assert again.survival is not None
    assert np.array_equal(again.survival.tables, tables())
    assert again.survival.changed == [1, 3, 4]
    assert again.with_rule(Threshold("survival", 0.3)).survival is again.survival
    assert "| survival recalibrated at depths | 1, 3, 4 |" in (tmp_path / "p" / "README.md").read_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t[..., ::-1], "increasing"),
        (lambda t: t * 1.5, r"\[0, 1\]"),
        (lambda t: t[0], r"expected survival tables \[L, K, 2, n\]"),
        (lambda t: t[..., :1], r"expected survival tables \[L, K, 2, n\]"),
        (lambda t: t.astype(np.float64), r"expected survival tables \[L, K, 2, n\]"),
        (lambda t: np.where(t > 0.9, np.float32(np.nan), t), "expected knots"),
    ],
    ids=["falling", "above one", "a dimension short", "one knot", "float64", "nan"],
)
def test_a_table_that_is_none_is_refused(change: object, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        SurvivalMaps(change(tables()))  # type: ignore[operator]


def test_a_folder_with_tables_of_another_depth_is_refused(tmp_path: Path) -> None:
    made = policy(Derived([0.05, 0.2, 0.1, 0.1], 1), SurvivalMaps(identity_tables(1, DEPTH + 1)))
    save_policy(made, tmp_path / "p")
    assert "calibration.survival" in safetensors.numpy.load_file(tmp_path / "p" / WEIGHTS_FILE)
    with pytest.raises(PolicyError, match="expected survival tables for 4 depths, got 5"):
        load_policy_folder(tmp_path / "p")


def test_facts_of_several_temperatures_cover_what_lies_between(tmp_path: Path) -> None:
    made = policy(Threshold("survival", 0.3), None)
    made.metadata = TrainingMetadata(temperature=(0.0, 0.7, 1.0))
    again = load_policy_folder(save_policy(made, tmp_path / "p"))
    assert again.metadata.temperature == (0.0, 0.7, 1.0)
    assert [again.metadata.covers(t) for t in (0.0, 0.3, 1.0, 1.2)] == [True, True, True, False]
    assert TrainingMetadata(temperature=0.7).covers(0.7)
    assert not TrainingMetadata(temperature=0.7).covers(0.0)
