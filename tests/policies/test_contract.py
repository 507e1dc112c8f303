"""The contract's helpers: a checked answer, and a policy held to a depth."""

from __future__ import annotations

import pytest
import torch
from specstop.policies.baselines import Confidence, FixedLength
from specstop.policies.contract import DraftStep, State, StopPolicy, checked_keep
from torch import Tensor


def step(depth: int, *probabilities: float) -> DraftStep:
    x = torch.tensor(probabilities).view(-1, 1, 1)
    return DraftStep(depth, torch.ones(len(x), 1, dtype=torch.bool), torch.zeros(len(x), 1, dtype=torch.int64), x)


class Answers(StopPolicy):
    def __init__(self, answer: object) -> None:
        self.answer = answer

    def keep(self, step: DraftStep, state: State) -> tuple[Tensor, State]:
        return self.answer  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (torch.ones(2, 1).bool(), TypeError, "must return .mask, state., not Tensor"),
        ((1, 2, 3), TypeError, "not tuple"),
        ((True, None), TypeError, "not bool"),
        ((torch.ones(2, 1), None), TypeError, "not torch.float32"),
        ((torch.ones(2).bool(), None), ValueError, r"shape \(2, 1\) on cpu, not \(2,\)"),
    ],
)
def test_an_answer_out_of_contract_is_told_what_was_expected(
    answer: object, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"policy: keep.. {message}|policy: keep.. must return .*{message}"):
        checked_keep(Answers(answer), step(1, 0.5, 0.5), None)


def test_a_dead_branch_is_never_kept() -> None:
    dead = DraftStep(1, torch.tensor([[True], [False]]), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1, 1))
    mask, state = checked_keep(Answers((torch.ones(2, 1, dtype=torch.bool), 7)), dead, None)
    assert mask.tolist() == [[True], [False]]
    assert state == 7


def test_confidence_stops_below_its_threshold() -> None:
    keep, _ = Confidence(0.5).keep(step(3, 0.49, 0.5, 0.51), None)
    assert keep[:, 0].tolist() == [False, True, True]


def test_limited_is_a_copy_that_drafts_no_deeper() -> None:
    policy = Confidence(0.3)
    assert (policy.limited(3).max_depth, policy.max_depth) == (3, 20)
    assert policy.limited(30) is policy
    assert FixedLength(8).limited(5).max_depth == 5


def test_a_policy_without_keep_says_so() -> None:
    with pytest.raises(TypeError, match=r"StopPolicy does not implement keep\(\)"):
        StopPolicy().keep(step(1, 0.5), None)
