"""Off-policy estimators against values computed by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from specstop.policies.errors import InputError
from specstop.train.off_policy.estimators import (
    ESTIMATORS,
    DirectMethod,
    DoublyRobust,
    InverseProbabilityWeighting,
    OffPolicyEstimator,
    SelfNormalizedInverseProbabilityWeighting,
)

# Four rounds, two actions. pi_e is (0.5, 0.5), (1, 0), (0, 1), (0.2, 0.8).
INPUTS: dict[str, Any] = {
    "reward": np.array([1.0, 2.0, 3.0, 4.0]),
    "action": np.array([0, 0, 1, 0]),
    "pscore": np.array([0.5, 0.8, 0.25, 0.4]),
    "action_dist": np.array([[0.5, 0.5], [1.0, 0.0], [0.0, 1.0], [0.2, 0.8]])[:, :, None],
    "estimated_rewards_by_reg_model": np.array([[1.0, 3.0], [2.5, 0.0], [1.0, 2.0], [5.0, 1.0]])[:, :, None],
}
# w = 0.5/0.5, 1/0.8, 1/0.25, 0.2/0.4 = 1, 1.25, 4, 0.5; w r = 1, 2.5, 12, 2
# q(x, pi) = 2, 2.5, 2, 1.8; q(x, a) = 1, 2.5, 2, 5; DR rounds: 2 + 0, 2.5 - 0.625, 2 + 4, 1.8 - 0.5
BY_HAND = {
    "ipw": 17.5 / 4,
    "snipw": 17.5 / 6.75,
    "dm": 8.3 / 4,
    "dr": (2 + 1.875 + 6 + 1.3) / 4,
}


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda e: e.estimator_name)
def test_values_are_those_computed_by_hand(estimator: OffPolicyEstimator) -> None:
    assert estimator.estimate_policy_value(**INPUTS) == pytest.approx(BY_HAND[estimator.estimator_name])


def test_positions_choose_among_lists() -> None:
    dist = np.concatenate([INPUTS["action_dist"][::-1], INPUTS["action_dist"]], 2)
    model = np.concatenate([np.zeros((4, 2, 1)), INPUTS["estimated_rewards_by_reg_model"]], 2)
    moved = {**INPUTS, "action_dist": dist, "estimated_rewards_by_reg_model": model, "position": np.ones(4, dtype=int)}
    for estimator in ESTIMATORS:
        assert estimator.estimate_policy_value(**moved) == pytest.approx(BY_HAND[estimator.estimator_name])


def test_a_policy_that_does_what_was_logged_is_worth_what_was_logged() -> None:
    dist = np.zeros((4, 2, 1))
    dist[np.arange(4), INPUTS["action"]] = 1.0
    same = {**INPUTS, "action_dist": dist, "pscore": np.ones(4)}
    for estimator in (InverseProbabilityWeighting(), SelfNormalizedInverseProbabilityWeighting(), DoublyRobust()):
        assert estimator.estimate_policy_value(**same) == pytest.approx(2.5)


def test_all_actions_enumerated_weigh_up_to_the_expectation() -> None:
    """Unbiased exactly: over both actions of a context, with their probabilities, whatever the regression says."""
    reward, logging, mine = np.array([3.0, 7.0]), np.array([0.3, 0.7]), np.array([0.9, 0.1])
    truth = float(mine @ reward)
    for estimator in (InverseProbabilityWeighting(), DoublyRobust()):
        total = 0.0
        for action in (0, 1):
            total += logging[action] * estimator.estimate_policy_value(
                reward=reward[[action]],
                action=np.array([action]),
                pscore=logging[[action]],
                action_dist=mine[None, :, None],
                estimated_rewards_by_reg_model=np.array([[[2.0], [11.0]]]),
            )
        assert total == pytest.approx(truth)


def test_the_direct_method_is_its_regression() -> None:
    model = np.full((4, 2, 1), 6.5)
    assert DirectMethod().estimate_policy_value(**{**INPUTS, "estimated_rewards_by_reg_model": model}) == 6.5


def test_intervals_have_the_names_of_open_bandit_pipeline_and_hold_the_mean() -> None:
    chance = np.random.default_rng(0)
    rounds = 300
    inputs = {
        "reward": chance.normal(2.0, 1.0, rounds),
        "action": chance.integers(0, 2, rounds),
        "pscore": np.full(rounds, 0.5),
        "action_dist": np.full((rounds, 2, 1), 0.5),
    }
    one = InverseProbabilityWeighting()
    found = one.estimate_interval(**inputs, alpha=0.1, random_state=1)
    assert list(found) == ["mean", "90.0% CI (lower)", "90.0% CI (upper)"]
    assert found["90.0% CI (lower)"] < found["mean"] < found["90.0% CI (upper)"]
    assert found == one.estimate_interval(**inputs, alpha=0.1, random_state=1)
    wide = one.estimate_interval(**inputs, alpha=0.01, random_state=1)
    assert wide["99.0% CI (lower)"] < found["90.0% CI (lower)"]
    # The same round ten times over is no more than once.
    again = {name: np.repeat(values, 10, 0) for name, values in inputs.items()}
    clustered = one.estimate_interval(**again, alpha=0.1, random_state=1, clusters=np.repeat(range(rounds), 10))
    assert clustered == pytest.approx(found)
    assert one.estimate_interval(**again, alpha=0.1, random_state=1)["90.0% CI (lower)"] > found["90.0% CI (lower)"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pscore": np.array([0.5, 0.0, 0.2, 0.4])}, "`pscore` above 0"),
        ({"pscore": np.array([0.5, 1.2, 0.2, 0.4])}, "at most 1"),
        ({"pscore": np.ones(3)}, "of one length"),
        ({"action_dist": np.ones((4, 2))}, r"`action_dist` \[4, actions, positions\]"),
        ({"action_dist": np.ones((4, 2, 1))}, "sum to 1"),
        ({"estimated_rewards_by_reg_model": None}, "`estimated_rewards_by_reg_model`"),
        ({"estimated_rewards_by_reg_model": np.ones((4, 3, 1))}, "`estimated_rewards_by_reg_model`"),
    ],
)
def test_bad_feedback_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        DoublyRobust().estimate_policy_value(**{**INPUTS, **changes})
