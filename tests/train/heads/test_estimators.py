"""Heads as scikit-learn estimators, and the calibration of their outputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy.special import expit, logit
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss as sklearn_loss, roc_auc_score
from sklearn.utils.estimator_checks import parametrize_with_checks
from specstop.policies import InputError
from specstop.policies.learned import Calibrator, SurvivalMaps
from specstop.policies.rules import Threshold
from specstop.train import make_head
from specstop.train.heads import calibration
from specstop.train.heads.calibration import (
    MIN_ROWS,
    Outputs,
    calibrate,
    calibration_error,
    fit_calibrator,
    fit_survival,
)
from specstop.train.heads.crossfit import fit_head
from specstop.train.heads.linear import TokensEstimator
from specstop.train.heads.rows import FitRows
from synthetic import NAMES, TRUE_BIAS, TRUE_WEIGHT, synthetic_rows

from specstop import DraftStep, LearnedPolicy

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore")
Array = np.ndarray[Any, Any]
# The checks have 20 to 300 rows. The defaults, which are for hundreds of thousands, would learn nothing from them.
SMALL: dict[str, dict[str, Any]] = {
    "logistic": {},
    "xgboost": {"min_child_weight": 1, "trees": 30},
    "mlp": {"learning_rate": 0.04, "width": 16, "epochs": 15},
}


@parametrize_with_checks([make_head(name, params) for name, params in SMALL.items() if name != "mlp"])
def test_scikit_learns_checks(estimator, check):
    check(estimator)


@pytest.fixture(scope="module")
def parts():
    return synthetic_rows(1500, 1), synthetic_rows(600, 2)


@pytest.mark.parametrize("name", SMALL)
def test_a_policy_decides_as_the_estimator_predicts(name):
    generator = torch.Generator().manual_seed(0)
    x = 1.5 * torch.randn(1200, 3, generator=generator)
    y = (torch.rand(1200, generator=generator) < torch.sigmoid(x @ TRUE_WEIGHT[0] + TRUE_BIAS[0])).numpy()
    x = x.numpy()
    model = make_head(name, SMALL[name]).set_params(features=NAMES).fit(x, y)
    assert model.score(x, y) > max(y.mean(), 1 - y.mean()) + 0.05
    np.testing.assert_array_equal(model.decision_function(x), model.export().scores(x, 1)[:, 0])
    rule, exact = Threshold("survival", 0.4), Calibrator()
    policy = LearnedPolicy(name, model.feature_names_, model.export(), exact, exact, rule, 4)
    alive, parent = np.ones((len(x), 1), dtype=bool), np.zeros((len(x), 1), dtype=np.int64)
    keep, _ = policy.keep(DraftStep(1, alive, parent, x[:, None], {}, np.arange(len(x))), None)
    clear = np.abs(model.predict_proba(x)[:, 1] - 0.4) > 1e-4
    np.testing.assert_array_equal(keep[clear, 0], model.predict_proba(x)[clear, 1] > 0.4)


# The registry


# Networks


@pytest.mark.parametrize(
    ("name", "params", "trainer", "noun"),
    [
        ("forest", {}, {}, "forest"),
        ("mlp", {"learning_rat": 3}, {}, "did you mean 'learning_rate'"),
        ("xgboost", {"max_depth": 30}, {}, "max_depth"),
        ("logistic", {}, {"accelerator": "gpu"}, "trainer"),
        ("mlp", {}, {"epochs": 3}, "trainer.*epochs"),
    ],
)
def test_invalid_parameters_are_refused_by_name(name, params, trainer, noun, parts):
    with pytest.raises(InputError, match=noun) as caught:
        make_head(name, params, trainer).set_params(features=NAMES).fit(parts[0], stop_rows=parts[1])
    assert "\n" not in str(caught.value)


# Tokens


def test_rare_tokens_are_fitted_as_far_as_frequent_ones():
    generator = torch.Generator().manual_seed(0)
    frequencies = 1.0 / torch.arange(1, 200).double()
    ids = torch.multinomial(frequencies, 2 * 10_000, replacement=True, generator=generator).view(-1, 2)
    odds = 2.0 * torch.randn(len(frequencies), generator=generator)
    chances = torch.sigmoid(torch.stack([odds[ids].sum(1), -odds[ids].sum(1)], 1))  # of the two outputs
    hits = torch.rand(chances.shape, generator=generator) < chances
    known = torch.stack([torch.ones_like(hits[:, 0]), hits[:, 0]], 1)
    rows = FitRows(ids.float(), torch.ones(len(ids), dtype=torch.int64), hits.float(), known)
    head = TokensEstimator(("drawn_token", "above_token"), C=0.5, buckets=0).fit(rows, stop_rows=rows).export()
    x = torch.nn.functional.one_hot(ids, len(frequencies)).flatten(1).double().numpy()
    for column, use in enumerate(known.T.numpy()):
        model = LogisticRegression(C=0.5, solver="newton-cholesky", tol=1e-10, max_iter=1000)
        expected = logit(model.fit(x[use], hits[:, column].numpy()[use]).predict_proba(x)[:, 1])
        # 3.0 where the fit ends early
        assert np.abs(head.scores(rows.features.numpy(), 1)[:, column] - expected).max() < 0.15


# Engines


# Calibration


COUNT = 6000
BAND = 0.05  # of probability; three binomial standard errors of the 100 rows around one knot's block are smaller
ROUNDS, DEPTH = 16_000, 4
CALIBRATED = 0.02  # of calibration error; a calibrated predictor shows .005 to .01 with so many rounds


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
    ("shape", "expected", "least", "count"),
    [
        ("calibrated", "identity", 6, COUNT),
        ("overconfident", "temperature", 8, COUNT),
        ("bent", "isotonic", 10, 4 * COUNT),
    ],
)
def test_the_simplest_map_that_fits_is_chosen(shape, expected, least, count):
    """A freer map wins by chance now and then, and is then as good."""
    kinds = []
    for seed in range(10):
        logits, truth, labels = simulated_logits(shape, seed, count)
        calibrator = fit_calibrator(logits, labels)
        kinds.append(calibrator.kind)
        error = np.abs(calibrator(logits) - truth)
        if calibrator.kind == "isotonic":
            assert 2 <= calibrator.knots.shape[1] <= 64 and float(error[np.abs(logits) < 3].mean()) < BAND / 2
        elif calibrator.kind == expected:
            assert float(error.max()) < BAND
        assert calibration.log_loss(calibrator(logits), labels) < calibration.log_loss(truth, labels) + 1e-3
    assert kinds.count(expected) >= least
    assert shape != "calibrated" or "isotonic" not in kinds


@settings(max_examples=25, deadline=None)
@given(
    shape=st.sampled_from(["calibrated", "overconfident", "bent"]),
    kind=st.sampled_from(["chosen", "temperature", "isotonic"]),
    count=st.integers(0, 400),
    seed=st.integers(0, 99),
    soft=st.booleans(),
)
def test_every_map_is_monotone_and_a_probability(shape, kind, count, seed, soft):
    logits, truth, labels = simulated_logits(shape, seed, count)
    targets = truth if soft else labels
    calibrator = fit_calibrator(logits, targets) if kind == "chosen" else calibration.fit_kind(kind, logits, targets)
    chance = calibrator(np.linspace(-30, 30, 4001))
    assert bool((np.diff(chance) >= -1e-7).all())
    assert 0 <= float(chance.min()) < float(chance.max()) <= 1
    if count < MIN_ROWS or (not soft and len(np.unique(labels)) < 2):
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


def largest_error(accept: Array, outputs: Outputs, maps: SurvivalMaps | None = None) -> float:
    """Return the calibration error of the products of `accept` from depth 1 on, each mapped by its table."""
    product, errors = np.ones(len(accept)), []
    for at in range(DEPTH):
        product = product * accept[:, at]
        if maps is not None:
            product = Calibrator("isotonic", knots=maps.tables[0, at])(product)
        errors.append(calibration_error(product, outputs.length > at))
    return max(errors)


@pytest.mark.parametrize("kind", ["overconfident", "shared"])
def test_an_uncalibrated_product_is_recalibrated_on_other_rounds(kind):
    fitted, outputs = simulated_rounds(kind)
    maps = fit_survival(fitted, outputs)
    accept, other = simulated_rounds(kind, seed=1)
    assert largest_error(accept, other) > 2 * CALIBRATED > 2 * largest_error(accept, other, maps)
    assert maps is not None and bool((np.diff(maps.tables, axis=-1) >= 0).all())
    if kind == "overconfident":  # products that begin at depth 2 have tables of their own
        alive = outputs.length >= 1
        product, labels = fitted[alive, 1], outputs.length[alive] >= 2
        table = Calibrator("isotonic", knots=maps.tables[1, 1])
        assert calibration_error(table(product), labels) < CALIBRATED < calibration_error(product, labels)
        assert np.array_equal(maps.by_depth(2)[2], table.pieces) and maps.by_depth(2)[1].size == 0


# Both outputs


def test_the_calibrator_of_a_lagging_head_is_fitted_on_the_token_before():
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
    accept = outputs.accept(calibrated.accept)
    assert bool((accept[:, 0] == 1.0).all()) and not bool((accept[:, 1] == 1.0).all())


# Scores


def test_log_loss_and_auc_are_scikit_learns():
    logits, truth, labels = simulated_logits("bent")
    assert calibration.log_loss(truth, labels) == pytest.approx(sklearn_loss(labels, truth), rel=1e-6)
    assert calibration.auc(logits, labels) == pytest.approx(roc_auc_score(labels, logits))
    assert calibration.log_loss(np.array([0.0, 1.0]), np.array([True, False])) < 14, "a loss is finite"
    assert calibration.auc(logits, np.ones(COUNT)) is None
    # Chances weigh as much as draws with these chances.
    assert calibration.auc(logits, truth) == pytest.approx(calibration.auc(logits, labels), abs=0.03)
    assert calibration.log_loss(truth, truth) == pytest.approx(calibration.log_loss(truth, labels), abs=0.03)


def test_the_calibration_error_is_the_mean_gap_of_bins_of_equal_mass():
    predicted, labels = np.linspace(0, 1, 100), np.arange(100) % 3 == 0
    expected = sum(
        abs(float(predicted[a : a + 10].mean()) - float(labels[a : a + 10].mean())) / 10 for a in range(0, 100, 10)
    )
    order = np.random.default_rng(0).permutation(100)
    assert calibration_error(predicted[order], labels[order]) == pytest.approx(expected)
    assert calibration_error(predicted[:0], labels[:0]) == 0.0
    assert calibration.perfect_error(predicted[:0]) == (0.0, 0.0)
    # Each bin's gap of a perfect predictor is nearly normal: its mean is sqrt(2 / pi) of its deviation, sqrt(p (1 - p) / n).
    for rows in (500, 5000):
        mean, high = calibration.perfect_error(np.full(rows, 0.3))
        assert mean == pytest.approx((2 / np.pi * 0.3 * 0.7 / (rows / 10)) ** 0.5, rel=0.1) and mean < high < 2 * mean


@pytest.mark.parametrize("name", ["logistic", "mlp", "xgboost"])
def test_a_head_is_fitted_if_the_held_out_prompts_have_no_drawn_token(name):
    rows, others = synthetic_rows(1500, 1), synthetic_rows(600, 2)
    without = others.subset(others.depth == 0)
    for held_out in (without, without.subset(torch.zeros(len(without), dtype=torch.bool))):
        fitted = fit_head(make_head(name), rows, held_out, NAMES).export()
        use = (others.depth == 1).numpy()
        logits = fitted.scores(others.features[use].numpy(), 1)[:, 0]
        assert calibration.auc(logits, others.labels[use, 0].numpy()) > 0.7
