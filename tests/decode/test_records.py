"""Records: sums over rounds, and what counts as acceptance."""

from __future__ import annotations

import pytest
from conftest import NEW
from contract_policies import TEST_POLICIES
from specstop.decode.loop import Request, Settings, Speculator
from specstop.decode.models.pair import Pair
from specstop.decode.records import Generation, Round, Tally
from specstop.policies.fixed import FixedLength


def make_round(drafted: int, verified: int, accepted: int, cut: bool = False, committed: int = -1) -> Round:
    committed = accepted + 1 if committed < 0 else committed
    return Round(
        1, 5, drafted, verified, accepted, committed, drafted, 1, cut, 0.25, 0.5, 1.0, 0.125, 2.0, deepest=verified
    )


GENERATIONS = [
    Generation(tuple(range(9)), (make_round(4, 4, 2), make_round(3, 2, 2), make_round(2, 2, 1)), 5, 3.0, 10.0),
    Generation((1, 2), (make_round(4, 3, 3, cut=True, committed=1),), 5, 4.0, 7.0),
    Generation((1,), (), 5, 1.0, 1.0),
]


def test_sums_of_handmade_rounds() -> None:
    summary = Tally(GENERATIONS).summary()
    expected = {
        "texts": 3, "tokens": 12, "seconds": 18.0, "tokens_per_s": 12 / 18, "target_calls": 4,
        "block_efficiency": (3 + 3 + 2 + 1) / 4, "drafted": 13, "verified": 11, "accepted": 8, "wasted": 5,
        "prefill_s": 8.0, "draft_s": 3.0, "verify_s": 4.0, "policy_s": 0.5, "outside_s": 0.5,
        "failed": False,
    }  # fmt: skip
    assert summary == pytest.approx(expected)


def test_a_verification_that_streams_share_is_one_call_of_the_target(pair: Pair, prompt_ids: list[list[int]]) -> None:
    shared = [round._replace(together=2) for round in GENERATIONS[0].rounds]
    texts = [Generation((1,), tuple(shared), 5, 0.0, 1.0)] * 2
    assert Tally(texts).target_calls == 3
    alone = Tally(Speculator(pair, FixedLength(2), Settings(0.0, NEW)).run([Request(p) for p in prompt_ids[:4]]))
    many = Tally(
        Speculator(pair, FixedLength(2), Settings(0.0, NEW), batch=4).run([Request(p) for p in prompt_ids[:4]])
    )
    assert many.target_calls < alone.target_calls == len(alone.rounds) and len(many.rounds) == len(alone.rounds)


def test_phases_sum_up_to_prefill_and_rounds() -> None:
    tally = Tally(GENERATIONS)
    assert sum(tally.shares().values()) == pytest.approx(8.0 + 4 * 2.0)


def test_acceptance_leaves_out_cut_rounds_and_counts_those_that_verified_as_deep() -> None:
    expected = [(1, 3 / 3, 3), (2, 2 / 3, 3), (3, 0 / 1, 1), (4, 0 / 1, 1)]
    assert Tally(GENERATIONS).acceptance() == expected
    assert Tally(GENERATIONS[1:]).acceptance() == []


def test_acceptance_in_a_tree_counts_depths_not_nodes(pair: Pair, prompt_ids: list[list[int]]) -> None:
    made = Speculator(pair, FixedLength(2), Settings(0.0, NEW, tree="3,2")).run([Request(p) for p in prompt_ids[:4]])
    tally = Tally(made)
    whole = sum(not r.cut for r in tally.rounds)
    assert max(r.verified for r in tally.rounds) > 2
    assert [(depth, count) for depth, _, count in tally.acceptance()] == [(1, whole), (2, whole)]


def test_no_round_at_all_is_no_division_by_zero() -> None:
    tally = Tally()
    assert (tally.block_efficiency, tally.tokens_per_s, tally.acceptance()) == (0.0, 0.0, [])
    assert tally.summary()["tokens"] == 0


def test_measured_phases_lie_within_their_round_and_rounds_within_the_text(
    pair: Pair, prompt_ids: list[list[int]]
) -> None:
    speculator = Speculator(pair, TEST_POLICIES["reads-history"], Settings(0.7, NEW, verification="match"))
    for prompt in prompt_ids[:4]:
        generation = speculator.generate(prompt)
        assert generation.prefill_s + sum(r.seconds for r in generation.rounds) <= generation.seconds
        for r in generation.rounds:
            assert min(r.first_draft_s, r.verify_s, r.policy_s, r.outside_s) >= 0
            assert (r.first_draft_s > 0) == (r.drafted > 0)
            assert (r.draft_s > 0) == (r.drafted > 1)
            assert min(r.verify_s, r.policy_s) > 0


def test_a_generation_says_what_it_amounts_to_in_a_line() -> None:
    made = Generation((1, 2, 3), (make_round(4, 3, 2),), 5, 0.5, 2.0, "def main():")
    assert made.tokens_per_s == 1.5
    assert repr(made) == "Generation(3 tokens, 1 rounds, 1.5 tokens/s, 'def main():')"
    assert repr(Generation((1,), (), 5, 0.0, 1.0)) == "Generation(1 tokens, 0 rounds, 1.0 tokens/s)"
