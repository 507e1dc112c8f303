"""Policies on transformers' own loop of assisted generation."""

from __future__ import annotations

import copy
import dataclasses
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from conftest import NEW
from contract_policies import TEST_POLICIES, SelectingByToken
from specstop.collect.store import Trace
from specstop.decode import PolicyStoppingCriteria, Settings, Speculator
from specstop.decode.models.pair import Pair, join
from specstop.policies.contract import Array, DraftStep, RoundOutcome, State, StopPolicy
from specstop.policies.errors import PolicyError
from specstop.policies.fixed import Confidence, FixedLength
from specstop.policies.profile import Profile
from specstop.policies.registry import load_policy
from specstop.train.fit.run import train
from stock_generate import stock
from torch import Tensor


class ByTokens(StopPolicy):
    """Decides by the tokens."""

    name, first, max_depth = "by-tokens", 1, 6
    features = ("anchor_token", "before_token", "drawn_token", "above_token")

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        return step.alive & (step.features @ np.array([1, 2, 3, 5], dtype=np.float32) % 4 > 0), state


class ByPath(StopPolicy):
    """Is not called about the first token, which is part of the path nevertheless."""

    name, first, max_depth, features = "by-path", 2, 6, ("path_logprob",)

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        return step.alive & (step.features[:, :, 0] > -2.0), state


class Uncalled(StopPolicy):
    """Its length for one text is known: `keep`, which it does not implement, would raise."""

    name, max_depth, unasked = "uncalled", 6, MappingProxyType({1: 2})


class Watching(StopPolicy):
    """Records the outcomes; drafts one token more from round to round."""

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


class AtTheRoot(Watching):
    """Chooses at the root to draft three tokens."""

    first = 0

    def keep(self, step: Any, state: State) -> tuple[Array, State]:
        state = np.full(len(step.alive), 3) if step.depth == 0 else state
        return super().keep(step, state)


class ReadsHidden(StopPolicy):
    name, hidden = "reads-hidden", ("draft_hidden",)


class ReadsNoise(StopPolicy):
    name, features = "reads-noise", ("noisy_margin",)


@pytest.fixture(scope="session")
def pair(plain_pair: Pair) -> Pair:
    return plain_pair


@pytest.fixture(scope="module")
def endless(pair: Pair) -> Pair:
    """Neither model has an end of text: in the stock loop, the draft stops at its own."""
    models = [copy.deepcopy(model) for model in (pair.target, pair.draft_model)]
    for model in models:
        model.generation_config.eos_token_id = None
    return join(*models)


@pytest.fixture(scope="module")
def begun(endless: Pair, prompt_ids: list[list[int]]) -> list[list[int]]:
    """Prompts that end with a token of the target, as each round of our loop begins."""
    return [stock(endless, [prompt], max_new_tokens=3)[0].tolist() for prompt in prompt_ids[4:6]]


def assisted(pair: Pair, prompt: list[int], policy: StopPolicy) -> tuple[Tensor, list[int]]:
    """Return the text of assisted generation with a policy, and the lengths of its drafts."""
    lengths: list[int] = []
    generate, draft = pair.draft_model.generate, pair.draft_model

    def counting(*args: Any, **kwargs: Any) -> Any:
        out = generate(*args, **kwargs)
        ids = out.sequences if hasattr(out, "sequences") else out
        lengths.append(ids.shape[1] - kwargs["input_ids"].shape[1])
        return out

    riding = PolicyStoppingCriteria(policy)
    draft.generate = counting  # type: ignore[method-assign]
    try:
        with riding.riding(draft):
            text = stock(pair, [prompt], assistant_model=draft)
    finally:
        del draft.__dict__["generate"]
    assert [drafted for drafted, _ in riding.rounds] == lengths[:-1], "the outcome of the last round is not known"
    return text, lengths


@pytest.mark.parametrize(
    "policy", [FixedLength(3), Confidence(0.3, 6), Confidence(0.6), ByTokens(), ByPath()], ids=lambda p: p.name
)
def test_assisted_text_is_plain_and_its_drafts_are_those_of_our_loop(
    endless: Pair, begun: list[list[int]], policy: StopPolicy
) -> None:
    speculator, observed = Speculator(endless, policy, Settings(0.0, NEW + 1)), set[int]()
    for prompt in begun:
        text, drafts = assisted(endless, prompt, policy)
        assert torch.equal(text, stock(endless, [prompt]))
        assert drafts == [r.drafted for r in speculator.generate(prompt[:-1]).rounds if r.drafted]
        observed |= set(drafts[:-3])
    assert len(observed) > 1 or policy.name.startswith("fixed")


@pytest.mark.parametrize(("policy", "length"), [(Uncalled(), 2), (AtTheRoot(), 3)])
def test_a_length_that_is_known_at_the_root_is_drafted(
    endless: Pair, begun: list[list[int]], policy: StopPolicy, length: int
) -> None:
    text, drafts = assisted(endless, begun[0], policy)
    assert torch.equal(text, stock(endless, begun[:1])) and set(drafts[:-2]) == {length}


def test_a_policy_observes_the_outcomes_of_our_loop(endless: Pair, begun: list[list[int]]) -> None:
    policy, reference = Watching(), Watching()
    _, drafts = assisted(endless, begun[0], policy)
    Speculator(endless, reference, Settings(0.0, NEW + 1)).generate(begun[0][:-1])
    assert [drafted for drafted, *_ in policy.outcomes] == drafts[:-1] and drafts[:6] == [1, 2, 3, 4, 5, 1]
    assert policy.outcomes == reference.outcomes[: len(policy.outcomes)]
    assert any(0 < accepted < drafted for drafted, _, accepted in policy.outcomes)


def test_the_next_turn_of_a_conversation_is_another_text(endless: Pair, prompt_ids: list[list[int]]) -> None:
    both, second = PolicyStoppingCriteria(Watching()), PolicyStoppingCriteria(Watching())
    with both.riding(endless.draft):
        text = stock(endless, [prompt_ids[4]], assistant_model=endless.draft)[0].tolist()
        first_rounds = list(both.rounds)
        stock(endless, [[*text, *prompt_ids[5]]], assistant_model=endless.draft)
    with second.riding(endless.draft):
        stock(endless, [[*text, *prompt_ids[5]]], assistant_model=endless.draft)
    assert len(first_rounds) > 2 and both.rounds == [*first_rounds, *second.rounds]


def test_the_assistant_is_restored_after_an_error(pair: Pair, prompt_ids: list[list[int]]) -> None:
    config, method = pair.draft_model.generation_config, pair.draft_model.generate
    before = config.to_dict()
    with pytest.raises(RuntimeError, match="inside"), PolicyStoppingCriteria("fixed:2").riding(pair.draft):
        stock(pair, prompt_ids[2:3], assistant_model=pair.draft)
        assert config.num_assistant_tokens == 2
        raise RuntimeError("inside")
    assert config.to_dict() == before
    assert pair.draft_model.generate == method and "generate" not in vars(pair.draft)


@pytest.mark.parametrize(
    "policy",
    [*(TEST_POLICIES[n] for n in ("from-anchor", "trimming", "selecting")), SelectingByToken(), ReadsHidden(), ReadsNoise()],
    ids=lambda p: p.name,
)  # fmt: skip
def test_a_policy_that_needs_more_than_the_stock_loop_has_is_refused(policy: StopPolicy) -> None:
    with pytest.raises(PolicyError, match=f"{policy.name}: (reads|leaves)"):
        PolicyStoppingCriteria(policy, temperature=0.7)
    if policy.name == "reads-noise":
        PolicyStoppingCriteria(policy)


def test_a_learned_policy_with_history_rides(
    pair: Pair, traces: dict[float, Trace], full_profile: Profile, prompt_ids: list[list[int]],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    folder = tmp_path_factory.mktemp("riding") / "policy"
    features = ["drawn_prob", "entropy", "mean_accepted", "last_accepted", "depth"]
    train(traces[0.0], dataclasses.replace(full_profile, temperature=0.0), features=features, out=folder)
    policy = load_policy(folder)
    assert "mean_accepted" in policy.features
    for prompt in prompt_ids[2:5]:
        text, drafts = assisted(pair, prompt, policy)
        assert torch.equal(text, stock(pair, [prompt]))
        assert drafts and max(drafts) <= policy.max_depth
