"""What rounds of a batch cost: between points, beyond them, at steps, and read from a file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from specstop.policies.costs import BatchCosts, BatchTable
from specstop.policies.errors import InputError
from specstop.policies.estimate import (
    BATCH_DRAFTS,
    BATCH_FIRST,
    BATCH_OUTSIDE,
    BATCH_PLAIN,
    BATCH_PLAIN_OUTSIDE,
    BATCH_VERIFY,
    batch_costs,
)
from specstop.policies.measurements import Key, Timings
from specstop.policies.profile import Profile

EXACT = 1e-12

LOW = BatchTable(
    10.0,
    ((1, 1.0), (4, 4.0)),
    0.5,
    ((1, 2.0), (2, 2.0), (3, 3.0)),
    {2: ((2, 10.0), (6, 14.0)), 4: ((4, 12.0), (8, 20.0))},
)
HIGH = dataclasses.replace(LOW, context=30.0, verify_s={2: ((2, 20.0), (6, 24.0)), 4: ((4, 22.0), (8, 30.0))})
COSTS = BatchCosts(LOW, HIGH, (0.1, 0.01, 0.001))
BARE = dataclasses.replace(COSTS, plain_outside_s=(0.02, 0.003))


def said(value: Any) -> Any:
    return pytest.approx(value, rel=EXACT)


def test_verifications_between_sizes_tokens_and_contexts() -> None:
    outside = 0.1 + 0.01 * 2
    assert COSTS.verify_s(2, [2, 3, 6], 10.0) == said(np.array([10.0, 11.0, 14.0]) + outside)
    assert COSTS.verify_s(2, 8, 10.0) == said(16.0 + outside), "beyond the last point as it rises over all"
    assert COSTS.verify_s(2, 4, [10.0, 20.0, 30.0]) == said(np.array([12.0, 17.0, 22.0]) + outside)
    assert COSTS.verify_s(3, 6, 10.0) == said((14.0 + 16.0) / 2 + 0.13), "half of each size measured"
    assert COSTS.verify_s([1, 9], [1, 8], 10.0) == said([10.0 + 0.11, 20.0 + 0.19]), "as of the nearest size"
    assert COSTS.plain_s([2, 4], 10.0) == said([10.12, 12.14])


def test_draft_steps_by_the_streams_that_draft() -> None:
    assert COSTS.draft_s([0, 1, 2, 3, 4], 10.0) == said([0.0, 2.001, 2.002, 3.003, 3.504])
    assert COSTS.first_draft_s(4, 10.0) == said(4.004)
    assert COSTS.first_draft_s(4, 10.0, 9) == said(4.004 + 5 * 0.5), "tokens beyond one of each stream"
    assert COSTS.first_draft_s(0, 10.0, 0) == 0.0
    alone = COSTS.first_draft_s(3, 10.0, 3, begun=2)
    assert alone == said(1.0 + 2 * 1.0 + 0.003), "drafts that begin a text read it in calls of their own"
    assert COSTS.first_draft_s(2, 10.0, 2, begun=2) == said(2.002)


def test_a_round_is_the_sum_of_its_steps() -> None:
    seconds = COSTS.round_s([10.0, 10.0], [2, 4], [6, 4], np.array([[2, 1, 1], [0, 0, 0]]), [3, 0], [0, 0])
    first = 2.0 + 0.5 + 0.002
    assert seconds == said([first + 2 * 2.001 + 14.12, 12.14])


def test_the_second_draft_step_has_a_price_of_its_own(profile: Profile, tmp_path: Path) -> None:
    cold = [dataclasses.replace(side, second_draft_s=((1, 5.0), (2, 6.0))) for side in (LOW, HIGH)]
    costs = BatchCosts(*cold, COSTS.outside_s)
    assert costs.second_draft_s([0, 1, 2], 10.0) == said([0.0, 5.001, 6.002])
    assert COSTS.second_draft_s([1, 2], 10.0) == said(COSTS.draft_s([1, 2], 10.0)), (
        "as later ones where it was not timed"
    )
    fed = np.array([[2, 2, 1, 1], [2, 1, 0, 0], [2, 0, 0, 0]])
    rounds = [10.0] * 3, [2] * 3, [6] * 3, fed, [2] * 3
    assert costs.round_s(*rounds) - COSTS.round_s(*rounds) == said([4.0, 3.0, 0.0])
    known = dataclasses.replace(profile, batch=costs)
    known.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json").batch == costs


def test_timings_tell_the_second_draft_step_from_later_ones() -> None:
    """Two streams: 5 s, then 2 s a step; of three only one length was timed, so both are its mean."""
    timed = {
        Key(BATCH_VERIFY, "short", (2, 4)): [9.0],
        Key(BATCH_OUTSIDE, "short", (2, 2)): [1.0],
        **{Key(BATCH_PLAIN_OUTSIDE, "short", (n,)): [0.5 + 0.125 * n] for n in (1, 2, 4)},
        Key(BATCH_FIRST, "short", (2, 2)): [6.0],
        Key(BATCH_FIRST, "short", (2, 5)): [7.5],
        **{Key(BATCH_DRAFTS, "short", (2, steps)): [5.0 + 2.0 * (steps - 1)] for steps in (1, 2, 4)},
        Key(BATCH_DRAFTS, "short", (3, 2)): [8.0],
    }
    found = batch_costs(Timings({key: np.array(seconds) for key, seconds in timed.items()}), (10.0, 30.0))
    assert found is not None
    low = found.low
    assert [n for n, _ in low.second_draft_s] == [n for n, _ in low.draft_s] == [2, 3]
    assert [s for _, s in low.second_draft_s] == said([5.0, 4.0]) and [s for _, s in low.draft_s] == said([2.0, 4.0])
    assert dict(low.first_draft_s)[2] == said(6.0) and low.backlog_token_s == said(0.5)
    assert found.plain_outside_s == said((0.5, 0.125))


def test_a_step_stays_a_step() -> None:
    captured = {8: ((8, 5.0), (64, 5.0), (65, 9.0), (128, 9.0))}
    table = BatchTable(10.0, ((1, 1.0),), 0.0, ((1, 1.0),), captured)
    flat = BatchCosts(table, table)
    assert flat.verify_s(8, [8, 63, 64, 65, 100, 128], 10.0).tolist() == [5.0, 5.0, 5.0, 9.0, 9.0, 9.0]


def test_what_was_timed_as_cheaper_than_less_is_the_mean_of_both_but_for_plain_decoding() -> None:
    """Two streams: 2 tokens 9 s, 3 to 6 tokens 4, 6, 5 (twice as often timed) and 8 s."""
    timed = {
        Key(BATCH_PLAIN, "short", (2,)): [9.0],
        **{Key(BATCH_VERIFY, "short", (2, n)): s for n, s in ((3, [4.0]), (4, [6.0]), (5, [5.0, 5.0]), (6, [8.0]))},
        Key(BATCH_FIRST, "short", (2, 2)): [1.0],
    }
    found = batch_costs(Timings({key: np.array(seconds) for key, seconds in timed.items()}), (10.0, 30.0))
    assert found is not None
    mean = (6.0 + 2 * 5.0) / 3
    assert found.verify_s(2, [2, 3, 4, 5, 6], 10.0) == said([9.0, 4.0, mean, mean, 8.0])


def test_a_round_that_asks_nobody_has_a_price_of_its_own_outside_the_models() -> None:
    assert BARE.plain_s([2, 4], 10.0) == said([10.0 + 0.026, 12.0 + 0.032])
    assert BARE.verify_s([2, 4], [2, 4], 10.0).tolist() == COSTS.verify_s([2, 4], [2, 4], 10.0).tolist()
    context, none, some = np.full(2, 10), np.zeros(2, dtype=np.int64), np.array([1, 0])
    assert BARE.shared_s(context, none, none, none, none) == said(10.026)
    for drafted, asked in ((none, some), (some, none), (none, None)):
        expected = COSTS.shared_s(context, drafted, none, some)
        assert BARE.shared_s(context, drafted, none, some, asked) == said(expected)
    assert COSTS.shared_s(context, none, none, none, none) == said(10.12)


def test_what_is_kept_in_a_file_comes_back(profile: Profile, tmp_path: Path) -> None:
    for costs in (BARE, COSTS):
        known = dataclasses.replace(profile, batch=costs)
        known.save(tmp_path / "profile.json")
        assert Profile.load(tmp_path / "profile.json") == dataclasses.replace(known, source=None)
    assert known.same_costs(known.to_dict()) and not known.same_costs(profile.to_dict())
    older = known.to_dict()
    for side in ("low", "high"):
        del older["batch"][side]["second_draft_s"]
    del older["batch"]["plain_outside_s"]
    assert known.same_costs(older), "a policy of an earlier version keeps such a record"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: raw.pop("low"), "'low'"),
        (lambda raw: raw["low"].update(draft_s=[]), "batch.low.draft_s: expected a list of 1 to 4096"),
        (lambda raw: raw["high"]["verify_s"].pop("4"), "batch.high.verify_s: both contexts need the same sizes"),
        (
            lambda raw: raw["low"]["verify_s"].update({"0": [[1, 1.0]]}),
            "batch.low.verify_s: expected batch sizes between",
        ),
        (
            lambda raw: raw["low"]["verify_s"].update({"two": [[2, 1.0]]}),
            "batch.low.verify_s: expected batch sizes between",
        ),
        *(
            (
                lambda raw, key=key: raw["low"]["verify_s"].update({key: [[1, 1.0]]}),
                "batch.low.verify_s: expected batch sizes between",
            )
            for key in ("02", "0000000012345", "9" * 5000)
        ),
        (lambda raw: raw["low"].update(verify_s={}), "batch.low.verify_s: expected at least one batch size"),
        (
            lambda raw: raw["low"]["verify_s"].update({"2": [[1, 1.0]]}),
            r"batch.low.verify_s.2\[0\]: expected a whole number",
        ),
        (lambda raw: raw["low"]["verify_s"].update({"2": [[2, 0.0]]}), r"batch.low.verify_s.2\[0\]: expected a number"),
        (lambda raw: raw["high"].update(context=10.5), "batch.high.context: expected that of low"),
        (lambda raw: raw.update(outside_s=[0.1]), "batch.outside_s: expected a list of 3"),
    ],
)
def test_what_is_mangled_is_named(profile: Profile, damage: Callable[[Any], object], message: str) -> None:
    raw = json.loads(json.dumps(dataclasses.replace(profile, batch=COSTS).to_dict()))
    damage(raw["batch"])
    with pytest.raises(InputError, match=message):
        Profile.from_dict(raw, "here")
