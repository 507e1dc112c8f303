"""A decision of one stream: the fast path speaks for a policy only as long as it is the policy's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from specstop.decode.candidates import Candidates
from specstop.decode.decide import Decider, Level
from specstop.decode.loop import Settings, Speculator
from specstop.decode.pair import Pair
from specstop.policies.baselines import Confidence, FixedLength
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
    assert (Decider(policy)._one is not None) == fast


def test_an_overridden_keep_decides_live(pair: Pair, prompt_ids: list[list[int]]) -> None:
    generation = Speculator(pair, StopsAtOnce(0.0), Settings(0.0, 20)).generate(prompt_ids[0])
    assert all(r.drafted <= 1 for r in generation.rounds)


class Late(Confidence):
    """Looks at what it drew from depth 3 on."""

    first = 3


class Paths(Late):
    """Follows a path whose first tokens it does not decide on."""

    features = ("path_logprob",)


READ = [(FixedLength(4), set()), (Confidence(0.0, 4), {1, 2, 3}), (Late(0.0, 4), {3}), (Paths(0.0, 4), {1, 2, 3})]


@pytest.mark.parametrize(("policy", "read"), READ)
@pytest.mark.parametrize("tree", [None, "2,1,1,1"])
def test_tokens_that_no_decision_looks_at_are_not_read(
    pair: Pair, prompt_ids: list[list[int]], monkeypatch: pytest.MonkeyPatch, policy: StopPolicy, read: set[int],
    tree: str | None,
) -> None:  # fmt: skip
    seen: set[int] = set()
    level = Decider.level

    def noted(self: Decider, found: Candidates, places: Sequence[int], *more: Any) -> Level:
        seen.add(found.depth[places[0]])
        return level(self, found, places, *more)

    monkeypatch.setattr(Decider, "level", noted)
    Speculator(pair, policy, Settings(0.0, 30, tree=tree, ignore_eos=True)).generate(prompt_ids[0])
    assert seen == read


class Notes(StopPolicy):
    """Writes down what it is shown of trees, and keeps every other branch."""

    name, max_depth = "notes", 3
    features = ("mean_accepted", "drawn_token", "above_token", "branch_rank", "noisy_margin")

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def keep(self, step: DraftStep, state: State) -> tuple[Tensor, State]:
        self.seen.append((step.depth, step.alive[0].tolist(), step.parent[0].tolist(), step.features[0]))
        return step.alive & (torch.arange(step.alive.shape[1]) % 2 == step.depth % 2), state


class NotesInNumbers(Notes):
    """The same in plain numbers."""

    def keep_few(
        self, depth: int, alive: Sequence[bool], parent: Sequence[int], columns: Sequence[Sequence[float]], state: State
    ) -> tuple[list[bool], State]:
        self.seen.append((depth, list(alive), list(parent), torch.tensor(columns).T))
        return [there and at % 2 == depth % 2 for at, there in enumerate(alive)], state


@pytest.mark.parametrize("tree", ["3,2,1", "parents:-1,-1,1,1,0,0,4,3", "parents:-1,-1,1,0,0,3"])
def test_a_tree_is_shown_alike_in_numbers_and_in_tensors(pair: Pair, prompt_ids: list[list[int]], tree: str) -> None:
    """The children of a later branch may stand before those of an earlier one."""
    shown = []
    for policy in (NotesInNumbers(), Notes()):
        Speculator(pair, policy, Settings(0.7, 20, tree=tree, verification="match")).generate(prompt_ids[3])
        shown.append(policy.seen)
    for numbers, tensors in zip(*shown, strict=True):
        assert numbers[:3] == tensors[:3]
        assert torch.equal(numbers[3], tensors[3])
    assert len(shown[0]) > 10
