"""Verifications behind rounds of other lengths, as they would be behind rounds like their own."""

from __future__ import annotations

import pytest
from specstop.decode.profile.behind import LEAST, Before, behind_their_like
from specstop.policies.latency.estimate import PLAIN, TREE_PATH, TREE_VERIFY, VERIFY
from specstop.policies.latency.measurements import Key, Measurements


def test_the_mean_of_the_last_rounds() -> None:
    before = Before()
    assert [before.add(verified) for verified in (3, 1, 8, 0, 0, 0, 0)] == [None, 3, 2, 4, 3, 2, 2]


@pytest.mark.parametrize("slope", [0, 7, 40])
def test_a_line_in_the_rounds_before_is_found_and_taken_out(slope: int) -> None:
    """The context has a price of its own, of which the slope knows nothing."""

    def series(what: str, price: int, steepness: int) -> dict[Key, tuple[tuple[int, ...], ...]]:
        return {
            Key(what, side, (n, m)): (
                (price * n + more + steepness * (m - n),),
                (price * n + more + steepness * (m - n),) * 2,
            )
            for side, more in (("short", 1000), ("long", 2000))
            for n in (1, 2, 5)
            for m in (0, 1, 3, 6)
        }

    path = {Key(TREE_PATH, "short", (2, 3, 5)): ((900 + 2 * slope * 2,), ())}
    plain = {Key(PLAIN, "short"): ((500,), (600,))}
    settled = behind_their_like(
        Measurements({**series(VERIFY, 100, slope), **series(TREE_VERIFY, 300, 2 * slope), **path, **plain})
    ).series
    for what, price in ((VERIFY, 100), (TREE_VERIFY, 300)):
        for side, more in (("short", 1000), ("long", 2000)):
            for n in (1, 2, 5):
                assert settled[Key(what, side, (n,))] == ((price * n + more,) * 4, (price * n + more,) * 8)
    assert settled[Key(TREE_PATH, "short", (2, 3))] == ((900,), ())
    assert settled[Key(PLAIN, "short")] == ((500,), (600,))


def test_what_falls_with_the_rounds_before_is_noise_and_little_stays_positive() -> None:
    falling = {Key(VERIFY, "short", (2, m)): ((100 - 5 * m,),) for m in (0, 2, 4)}
    assert behind_their_like(Measurements(falling)).series == {Key(VERIFY, "short", (2,)): ((100, 90, 80),)}
    steep = {Key(VERIFY, "short", (2, m)): ((10 + 30 * m,),) for m in (2, 3, 9)}
    (ns,) = behind_their_like(Measurements(steep)).series[Key(VERIFY, "short", (2,))]
    assert ns[0] == 70 and ns[2] == LEAST * 280
    assert not behind_their_like(Measurements())
