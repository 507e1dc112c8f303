"""Calibration of outputs and survival: the simplest map that fits, monotone; scores as scikit-learn and theory have them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy.special import expit, logit
from sklearn.metrics import log_loss as sklearn_loss, roc_auc_score
from specstop.policies.learned import Calibrator, SurvivalMaps
from specstop.train.heads.calibration import (
    LEAST,
    Outputs,
    auc,
    calibrate,
    calibration_error,
    fit_calibrator,
    fit_kind,
    fit_survival,
    log_loss,
    perfect_error,
)

COUNT = 6000
BAND = 0.05  # of probability; three binomial standard errors of the 100 rows around one knot's block are smaller
ROUNDS, DEPTH = 16_000, 4
SMALL = 0.02  # of calibration error; a calibrated predictor shows .005 to .01 with so many rounds

Array = np.ndarray[Any, Any]


def simulated_logits(kind: str, seed: int = 0, count: int = COUNT) -> tuple[Array, Array, Array]:
    """Return (logits, true probabilities, labels) of a map of this kind."""
    generator = np.random.default_rng(seed)
    logits = 2.0 * generator.standard_normal(count)
    truth = {
        "calibrated": lambda: expit(logits),
        "overconfident": lambda: expit(logits / 2.5),
        "bent": lambda: 0.25 + 0.5 * expit(4 * logits),
    }[kind]()
    return logits, truth, generator.random(count) < truth


@pytest.mark.parametrize(
    ("shape", "expected", "least"), [("calibrated", "identity", 6), ("overconfident", "temperature", 8)]
)
def test_the_simplest_map_that_fits_is_chosen(shape: str, expected: str, least: int) -> None:
    """A freer map wins by chance now and then, and is then as good."""
    kinds = []
    for seed in range(10):
        logits, truth, labels = simulated_logits(shape, seed)
        calibrator = fit_calibrator(logits, labels)
        kinds.append(calibrator.kind)
        if calibrator.kind == expected:
            assert float(np.abs(calibrator(logits) - truth).max()) < BAND
        if calibrator.kind == expected == "temperature":
            assert calibrator.temperature == pytest.approx(2.5, rel=0.1)
        assert log_loss(calibrator(logits), labels) < log_loss(truth, labels) + 1e-3
    assert kinds.count(expected) >= least
    assert shape != "calibrated" or "isotonic" not in kinds


@pytest.mark.parametrize("seed", range(3))
def test_a_bent_map_is_isotonic(seed: int) -> None:
    logits, truth, labels = simulated_logits("bent", seed, 4 * COUNT)
    calibrator = fit_calibrator(logits, labels)
    assert calibrator.kind == "isotonic" and 2 <= calibrator.knots.shape[1] <= 64
    inner = np.abs(logits) < 3
    assert float(np.abs(calibrator(logits) - truth)[inner].mean()) < BAND / 2
    assert log_loss(calibrator(logits), labels) < log_loss(expit(logits), labels) - 0.05


def test_halves_are_whole_groups_in_their_order() -> None:
    logits, _, labels = simulated_logits("overconfident")
    text = np.arange(COUNT) // 100
    expected = fit_calibrator(logits, labels, text)
    assert expected.kind != "identity"
    for numbers in (2 * text, 2 * text + 1, text - 7):
        assert np.array_equal(fit_calibrator(logits, labels, numbers)(logits), expected(logits))
    single = fit_calibrator(logits, labels, np.full(COUNT, 4))
    assert np.array_equal(single(logits), fit_calibrator(logits, labels)(logits)) and single.kind != "identity"
    # With each logit twice, in rows of both parities, only whole groups keep an isotonic fit from memorising noise.
    generator = np.random.default_rng(1)
    noise, chance = 0.01 * generator.standard_normal(200).repeat(2), (generator.random(200) < 0.5).repeat(2)
    assert fit_calibrator(noise, chance, np.arange(200).repeat(2)).kind != "isotonic"


@settings(max_examples=25, deadline=None)
@given(
    shape=st.sampled_from(["calibrated", "overconfident", "bent"]),
    kind=st.sampled_from(["chosen", "temperature", "isotonic"]),
    count=st.integers(0, 400),
    seed=st.integers(0, 99),
    soft=st.booleans(),
)
def test_every_map_is_monotone_and_a_probability(shape: str, kind: str, count: int, seed: int, soft: bool) -> None:
    logits, truth, labels = simulated_logits(shape, seed, count)
    targets = truth if soft else labels
    calibrator = fit_calibrator(logits, targets) if kind == "chosen" else fit_kind(kind, logits, targets)
    chance = calibrator(np.linspace(-30, 30, 4001))
    assert bool((np.diff(chance) >= -1e-7).all())
    assert 0 <= float(chance.min()) < float(chance.max()) <= 1
    if count < LEAST or (not soft and len(np.unique(labels)) < 2):
        assert calibrator.kind == "identity"


# Survival


def simulated_rounds(kind: str, seed: int = 0, rounds: int = ROUNDS) -> tuple[Array, Outputs]:
    """Return `accept` of rounds, and the rounds, whose survival is not (or is) the product of the factors.

    "shared": the tokens of a round are easy or hard together, which the features tell only at depth 3, in hindsight.
    """
    generator = np.random.default_rng(seed)
    u = generator.random((rounds, DEPTH))
    if kind == "shared":
        truth = np.where(generator.random((rounds, 1)) < 0.5, 0.95, 0.4).repeat(DEPTH, 1)
        # Given that the tokens before were accepted, the mean over both kinds of rounds at each depth.
        weights = np.stack([0.5 * 0.95 ** np.arange(DEPTH), 0.5 * 0.4 ** np.arange(DEPTH)])
        mean = (weights * [[0.95], [0.4]]).sum(0) / weights.sum(0)
        accept = np.where(np.arange(DEPTH) >= 2, truth, mean)
    else:
        accept = 0.3 + 0.65 * generator.random((rounds, DEPTH))
        truth = accept if kind == "calibrated" else accept**1.7
    return accept, outputs_of(np.zeros((rounds, DEPTH + 1, 2)), (u < truth).cumprod(1).sum(1))


def outputs_of(logits: Array, length: Array, lag: int = 0) -> Outputs:
    """Return the outputs of rounds with these accepted lengths, all tokens drawn."""
    depth, length_ = np.arange(logits.shape[1])[None], length[:, None]
    labels = np.stack([length_ >= depth - lag, length_ > depth], -1).astype(np.float32)
    known = np.stack(
        [(length_ >= depth - lag - 1) & (depth > lag), (length_ >= depth) & (depth < logits.shape[1] - 1)], -1
    )
    drawn = np.ones((len(length), logits.shape[1] - 1), dtype=bool)
    return Outputs(logits, labels, known, length, np.arange(len(length)) % 8, drawn, lag)


def survival(accept: Array, maps: SurvivalMaps | None = None) -> Array:
    """Return [R, K], the products of `accept` from depth 1 on, each mapped by its table."""
    product, columns = np.ones(len(accept)), []
    for at in range(accept.shape[1]):
        product = product * accept[:, at]
        if maps is not None:
            product = Calibrator("isotonic", knots=maps.tables[0, at])(product)
        columns.append(product)
    return np.stack(columns, 1)


def errors(predicted: Array, outputs: Outputs) -> list[float]:
    return [calibration_error(predicted[:, j], outputs.length > j) for j in range(DEPTH)]


@pytest.mark.parametrize("kind", ["overconfident", "shared"])
def test_an_uncalibrated_product_is_recalibrated_on_other_rounds(kind: str) -> None:
    maps = fit_survival(*simulated_rounds(kind))
    accept, other = simulated_rounds(kind, seed=1)
    before, after = survival(accept), survival(accept, maps)
    assert max(errors(before, other)) > 2 * SMALL > 2 * max(errors(after, other))
    assert maps is not None
    for depth in range(DEPTH):
        if not np.array_equal(*maps.tables[0, depth]):
            labels = other.length > depth
            assert log_loss(after[:, depth], labels) < log_loss(before[:, depth], labels)


def test_products_that_begin_later_have_tables_of_their_own() -> None:
    accept, outputs = simulated_rounds("overconfident")
    maps, alive = fit_survival(accept, outputs), outputs.length >= 1
    assert maps is not None
    product, labels = accept[alive, 1], outputs.length[alive] >= 2
    table = Calibrator("isotonic", knots=maps.tables[1, 1])
    assert calibration_error(table(product), labels) < SMALL < calibration_error(product, labels)
    assert np.array_equal(maps.by_depth(2)[2], table.pieces) and maps.by_depth(2)[1].size == 0
    assert bool((np.diff(maps.tables, axis=-1) >= 0).all()) and 0 <= maps.tables.min() < maps.tables.max() <= 1


def test_rounds_that_say_nothing_change_nothing() -> None:
    accept, outputs = simulated_rounds("calibrated", rounds=400)
    for length in (0, DEPTH):
        assert fit_survival(accept, dataclasses.replace(outputs, length=np.full(400, length))) is None
    assert fit_survival(*simulated_rounds("overconfident", rounds=LEAST - 1)) is None
    # Rounds whose tokens were not drawn, among others.
    accept, outputs = simulated_rounds("overconfident", rounds=3000)
    drawn = np.concatenate([outputs.drawn, np.zeros((400, DEPTH), dtype=bool)])
    length, group = np.append(outputs.length, np.zeros(400, dtype=int)), np.append(outputs.group, np.arange(400) % 8)
    both = dataclasses.replace(outputs, length=length, group=group, drawn=drawn)
    expected, maps = fit_survival(accept, outputs), fit_survival(np.concatenate([accept, np.ones((400, DEPTH))]), both)
    assert expected is not None and maps is not None
    np.testing.assert_array_equal(maps.tables[0], expected.tables[0])


# Both outputs


def test_the_calibrator_of_a_lagging_head_is_fitted_on_the_token_before() -> None:
    """The logit at depth j is the truth of x_{j-1}; as that of x_j it would be noise."""
    generator = np.random.default_rng(0)
    count, depth = 4000, 4
    chance = generator.random((count, depth))
    length = (generator.random((count, depth)) < chance).cumprod(1).sum(1)
    logits = np.zeros((count, depth + 1, 2))
    logits[:, 2:, 0] = 2.0 * logit(chance[:, :-1].clip(1e-4, 1 - 1e-4))  # overconfident by a factor of 2
    outputs = outputs_of(logits, length, lag=1)
    calibrated = calibrate(outputs)
    assert float(np.abs(calibrated.accept(logits[:, 2, 0]) - chance[:, 0]).mean()) < 0.02
    scores = [auc(*of.labelled(0)[:2]) for of in (outputs, outputs_of(logits, length))]
    assert scores[0] > 0.7 > 0.6 > scores[1]  # type: ignore[operator]
    accept = outputs.accept(calibrated.accept)
    assert bool((accept[:, 0] == 1.0).all()) and not bool((accept[:, 1] == 1.0).all())
    unchanged = calibrate(outputs, unchanged=True)
    assert (unchanged.accept.kind, unchanged.next.kind, unchanged.survival) == ("identity", "identity", None)


# Scores


def test_log_loss_and_auc_are_scikit_learns() -> None:
    logits, truth, labels = simulated_logits("bent")
    assert log_loss(truth, labels) == pytest.approx(sklearn_loss(labels, truth), rel=1e-6)
    assert auc(logits, labels) == pytest.approx(roc_auc_score(labels, logits))
    assert log_loss(np.array([0.0, 1.0]), np.array([True, False])) < 14, "a loss is finite"
    assert auc(logits, np.ones(COUNT)) is None
    # Chances weigh as much as draws with these chances.
    assert auc(logits, truth) == pytest.approx(auc(logits, labels), abs=0.03)
    assert log_loss(truth, truth) == pytest.approx(log_loss(truth, labels), abs=0.03)


def test_the_calibration_error_is_the_mean_gap_of_bins_of_equal_mass() -> None:
    predicted, labels = np.linspace(0, 1, 100), np.arange(100) % 3 == 0
    expected = sum(
        abs(float(predicted[a : a + 10].mean()) - float(labels[a : a + 10].mean())) / 10 for a in range(0, 100, 10)
    )
    order = np.random.default_rng(0).permutation(100)
    assert calibration_error(predicted[order], labels[order]) == pytest.approx(expected)
    assert calibration_error(predicted[:0], labels[:0]) == 0.0 and perfect_error(predicted[:0]) == (0.0, 0.0)
    assert calibration_error(np.array([0.25]), np.array([True])) == pytest.approx(0.75)


@pytest.mark.parametrize("rows", [500, 5000])
def test_the_error_of_a_perfect_predictor_agrees_with_theory(rows: int) -> None:
    """Each bin's gap is nearly normal: its mean size is sqrt(2 / pi) of its deviation, sqrt(p (1 - p) / n)."""
    predicted = np.full(rows, 0.3)
    expected = (2 / np.pi) ** 0.5 * (0.3 * 0.7 / (rows / 10)) ** 0.5
    mean, high = perfect_error(predicted)
    assert mean == pytest.approx(expected, rel=0.1)
    assert mean < high < 2 * mean and perfect_error(predicted) == (mean, high)
