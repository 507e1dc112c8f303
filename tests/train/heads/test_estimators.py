"""Heads as scikit-learn estimators: scikit-learn's checks, the way to a policy, the registry, and what lightning is given."""

from __future__ import annotations

import signal
from importlib.metadata import EntryPoint
from typing import Any

import numpy as np
import optuna
import pytest
import specstop.train.heads.trainer as trainer_module
import torch
import xgboost as xgb
from sklearn.base import clone
from sklearn.model_selection import GroupKFold, cross_val_score
from sklearn.utils.estimator_checks import parametrize_with_checks
from specstop.policies.contract import DraftStep
from specstop.policies.errors import InputError, PolicyError
from specstop.policies.heads import HEADS as INFERENCE_HEADS
from specstop.policies.learned import Calibrator, LearnedPolicy
from specstop.policies.rules import Threshold
from specstop.train.heads import HEADS, head_class, make_head
from specstop.train.heads.boosted import XGBoostEstimator, flatten
from specstop.train.heads.linear import LogisticEstimator
from specstop.train.heads.networks import MLPEstimator, ResNet, ResNetEstimator
from specstop.train.heads.rows import FitRows
from synthetic import NAMES, TRUE_BIAS, TRUE_WEIGHT, synthetic_rows

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore")

# The checks have 20 to 300 rows. The defaults, which are for hundreds of thousands, would learn nothing from them.
SMALL: dict[str, dict[str, Any]] = {
    "logistic": {},
    "xgboost": {"min_child_weight": 1, "trees": 30},
    "mlp": {"learning_rate": 0.04, "width": 16, "epochs": 15},
}


@parametrize_with_checks([make_head(name, params) for name, params in SMALL.items() if name != "mlp"])
def test_scikit_learns_checks(estimator: Any, check: Any) -> None:
    check(estimator)


@pytest.mark.slow
@parametrize_with_checks([make_head("mlp", SMALL["mlp"])])
def test_scikit_learns_checks_of_a_network(estimator: Any, check: Any) -> None:
    check(estimator)


def accept_rows(count: int, seed: int = 0) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    generator = torch.Generator().manual_seed(seed)
    x = 1.5 * torch.randn(count, 3, generator=generator)
    truth = torch.sigmoid(x @ TRUE_WEIGHT[0] + TRUE_BIAS[0])
    return x.numpy(), (torch.rand(count, generator=generator) < truth).numpy()


@pytest.fixture(scope="module")
def parts() -> tuple[FitRows, FitRows]:
    return synthetic_rows(1500, 1), synthetic_rows(600, 2)


@pytest.mark.parametrize("name", SMALL)
def test_a_policy_decides_as_the_estimator_predicts(name: str) -> None:
    x, y = accept_rows(1200)
    model = make_head(name, SMALL[name]).set_params(features=NAMES).fit(x, y)
    assert model.score(x, y) > max(y.mean(), 1 - y.mean()) + 0.05
    np.testing.assert_array_equal(model.decision_function(x), model.export().scores(x, 1)[:, 0])
    rule, exact = Threshold("survival", 0.4), Calibrator()
    policy = LearnedPolicy(name, model.feature_names_, model.export(), exact, exact, rule, 4)
    alive, parent = np.ones((len(x), 1), dtype=bool), np.zeros((len(x), 1), dtype=np.int64)
    keep, _ = policy.keep(DraftStep(1, alive, parent, x[:, None], {}, np.arange(len(x))), None)
    clear = np.abs(model.predict_proba(x)[:, 1] - 0.4) > 1e-4
    np.testing.assert_array_equal(keep[clear, 0], model.predict_proba(x)[clear, 1] > 0.4)


def test_prompts_are_grouped_by_scikit_learns_means() -> None:
    x, y = accept_rows(900)
    groups = np.arange(900) % 30
    scores = cross_val_score(LogisticEstimator(NAMES), x, y, groups=groups, cv=GroupKFold(3), scoring="neg_log_loss")
    constant = y.mean() * np.log(y.mean()) + (1 - y.mean()) * np.log(1 - y.mean())
    assert scores.mean() > constant + 0.1


def test_wrong_names_of_features_are_refused() -> None:
    x, y = accept_rows(100)
    with pytest.raises(InputError, match="features: expected the names of 3 features, got top1"):
        LogisticEstimator(("top1",)).fit(x, y)
    with pytest.raises(PolicyError, match="fit the estimator with the names of its columns"):
        LogisticEstimator().fit(x, y).export()


# The registry


@pytest.mark.parametrize("name", HEADS.builtin)
def test_every_head_names_a_form_that_policies_run_and_can_be_searched(name: str) -> None:
    build = head_class(name)
    assert build.form in INFERENCE_HEADS
    found = []
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(0))
    study.optimize(lambda trial: found.append(make_head(name, build.search_space(trial))) or 0.0, n_trials=3)
    assert len(found) == 3 and all(isinstance(clone(one), build) for one in found)
    assert set(study.trials[0].params) == {f"{build.form} {key}" for key in build.space}


@pytest.mark.parametrize(
    ("name", "params", "trainer", "message"),
    [
        ("forest", {}, {}, "head: unknown head 'forest'.*; expected logistic, "),
        (
            "mlp",
            {"depth": 3},
            {},
            "unknown hyper-parameter 'depth' .* of the head mlp; expected epochs, .*width, layers",
        ),
        ("mlp", {"learning_rat": 3}, {}, "did you mean 'learning_rate'"),
        ("mlp", {"learning_rate": 0.0}, {}, "learning_rate: expected"),
        ("mlp", {"batch_size": 0}, {}, "batch_size: expected"),
        ("xgboost", {"max_depth": 30}, {}, "max_depth: expected a whole number from 1 to 10"),
        ("logistic", {}, {"accelerator": "gpu"}, "trainer: the head logistic is not a network"),
    ],
)
def test_wrong_parameters_are_refused_by_name(name: str, params: Any, trainer: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_head(name, params, trainer)


def test_a_plugin_adds_a_head(monkeypatch: pytest.MonkeyPatch, parts: tuple[FitRows, FitRows]) -> None:
    point = EntryPoint("strict", f"{__name__}:Strict", "specstop.heads")
    monkeypatch.setattr("specstop.policies.registry.entry_points", lambda group: [point])
    assert "strict" in HEADS.names()
    head = make_head("strict", {"C": 0.01}).set_params(features=NAMES).fit(parts[0], stop_rows=parts[1]).export()
    assert head.kind == "logistic"
    odd = EntryPoint("odd", f"{__name__}:accept_rows", "specstop.heads")
    monkeypatch.setattr("specstop.policies.registry.entry_points", lambda group: [odd])
    with pytest.raises(InputError, match="the plugin 'odd' is not a subclass of"):
        make_head("odd")


class Strict(LogisticEstimator):
    """A plugin."""

    passes = 2


# Networks


def fit_mlp(parts: tuple[FitRows, FitRows], **params: Any) -> dict[str, Any]:
    """Return the tensors of a small network."""
    return MLPEstimator(NAMES, **{"width": 8, **params}).fit(parts[0], stop_rows=parts[1]).tensors_


def test_training_stops_early() -> None:
    """Labels are noise: the held-out loss rises once the network memorises them."""
    generator = torch.Generator().manual_seed(0)
    noise = []
    for count in (60, 60):
        rows = synthetic_rows(count)
        labels = torch.rand(count, generator=generator) < 0.5
        noise.append(FitRows(rows.features, rows.depth.clamp_min(1), labels, labels, labels))
    calls: list[tuple[int, int]] = []
    MLPEstimator(NAMES, epochs=100, learning_rate=0.05, batch_size=16).fit(
        noise[0], stop_rows=noise[1], progress=lambda task, *done: calls.append(done)
    )
    done, total = calls[-1]
    assert done == total < calls[0][1] / 2, "the task ends there"


def test_params_shape_the_network(parts: tuple[FitRows, FitRows]) -> None:
    tensors = fit_mlp(parts, epochs=1, width=5, layers=3, learning_rate=0.01, weight_decay=0.1)
    assert [tensors[f"weight.{i}"].shape[0] for i in range(4)] == [5, 5, 5, 2]
    first, second = (fit_mlp(parts, epochs=1, learning_rate=rate) for rate in (2e-3, 0.1))
    assert not np.array_equal(first["weight.0"], second["weight.0"])


@pytest.mark.parametrize("caught", [True, False], ids=["handled by the caller", "not handled"])
def test_a_request_to_terminate_reaches_the_caller(
    caught: bool, parts: tuple[FitRows, FitRows], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning would end the process with exit code 0."""
    calls: list[Any] = []
    raise_signal = signal.raise_signal

    def terminate(task: str, done: int, total: int) -> None:
        if done == 1:
            raise_signal(signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, (lambda number, frame: calls.append("caught")) if caught else signal.SIG_DFL)
    monkeypatch.setattr(trainer_module.signal, "raise_signal", calls.append)
    try:
        with pytest.raises(KeyboardInterrupt):
            MLPEstimator(NAMES, epochs=3).fit(parts[0], stop_rows=parts[1], progress=terminate)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert calls == (["caught"] if caught else [signal.SIGTERM])


def test_an_interrupted_fit_raises_and_leaves_handlers_and_random_state(parts: tuple[FitRows, FitRows]) -> None:
    def interrupt(task: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    state = torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt):
        MLPEstimator(NAMES, epochs=3).fit(parts[0], stop_rows=parts[1], progress=interrupt)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        ({"accelerator": "gpuu"}, "trainer: .*gpuu"),
        ({"devices": 2}, "trainer devices: expected one device, not 2"),
        ({"precision": "17"}, "trainer: .*17"),
        ({"epochs": 3}, "trainer: .*unexpected keyword argument 'epochs'"),
    ],
)
def test_what_lightning_refuses_is_one_line(
    trainer: dict[str, Any], message: str, parts: tuple[FitRows, FitRows]
) -> None:
    with pytest.raises(InputError, match=message) as caught:
        fit_mlp(parts, trainer=trainer)
    assert "\n" not in str(caught.value)


def test_arguments_reach_lightning(parts: tuple[FitRows, FitRows]) -> None:
    calls: list[tuple[int, int]] = []
    MLPEstimator(NAMES, trainer={"max_steps": 2}).fit(
        parts[0], stop_rows=parts[1], progress=lambda task, *done: calls.append(done)
    )
    assert calls[-1] == (2, 2)


def test_a_fit_that_diverges_is_refused(parts: tuple[FitRows, FitRows]) -> None:
    rows = parts[0].subset(torch.arange(len(parts[0])))
    rows.features[0] = float("nan")
    with pytest.raises(InputError, match="training diverged"):
        MLPEstimator(NAMES, epochs=1).fit(rows, stop_rows=rows)


def test_dropout_is_off_in_the_exported_head() -> None:
    network = ResNet([3, 4], 8, 2, 0.5).eval()
    x, state = torch.randn(5, 3), torch.randn(5, 4)
    assert torch.equal(network(x, state), network(x, state))
    assert ResNetEstimator(dropout=0.3).get_params()["dropout"] == 0.3


# Boosted trees


def test_params_reach_the_booster_and_deeper_trees_are_flattened(parts: tuple[FitRows, FitRows]) -> None:
    model = XGBoostEstimator(NAMES, max_depth=6, trees=7, eta=0.3, min_child_weight=1)
    head = model.fit(parts[0], stop_rows=parts[1]).export()
    booster = xgb.Booster()
    booster.load_model(bytearray(model.files_["accept.ubj"]))
    assert head.tensors()["leaf"].shape[-1] == 2**6
    assert booster.num_boosted_rounds() <= 7
    features = np.clip(parts[1].features.numpy(), *(head.tensors()[side] for side in ("low", "high")))
    expected = booster.predict(xgb.DMatrix(features, feature_names=list(NAMES)), output_margin=True)
    np.testing.assert_allclose(head.scores(features, 1)[:, 0], expected, atol=2e-5)
    assert flatten(booster, 8)["leaf"].shape[1] == 2**8


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_one_line(parts: tuple[FitRows, FitRows]) -> None:
    with pytest.raises(InputError, match="params device warp: XGBoost cannot use it here") as caught:
        XGBoostEstimator(NAMES, device="warp").fit(parts[0], stop_rows=parts[1])
    assert "\n" not in str(caught.value)
