"""Hidden states in the loop: what a policy is shown is the model's own last state, wherever it is computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from conftest import NEW, VOCABULARY, build_draft, build_model
from contract_policies import DEPTH, ReadsDraftStates, ReadsStates
from small_drafters import small_drafter
from specstop.decode import model_source
from specstop.decode.drafters import LookupDrafter, ModelDrafter, model as drafters_module
from specstop.decode.loop import Speculator
from specstop.decode.models.cuda import CudaGraphModel
from specstop.decode.models.engine import speed_up
from specstop.decode.models.outputs import rounded, stored
from specstop.decode.models.pair import Pair
from specstop.decode.models.view import hidden_width
from specstop.decode.plain import plain_texts
from specstop.decode.settings import Settings
from specstop.decode.verify.noise import stream_key
from specstop.policies.contract import Array, DraftStep, DraftTree, RoundOutcome, State, StopPolicy
from specstop.policies.errors import PolicyError, SpecstopWarning
from specstop.policies.features import HIDDEN_STATES
from specstop.policies.fixed import FixedLength
from specstop.policies.testing import PolicyTests, TreePolicyTests
from torch import Tensor

TREES = [None, "3,2,1", "parents:-1,-1,0,0,1,2,5"]
HALF = 2.0**-11  # float16 keeps eleven bits


@pytest.fixture(scope="session")
def pair(plain_pair: Pair) -> Pair:
    return plain_pair


class Shown(StopPolicy):
    """Drafts all it may and remembers the states of each round, and the nodes that were drawn."""

    name, hidden, first, max_depth = "shown", tuple(HIDDEN_STATES), 0, 4

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


def last_states(model: Any, prefix: Sequence[int]) -> Tensor:
    with torch.no_grad():
        states: Tensor = model(torch.tensor([list(prefix)]), output_hidden_states=True).hidden_states[-1]
    return states[0, -1]


def near_half(seen_states: Array, exact: Tensor, slack: float = 1e-9) -> None:
    shown = torch.from_numpy(seen_states)
    torch.testing.assert_close(shown.double(), exact, rtol=HALF, atol=slack)
    assert torch.equal(shown, shown.half().float()), "what a policy sees is rounded as a trace rounds it"


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_policy_sees_the_states_that_a_whole_forward_has(
    pair: Pair, prompt_ids: list[list[int]], tree: str | None, temperature: float
) -> None:
    checked = 0
    for s, prompt in enumerate(prompt_ids[2:5]):
        policy = Shown()
        made = Speculator(pair, policy, Settings(temperature, NEW, 5, tree=tree, verification="match")).generate(
            prompt, stream_key(0, f"p{s}")
        )
        for (steps, nodes), record in list(zip(policy.rounds, made.rounds, strict=True))[::3]:
            text = [*prompt, *made.tokens[: record.anchor]]
            target = last_states(pair.target, text[:-1])
            for step in steps:
                for branch in np.flatnonzero(step.alive[0]).tolist():
                    near_half(step.hidden["target_hidden"][0, branch], target)
                    if step.depth == 0:
                        continue
                    assert nodes is not None
                    node = int(np.flatnonzero(nodes.depth[0] == step.depth)[branch])
                    path = []
                    while (node := int(nodes.parent[0, node])) >= 0:
                        path.append(int(nodes.tokens[0, node]))
                    near_half(step.hidden["draft_hidden"][0, branch], last_states(pair.draft, [*text, *path[::-1]]))
                    checked += 1
    assert checked > 15


@pytest.mark.parametrize("tree", [None, "2,2,1"])
def test_fixed_shapes_show_the_same_states(
    pair: Pair, prompt_ids: list[list[int]], monkeypatch: pytest.MonkeyPatch, tree: str | None
) -> None:
    def shown() -> list[Array]:
        policy = Shown()
        speculator = Speculator(pair, policy, Settings(0.7, 12, 4, tree=tree, verification="match"))
        for ids in prompt_ids[3:5]:
            speculator.generate(ids, 5)
        return [v for steps, _ in policy.rounds for step in steps for v in step.hidden.values()]

    grown = shown()
    for module in (model_source, drafters_module):
        monkeypatch.setattr(module, "open_cache", CudaGraphModel)
    fixed = shown()
    assert len(grown) == len(fixed) > 20
    for one, other in zip(grown, fixed, strict=True):
        np.testing.assert_allclose(other, one, rtol=2 * HALF, atol=1e-9)


@pytest.mark.parametrize("engine", ["packed", "compact"])
def test_every_engine_shows_the_states_of_the_library(prompt_ids: list[list[int]], engine: str) -> None:
    target = build_model().float()
    draft = build_draft(build_model()).float()
    ids = prompt_ids[4]

    def shown(pair: Pair) -> list[tuple[str, Array]]:
        policy = Shown()
        Speculator(pair, policy, Settings(0.0, 10, 3)).generate(ids)
        return [item for steps, _ in policy.rounds[:1] for step in steps for item in step.hidden.items()]

    plain = shown(Pair(target, draft, None, VOCABULARY))
    widths = hidden_width(target), hidden_width(draft)
    fast = Pair(speed_up(target, engine), speed_up(draft, engine), None, VOCABULARY)
    assert (hidden_width(fast.target), hidden_width(fast.draft)) == widths == (16, 16)
    for (name, one), (other_name, other) in zip(plain, shown(fast), strict=True):
        assert name == other_name
        torch.testing.assert_close(other, one, rtol=2 * HALF, atol=1e-4)


@pytest.mark.parametrize("policy", [ReadsStates(), ReadsDraftStates()], ids=lambda p: p.name)
@pytest.mark.parametrize("tree", TREES)
def test_the_text_is_the_targets(pair: Pair, prompt_ids: list[list[int]], policy: StopPolicy, tree: str | None) -> None:
    lengths, prompt_ids = set(), prompt_ids[1::3]
    for temperature in (0.0, 0.7):
        speculator = Speculator(pair, policy, Settings(temperature, NEW, tree=tree, verification="match"))
        keys = [stream_key(0, f"p{i}") for i in range(len(prompt_ids))]
        made = [speculator.generate(ids, key) for ids, key in zip(prompt_ids, keys, strict=True)]
        assert [list(g.tokens) for g in made] == plain_texts(pair, prompt_ids, keys, NEW, temperature).tokens
        assert type(speculator.policy) is type(policy), "it did not fail"
        lengths |= {(r.drafted, r.verified) for g in made for r in g.rounds}
    assert len(lengths) > 4


@pytest.mark.parametrize("verification", ["rejection", "typical"])
def test_every_verification_shows_them(pair: Pair, prompt_ids: list[list[int]], verification: str) -> None:
    """PRE and ANCHOR values: a trimming policy may read them under rejection too."""
    policy = ReadsDraftStates() if verification == "rejection" else ReadsStates()
    speculator = Speculator(pair, policy, Settings(0.7, NEW, verification=verification, tree="3,2,1"))
    for i, ids in enumerate(prompt_ids[1::3]):
        speculator.generate(ids, i)
    assert type(speculator.policy) is type(policy)


def test_who_reads_none_pays_for_none(pair: Pair, prompt_ids: list[list[int]]) -> None:
    drafter = ModelDrafter(pair)
    speculator = Speculator(pair, FixedLength(2), Settings(0.0, 6), drafter=drafter)
    speculator.generate(prompt_ids[3])
    assert drafter._model.states is None and speculator._source.target.states is None
    speculator = Speculator(pair, ReadsDraftStates(), Settings(0.0, 6), drafter=drafter)
    speculator.generate(prompt_ids[3])
    assert drafter._model.states is not None and speculator._source.target.states is None, "only what is declared"


def test_a_drafter_without_states_is_refused(pair: Pair) -> None:
    for drafter in (LookupDrafter(pair), small_drafter("ctc", pair)):  # of CTC a path has no state of its own
        who = type(drafter).__name__
        with pytest.raises(PolicyError, match=f"reads-draft-states: reads draft_hidden, which {who} has not"):
            Speculator(pair, ReadsDraftStates(), drafter=drafter)


def test_the_targets_states_go_with_any_drafter(pair: Pair, prompt_ids: list[list[int]]) -> None:
    class Targets(ReadsStates):
        hidden = ("target_hidden",)

        def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
            return step.alive & (self.score(step.hidden["target_hidden"]) > 0), state

    speculator = Speculator(pair, Targets(), Settings(0.0, NEW), drafter=LookupDrafter(pair))
    drafted = {r.drafted > 0 for ids in prompt_ids for r in speculator.generate([*ids, *ids]).rounds}
    assert drafted == {False, True}
    assert isinstance(speculator.policy, Targets)


def test_a_policy_made_for_another_model_is_refused(pair: Pair) -> None:
    policy = ReadsDraftStates()
    policy.sizes = {"draft_hidden": 17}  # type: ignore[attr-defined]
    with pytest.raises(PolicyError, match="draft_hidden of 17 numbers"):
        Speculator(pair, policy)


def test_a_policy_that_writes_into_what_it_is_shown_harms_nobody(pair: Pair, prompt_ids: list[list[int]]) -> None:
    class Scribbles(ReadsStates):
        def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
            kept, state = super().keep(step, state)
            for states in step.hidden.values():
                states.fill(7.0)
            return kept, state

    one, other = (
        Speculator(pair, policy, Settings(0.7, NEW, verification="match")).generate(prompt_ids[5], 3)
        for policy in (ReadsStates(), Scribbles())
    )
    assert [r.drafted for r in one.rounds] == [r.drafted for r in other.rounds]


def test_a_failing_policy_is_replaced(pair: Pair, prompt_ids: list[list[int]]) -> None:
    class Fails(ReadsStates):
        def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
            return step.hidden["nothing"], state

    speculator = Speculator(pair, Fails(), Settings(0.0, NEW))
    with pytest.warns(SpecstopWarning, match="failed"):
        speculator.generate(prompt_ids[1])
    assert isinstance(speculator.policy, FixedLength)
    speculator.reset()
    assert isinstance(speculator.policy, Fails)


def test_rounding_stays_within_the_range_of_float16() -> None:
    states = torch.tensor([1.0 + 2.0**-12, 1e6, -1e6, 1e-9], dtype=torch.float64)
    assert stored(states).tolist() == [1.0, 65504.0, -65504.0, 0.0]
    assert rounded(states).dtype == torch.float32
    assert torch.equal(rounded(stored(states)), rounded(states)), "what was stored is seen as it is"


def test_renewed_is_as_newly_made(pair: Pair, prompt_ids: list[list[int]]) -> None:
    class Carrying(StopPolicy):
        name, carries, max_depth = "carrying", True, DEPTH

        def start(self, streams: int, keys: Array) -> State:
            return np.zeros(streams, dtype=np.int64)

        def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
            return step.alive & (step.depth <= state // 4)[:, None], state

        def observe(self, outcome: RoundOutcome, state: State) -> State:
            return state + outcome.active

    speculator = Speculator(pair, Carrying(), Settings(0.0, NEW))

    def play() -> list[list[int]]:
        return [[r.drafted for r in speculator.generate(ids).rounds] for ids in prompt_ids[:4]]

    first, second = play(), play()
    assert first != second
    speculator.reset()
    assert play() == first


class TestReadsStates(PolicyTests):
    def make(self) -> StopPolicy:
        return ReadsStates()


class TestReadsDraftStatesOnTrees(TreePolicyTests):
    def make(self) -> StopPolicy:
        return ReadsDraftStates()
