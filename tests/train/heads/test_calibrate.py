"""Calibration: the simplest map that fits, always monotone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.special import expit
from sklearn.metrics import log_loss as sklearn_loss, roc_auc_score
from specstop.policies.learned import Calibrator
from specstop.train.heads.calibration import auc, fit_calibrator, log_loss

COUNT = 6000
BAND = 0.05  # of probability; three binomial standard errors of the 100 rows around one knot's block are smaller


Array = np.ndarray[Any, Any]


def made(kind: str, seed: int = 0, count: int = COUNT) -> tuple[Array, Array, Array]:
    """Return (logits, true probabilities, labels) of a map of this kind."""
    generator = np.random.default_rng(seed)
    logits = 2.0 * generator.standard_normal(count)
    truth = {
        "calibrated": lambda: expit(logits),
        "overconfident": lambda: expit(logits / 2.5),
        "bent": lambda: 0.25 + 0.5 * expit(4 * logits),
    }[kind]()
    return logits, truth, generator.random(count) < truth


def test_calibrated_logits_are_left_alone() -> None:
    """A free temperature wins by chance now and then, and is then close to 1."""
    kinds = []
    for seed in range(10):
        logits, truth, labels = made("calibrated", seed)
        calibrator = fit_calibrator(logits, labels)
        kinds.append(calibrator.kind)
        assert float(np.abs(calibrator(logits) - truth).max()) < BAND
    assert kinds.count("identity") >= 6
    assert "isotonic" not in kinds


def test_a_temperature_is_recovered() -> None:
    """An isotonic map wins by chance now and then (2 of 40 seeds), and is then as good."""
    kinds = []
    for seed in range(10):
        logits, truth, labels = made("overconfident", seed)
        calibrator = fit_calibrator(logits, labels)
        kinds.append(calibrator.kind)
        if calibrator.kind == "temperature":
            assert calibrator.temperature == pytest.approx(2.5, rel=0.1)
            assert float(np.abs(calibrator(logits) - truth).max()) < BAND
        assert log_loss(calibrator(logits), labels) < log_loss(truth, labels) + 1e-3
    assert kinds.count("temperature") >= 8


def test_texts_are_halved_by_their_order_and_one_alone_by_its_rows() -> None:
    logits, _, labels = made("overconfident")
    text = np.arange(COUNT) // 100
    expected = fit_calibrator(logits, labels, text)
    assert expected.kind != "identity"
    for numbers in (2 * text, 2 * text + 1, text - 7):
        assert np.array_equal(fit_calibrator(logits, labels, numbers)(logits), expected(logits))
    alone = fit_calibrator(logits, labels, np.full(COUNT, 4))
    assert np.array_equal(alone(logits), fit_calibrator(logits, labels)(logits)) and alone.kind != "identity"


@pytest.mark.parametrize("seed", range(3))
def test_a_bent_map_gets_the_isotonic_one(seed: int) -> None:
    logits, truth, labels = made("bent", seed, 4 * COUNT)
    calibrator = fit_calibrator(logits, labels)
    assert calibrator.kind == "isotonic"
    assert 2 <= calibrator.knots.shape[1] <= 64
    inner = np.abs(logits) < 3
    assert float(np.abs(calibrator(logits) - truth)[inner].mean()) < BAND / 2
    assert log_loss(calibrator(logits), labels) < log_loss(expit(logits), labels) - 0.05


@pytest.mark.parametrize("kind", ["calibrated", "overconfident", "bent"])
@pytest.mark.parametrize("count", [20, 300, COUNT])
def test_every_fit_is_monotone_and_a_probability(kind: str, count: int) -> None:
    logits, _, labels = made(kind, 3, count)
    chance = fit_calibrator(logits, labels)(np.linspace(-30, 30, 4001))
    assert bool((np.diff(chance) >= -1e-7).all())
    assert 0 <= float(chance.min()) < float(chance.max()) <= 1


def test_labels_of_one_kind_or_too_few_keep_the_identity() -> None:
    logits = np.random.default_rng(0).standard_normal(100)
    for labels in (np.ones(100, dtype=bool), np.zeros(100, dtype=bool)):
        assert fit_calibrator(logits, labels).kind == "identity"
    assert fit_calibrator(5 * logits[:19], logits[:19] > 0).kind == "identity"
    assert fit_calibrator(logits[:0], logits[:0] > 0).kind == "identity"


def test_logits_of_one_value_are_no_trouble() -> None:
    """A head that fell back to a constant."""
    labels = np.random.default_rng(0).random(400) < 0.25
    calibrator = fit_calibrator(np.full(400, 1.5), labels)
    assert float(calibrator(np.array([1.5]))[0]) == pytest.approx(labels.mean(), abs=1e-3)


def test_halves_are_whole_texts_where_texts_are_given() -> None:
    """With each logit twice, in rows of both parities, only whole texts keep an isotonic fit from cheating."""
    generator = np.random.default_rng(1)
    logits = generator.standard_normal(200).repeat(2)
    labels = (generator.random(200) < 0.5).repeat(2)
    sequence = np.arange(200).repeat(2)
    calibrator = fit_calibrator(0.01 * logits, labels, sequence)
    assert calibrator.kind != "isotonic"


def test_log_loss_and_auc_are_scikit_learns() -> None:
    logits, truth, labels = made("bent")
    assert log_loss(truth, labels) == pytest.approx(sklearn_loss(labels, truth), rel=1e-6)
    assert auc(logits, labels) == pytest.approx(roc_auc_score(labels, logits))
    assert log_loss(np.array([0.0, 1.0]), np.array([True, False])) < 14, "certainty is held back"
    assert Calibrator()(logits).shape == logits.shape
