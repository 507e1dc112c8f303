"""Policies that weigh the streams of a batch against each other: every text stays the target's."""

from __future__ import annotations

import numpy as np
import pytest
from cases import Case
from enumeration import EXACT, prove_within
from joint_policies import COSTS, JOINT, MOST, batch_policy
from oracle import Law, oracle_pair
from specstop.decode.loop import Request, Speculator
from specstop.decode.records import Generation
from specstop.decode.settings import Settings
from specstop.policies.contract import Array, DraftStep, DraftTree, State, StopPolicy
from specstop.policies.errors import PolicyError
from specstop.policies.fixed import FixedLength
from specstop.policies.published.load import LoadLength
from specstop.policies.published.tetris import Tetris

LEAVES = 60
REFUSED = "tetris:1: excludes drawn tokens and reads path_logprob, which would bias the output under rejection"


@pytest.mark.parametrize(("mode", "tree"), [("rejection", "chain:3"), ("block", "chain:2"), ("rejection", "2,1")])
@pytest.mark.parametrize("decider", [name for name in JOINT if name != "tetris"])
def test_a_stream_that_shares_its_batch_has_the_targets_distribution(decider: str, mode: str, tree: str) -> None:
    """All choices of one stream enumerated, with another one beside it, whose choices are keyed."""
    if tree != "chain:3" and not decider.startswith(("adaptive linear", "batch best stepped")):
        return
    case, proof = prove_within(Case(mode, tree, decider, "mixed", 3, new=4), LEAVES, beside=1)
    assert proof.distance <= EXACT and proof.reused == 0 and proof.shared > 5, case


def test_tokens_that_vllms_rule_leaves_out_do_not_show() -> None:
    _, proof = prove_within(Case("rejection", "chain:3", "adaptive stepped", "sparse"), 150, beside=1)
    assert proof.distance <= EXACT and proof.dropped > 0 and proof.shared > 5


def test_the_proof_sees_what_tetris_would_do_to_rejection(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused there: sending a token because of what it is favours what the draft likes."""
    monkeypatch.setattr("specstop.decode.loop.check_mode", lambda *told: None)
    monkeypatch.setattr("specstop.decode.model_source.is_trimming", lambda policy: False)
    monkeypatch.setitem(JOINT, "tetris", lambda: Tetris(0.5, 1))
    _, proof = prove_within(Case("rejection", "chain:2", "tetris", "mixed"), 200, beside=1)
    assert proof.distance > 1e-3 and proof.dropped > 0 and proof.shared > 5


def test_what_reads_the_drawn_token_is_refused_where_it_would_bias() -> None:
    pair = oracle_pair(Law(3, 1), ())
    with pytest.raises(PolicyError, match=REFUSED):
        Speculator(pair, JOINT["tetris"](), Settings(1.0, 4, verification="rejection"), batch=2)
    with pytest.raises(PolicyError, match="reads drawn_prob, which would bias"):
        policy = batch_policy(names=("drawn_prob",))
        Speculator(pair, policy, Settings(1.0, 4, verification="rejection"), batch=2)


def requests(count: int) -> list[Request]:
    return [Request((0, at % 3, 1)[: 1 + at % 3], 11 * at + 2) for at in range(count)]


def run(policy: StopPolicy, temperature: float, batch: int, count: int = 5, ends: bool = True) -> list[Generation]:
    pair = oracle_pair(Law(3, 4, "mixed"), (2,) if ends else ())
    settings = Settings(temperature, 9, MOST, verification="match")
    return Speculator(pair, policy, settings, batch=batch).run(requests(count))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", JOINT)
def test_texts_under_match_are_those_of_plain_decoding(name: str, temperature: float) -> None:
    plain, drafted = [g.tokens for g in run(FixedLength(0), temperature, 1)], 0
    for batch in (1, 2, 3):
        made = run(JOINT[name](), temperature, batch)
        assert [g.tokens for g in made] == plain
        drafted += sum(r.drafted for g in made for r in g.rounds)
    assert len(set(plain)) > 1 and drafted > 0


def test_the_length_is_that_of_the_streams_that_are_left() -> None:
    """Three share a verification at first, then two, then one; a row without a text is in no batch."""
    shown: list[Array] = []

    class Seen(LoadLength):
        def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
            if step.depth == 0:
                shown.append(step.batch.copy())
            return super().keep(step, state)

    asked, table = Seen("1:3,2:2,3:1"), LoadLength("1:3,2:2,3:1")
    asked.unasked = {}  # the size settles the length, so that nobody would have asked
    made, unasked = (run(policy, 1.0, 3, 5, False) for policy in (asked, table))
    assert [[(r.drafted, r.accepted) for r in g.rounds] for g in made] == [
        [(r.drafted, r.accepted) for r in g.rounds] for g in unasked
    ]
    assert not any(r.decisions for g in unasked for r in g.rounds)
    alive = [int((batch == 0).sum()) for batch in shown]
    assert set(alive) == {1, 2, 3} and alive == sorted(alive, reverse=True)
    assert all(set(batch.tolist()) <= {0, -1} for batch in shown)
    assert all(g.rounds[0].drafted <= 1 for g in made[:3] if g.rounds)
    assert max(r.drafted for g in made for r in g.rounds) > 1


class ShownAll(StopPolicy):
    """Notes for how many streams it is asked to select, and sends the first token of each stream that has the lowest row."""

    name, joint, first, max_depth = "shown-all", True, 0, 2

    def __init__(self) -> None:
        self.asked: list[tuple[int, bool]] = []

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        return step.alive, state

    def select(self, tree: DraftTree, state: State) -> Array:
        self.asked.append((len(tree.drawn), tree.by_level))
        assert (tree.offered <= tree.drawn).all()
        if tree.by_level:
            assert (tree.tokens == -1).all() and len(np.unique(tree.depth[tree.offered])) == 1
        return tree.depth == 1


@pytest.mark.parametrize(("mode", "by_level"), [("match", False), ("rejection", True)])
def test_select_is_asked_for_all_streams_together(mode: str, by_level: bool) -> None:
    policy, pair = ShownAll(), oracle_pair(Law(3, 4, "dense"), ())
    made = Speculator(pair, policy, Settings(1.0, 6, verification=mode), batch=3).run(requests(3))
    assert set(policy.asked) == {(3, by_level)}
    assert {r.verified for g in made for r in g.rounds} <= {0, 1}


def test_costs_have_a_step() -> None:
    """What the cases above rest on."""
    rises = {name: np.diff(seconds).round(9) for name, seconds in COSTS.items()}
    assert len(set(rises["linear"])) == 1 and set(rises["stepped"]) == {0.0, 0.9}
