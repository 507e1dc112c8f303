"""What a verification mode asks of a policy: no leaving out by what was drawn, where that would bias the output."""

from __future__ import annotations

import numpy as np
import pytest
from oracle import Law, oracle_pair
from specstop.decode.loop import Settings, Speculator
from specstop.policies.contract import Array, DraftStep, DraftTree, State, StopPolicy
from specstop.policies.errors import PolicyError
from specstop.policies.fixed import FixedLength

FAMILY = ("rejection", "rejection_replace", "block")
PAIR = oracle_pair(Law(4, 0))


class Trims(StopPolicy):
    name, trims, max_depth = "it-trims", True, 2

    def __init__(self, *features: str) -> None:
        self.features = features

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        return step.alive, state


class Selects(Trims):
    """Notes what it is shown."""

    name, trims = "it-selects", False

    def __init__(self, *features: str) -> None:
        super().__init__(*features)
        self.shown: list[DraftTree] = []

    def select(self, tree: DraftTree, state: State) -> Array | None:
        self.shown.append(tree)
        return None


class StopsAfter(Trims):
    name, trims = "it-stops-after", False


def build(policy: StopPolicy, mode: str, tree: str = "chain:2") -> Speculator:
    return Speculator(PAIR, policy, Settings(1.0, 6, verification=mode, tree=tree))


@pytest.mark.parametrize("mode", FAMILY)
@pytest.mark.parametrize("kind", [Trims, Selects])
@pytest.mark.parametrize("feature", ["drawn_prob", "path_logprob"])
def test_leaving_out_by_what_was_drawn_is_refused_by_name(mode: str, kind: type[Trims], feature: str) -> None:
    policy = kind("top1", feature)
    with pytest.raises(PolicyError, match=rf"{policy.name}: .*{feature}.* bias .*{mode}"):
        build(policy, mode)
    build(policy, "match")


@pytest.mark.parametrize("mode", [*FAMILY, "match"])
@pytest.mark.parametrize("kind", [Trims, Selects])
def test_leaving_out_by_what_was_known_before_is_accepted(mode: str, kind: type[Trims]) -> None:
    build(kind("top1", "entropy", "anchor_prob", "mean_accepted", "depth", "branch_rank"), mode)


@pytest.mark.parametrize("mode", FAMILY)
def test_stopping_by_what_was_drawn_is_accepted(mode: str) -> None:
    build(StopsAfter("drawn_prob", "path_logprob"), mode)


@pytest.mark.parametrize("mode", ["rejection", "typical"])
def test_noisy_features_belong_to_match(mode: str) -> None:
    with pytest.raises(PolicyError, match=r"noisy_margin.*match"):
        build(StopsAfter("noisy_margin"), mode, "2,1")
    build(StopsAfter("noisy_margin"), "match", "2,1")


def test_rejection_hides_tokens_and_asks_level_by_level() -> None:
    policy = Selects("top1")
    rounds = build(policy, "rejection", "2,2").generate([0, 1]).rounds
    depths = [int((tree.depth * tree.drawn).max()) for tree in policy.shown]
    assert depths[:2] == [1, 2]
    assert len(depths) == sum(min(2, 6 - 1 - r.anchor) for r in rounds)
    assert all(bool((tree.tokens == -1).all()) for tree in policy.shown)


def test_match_shows_tokens_and_asks_once() -> None:
    policy = Selects("top1")
    rounds = build(policy, "match", "2,2").generate([0, 1]).rounds
    assert len(policy.shown) == sum(r.drafted > 0 for r in rounds) > 0
    for tree in policy.shown:
        assert np.array_equal(tree.tokens >= 0, tree.drawn)


@pytest.mark.parametrize(
    ("length", "tree", "mode"),
    [
        (0, "2,2,1", "match"),
        (1, "2,2,1", "match"),
        (1, "1,2,1", "block"),
        (2, "1,2,1", "match"),
        (0, "chain:2", "block"),
    ],
)
def test_auto_goes_by_what_a_policy_reaches_of_a_tree(length: int, tree: str, mode: str) -> None:
    speculator = build(FixedLength(length), "auto", tree)
    assert speculator.mode.name == mode
    assert speculator.generate([1, 2], 1).tokens
