"""Hidden states in the loop: a policy receives the last states of the models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from conftest import NEW
from contract_policies import ReadsDraftStates
from small_drafters import small_drafter
from specstop.decode.drafters import LookupDrafter
from specstop.decode.loop import Speculator
from specstop.decode.models.outputs import rounded, stored
from specstop.decode.models.pair import Pair
from specstop.decode.plain import plain_texts
from specstop.decode.settings import Settings
from specstop.policies.contract import Array, DraftStep, DraftTree, RoundOutcome, State, StopPolicy
from specstop.policies.errors import PolicyError
from specstop.policies.features import HIDDEN_STATES
from torch import Tensor

Prompts = list[list[int]]

TREES = [None, "3,2,1", "parents:-1,-1,0,0,1,2,5"]
HALF = 2.0**-11  # float16 has eleven bits


@pytest.fixture(scope="session")
def pair(plain_pair: Pair) -> Pair:
    return plain_pair


class Recording(StopPolicy):
    """Drafts as much as possible and records the states and the tree of each round."""

    name, hidden, first, max_depth = "recording", tuple(HIDDEN_STATES), 0, 4

    def __init__(self) -> None:
        self.rounds: list[tuple[list[DraftStep], DraftTree | None]] = []
        self.steps: list[DraftStep] = []
        self.tree: DraftTree | None = None

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        self.steps.append(step)
        assert not any(states[~step.alive].any() for states in step.hidden.values())
        return step.alive, state

    def select(self, tree: DraftTree, state: State) -> None:
        self.tree = tree

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        self.rounds.append((self.steps, self.tree))
        self.steps, self.tree = [], None
        return state


def assert_near_half(observed: Array, model: Any, prefix: Sequence[int]) -> None:
    """Compare states with the last ones of a whole forward pass, rounded as in a trace."""
    with torch.no_grad():
        expected: Tensor = model(torch.tensor([list(prefix)]), output_hidden_states=True).hidden_states[-1][0, -1]
    states = torch.from_numpy(observed)
    torch.testing.assert_close(states.double(), expected, rtol=HALF, atol=1e-9)
    assert torch.equal(states, states.half().float())


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_states_are_those_of_a_whole_forward_pass_and_do_not_change_the_text(
    pair: Pair, prompt_ids: Prompts, tree: str | None, temperature: float
) -> None:
    compared = 0
    for s, prompt in enumerate(prompt_ids[2:5]):
        policy = Recording()
        speculator = Speculator(pair, policy, Settings(temperature, NEW, 5, tree=tree, verification="match"))
        text = speculator.generate(prompt, s)
        assert [list(text.tokens)] == plain_texts(pair, [prompt], [s], NEW, temperature).tokens
        for (steps, nodes), record in list(zip(policy.rounds, text.rounds, strict=True))[::3]:
            prefix = [*prompt, *text.tokens[: record.anchor]]
            for step in steps:
                for branch in np.flatnonzero(step.alive[0]).tolist():
                    assert_near_half(step.hidden["target_hidden"][0, branch], pair.target, prefix[:-1])
                    if step.depth == 0:
                        continue
                    assert nodes is not None
                    node, path = int(np.flatnonzero(nodes.depth[0] == step.depth)[branch]), list[int]()
                    while (node := int(nodes.parent[0, node])) >= 0:
                        path.append(int(nodes.tokens[0, node]))
                    assert_near_half(step.hidden["draft_hidden"][0, branch], pair.draft, [*prefix, *path[::-1]])
                    compared += 1
    assert compared > 15


def test_states_that_do_not_fit_are_refused(pair: Pair) -> None:
    trimming = Speculator(pair, ReadsDraftStates(), Settings(0.7, NEW, tree="3,2,1", verification="rejection"))
    assert trimming.generate([5, 6]).tokens, "a policy that trims may read states of the draft"
    for drafter in (LookupDrafter(pair), small_drafter("ctc", pair)):  # a path of CTC has no state
        with pytest.raises(PolicyError, match=f"reads-draft-states: .*draft_hidden.*{type(drafter).__name__}"):
            Speculator(pair, ReadsDraftStates(), drafter=drafter)
    policy = ReadsDraftStates()
    policy.sizes = {"draft_hidden": 17}  # type: ignore[attr-defined]
    with pytest.raises(PolicyError, match="draft_hidden of 17 numbers"):
        Speculator(pair, policy)


def test_states_are_rounded_and_clipped_to_float16() -> None:
    states = torch.tensor([1.0 + 2.0**-12, 1e6, -1e6, 1e-9], dtype=torch.float64)
    assert stored(states).tolist() == [1.0, 65504.0, -65504.0, 0.0]
    assert rounded(states).dtype == torch.float32 and torch.equal(rounded(stored(states)), rounded(states))
