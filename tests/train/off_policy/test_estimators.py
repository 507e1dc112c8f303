"""Off-policy estimators against values computed by hand."""

from __future__ import annotations

import numpy as np
import pytest
from specstop.train.off_policy.estimators import ESTIMATORS

REWARD = np.array([1.0, 2.0, 3.0, 4.0])
WEIGHT = np.array([0.5 / 0.5, 1 / 0.8, 1 / 0.25, 0.2 / 0.4])
EXPECTED, HERE = np.array([2.0, 2.5, 2.0, 1.8]), np.array([1.0, 2.5, 2.0, 5.0])
# w = 1, 1.25, 4, 0.5; w r = 1, 2.5, 12, 2; DR rounds: 2 + 0, 2.5 - 0.625, 2 + 4, 1.8 - 0.5
BY_HAND = {
    "ipw": 17.5 / 4,
    "snipw": 17.5 / 6.75,
    "dm": 8.3 / 4,
    "dr": (2 + 1.875 + 6 + 1.3) / 4,
}


def value(name: str, reward: np.ndarray, weight: np.ndarray, expected: np.ndarray, here: np.ndarray) -> float:
    above, below = ESTIMATORS[name](reward, weight, expected, here)
    return float(above.sum() / below.sum())


@pytest.mark.parametrize("name", ESTIMATORS)
def test_values_are_those_computed_by_hand(name: str) -> None:
    assert value(name, REWARD, WEIGHT, EXPECTED, HERE) == pytest.approx(BY_HAND[name])


@pytest.mark.parametrize("name", ["ipw", "snipw", "dr"])
def test_a_policy_that_does_what_was_logged_is_worth_what_was_logged(name: str) -> None:
    assert value(name, REWARD, np.ones(4), HERE, HERE) == pytest.approx(2.5)


@pytest.mark.parametrize("name", ["ipw", "dr"])
def test_all_actions_enumerated_weigh_up_to_the_expectation(name: str) -> None:
    """Unbiased exactly: over both actions of a context, with their probabilities, whatever the regression says."""
    reward, logging, mine, model = (np.array(row) for row in ([3.0, 7.0], [0.3, 0.7], [0.9, 0.1], [2.0, 11.0]))
    total, expected = 0.0, np.array([mine @ model])
    for at in (0, 1):
        one = slice(at, at + 1)
        total += logging[at] * value(name, reward[one], (mine / logging)[one], expected, model[one])
    assert total == pytest.approx(float(mine @ reward))


def test_the_direct_method_is_its_regression() -> None:
    assert value("dm", REWARD, WEIGHT, np.full(4, 6.5), HERE) == 6.5
