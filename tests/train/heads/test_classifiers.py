"""Heads as scikit-learn classifiers: its own checks, and the way back to a policy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.model_selection import GroupKFold, cross_val_score
from sklearn.utils.estimator_checks import parametrize_with_checks
from specstop.policies.contract import DraftStep
from specstop.policies.errors import InputError, PolicyError
from specstop.policies.rules import Derived, Threshold
from specstop.train.heads.kinds.classifiers import StopClassifier
from synthetic import NAMES, TRUE_BIAS, TRUE_WEIGHT

torch.set_num_threads(1)

# The checks hold samples of 20 to 300 rows: the defaults, which are for hundreds of thousands, would learn nothing from them.
SMALL: dict[str, dict[str, Any]] = {
    "logistic": {},
    "xgboost": {"params": {"min_child_weight": 1, "trees": 30}},
    "mlp": {"params": {"learning_rate": 0.04, "width": 16}, "epochs": 15},
}


@parametrize_with_checks([StopClassifier(kind, **options) for kind, options in SMALL.items() if kind != "mlp"])
@pytest.mark.filterwarnings("ignore")
def test_scikit_learns_checks(estimator: StopClassifier, check: Any) -> None:
    check(estimator)


@pytest.mark.slow
@parametrize_with_checks([StopClassifier("mlp", **SMALL["mlp"])])
@pytest.mark.filterwarnings("ignore")
def test_scikit_learns_checks_of_a_network(estimator: StopClassifier, check: Any) -> None:
    check(estimator)


def accept_rows(count: int, seed: int = 0) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    generator = torch.Generator().manual_seed(seed)
    x = 1.5 * torch.randn(count, 3, generator=generator)
    truth = torch.sigmoid(x @ TRUE_WEIGHT[0] + TRUE_BIAS[0])
    return x.numpy(), (torch.rand(count, generator=generator) < truth).numpy()


@pytest.mark.parametrize("kind", SMALL)
def test_a_classifier_is_the_head_that_it_gives(kind: str) -> None:
    x, y = accept_rows(1200)
    model = StopClassifier(kind, NAMES, **SMALL[kind]).fit(x, y)
    assert model.score(x, y) > max(y.mean(), 1 - y.mean()) + 0.05
    np.testing.assert_array_equal(model.decision_function(x), model.to_head().scores(x, 1)[:, 0])
    policy = model.to_policy(Threshold("survival", 0.4), max_depth=4)
    assert (policy.features, policy.head.kind) == (NAMES, kind)
    alive, parent = np.ones((len(x), 1), dtype=bool), np.zeros((len(x), 1), dtype=np.int64)
    keep, _ = policy.keep(DraftStep(1, alive, parent, x[:, None], {}, np.arange(len(x))), None)
    clear = np.abs(model.predict_proba(x)[:, 1] - 0.4) > 1e-4
    np.testing.assert_array_equal(keep[clear, 0], model.predict_proba(x)[clear, 1] > 0.4)


def test_prompts_are_grouped_by_scikit_learns_own_means() -> None:
    x, y = accept_rows(900)
    scores = cross_val_score(
        StopClassifier(features=NAMES), x, y, groups=np.arange(900) % 30, cv=GroupKFold(3), scoring="neg_log_loss"
    )
    constant = y.mean() * np.log(y.mean()) + (1 - y.mean()) * np.log(1 - y.mean())
    assert scores.mean() > constant + 0.1


def test_what_cannot_be_is_said() -> None:
    x, y = accept_rows(100)
    with pytest.raises(InputError, match=r"kind: expected one of logistic, .* not 'forest'"):
        StopClassifier("forest").fit(x, y)
    with pytest.raises(InputError, match="features: expected the names of 3 features, got top1"):
        StopClassifier(features=("top1",)).fit(x, y)
    with pytest.raises(PolicyError, match="give the classifier the names of its columns"):
        StopClassifier().fit(x, y).to_head()
    with pytest.raises(PolicyError, match="wants the output `next`"):
        StopClassifier(features=NAMES).fit(x, y).to_policy(Derived([0.1]), 1)
