"""Heads as scikit-learn estimators: their checks, export to a policy, the registry, lightning's arguments, engines."""

from __future__ import annotations

import dataclasses
import signal
from typing import Any

import numpy as np
import optuna
import pytest
import specstop.train.heads.trainer as trainer_module
import torch
import xgboost as xgb
from scipy.special import expit, logit
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from sklearn.utils.estimator_checks import parametrize_with_checks
from specstop.collect.store import Trace
from specstop.decode.engines.settings import check_engine_policy
from specstop.policies.contract import DraftStep
from specstop.policies.errors import InputError, TraceError
from specstop.policies.heads import HEADS as INFERENCE_HEADS
from specstop.policies.learned import Calibrator, LearnedPolicy
from specstop.policies.profile import Profile
from specstop.policies.rules import Threshold
from specstop.train import train
from specstop.train.heads import HEADS, head_class, make_head
from specstop.train.heads.boosted import XGBoostEstimator, flatten
from specstop.train.heads.linear import TokensEstimator
from specstop.train.heads.networks import MLPEstimator, ResNet
from specstop.train.heads.rows import FitRows
from synthetic import NAMES, TRUE_BIAS, TRUE_WEIGHT, synthetic_rows

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore")

Array = np.ndarray[Any, Any]
Parts = tuple[FitRows, FitRows]

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


def accept_rows(count: int, seed: int = 0) -> tuple[Array, Array]:
    generator = torch.Generator().manual_seed(seed)
    x = 1.5 * torch.randn(count, 3, generator=generator)
    truth = torch.sigmoid(x @ TRUE_WEIGHT[0] + TRUE_BIAS[0])
    return x.numpy(), (torch.rand(count, generator=generator) < truth).numpy()


@pytest.fixture(scope="module")
def parts() -> Parts:
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


# The registry


@pytest.mark.parametrize("name", HEADS.builtin)
def test_every_head_has_a_form_that_policies_run_and_a_search_space(name: str) -> None:
    build = head_class(name)
    assert build.form in INFERENCE_HEADS
    heads: list[Any] = []
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(0))
    study.optimize(lambda trial: heads.append(make_head(name, build.search_space(trial))) or 0.0, n_trials=3)
    assert len(heads) == 3 and all(isinstance(clone(one), build) for one in heads)
    assert set(study.trials[0].params) == {f"{build.form} {key}" for key in build.space}


@pytest.mark.parametrize(
    ("name", "params", "trainer", "noun"),
    [
        ("forest", {}, {}, "forest"),
        ("mlp", {"learning_rat": 3}, {}, "did you mean 'learning_rate'"),
        ("mlp", {"learning_rate": 0.0}, {}, "learning_rate"),
        ("mlp", {"batch_size": 0}, {}, "batch_size"),
        ("xgboost", {"max_depth": 30}, {}, "max_depth"),
        ("logistic", {}, {"accelerator": "gpu"}, "trainer"),
    ],
)
def test_invalid_parameters_are_refused_by_name(name: str, params: Any, trainer: Any, noun: str) -> None:
    with pytest.raises(InputError, match=noun):
        make_head(name, params, trainer)


# Networks


def fit_mlp(parts: Parts, **params: Any) -> tuple[dict[str, Array], list[tuple[int, int]]]:
    """Return the tensors of a small network and its progress."""
    calls: list[tuple[int, int]] = []
    model = MLPEstimator(NAMES, **{"width": 8, **params})
    model.fit(parts[0], stop_rows=parts[1], progress=lambda task, *done: calls.append(done))
    return model.tensors_, calls


def test_training_stops_early() -> None:
    """Labels are noise: the held-out loss rises once the network memorises them."""
    noise = []
    for seed in (0, 1):
        rows = synthetic_rows(60)
        labels = (torch.rand(60, 2, generator=torch.Generator().manual_seed(seed)) < 0.5).float()
        noise.append(FitRows(rows.features, rows.depth.clamp_min(1), labels, torch.ones(60, 2).bool()))
    _, calls = fit_mlp((noise[0], noise[1]), width=64, epochs=100, learning_rate=0.05, batch_size=16)
    done, total = calls[-1]
    assert done == total < calls[0][1] / 2, "the task ends there"


def test_params_and_arguments_of_lightning_have_an_effect(parts: Parts) -> None:
    tensors, _ = fit_mlp(parts, epochs=1, width=5, layers=3, learning_rate=0.01, weight_decay=0.1)
    assert [tensors[f"weight.{i}"].shape[0] for i in range(4)] == [5, 5, 5, 2]
    first, second = (fit_mlp(parts, epochs=1, learning_rate=rate)[0] for rate in (2e-3, 0.1))
    assert not np.array_equal(first["weight.0"], second["weight.0"])
    assert fit_mlp(parts, trainer={"max_steps": 2})[1][-1] == (2, 2)
    network, x, state = ResNet([3, 4], 8, 2, 0.5).eval(), torch.randn(5, 3), torch.randn(5, 4)
    assert torch.equal(network(x, state), network(x, state)), "dropout is off"


@pytest.mark.parametrize("is_handled", [True, False])
def test_a_request_to_terminate_reaches_the_caller(
    is_handled: bool, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning would end the process with exit code 0."""
    calls: list[Any] = []
    raise_signal = signal.raise_signal

    def terminate(task: str, done: int, total: int) -> None:
        if done == 1:
            raise_signal(signal.SIGTERM)

    handler = (lambda number, frame: calls.append("handled")) if is_handled else signal.SIG_DFL
    before = signal.signal(signal.SIGTERM, handler)
    monkeypatch.setattr(trainer_module.signal, "raise_signal", calls.append)
    try:
        with pytest.raises(KeyboardInterrupt):
            MLPEstimator(NAMES, epochs=3).fit(parts[0], stop_rows=parts[1], progress=terminate)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert calls == (["handled"] if is_handled else [signal.SIGTERM])


@pytest.mark.parametrize(
    ("name", "value", "noun"),
    [("accelerator", "gpuu", "gpuu"), ("devices", 2, "devices"), ("precision", "17", "17"), ("epochs", 3, "epochs")],
)
def test_a_refusal_of_lightning_is_one_line(name: str, value: Any, noun: str, parts: Parts) -> None:
    with pytest.raises(InputError, match=f"trainer.*{noun}") as caught:
        fit_mlp(parts, trainer={name: value})
    assert "\n" not in str(caught.value)


def test_a_fit_that_diverges_is_refused(parts: Parts) -> None:
    rows = parts[0].subset(torch.arange(len(parts[0])))
    rows.features[0] = float("nan")
    with pytest.raises(InputError, match="diverged"):
        MLPEstimator(NAMES, epochs=1).fit(rows, stop_rows=rows)


# Boosted trees


def test_params_reach_the_booster_and_deeper_trees_are_flattened(parts: Parts) -> None:
    model = XGBoostEstimator(NAMES, max_depth=6, trees=7, eta=0.3, min_child_weight=1)
    head = model.fit(parts[0], stop_rows=parts[1]).export()
    booster = xgb.Booster()
    booster.load_model(bytearray(model.files_["accept.ubj"]))
    assert head.tensors()["leaf"].shape[-1] == 2**6 and booster.num_boosted_rounds() <= 7
    features = np.clip(parts[1].features.numpy(), *(head.tensors()[side] for side in ("low", "high")))
    expected = booster.predict(xgb.DMatrix(features, feature_names=list(NAMES)), output_margin=True)
    np.testing.assert_allclose(head.scores(features, 1)[:, 0], expected, atol=2e-5)
    assert flatten(booster, 8)["leaf"].shape[1] == 2**8
    with pytest.raises(InputError, match="device warp") as caught:
        XGBoostEstimator(NAMES, device="warp").fit(parts[0], stop_rows=parts[1])
    assert "\n" not in str(caught.value)


# Tokens


def token_rows(ids: torch.Tensor, accept: torch.Tensor, following: torch.Tensor, seed: int) -> FitRows:
    """Return rows at depth 1 of tokens [M, F] whose labels are drawn with these chances [M]."""
    chances = torch.stack([accept, following], 1).double()
    hits = torch.rand(len(ids), 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) < chances
    known = torch.stack([torch.ones_like(hits[:, 0]), hits[:, 0]], 1)
    return FitRows(ids.float(), torch.ones(len(ids), dtype=torch.int64), hits.float(), known)


def test_each_token_gets_its_weight() -> None:
    def drawn(count: int, seed: int) -> FitRows:
        ids = torch.randint(0, 12, (count, 1), generator=torch.Generator().manual_seed(seed))
        chance = 0.1 + 0.8 * (ids[:, 0] % 2)
        return token_rows(ids, chance, 1.0 - chance, seed + 10)

    head = TokensEstimator(("drawn_token",)).fit(drawn(4000, 0), stop_rows=drawn(1000, 1)).export()
    odds = expit(head.scores(np.arange(12, dtype=np.float32)[:, None], 1))
    assert odds[1::2, 0].min() > 0.8 > 0.2 > odds[::2, 0].max()
    assert odds[::2, 1].min() > 0.65 > 0.35 > odds[1::2, 1].max()  # of the second output few rows are known
    with pytest.raises(InputError, match="before_token"):
        TokensEstimator(("entropy",)).fit(drawn(40, 0), stop_rows=drawn(40, 1))


def test_rare_tokens_are_fitted_as_far_as_frequent_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    frequencies = 1.0 / torch.arange(1, 200).double()
    ids = torch.multinomial(frequencies, 2 * 10_000, replacement=True, generator=generator).view(-1, 2)
    odds = 2.0 * torch.randn(len(frequencies), generator=generator)
    chance = torch.sigmoid(odds[ids].sum(1))
    rows = token_rows(ids, chance, chance, 1)
    head = TokensEstimator(("drawn_token", "above_token"), C=0.5, buckets=0).fit(rows, stop_rows=rows).export()
    x = torch.nn.functional.one_hot(ids, len(frequencies)).flatten(1).double().numpy()
    model = LogisticRegression(C=0.5, solver="newton-cholesky", tol=1e-10, max_iter=1000)
    expected = logit(model.fit(x, rows.labels[:, 0].numpy()).predict_proba(x)[:, 1])
    assert np.abs(head.scores(rows.features.numpy(), 1)[:, 0] - expected).max() < 0.15  # 3.0 where the fit ends early


# Engines


def labelled(trace: Trace, label: str) -> Trace:
    """Return the trace as if its labels were of another kind."""
    return Trace(trace.folder, dataclasses.replace(trace.header, label=label), trace.rows)


def test_a_policy_for_vllm_reads_features_of_vllm(traces: dict[float, Trace], profile: Profile) -> None:
    greedy = train(traces[0.0], profile, host="vllm", folds=2, cross_fit=False).policy
    assert greedy.features == train(traces[0.0], profile, folds=2, cross_fit=False).policy.features
    sampled = train(labelled(traces[0.7], "point"), profile, host="vllm", folds=2, cross_fit=False).policy
    assert "noisy_margin" not in sampled.features and {"margin", "entropy", "top1"} <= set(sampled.features)
    for policy in (greedy, sampled):
        assert check_engine_policy(policy) is policy and policy.hidden == ()


@pytest.mark.parametrize(
    ("temperature", "options", "error", "noun"),
    [
        (0.0, {"host": "vlm"}, InputError, "did you mean 'vllm'"),
        (0.0, {"features": ["top1", "anchor_entropy"]}, InputError, "anchor_entropy"),
        (0.0, {"hidden": ["draft_hidden"]}, InputError, "draft_hidden"),
        (0.0, {"head": "specdec"}, InputError, "draft_hidden"),
        (0.0, {"rule": "gain"}, InputError, "host"),
        (0.7, {}, TraceError, "labels"),
        (0.7, {"features": ["top1", "noisy_margin"], "label": "point"}, InputError, "noisy_margin"),
    ],
)
def test_a_policy_that_vllm_cannot_run_is_refused(
    traces: dict[float, Trace], profile: Profile, temperature: float, options: dict[str, Any], error: type, noun: str
) -> None:
    options = {"host": "vllm", **options}
    trace = labelled(traces[temperature], options.pop("label", traces[temperature].header.label))
    with pytest.raises(error, match=noun):
        train(trace, profile, **options)
