"""A decision of one stream: the fast path speaks for a policy only as long as it is the policy's own."""

from __future__ import annotations

import pytest
import torch
from specstop.decode.decide import Decider
from specstop.decode.loop import Settings, Speculator
from specstop.decode.pair import Pair
from specstop.policies.baselines import Confidence
from specstop.policies.contract import DraftStep, State, StopPolicy
from torch import Tensor


class StopsAtOnce(Confidence):
    """Overrides `keep` alone: the inherited `keep_one` no longer decides as it does."""

    def keep(self, step: DraftStep, state: State) -> tuple[Tensor, State]:
        return step.alive & False, state


class Renamed(Confidence):
    """Changes nothing that decides."""

    name = "renamed"


@pytest.mark.parametrize(("policy", "fast"), [(Confidence(), True), (Renamed(), True), (StopsAtOnce(), False)])
def test_the_fast_path_is_taken_only_where_it_is_the_policys_own(policy: StopPolicy, fast: bool) -> None:
    assert (Decider(policy, torch.device("cpu"))._one is not None) == fast
    assert Decider(policy, torch.device("meta"))._one is None


def test_an_overridden_keep_decides_live(pair: Pair, prompt_ids: list[list[int]]) -> None:
    generation = Speculator(pair, StopsAtOnce(0.0), Settings(0.0, 20)).generate(prompt_ids[0])
    assert all(r.drafted <= 1 for r in generation.rounds)
