"""What rounds cost the verifications after them: found from a script's, and charged to their parts."""

from __future__ import annotations

import random

import pytest
from specstop.decode.profile.carry_over import FINE, ROUND, TREE_ROUND, Before, charged
from specstop.policies.estimate import FIRST, LATER, OUTSIDE, PLAIN, PLAIN_OUTSIDE, PREFILL, TREE_DRAFTS, TREE_VERIFY
from specstop.policies.measurements import DECISIONS, VERIFY, Key, Measurements

SIDE = "short"
BASE, TOKEN = 3_000_000, 500_000
"""Nanoseconds of a round that verifies nothing, and of each token more."""


def test_the_mean_of_the_last_rounds() -> None:
    before = Before()
    met = [before.add(verified) for verified in (3, 1, 8, 0, 0, 0, 0, 0, 4)]
    assert met == [
        None,
        3 * FINE,
        2 * FINE,
        4 * FINE,
        3 * FINE,
        round(2.4 * FINE),
        2 * FINE,
        round(12 * FINE / 7),
        FINE * 3 // 2,
    ]


def scripted(share: float) -> Measurements:
    """Return timings in which verifying n tokens takes 2 ms, 0.1 more a token, and a share of the rounds before."""
    chance, series = random.Random(0), {}
    for n in range(6):
        series[Key(ROUND, SIDE, (n,))] = ((BASE + TOKEN * n,),)
        for m in sorted({chance.randrange(24) for _ in range(8)}):
            before = BASE + TOKEN * m / FINE
            series[Key(VERIFY, SIDE, (n, m))] = ((round(2_000_000 + 100_000 * n + share * before),), ())
    return Measurements(series)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3])
def test_the_share_is_found_and_charged(share: float) -> None:
    others = {
        Key(OUTSIDE, SIDE, (1,)): ((50_000,),),
        Key(LATER, SIDE, (2,)): ((300_000,),),
        Key(PLAIN, SIDE): ((2_000_000,),),
        Key(PLAIN_OUTSIDE, SIDE): ((100_000,),),
        Key(PREFILL, SIDE, (9,)): ((7_000_000,),),
        Key(DECISIONS, "mine", (1,)): ((60_000,),),
    }
    measured, found = charged(scripted(share).with_series(Measurements(others)))
    assert found == pytest.approx(share, abs=1e-6)
    series = measured.series
    assert not any(key.what == ROUND for key in series)
    for n in range(6):
        (first, second) = series[Key(VERIFY, SIDE, (n,))]
        assert first == pytest.approx([(2_000_000 + 100_000 * n) / (1.0 - share)] * len(first), abs=5) and second == ()
    assert series[Key(OUTSIDE, SIDE, (1,))][0][0] == pytest.approx(50_000 / (1.0 - share), abs=1)
    assert series[Key(LATER, SIDE, (2,))][0][0] == pytest.approx(300_000 / (1.0 - share), abs=1)
    plain = series[Key(PLAIN, SIDE)][0][0] + series[Key(PLAIN_OUTSIDE, SIDE)][0][0]
    assert plain == pytest.approx(2_100_000, abs=5), "plain decoding comes after its like as it was timed"
    assert series[Key(PREFILL, SIDE, (9,))] == ((7_000_000,),) and series[Key(DECISIONS, "mine", (1,))] == ((60_000,),)


@pytest.mark.parametrize(("verified", "before"), [(2, 3), (4, 9), (9, 2), (60, 60)])
def test_trees_lose_no_more_of_the_cache_than_the_longest_chain(verified: int, before: int) -> None:
    """Of rounds that are longer nothing more is told by the chains: both are charged as that one."""

    def seconds(nodes: int) -> int:
        return 1_000_000 + 600_000 * nodes  # of a round of a tree

    tree = {
        Key(TREE_ROUND, SIDE, (4,)): ((seconds(4),),),
        Key(TREE_ROUND, SIDE, (9,)): ((seconds(9),),),
        Key(TREE_VERIFY, SIDE, (verified, before * FINE)): ((30_000_000,),),
        Key(TREE_DRAFTS, SIDE, (2,)): ((400_000,),),
    }
    measured, share = charged(scripted(0.2).with_series(Measurements(tree)))
    assert share == pytest.approx(0.2, abs=1e-6)
    most = BASE + 5 * TOKEN
    charge = 0.2 * (min(seconds(verified), most) - min(seconds(before), most))
    assert measured.series[Key(TREE_VERIFY, SIDE, (verified,))][0][0] == pytest.approx(30e6 + charge, abs=50)
    assert measured.series[Key(TREE_DRAFTS, SIDE, (2,))] == ((400_000,),)


@pytest.mark.parametrize("backlog", [1, 2])
def test_the_first_draft_step_of_a_tree_bears_its_share_once(backlog: int) -> None:
    tree = {
        **{Key(TREE_ROUND, SIDE, (n,)): ((1_000_000 + 600_000 * n,),) for n in (4, 9)},
        Key(TREE_VERIFY, SIDE, (2, 2 * FINE)): ((30_000_000,),),
    }
    alone, with_first = (
        charged(scripted(0.2).with_series(Measurements({**tree, **more})))[0].series
        for more in ({}, {Key(FIRST, SIDE, (backlog,)): ((400_000,),)})
    )
    # What a round bears is b / (1 - b) of its seconds; of the first step's the chain's price has it.
    assert with_first[Key(FIRST, SIDE, (backlog,))][0][0] == pytest.approx(400_000 / 0.8, abs=1)
    verify = Key(TREE_VERIFY, SIDE, (2,))
    less = alone[verify][0][0] - with_first[verify][0][0]
    assert less == pytest.approx(400_000 * 0.2 / 0.8, abs=5)


def test_what_falls_with_the_rounds_before_is_noise() -> None:
    falling = {Key(VERIFY, SIDE, (2, m * FINE)): ((10_000 - 500 * m,),) for m in (0, 2, 4)}
    rounds = {Key(ROUND, SIDE, (n,)): ((20_000 + 3_000 * n,),) for n in (0, 5)}
    measured, share = charged(Measurements({**falling, **rounds}))
    assert share == 0.0 and measured.series == {Key(VERIFY, SIDE, (2,)): ((10_000, 9_000, 8_000),)}
    assert charged(Measurements()) == (Measurements(), 0.0)
