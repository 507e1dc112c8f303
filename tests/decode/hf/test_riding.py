"""Our policies riding on the stock loop of assisted generation."""

from __future__ import annotations

import copy
import dataclasses
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from assisted_policies import ByPath, ByTokens
from conftest import NEW
from contract_policies import TEST_POLICIES, SelectingByToken
from specstop.collect.store import Trace
from specstop.decode import (
    PolicyStoppingCriteria,
    Settings,
    Speculator,
)
from specstop.decode.models.pair import Pair, join
from specstop.policies.contract import Array, RoundOutcome, State, StopPolicy
from specstop.policies.errors import PolicyError
from specstop.policies.fixed import Confidence, FixedLength
from specstop.policies.profile import Profile
from specstop.policies.registry import load_policy
from specstop.train.fit.run import train
from stock_generate import stock
from torch import Tensor


@pytest.fixture(scope="session")
def pair(plain_pair: Pair) -> Pair:
    return plain_pair


@pytest.fixture(scope="module")
def endless(pair: Pair) -> Pair:
    """Neither model has an end of text: the stock loop lets the draft stop at its own."""
    models = [copy.deepcopy(model) for model in (pair.target, pair.draft)]
    for model in models:
        model.generation_config.eos_token_id = None
    return join(*models)


def drafts_of(draft: Any, run: Any) -> list[int]:
    """How many tokens each call of the assistant drafted while `run` ran."""
    lengths: list[int] = []
    before = draft.generate

    def counting(*args: Any, **kwargs: Any) -> Any:
        out = before(*args, **kwargs)
        ids = out.sequences if hasattr(out, "sequences") else out
        lengths.append(ids.shape[1] - kwargs["input_ids"].shape[1])
        return out

    draft.generate = counting
    try:
        run()
    finally:
        draft.__dict__.pop("generate", None)
    return lengths


def assisted(pair: Pair, prompt: list[int], policy: StopPolicy) -> tuple[Tensor, list[int]]:
    """The text of assisted generation with a policy riding, and the lengths of its drafts."""
    out: list[Tensor] = []
    riding = PolicyStoppingCriteria(policy)

    def run() -> None:
        with riding.riding(pair.draft):
            out.append(stock(pair, [prompt], assistant_model=pair.draft))

    drafts = drafts_of(pair.draft, run)
    assert [drafted for drafted, _ in riding.rounds] == drafts[:-1]  # there is no one to tell of the last
    return out[0], drafts


@pytest.mark.parametrize(
    "policy", [FixedLength(3), Confidence(0.3, 6), Confidence(0.6), ByTokens(), ByPath()], ids=lambda p: p.name
)
def test_assisted_text_is_plain_and_its_drafts_are_the_policys(
    endless: Pair, prompt_ids: list[list[int]], policy: StopPolicy
) -> None:
    speculator = Speculator(endless, policy, Settings(0.0, NEW + 1))
    seen = set()
    for prompt in prompt_ids[4:6]:
        # The stock loop has no token of the target's before its first round: the rounds of both are the same after a
        # prompt whose last token is the target's own.
        begun = stock(endless, [prompt], max_new_tokens=3)[0].tolist()
        text, drafts = assisted(endless, begun, policy)
        assert torch.equal(text, stock(endless, [begun]))
        rounds = speculator.generate(begun[:-1]).rounds
        assert drafts == [r.drafted for r in rounds if r.drafted]
        seen |= set(drafts[:-3])
    assert len(seen) > 1 or policy.name.startswith("fixed")


class Unasked(StopPolicy):
    """Has nothing to say about one text: the contract's `keep`, which it does not implement, would raise."""

    name, max_depth, unasked = "unasked", 6, MappingProxyType({1: 2})


def test_a_policy_that_need_not_be_asked_about_one_text_is_not(endless: Pair, prompt_ids: list[list[int]]) -> None:
    policy = Unasked()
    begun = stock(endless, [prompt_ids[4]], max_new_tokens=3)[0].tolist()
    text, drafts = assisted(endless, begun, policy)
    assert torch.equal(text, stock(endless, [begun])) and set(drafts[:-2]) == {2}


class Watching(StopPolicy):
    """Notes the outcomes; drafts one token more from round to round."""

    name, max_depth = "watching", 5

    def __init__(self) -> None:
        self.outcomes: list[tuple[int, int, int]] = []

    def start(self, streams: int, keys: Array) -> State:
        return np.ones(streams, dtype=np.int64)

    def keep(self, step: Any, state: State) -> tuple[Array, State]:
        return step.alive & (step.depth < state)[:, None], state

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        self.outcomes.append((int(outcome.drafted[0]), int(outcome.verified[0]), int(outcome.accepted[0])))
        return state % self.max_depth + 1


def test_a_riding_policy_hears_how_its_rounds_went(endless: Pair, prompt_ids: list[list[int]]) -> None:
    """The same outcomes as in our own loop; there is no one to tell of the last round."""
    begun = stock(endless, [prompt_ids[4]], max_new_tokens=3)[0].tolist()
    policy, same = Watching(), Watching()
    _, drafts = assisted(endless, begun, policy)
    Speculator(endless, same, Settings(0.0, NEW + 1)).generate(begun[:-1])
    assert [o[0] for o in policy.outcomes] == drafts[:-1]
    assert drafts[:6] == [1, 2, 3, 4, 5, 1]
    assert policy.outcomes == same.outcomes[: len(policy.outcomes)]
    assert any(0 < accepted < drafted for drafted, _, accepted in policy.outcomes)


def test_the_next_turn_of_a_conversation_is_another_text(endless: Pair, prompt_ids: list[list[int]]) -> None:
    riding = PolicyStoppingCriteria(Watching())
    with riding.riding(endless.draft):
        first = stock(endless, [prompt_ids[4]], assistant_model=endless.draft)[0].tolist()
        before = list(riding.rounds)
        stock(endless, [[*first, *prompt_ids[5]]], assistant_model=endless.draft)
    again = PolicyStoppingCriteria(Watching())
    with again.riding(endless.draft):
        stock(endless, [[*first, *prompt_ids[5]]], assistant_model=endless.draft)
    assert len(before) > 2 and riding.rounds == [*before, *again.rounds]


class Settling(Watching):
    """Settles at the root how much a round drafts: three tokens."""

    first = 0

    def keep(self, step: Any, state: State) -> tuple[Array, State]:
        state = np.full(len(step.alive), 3) if step.depth == 0 else state
        return super().keep(step, state)


def test_a_policy_that_settles_at_the_root_is_asked_there(endless: Pair, prompt_ids: list[list[int]]) -> None:
    begun = stock(endless, [prompt_ids[4]], max_new_tokens=3)[0].tolist()
    _, drafts = assisted(endless, begun, Settling())
    assert set(drafts[:-2]) == {3}


def test_riding_leaves_the_assistant_as_it_was(pair: Pair, prompt_ids: list[list[int]]) -> None:
    config, method = pair.draft.generation_config, pair.draft.generate
    before = config.to_dict()
    with pytest.raises(RuntimeError, match="inside"), PolicyStoppingCriteria("fixed:2").riding(pair.draft):
        stock(pair, prompt_ids[2:3], assistant_model=pair.draft)
        assert config.num_assistant_tokens == 2
        raise RuntimeError("inside")
    assert config.to_dict() == before
    assert pair.draft.generate == method
    assert "generate" not in vars(pair.draft)


@pytest.mark.parametrize(
    "policy",
    [
        TEST_POLICIES["from-anchor"],
        TEST_POLICIES["trimming"],
        TEST_POLICIES["selecting"],
        SelectingByToken(),
    ],
    ids=lambda p: p.name,
)
def test_a_policy_that_the_stock_loop_cannot_serve_is_refused(policy: StopPolicy) -> None:
    with pytest.raises(PolicyError, match=f"{policy.name}: (reads|leaves) .*assisted generation"):
        PolicyStoppingCriteria(policy)


class ReadsHidden(StopPolicy):
    name, hidden = "reads-hidden", ("draft_hidden",)


class ReadsNoise(StopPolicy):
    name, features = "reads-noise", ("noisy_margin",)


def test_hidden_states_and_noise_are_refused(pair: Pair) -> None:
    with pytest.raises(PolicyError, match="reads-hidden: reads draft_hidden, which assisted generation has not"):
        PolicyStoppingCriteria(ReadsHidden())
    with pytest.raises(PolicyError, match="reads-noise: reads noisy_margin"):
        PolicyStoppingCriteria(ReadsNoise(), temperature=0.7)
    PolicyStoppingCriteria(ReadsNoise())


def test_a_learned_policy_with_history_rides(
    pair: Pair, traces: dict[float, Trace], full_profile: Profile, prompt_ids: list[list[int]],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    folder = tmp_path_factory.mktemp("riding") / "policy"
    profile = dataclasses.replace(full_profile, temperature=0.0)
    features = ["drawn_prob", "entropy", "mean_accepted", "last_accepted", "depth"]
    train(traces[0.0], profile, features=features, out=folder)
    policy = load_policy(folder)
    assert "mean_accepted" in policy.features
    for prompt in prompt_ids[2:5]:
        text, drafts = assisted(pair, prompt, policy)
        assert torch.equal(text, stock(pair, [prompt]))
        assert drafts
        assert max(drafts) <= policy.max_depth
