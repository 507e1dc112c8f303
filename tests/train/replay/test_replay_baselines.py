"""Every rule is replayed as the live loop plays it: on chains and on a tree, greedy and sampled."""

from __future__ import annotations

import pytest
import torch
from conftest import NEW
from contract_policies import DEPTH
from specstop.collect.prompts import Prompt
from specstop.collect.run import collect
from specstop.collect.store import Trace
from specstop.decode.loop import Settings, Speculator
from specstop.decode.models.pair import Pair
from specstop.decode.records import Round
from specstop.decode.verify.noise import stream_key
from specstop.policies.errors import PolicyError
from specstop.policies.profile import Profile
from specstop.policies.registry import load_policy
from specstop.train.replay.run import replay
from specstop.train.replay.arrays import TraceArrays, trace_arrays

SOME = 5  # prompts, in their order
TREE = "parents:-1,-1,-1,0,0,1,3,3,4,6,9"
SPECS = (
    "heuristic:2",
    "heuristic-transient:2",
    "roc:0.2?samples=3",
    "entropy:2.5",
    "adaedl:0.3?eps=0.2",
    "maxprob:0.2",
    "product:0.03",
    "online:0.1?prior=2",
    "bandit:0.5?arms=fixed:0,fixed:2,confidence:0.2,heuristic:1",
    "bandit?kind=thompson&arms=fixed:1,product:0.05,roc",
    "ddd:-1.5?begin=1&every=1",
    "eagle:3?top=2",
    "opt:0.2?nodes=6",
    "c2t:3",
    "gain:0.2?power=0.5",
)
"""Settings that stop now and then on the tiny pair."""


@pytest.fixture(scope="module")
def arrays(
    pair: Pair, prompts: list[Prompt], traces: dict[float, Trace], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str | None, float], TraceArrays]:
    folder = tmp_path_factory.mktemp("tree")
    made: dict[tuple[str | None, float], TraceArrays] = {(None, t): trace_arrays(trace) for t, trace in traces.items()}
    for t in (0.0, 0.7):
        trace = collect(pair, prompts, folder / str(t), tree=TREE, temperature=t, max_new_tokens=NEW)
        made[TREE, t] = trace_arrays(trace)
    return made


FOR_TREES = ("ddd", "eagle", "opt", "c2t", "gain")
CASES = [
    (spec, tree, t)
    for at, spec in enumerate(SPECS)
    for tree, t in ((None, 0.0), (None, 0.7), (TREE, 0.0), (TREE, 0.7))
    # Those for trees on one at both temperatures; each on a chain at one, in turn, and the others on a tree at the other one.
    if (tree and spec.startswith(FOR_TREES)) or t == (0.0, 0.7)[(at + (tree is not None)) % 2]
]


@pytest.mark.parametrize(("spec", "tree", "temperature"), CASES)
def test_rounds_are_those_of_the_live_loop(
    pair: Pair,
    prompts: list[Prompt],
    prompt_ids: list[list[int]],
    arrays: dict[tuple[str | None, float], TraceArrays],
    profile: Profile,
    spec: str,
    tree: str | None,
    temperature: float,
) -> None:
    policy = load_policy(spec).limited(DEPTH)
    held = arrays[tree, temperature].subset(range(SOME))
    speculator = Speculator(pair, policy, Settings(temperature, NEW, tree=tree, verification="match"), profile)
    rounds: list[list[Round]] = [
        list(speculator.generate(ids, stream_key(0, p.id)).rounds)
        for p, ids in zip(prompts[:SOME], prompt_ids, strict=False)
    ]
    assert speculator.policy is policy, "the policy failed and was replaced"
    log = replay(held, policy, profile).log
    played = [log[log[:, 0] == s, 1:].tolist() for s in range(SOME)]
    assert played == [[[r.anchor, r.drafted, r.verified, r.accepted] for r in text] for text in rounds]
    assert len({r.verified for text in rounds for r in text}) > 1


@pytest.mark.parametrize("spec", ["eagle", "opt", "gain", "c2t"])
def test_what_prunes_by_the_drawn_tokens_is_refused_under_rejection(pair: Pair, spec: str) -> None:
    with pytest.raises(PolicyError, match="would bias the output"):
        Speculator(pair, load_policy(spec), Settings(0.7, NEW, verification="rejection"))


@pytest.mark.parametrize("spec", ["entropy", "maxprob", "product", "online", "roc", "adaedl", "heuristic", "ddd"])
def test_what_stops_after_the_drawn_token_is_exact_under_rejection_too(pair: Pair, spec: str) -> None:
    Speculator(pair, load_policy(spec), Settings(0.7, NEW, verification="rejection"))


def test_a_carrying_rule_passes_its_state_from_text_to_text(
    arrays: dict[tuple[str | None, float], TraceArrays], profile: Profile
) -> None:
    whole = arrays[None, 0.7]
    for spec in ("heuristic:2", "online:0.1?prior=2", "bandit:0.5?arms=fixed:0,fixed:2"):
        policy = load_policy(spec).limited(DEPTH)
        alone = replay(whole.subset([5]), policy, profile).log[:, 1:]
        after = replay(whole, policy, profile).log
        assert policy.carries
        assert not torch.equal(after[after[:, 0] == 5, 1:], alone), spec
