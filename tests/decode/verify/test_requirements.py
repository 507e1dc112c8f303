"""What a verification mode requires of a policy and shows to it, and whether a profile was measured for a run."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from joint_policies import JOINT
from oracle import Law, oracle_pair
from specstop.decode.loop import Settings, Speculator
from specstop.decode.verify.conditions import warn_if_unmeasured
from specstop.decode.verify.noise import gumbel
from specstop.decode.verify.sampling import SamplingParams
from specstop.policies.contract import Array, DraftStep, DraftTree, State, StopPolicy
from specstop.policies.errors import InputError, PolicyError, SpecstopWarning
from specstop.policies.fixed import FixedLength
from specstop.policies.registry import load_policy
from transformers import PrefixConstrainedLogitsProcessor

FAMILY = ("rejection", "rejection_replace", "block")
TEMPERATURE, KEY, BOUND = 0.7, 91, 30.0


class Recording(StopPolicy):
    """Drafts the whole tree and records what it is shown."""

    name, max_depth = "recording", 4

    def __init__(self, *features: str, trims: bool = False) -> None:
        self.features, self.trims = features, trims
        self.trees: list[DraftTree] = []
        self.steps: list[list[Array]] = [[]]

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        self.steps[-1].append(step.features[0].copy())
        return step.alive, state


class Selecting(Recording):
    def select(self, tree: DraftTree, state: State) -> Array | None:
        self.trees.append(tree)
        self.steps.append([])
        return None


def build(policy: StopPolicy, mode: str, tree: str = "chain:2", batch: int = 1) -> Speculator:
    pair = oracle_pair(Law(4, 0))
    return Speculator(pair, policy, Settings(1.0, 6, verification=mode, tree=tree), batch=batch)


PRE = ("top1", "entropy", "anchor_prob", "mean_accepted", "depth", "branch_rank")


@pytest.mark.parametrize("mode", FAMILY)
@pytest.mark.parametrize("policy", [Recording("top1", "drawn_prob", trims=True), Selecting("path_logprob")])
def test_excluding_tokens_by_what_was_drawn_is_refused_by_name(mode, policy):
    with pytest.raises(PolicyError, match=rf"{policy.name}: .*{policy.features[-1]}.*{mode}"):
        build(policy, mode)
    with pytest.raises(PolicyError, match="path_logprob"):
        build(JOINT["tetris"](), mode, batch=2)
    build(policy, "match")
    build(Recording("drawn_prob", "path_logprob"), mode)  # stops after the token
    build(Recording(*PRE, trims=True), mode)
    build(Selecting(*PRE), mode)


@pytest.mark.parametrize("mode", ["rejection", "typical"])
def test_noisy_features_belong_to_match(mode):
    with pytest.raises(PolicyError, match=r"noisy_margin.*match"):
        build(Recording("noisy_margin"), mode, "2,1")


def test_match_shows_the_tokens_and_selects_once_a_round():
    """Enumeration proves that the other modes hide them, and that policies select level by level."""
    policy = Selecting("top1")
    rounds = build(policy, "match", "2,2").generate([0, 1]).rounds
    assert len(policy.trees) == sum(r.drafted > 0 for r in rounds) > 0
    assert all(np.array_equal(tree.tokens >= 0, tree.drawn) for tree in policy.trees)


@pytest.mark.parametrize(
    ("length", "tree", "mode"),
    [(0, "2,2,1", "match"), (1, "2,2,1", "match"), (1, "1,2,1", "block"), (2, "1,2,1", "match"), (0, "chain:2", "block")],
)  # fmt: skip
def test_auto_depends_on_what_a_policy_reaches_of_a_tree(length, tree, mode):
    with pytest.raises(InputError, match="chain"):
        build(FixedLength(2), "block", "2,1")
    assert build(FixedLength(length), "auto", tree).mode.name == mode


# Noisy margins: a token that a filter removed still counts by its probability, one that a grammar forbids does not.


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (SamplingParams(), lambda w: w > -torch.inf),
        (SamplingParams(top_k=1), lambda w: w >= w.max()),
        (SamplingParams(min_p=0.3), lambda w: w >= w.max() + torch.tensor(0.3).log()),
    ],
    ids=["all", "top-k", "min-p"],
)
def test_a_token_that_a_filter_removed_counts_without_noise(plain_pair, prompt_ids, sampling, kept):
    policy = Selecting("noisy_margin", "noisy_lead")
    settings = Settings(TEMPERATURE, 16, 4, sampling=sampling, ignore_eos=True, verification="match")
    text = Speculator(plain_pair, policy, settings).generate(prompt_ids[4], KEY)
    checked, drafted = 0, [record for record in text.rounds if record.drafted]
    for steps, tree, record in zip(policy.steps, policy.trees, drafted, strict=False):
        anchor = [*prompt_ids[4], *text.tokens[: record.anchor]]
        for depth, features in enumerate(steps, 1):
            prefix = [*anchor, *tree.tokens[0, : depth - 1].tolist()]
            with torch.no_grad():
                logits = plain_pair.draft_model(torch.tensor([prefix])).logits[0, -1]
            weight = torch.log_softmax(logits / TEMPERATURE, -1)
            noise = gumbel(KEY, torch.tensor([len(prefix)]), len(weight), torch.float64)[0]
            stays, token = kept(weight), int(tree.tokens[0, depth - 1])
            others = torch.arange(len(weight)) != token
            noisy, removed = (weight + noise)[others & stays], weight[~stays]
            margins = [weight[token] + noise[token] - noisy.max()] if len(noisy) else []
            margins += [weight[token] - removed.max()] if len(removed) else []
            expected = min(float(min(margins)), BOUND)
            assert features[0].tolist() == pytest.approx([expected, expected], abs=1e-5)
            checked += 1
    assert checked > 10


def test_a_token_that_a_grammar_forbids_is_no_rival(plain_pair, prompt_ids):
    """Draft and target obey the same grammar: the only token that it allows is accepted."""
    only = PrefixConstrainedLogitsProcessor(lambda batch, ids: [20 + len(ids) % 5], num_beams=1)
    policy, sampling = Selecting("noisy_margin", "noisy_lead"), SamplingParams(processors=(only,))
    settings = Settings(TEMPERATURE, 12, 4, sampling=sampling, verification="match")
    text = Speculator(plain_pair, policy, settings).generate(prompt_ids[4], KEY)
    assert all(features[0].tolist() == [BOUND, BOUND] for steps in policy.steps for features in steps)
    assert all(record.accepted == record.drafted for record in text.rounds)


# Profiles

HYDRA = {"device": "cpu", "drafter": "hydra:folder/a"}
BOTH = {"device": "cpu", "drafter": "suffix+medusa:here"}


@pytest.mark.parametrize(
    ("measured", "temperature", "drafter", "options", "noun"),
    [
        ({"verification": "match"}, 0.7, "model", {"verification": "block"}, "block"),
        ({"verification": "match"}, 0.7, "model", {"verification": "match"}, ""),
        ({"verification": "match"}, 0.7, "model", {"verification": "rejection", "tree": "2,2"}, ""),  # chains only
        ({}, 0.7, "model", {}, ""),
        ({"facts": {"device": "cpu"}}, 0.0, "suffix:file.txt", {}, "suffix"),
        ({"facts": HYDRA}, 0.0, "model", {}, "hydra"),
        ({"facts": HYDRA}, 0.0, "hydra:folder/b", {}, ""),
        ({"facts": HYDRA}, 0.0, "suffix:/a/b+hydra:/models/llama+hydra-v2", {}, "suffix"),
        ({"facts": BOTH}, 0.0, "suffix+medusa:there", {}, ""),
        ({"facts": BOTH}, 0.0, "suffix", {}, "medusa"),
    ],
)
def test_a_profile_of_another_verification_or_drafter_causes_one_warning(
    profile, measured, temperature, drafter, options, noun
):
    policies = [FixedLength(2), FixedLength(3)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SpecstopWarning)
        warn_if_unmeasured(replace(profile, **measured), policies, Settings(temperature, 8, 3, **options), drafter)
        warn_if_unmeasured(None, policies, Settings(temperature, 8, 3, **options), drafter)
    assert [noun in str(one.message) for one in caught] == [True] * bool(noun)


def test_a_policy_that_observes_seconds_requires_a_profile_as_deep_as_it_drafts(pair, profile):
    bandit = load_policy("bandit?arms=fixed:1,fixed:8")
    with pytest.raises(InputError, match=r"observes the seconds .*8 tokens.*6"):
        Speculator(pair, bandit, Settings(0.0, 8, 8), profile)
    assert Speculator(pair, bandit, Settings(0.0, 8, 6), profile).generate([5, 6, 7]).tokens
    assert Speculator(pair, FixedLength(8), Settings(0.0, 8, 8), profile).generate([5, 6, 7]).tokens
