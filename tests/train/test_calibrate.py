"""Calibration: the simplest map that fits, always monotone."""

from __future__ import annotations

import pytest
import torch
from sklearn.metrics import log_loss as sklearn_loss
from sklearn.metrics import roc_auc_score
from specstop.policies.calibration import Calibrator
from specstop.train.heads.calibrate import auc, fit_calibrator, log_loss

COUNT = 6000
BAND = 0.05  # of probability; three binomial standard errors of the 100 rows around one knot's block are smaller


def made(kind: str, seed: int = 0, count: int = COUNT) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (logits, true probabilities, labels) of a map of this kind."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2.0 * torch.randn(count, generator=generator)
    truth = {
        "calibrated": lambda: torch.sigmoid(logits),
        "overconfident": lambda: torch.sigmoid(logits / 2.5),
        "bent": lambda: 0.25 + 0.5 * torch.sigmoid(4 * logits),
    }[kind]()
    return logits, truth, torch.rand(count, generator=generator) < truth


def test_calibrated_logits_are_left_alone() -> None:
    """A free temperature wins by chance now and then, and is then close to 1."""
    kinds = []
    for seed in range(10):
        logits, truth, labels = made("calibrated", seed)
        calibrator = fit_calibrator(logits, labels)
        kinds.append(calibrator.kind)
        assert float((calibrator(logits) - truth).abs().max()) < BAND
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
            assert float((calibrator(logits) - truth).abs().max()) < BAND
        assert log_loss(calibrator(logits), labels) < log_loss(truth, labels) + 1e-3
    assert kinds.count("temperature") >= 8


@pytest.mark.parametrize("seed", range(3))
def test_a_bent_map_gets_the_isotonic_one(seed: int) -> None:
    logits, truth, labels = made("bent", seed, 4 * COUNT)
    calibrator = fit_calibrator(logits, labels)
    assert calibrator.kind == "isotonic"
    assert 2 <= calibrator.knots.shape[1] <= 64
    inner = logits.abs() < 3
    assert float((calibrator(logits) - truth)[inner].abs().mean()) < BAND / 2
    assert log_loss(calibrator(logits), labels) < log_loss(torch.sigmoid(logits), labels) - 0.05


@pytest.mark.parametrize("kind", ["calibrated", "overconfident", "bent"])
@pytest.mark.parametrize("count", [20, 300, COUNT])
def test_every_fit_is_monotone_and_a_probability(kind: str, count: int) -> None:
    logits, _, labels = made(kind, 3, count)
    chance = fit_calibrator(logits, labels)(torch.linspace(-30, 30, 4001))
    assert bool((chance.diff() >= -1e-7).all())
    assert 0 <= float(chance.min()) < float(chance.max()) <= 1


def test_labels_of_one_kind_or_too_few_keep_the_identity() -> None:
    logits = torch.randn(100, generator=torch.Generator().manual_seed(0))
    for labels in (torch.ones(100, dtype=torch.bool), torch.zeros(100, dtype=torch.bool)):
        assert fit_calibrator(logits, labels).kind == "identity"
    assert fit_calibrator(5 * logits[:19], logits[:19] > 0).kind == "identity"
    assert fit_calibrator(logits[:0], logits[:0] > 0).kind == "identity"


def test_logits_of_one_value_are_no_trouble() -> None:
    """A head that fell back to a constant."""
    labels = torch.rand(400, generator=torch.Generator().manual_seed(0)) < 0.25
    calibrator = fit_calibrator(torch.full((400,), 1.5), labels)
    assert float(calibrator(torch.tensor([1.5]))) == pytest.approx(float(labels.float().mean()), abs=1e-3)


def test_halves_are_whole_texts_where_texts_are_given() -> None:
    """With each logit twice, in rows of both parities, only whole texts keep an isotonic fit from cheating."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(200, generator=generator).repeat_interleave(2)
    labels = (torch.rand(200, generator=generator) < 0.5).repeat_interleave(2)
    sequence = torch.arange(200).repeat_interleave(2)
    calibrator = fit_calibrator(0.01 * logits, labels, sequence)
    assert calibrator.kind != "isotonic"


def test_log_loss_and_auc_are_scikit_learns() -> None:
    logits, truth, labels = made("bent")
    assert log_loss(truth, labels) == pytest.approx(sklearn_loss(labels.numpy(), truth.double().numpy()), rel=1e-6)
    assert auc(logits, labels) == pytest.approx(roc_auc_score(labels.numpy(), logits.numpy()))
    assert log_loss(torch.tensor([0.0, 1.0]), torch.tensor([True, False])) < 14, "certainty is held back"
    assert Calibrator()(logits).shape == logits.shape
