"""Fitting survival tables: a product that is off is recalibrated, one that is right is left alone."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pytest
from specstop.policies.learned import Calibrator, SurvivalMaps
from specstop.train.heads import calibration
from specstop.train.heads.calibration import (
    Scored,
    calibration_error,
    fit_survival,
    log_loss,
    perfect_error,
    survival,
    survival_scores,
)

ROUNDS, DEPTH = 16_000, 4
Array = np.ndarray[Any, Any]
SMALL = 0.02  # the bar; a calibrated predictor shows .005 to .01 with so many rounds


@dataclass(frozen=True)
class Rounds:
    """Arguments of `fit_survival`."""

    accept: Array
    length: Array
    group: Array
    drawn: Array

    def fit(self) -> tuple[SurvivalMaps, tuple[str, ...]]:
        return fit_survival(self.accept, self.length, self.group, self.drawn)


def simulated(kind: str, seed: int = 0, rounds: int = ROUNDS) -> Rounds:
    """Return rounds whose survival is not (or is) the product of what is predicted of their tokens.

    "shared": the tokens of a round are easy or hard together, which the features tell only at depth 3, in hindsight.
    """
    generator = np.random.default_rng(seed)
    u = generator.random((rounds, DEPTH))
    if kind == "calibrated":
        accept = truth = 0.3 + 0.65 * generator.random((rounds, DEPTH))
    elif kind == "overconfident":
        accept = 0.3 + 0.65 * generator.random((rounds, DEPTH))
        truth = accept**1.7
    else:
        truth = np.where(generator.random((rounds, 1)) < 0.5, 0.95, 0.4).repeat(DEPTH, 1)
        # Given that the tokens before were accepted, the mean over both kinds of rounds at each depth.
        weights = np.stack([0.5 * 0.95 ** np.arange(DEPTH), 0.5 * 0.4 ** np.arange(DEPTH)])
        mean = (weights * [[0.95], [0.4]]).sum(0) / weights.sum(0)
        accept = np.where(np.arange(DEPTH) >= 2, truth, mean)
    return Rounds(accept, (u < truth).cumprod(1).sum(1), np.arange(rounds) % 8, np.ones(accept.shape, dtype=bool))


def errors(predicted: Array, length: Array) -> list[float]:
    return [calibration_error(predicted[:, j], length > j) for j in range(DEPTH)]


@pytest.mark.parametrize("kind", ["overconfident", "shared"])
def test_a_product_that_is_off_is_recalibrated_on_other_rounds(kind: str) -> None:
    maps, kinds = simulated(kind).fit()
    other = simulated(kind, seed=1)
    before = survival(other.accept)
    after = survival(other.accept, maps)
    assert max(errors(before, other.length)) > 2 * SMALL
    assert max(errors(after, other.length)) < SMALL
    for depth in range(DEPTH):
        if kinds[depth] != "identity":
            labels = other.length > depth
            assert log_loss(after[:, depth], labels) < log_loss(before[:, depth], labels)


def test_a_calibrated_product_is_left_alone() -> None:
    """A freer map wins by chance now and then, and is then close to the identity."""
    fits = [simulated("calibrated", seed).fit() for seed in range(3)]
    assert [kind for _, kinds in fits for kind in kinds].count("identity") >= 8
    other = simulated("calibrated", 9)
    for maps, _ in fits:
        assert max(errors(survival(other.accept, maps), other.length)) < SMALL


def test_products_that_begin_later_have_tables_of_their_own() -> None:
    rounds = simulated("overconfident")
    maps, _ = rounds.fit()
    alive = rounds.length >= 1
    product = rounds.accept[alive, 1]
    table = Calibrator("isotonic", knots=maps.tables[1, 1])
    assert np.array_equal(maps.by_depth(2)[2], table.pieces)
    labels = rounds.length[alive] >= 2
    assert calibration_error(table(product), labels) < SMALL < calibration_error(product, labels)
    assert maps.by_depth(2)[1].size == 0


@pytest.mark.parametrize("kind", ["temperature", "isotonic"])
@pytest.mark.parametrize("rounds", [150, 4000])
def test_every_map_is_monotone_within_its_range(kind: str, rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "fit_calibrator", lambda x, y, groups: calibration.fit_kind(kind, x, y))
    maps, kinds = simulated("overconfident", rounds=rounds).fit()
    assert kinds == (kind,) * DEPTH
    assert maps.tables.shape == (calibration.MAX_STARTS, DEPTH, 2, calibration.KNOTS)
    assert bool((np.diff(maps.tables, axis=-1) >= 0).all())
    assert 0 <= float(maps.tables.min()) < float(maps.tables.max()) <= 1


@pytest.mark.parametrize("length", [0, DEPTH])
def test_labels_of_one_kind_or_too_few_rounds_change_nothing(length: int) -> None:
    same = simulated("calibrated", rounds=400)
    _, kinds = replace(same, length=np.full_like(same.length, length)).fit()
    assert kinds == ("identity",) * DEPTH
    assert not simulated("overconfident", rounds=calibration.LEAST - 1).fit()[0].changed


def test_rounds_in_which_a_drafter_knows_no_token_have_no_say() -> None:
    known, unknown = simulated("overconfident", rounds=3000), simulated("calibrated", rounds=2000, seed=1)
    unknown = replace(unknown, length=np.zeros_like(unknown.length), drawn=np.zeros_like(unknown.drawn))
    both = Rounds(*(np.concatenate([getattr(side, f.name) for side in (known, unknown)]) for f in fields(Rounds)))
    np.testing.assert_array_equal(both.fit()[0].tables[0], known.fit()[0].tables[0])
    scored = [Scored(survival(p.accept), p.length, np.zeros(len(p.length)), p.drawn) for p in (both, known, unknown)]
    assert survival_scores(scored[0]) == survival_scores(scored[1]) and survival_scores(scored[2]) == []


# Scores


def test_the_error_is_the_mean_gap_of_bins_of_equal_mass() -> None:
    predicted = np.linspace(0, 1, 100)
    labels = np.arange(100) % 3 == 0
    expected = sum(
        abs(float(predicted[a : a + 10].mean()) - float(labels[a : a + 10].mean())) / 10 for a in range(0, 100, 10)
    )
    order = np.random.default_rng(0).permutation(100)
    assert calibration_error(predicted[order], labels[order]) == pytest.approx(expected)
    assert calibration_error(predicted[:0], labels[:0]) == 0.0
    assert calibration_error(np.array([0.25]), np.array([True])) == pytest.approx(0.75)


@pytest.mark.parametrize("rows", [500, 5000])
def test_a_perfect_predictor_shows_what_theory_says(rows: int) -> None:
    """Each bin's gap is nearly normal: its mean size is sqrt(2 / pi) of its deviation, sqrt(p (1 - p) / n)."""
    predicted = np.full(rows, 0.3)
    expected = (2 / np.pi) ** 0.5 * (0.3 * 0.7 / (rows / 10)) ** 0.5
    mean, high = perfect_error(predicted)
    assert mean == pytest.approx(expected, rel=0.1)
    assert mean < high < 2 * mean
    assert perfect_error(predicted) == (mean, high)


def test_scores_come_by_depth_and_temperature() -> None:
    products = simulated("calibrated", rounds=2000)
    temperature = np.where(np.arange(2000) < 500, 0.0, 0.7)
    rows = survival_scores(Scored(survival(products.accept), products.length, temperature, products.drawn), deepest=3)
    assert [(row["temperature"], row["depth"]) for row in rows] == [(t, d) for t in (None, 0.0, 0.7) for d in (1, 2, 3)]
    assert [row["rounds"] for row in rows] == [2000] * 3 + [500] * 3 + [1500] * 3
    first = rows[0]
    labels = products.length >= 1
    assert first["observed"] == pytest.approx(float(labels.mean()))
    assert first["brier"] == pytest.approx(float(np.square(products.accept[:, 0] - labels).mean()), rel=1e-5)
    assert 0.5 < first["auc"] < 1
    alone = survival_scores(Scored(survival(products.accept), products.length, np.zeros(2000), products.drawn))
    assert [row["temperature"] for row in alone] == [0.0] * DEPTH
