"""Policies that route: every mode stays exact, texts are those of plain decoding, and the longest path is taken."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import enumeration
import numpy as np
import pytest
from cases import Case
from conftest import NEW
from deciders import DECIDERS
from enumeration import EXACT, prove_within
from oracle import Law, Oracle
from specstop.decode.drafters import Drafter, ModelDrafter, find_drafters, with_drafter
from specstop.decode.hooks import Hook
from specstop.decode.loop import Request, Speculator
from specstop.decode.models.pair import Pair
from specstop.decode.plain import plain_texts
from specstop.decode.round_state import RoundState
from specstop.decode.settings import Settings
from specstop.policies.contract import Array, State, StopPolicy
from specstop.policies.errors import PolicyError, SpecstopWarning
from specstop.policies.fixed import Confidence, FixedLength
from specstop.policies.learned import Conditions, TrainingMetadata, warn_other_conditions
from specstop.policies.routing import RoutingPolicy, ThresholdRoute, agreement, match
from test_batch import counts

DEPTH = 5


class InTurns(RoutingPolicy):
    """Uses the drafters of each set in turn; each set is the bits of a number."""

    name, joins = "in-turns", True

    def __init__(self, stops: Sequence[StopPolicy], sets: Sequence[int] = (3, 1, 0, 2)) -> None:
        super().__init__(stops)
        self.sets, self.joins = np.array(sets), 3 in sets

    def start_route(self, streams: int, keys: Array) -> State:
        return np.asarray(keys) % 4

    def route(self, features: Array, state: State) -> tuple[Array, State]:
        chosen = self.sets[state % len(self.sets)]
        return (chosen[:, None] >> np.arange(features.shape[1])) & 1 == 1, state + 1


class WhereItAgrees(RoutingPolicy):
    """Uses every drafter with a feature of at least 1, none or several."""

    name, joins = "where-it-agrees", True

    def route(self, features: Array, state: State) -> tuple[Array, State]:
        return features[..., 0] >= 1, state


class ByPastRounds(RoutingPolicy):
    """Uses the drafter with the smaller feature, and both if their sum is large."""

    name, joins = "by-past-rounds", True

    def route(self, features: Array, state: State) -> tuple[Array, State]:
        values = features[..., 0]
        return (np.arange(2) == values.argmin(1)[:, None]) | (values.sum(1) > 1.0)[:, None], state


def stops(depth: int = 3) -> list[StopPolicy]:
    return [FixedLength(depth), Confidence(0.45, depth)]


ROUTES: dict[str, Any] = {
    "in turns": lambda: InTurns(stops()),
    "one in turns": lambda: InTurns(stops(), (2, 1, 0)),
    "by probability": lambda: ThresholdRoute("match_prob", 0.6, stops()),
    "by past rounds": lambda: ByPastRounds(stops(), ["mean_accepted"]),
    "where they agree": lambda: WhereItAgrees(stops(), ["agreement_run"]),
}


@pytest.fixture(autouse=True)
def routes(monkeypatch):
    """Enumerate these policies, and `model+other`, where the other one is a draft of other numbers."""

    def find(name: str, pair: Pair) -> list[Drafter]:
        if name != "model+other":
            return find_drafters(name, pair)
        law: Law = pair.target.law  # type: ignore[assignment]
        draft: Any = Oracle(Law(law.vocabulary, law._seed + 1, law._kind), 1)
        return [ModelDrafter(pair), ModelDrafter(dataclasses.replace(pair, draft=draft))]

    monkeypatch.setattr(enumeration, "find_drafters", find)
    for name, make in ROUTES.items():
        monkeypatch.setitem(DECIDERS, name, make)


@pytest.mark.parametrize("name", ROUTES)
@pytest.mark.parametrize(
    ("mode", "tree"),
    [("rejection", "chain:2"), ("rejection", "1,1|2,1"), ("rejection_replace", "2|1,1"), ("block", "chain:2")],
)
def test_texts_have_the_distribution_of_the_target_under_any_route(mode, tree, name):
    if mode == "block" and DECIDERS[name]().joins:
        return
    prompt, accepted = (0, 1, 0, 2, 0, 1), 0
    for seed, eos, beside, drafters in ((1, False, 0, "lookup+model"), (2, True, 1, "model+other")):
        case = Case(mode, tree, name, "mixed", seed, eos=eos, drafter=drafters, new=4, prompt=prompt)
        case, proof = prove_within(case, 400, beside)
        assert proof.reused == 0 and proof.distance <= EXACT, f"{case}: {proof.distance:.1e}"
        accepted += proof.accepted
    assert accepted > 0 or name == "where they agree", "the draft models have no such signal"


@pytest.fixture(scope="module")
def two(pair):
    return with_drafter(pair, "suffix+model")


def requests_of(prompt_ids: Sequence[list[int]]) -> list[Request]:
    return [Request([*ids, *ids], key) for key, ids in enumerate(prompt_ids[:6])]


class Paths(Hook):
    """Keeps of each round the stream's number, context, accepted tokens, drafters, and the candidates sent of each."""

    def __init__(self) -> None:
        self.rounds: list[tuple[int, int, int, list[bool], list[list[int]]]] = []

    def on_round_end(self, round: RoundState) -> None:
        tree = round.topology
        for stream, record in round.records.items():
            sent = [
                [int(round.tokens[stream, row]) for row in range(1, len(tree)) if tree.drafter[row] == index and keep[row]]
                for index in range(tree.drafters)
                for keep in [round.sent[stream]]
            ]  # fmt: skip
            text: Any = round.texts[stream]
            self.rounds.append((text.number, record.context, record.accepted, round.drafting[stream].tolist(), sent))


@pytest.mark.parametrize(("temperature", "batch"), [(0.0, 1), (0.7, 4)])
@pytest.mark.parametrize("name", ROUTES)
def test_texts_are_those_of_plain_decoding_and_the_longest_path_is_taken(
    two, pair, prompt_ids, name, temperature, batch
):
    requests, paths, settings = requests_of(prompt_ids), Paths(), Settings(temperature, NEW, 3, verification="match")
    texts = Speculator(two, ROUTES[name](), settings, hooks=[paths], batch=batch).run(requests)
    plain = plain_texts(pair, [one.prompt for one in requests], [one.key for one in requests], NEW, temperature).tokens
    assert [list(text.tokens) for text in texts] == plain
    for number, context, accepted, drafting, sent in paths.rounds:
        following = [*requests[number].prompt, *plain[number]][context:]
        agreed = [
            next((at for at, (a, b) in enumerate(zip(part, following, strict=False)) if a != b), len(part)) for part in sent
        ]  # fmt: skip
        assert accepted == max(agreed) and all(on or not part for on, part in zip(drafting, sent, strict=True))
    undrafted = Speculator(two, ROUTES[name](), dataclasses.replace(settings, max_depth=0), batch=batch).run(requests)
    assert [list(text.tokens) for text in undrafted] == plain
    used = {tuple(one[3]) for one in paths.rounds}
    assert len(used) > 1 and (name != "in turns" or len(used) == 4), "the route changes"


@pytest.mark.parametrize("batch", [1, 4])
def test_a_route_of_fixed_lengths_decides_once_in_a_round(two, prompt_ids, batch):
    rounds = {}
    for kind in (FixedLength, AsNeeded):
        policy = ThresholdRoute("match_prob", 0.6, [kind(3), kind(2)])
        texts = Speculator(two, policy, Settings(0.7, NEW, DEPTH), batch=batch).run(requests_of(prompt_ids))
        rounds[kind] = [r for text in texts for r in text.rounds]
    once, repeated = rounds.values()
    assert all(r.decisions == 1 and r.drafted <= (3, 2)[r.drafter] for r in once if not r.cut)
    assert [(r.drafted, r.drafter, r.committed) for r in once] == [
        (r.drafted, r.drafter, r.committed) for r in repeated
    ]


class AsNeeded(FixedLength):
    """A fixed length that is called at each depth."""


@pytest.mark.parametrize("name", ["", "suffix", "model"])
@pytest.mark.parametrize(("tree", "own"), [(None, (None, None)), ("1,1|2,1", ("1,1", "2,1"))])
def test_a_policy_that_does_not_route_decodes_as_with_its_one_drafter(two, pair, prompt_ids, name, tree, own):
    policy, one = Confidence(0.3, DEPTH), with_drafter(pair, name or "suffix")
    policy.drafter = name
    results = [
        Speculator(each, policy, Settings(0.7, NEW, DEPTH, tree=shape, verification="match"), batch=2)
        for each, shape in ((two, tree), (one, own[name == "model"]))
    ]
    policy.drafter = ""
    routed, alone = (speculator.run(requests_of(prompt_ids)) for speculator in results)
    assert [text.tokens for text in routed] == [text.tokens for text in alone]
    assert [counts(text) for text in routed] == [counts(text) for text in alone]


class Raising(InTurns):
    name = "raising"

    def route(self, features: Array, state: State) -> tuple[Array, State]:
        if (state % 4 == 3).any():
            raise RuntimeError("no way")
        return super().route(features, state)


@pytest.mark.parametrize("batch", [1, 4])
def test_a_route_that_fails_is_replaced_by_a_fixed_length_of_the_first_drafter(two, pair, prompt_ids, batch):
    requests, paths = requests_of(prompt_ids), Paths()
    settings = Settings(0.7, NEW, DEPTH, fallback=2, verification="match")
    speculator = Speculator(two, Raising(stops()), settings, hooks=[paths], batch=batch)
    with pytest.warns(SpecstopWarning, match=r"raising failed .*no way.*fixed:2"):
        texts = speculator.run(requests)
    plain = plain_texts(pair, [one.prompt for one in requests], [one.key for one in requests], NEW, 0.7).tokens
    assert [list(text.tokens) for text in texts] == plain and texts[-1].failure is not None
    last = paths.rounds[-8:]
    assert all(one[3] == [True, False] and len(one[4][0]) <= 2 for one in last if any(one[3]))
    assert any(one[3] == [True, False] for one in last)


def test_block_refuses_policies_that_join_drafters(two):
    settings = Settings(0.7, NEW, DEPTH, verification="block")
    with pytest.raises(PolicyError, match=r"in-turns.*several drafters"):
        Speculator(two, InTurns(stops()), settings)
    assert Speculator(two, InTurns(stops(), (1, 2)), settings).mode.name == "block"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Speculator(two, InTurns(stops()), Settings(0.7, NEW, DEPTH)).mode.name == "match"


def test_a_rule_has_no_conditions_of_training():
    used = Conditions(0.7, verification="block", sampling={"top_k": 5})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rule in (ThresholdRoute("match_prob", 0.6, stops()), agreement(), match()):
            warn_other_conditions(rule, used, "this run")
    trained = ThresholdRoute("match_prob", 0.6, stops())
    trained.metadata = TrainingMetadata(temperature=0.3)
    with pytest.warns(SpecstopWarning) as caught:
        warn_other_conditions(trained, used, "this run")
    assert len(caught) == 3
