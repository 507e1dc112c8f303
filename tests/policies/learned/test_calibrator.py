"""Calibration maps: monotone, between 0 and 1, as sharp as what they were fitted on."""

from __future__ import annotations

import math

import numpy as np
import pytest
from head_tensors import (
    Array,
    knots,
    zeros,
)
from specstop.policies.errors import PolicyError
from specstop.policies.learned import Calibrator

MAPS = [
    Calibrator(),
    Calibrator("temperature", 2.5),
    Calibrator("isotonic", knots=knots()),
    Calibrator("isotonic", knots=knots(1, 2)),
]


@pytest.mark.parametrize("calibrate", MAPS, ids=lambda c: f"{c.kind}-{c.knots.shape[1]}")
def test_calibration_is_monotone_and_between_0_and_1(calibrate: Calibrator) -> None:
    x = np.linspace(-40, 40, 2001)
    y = calibrate(x)
    assert (np.diff(y) >= 0).all()
    assert 0 <= y.min() < y.max() <= 1
    assert np.array_equal(calibrate(x.reshape(3, -1)), y.reshape(3, -1))


def test_temperature_divides_the_logit() -> None:
    x = np.array([-3.0, 0.0, 2.0])
    assert Calibrator("temperature", 2.0)(x).tolist() == pytest.approx([1 / (1 + math.exp(-v / 2)) for v in x.tolist()])
    assert Calibrator()(x).tolist() == pytest.approx([1 / (1 + math.exp(-v)) for v in x.tolist()])


@pytest.mark.parametrize("seed", range(4))
def test_isotonic_interpolates_as_numpy_does(seed: int) -> None:
    table = knots(seed)
    x = np.concatenate([np.linspace(-12, 12, 301), table[0]])
    expected = np.interp(x, *table.astype(np.float64))
    np.testing.assert_allclose(Calibrator("isotonic", knots=table)(x), expected, atol=1e-5)


def test_isotonic_steps_are_as_sharp_as_the_data_they_were_fitted_on() -> None:
    """Blocks of an isotonic fit end and begin at neighbouring logits; gaps of 1e-6 occur among many."""
    edges = np.linspace(-8, 8, 51, dtype=np.float32)
    x = np.stack([edges, np.nextafter(edges + np.float32(1e-6), edges + 1)], 1).reshape(-1)
    y = np.linspace(0, 1, 52, dtype=np.float32).repeat(2)[1:-1]
    found = Calibrator("isotonic", knots=np.stack([x, y]))(x)
    np.testing.assert_allclose(found, y, atol=1e-3)
    assert 0 <= found.min() <= found.max() <= 1


@pytest.mark.parametrize(
    ("kind", "temperature", "table"),
    [
        ("platt", 1.0, None),
        ("temperature", 0.0, None),
        ("temperature", -1.0, None),
        ("temperature", float("nan"), None),
        ("isotonic", 1.0, None),
        ("isotonic", 1.0, zeros(2, 1)),
        ("isotonic", 1.0, zeros(3, 4)),
        ("isotonic", 1.0, np.array([[1.0, 0.0], [0.0, 1.0]], dtype=np.float32)),
        ("isotonic", 1.0, np.array([[0.0, 1.0], [1.0, 0.0]], dtype=np.float32)),
        ("isotonic", 1.0, np.array([[0.0, 1.0], [0.0, float("nan")]], dtype=np.float32)),
        ("isotonic", 1.0, np.array([[0.0, 1.0], [0.0, 1.5]], dtype=np.float32)),
    ],
)
def test_a_calibration_that_is_no_monotone_map_to_probabilities_is_refused(
    kind: str, temperature: float, table: Array | None
) -> None:
    with pytest.raises(PolicyError, match="calibration"):
        Calibrator(kind, temperature, table)
