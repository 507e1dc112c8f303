"""A decision of one stream: what is read for it, and what the policy is shown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from specstop.collect.exploring import exploring
from specstop.decode.loop import Settings, Speculator
from specstop.decode.models.pair import Pair
from specstop.decode.round_state import DraftScores, RoundState
from specstop.decode.topology import parse_tree
from specstop.policies.contract import Array, DraftStep, State, StopPolicy
from specstop.policies.fixed import Confidence, FixedLength
from specstop.policies.published.bandit import Bandit


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
    read_tokens = RoundState.drawn_tokens

    def noted(self: RoundState, scores: DraftScores) -> Any:
        seen.update(1 + self.topology.depth[rows[0]] for _, rows in scores.rows)
        return read_tokens(self, scores)

    monkeypatch.setattr(RoundState, "drawn_tokens", noted)
    Speculator(pair, policy, Settings(0.0, 30, tree=tree, ignore_eos=True)).generate(prompt_ids[0])
    assert seen == read


class Notes(StopPolicy):
    """Writes down what it is shown of trees, and keeps every other branch."""

    name, max_depth = "notes", 3
    features = ("mean_accepted", "drawn_token", "above_token", "branch_rank", "noisy_margin")

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        self.seen.append((step.depth, step.alive[0].tolist(), step.parent[0].tolist(), step.features[0].copy()))
        return step.alive & (np.arange(step.alive.shape[1]) % 2 == step.depth % 2), state


@pytest.mark.parametrize("tree", ["3,2,1", "parents:-1,-1,1,1,0,0,4,3", "parents:-1,-1,1,0,0,3"])
def test_every_branch_is_shown_in_its_own_place(pair: Pair, prompt_ids: list[list[int]], tree: str) -> None:
    """The children of a later branch may stand before those of an earlier one."""
    policy = Notes()
    Speculator(pair, policy, Settings(0.7, 20, tree=tree, verification="match")).generate(prompt_ids[3])
    levels = parse_tree(tree).parent_in_level
    drawn: dict[int, list[float]] = {0: []}
    for depth, alive, parent, features in policy.seen:
        assert parent == list(levels[depth])
        if depth == 1:
            drawn = {}
        drawn[depth] = features[:, 1].tolist()
        for branch, there in enumerate(alive):
            if not there:
                assert not features[branch].any()
            elif depth > 1:
                assert features[branch, 2] == drawn[depth - 1][parent[branch]]
    assert len(policy.seen) > 10


class Scribbles(Confidence):
    """Writes into all that it is shown."""

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        kept, state = super().keep(step, state)
        for shown in (step.alive, step.parent, step.features, step.batch):
            shown.fill(0)
        return kept, state


@pytest.mark.parametrize("tree", [None, "2,2,1"])
@pytest.mark.parametrize(
    "within", [lambda p: p, lambda p: exploring(p, 0.0, 4), lambda p: Bandit(arms=[p, FixedLength(2)])]
)
def test_what_a_plugin_writes_reaches_nobody(
    pair: Pair, prompt_ids: list[list[int]], tree: str | None, within: Callable[[StopPolicy], StopPolicy]
) -> None:
    """Not even where a policy of ours asks it: the arrays of a step may be those of other steps."""
    one, other, again = (
        Speculator(pair, policy, Settings(0.7, 20, tree=tree, verification="match")).generate(prompt_ids[5], 3)
        for policy in (within(Confidence(0.4, 4)), within(Scribbles(0.4, 4)), within(Confidence(0.4, 4)))
    )
    assert [r.drafted for r in one.rounds] == [r.drafted for r in other.rounds] == [r.drafted for r in again.rounds]
