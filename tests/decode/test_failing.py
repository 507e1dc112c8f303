"""What the round loop does with policies that break the contract, runs that are cut off, and what cannot be decoded."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import numpy as np
import pytest
from conftest import NEW, build_model
from contract_policies import DEPTH
from specstop.decode.drafters.lookup import LookupDrafter
from specstop.decode.loop import Request, Settings, Speculator
from specstop.decode.models.pair import Pair, join
from specstop.decode.plain import plain_texts
from specstop.decode.round_state import RoundState, Rows
from specstop.decode.verify.noise import stream_key
from specstop.policies.contract import Array, DraftStep, DraftTree, State, StopPolicy
from specstop.policies.errors import InputError, PolicyError, SpecstopWarning
from specstop.policies.fixed import FixedLength
from specstop.policies.registry import load_policy


@pytest.fixture(scope="module")
def endless_pair(pair: Pair) -> Pair:
    """The pair without an end of text."""
    return dataclasses.replace(pair, eos=())


@pytest.fixture(scope="module")
def plain(endless_pair: Pair, prompt_ids: list[list[int]]) -> list[list[int]]:
    """Plain texts of some prompts, sampled at 0.7."""
    prompts = prompt_ids[:4]
    return plain_texts(endless_pair, prompts, [stream_key(0, f"p{i}") for i in range(4)], NEW, 0.7).tokens


def failing(fault: str) -> StopPolicy:
    """Return a policy that is well behaved up to depth 1 and breaks at depth 2, or at its other methods."""

    class Failing(StopPolicy):
        features, max_depth, name = ("top1", "mean_accepted"), DEPTH, fault

        def start(self, streams: int, keys: Array) -> State:
            if fault == "start raises":
                raise RuntimeError("no state")
            return 0

        def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
            good = step.alive, state
            if step.depth < 2:
                return good
            answers = {
                "keep raises": lambda: 1 / 0,
                "keep exits": lambda: (step.features[99], state),
                "wrong shape": lambda: (np.ones((2, 3), dtype=bool), state),
                "integers": lambda: (step.alive.astype(np.int64), state),
                "NaN": lambda: (step.features[..., 0] * float("nan"), state),
                "no state": lambda: step.alive,
                "a Python bool": lambda: (True, state),
                "None": lambda: None,
            }
            return answers.get(fault, lambda: good)()

        def select(self, tree: DraftTree, state: State) -> Array | None:
            answers = {
                "select raises": lambda: 1 / 0,
                "select floats": lambda: np.full(tree.tokens.shape, np.nan),
                "select wrong shape": lambda: np.ones((1, 99), dtype=bool),
                "select flat": lambda: np.ones(tree.tokens.shape[1], dtype=bool),
            }
            return answers.get(fault, lambda: None)()

        def observe(self, outcome: object, state: State) -> State:
            return 1 / 0 if fault == "observe raises" else state

    return Failing()


FAULTS = [
    "keep raises",
    "keep exits",
    "wrong shape",
    "integers",
    "NaN",
    "no state",
    "a Python bool",
    "None",
    "select raises",
    "select floats",
    "select wrong shape",
    "select flat",
    "observe raises",
    "start raises",
]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failing_policy_is_reported_once_and_the_text_stays(
    endless_pair: Pair, prompt_ids: list[list[int]], plain: list[list[int]], fault: str
) -> None:
    speculator = Speculator(endless_pair, failing(fault), Settings(0.7, NEW, fallback=3, verification="match"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        generations = [speculator.generate(p, stream_key(0, f"p{i}")) for i, p in enumerate(prompt_ids[:4])]
    assert [list(one.tokens) for one in generations] == plain
    ours = [str(w.message) for w in caught if issubclass(w.category, SpecstopWarning)]
    assert len(ours) == 1
    assert fault in ours[0]
    lengths = {r.drafted for g in generations[1:] for r in g.rounds if not r.cut}
    assert lengths == {3}, "the fallback length is drafted from then on"


def test_a_well_behaved_policy_warns_of_nothing(pair: Pair, prompt_ids: list[list[int]]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Speculator(pair, failing("nothing"), Settings(0.0, NEW)).generate(prompt_ids[0])


def test_a_prompt_with_its_new_tokens_must_fit_the_models(pair: Pair) -> None:
    speculator = Speculator(pair, FixedLength(4), Settings(max_new_tokens=28))
    assert len(speculator.generate([7] * 100).tokens) > 0
    with pytest.raises(InputError, match=r"129 together, but the target reads at most 128"):
        speculator.generate([7] * 101)
    short = join(pair.target, build_model(max_position_embeddings=64))
    with pytest.raises(InputError, match="the draft reads at most 64"):
        Speculator(short, FixedLength(4), Settings(max_new_tokens=28)).generate([7] * 40)


def test_an_empty_prompt_is_refused(pair: Pair) -> None:
    with pytest.raises(InputError, match="prompt is empty"):
        Speculator(pair, FixedLength(4)).generate([])


def test_a_policy_that_reads_unknown_hidden_states_is_refused(pair: Pair) -> None:
    policy = FixedLength(2)
    policy.hidden = ("draft_hiden",)
    with pytest.raises(PolicyError, match=r"unknown hidden state 'draft_hiden' \(did you mean 'draft_hidden'"):
        Speculator(pair, policy)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_depth": -1}, "depth"),
        ({"fallback": -1}, "fallback"),
    ],
)
def test_settings_out_of_range_are_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Settings(**changes)  # type: ignore[arg-type]


def test_a_run_that_was_cut_off_in_a_round_spoils_no_later_one(pair: Pair, prompt_ids: list[list[int]]) -> None:
    class Cut(LookupDrafter):
        calls = 0

        def propose(self, round: RoundState, depth: int, rows: Rows) -> Any:
            Cut.calls += 1
            if Cut.calls == 4:
                raise KeyboardInterrupt
            return super().propose(round, depth, rows)

    settings = Settings(0.0, NEW, tree="2,1,1")
    loop = Speculator(pair, load_policy("eagle:4"), settings, drafter=Cut(pair), batch=2)
    with pytest.raises(KeyboardInterrupt):
        loop.run([Request(prompt_ids[3]), Request(prompt_ids[4])])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = loop.run([Request(prompt_ids[5])])
    assert made[0].tokens == Speculator(pair, FixedLength(0), settings).generate(prompt_ids[5]).tokens
    assert loop.policy.name.startswith("eagle")
