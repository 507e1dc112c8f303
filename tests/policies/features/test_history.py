"""HISTORY features: running means as a slow loop computes them."""

from __future__ import annotations

import random

import numpy as np
import pytest
from specstop.policies.contract import Array, RoundOutcome
from specstop.policies.features import HISTORY_FEATURES, PAST_WEIGHT, History
from specstop.policies.host import take

NAMES = ("mean_accepted", "mean_full", "last_accepted", "last_verified")


def after(
    history: History, accepted: list[int] | Array, verified: list[int] | Array, active: Array | None = None
) -> History:
    """Return the history after a round of these counts, of all streams unless `active` names them."""
    accepted, verified = np.asarray(accepted), np.asarray(verified)
    active = np.ones(len(accepted), dtype=np.bool_) if active is None else active
    return history.after(RoundOutcome(active, verified, verified, accepted, active & False, np.zeros(len(accepted))))


def test_running_means_are_those_of_a_slow_loop() -> None:
    dice = np.random.default_rng(0)
    streams, rounds = 6, 25
    history = History.start(streams)
    past: list[list[tuple[int, int]]] = [[] for _ in range(streams)]
    for _ in range(rounds):
        counts = dice.random(streams) < 0.6
        verified = dice.integers(0, 6, streams)
        accepted = verified * dice.integers(0, 2, streams)
        history = after(history, accepted, verified, counts)
        for s in range(streams):
            if counts[s]:
                past[s].append((int(accepted[s]), int(verified[s])))
        for s, seen in enumerate(past):
            if not seen:
                assert history.values(NAMES)[s].tolist() == [0.0] * 4
                continue
            weights = [PAST_WEIGHT ** (len(seen) - 1 - i) for i in range(len(seen))]
            mean = sum(w * a for w, (a, _) in zip(weights, seen, strict=True)) / sum(weights)
            full = sum(w * (a == k) for w, (a, k) in zip(weights, seen, strict=True)) / sum(weights)
            assert history.values(NAMES)[s].tolist() == pytest.approx([mean, full, *seen[-1]], rel=1e-5, abs=1e-6)


def test_the_record_is_that_of_plain_numbers_to_the_last_bit() -> None:
    """Boosted trees split at values that were seen: the least difference decides there."""
    history, record, weight, dice = History.start(3), [0.0] * 4, 0.0, random.Random(0)
    for _ in range(300):
        verified = dice.randint(0, 8)
        accepted = dice.randint(0, verified)
        active = np.array([False, True, True])
        history = after(history, [0, accepted, accepted], [0, verified, verified], active)
        weight = PAST_WEIGHT * weight + (1.0 - PAST_WEIGHT)
        share = (1.0 - PAST_WEIGHT) / weight
        mean = record[0] + share * (accepted - record[0])
        full = record[1] + share * ((accepted == verified) - record[1])
        record = [mean, full, float(accepted), float(verified)]
        assert history.record[1, :4].tolist() == history.record[2, :4].tolist() == record
        assert history.record[1, 4] == weight
    assert not history.record[0].any()
    alone = after(take(history, [1]), [2], [5])
    together = after(history, [0, 2, 1], [0, 5, 1])
    assert np.array_equal(alone.record[0], together.record[1])


def test_a_round_that_does_not_count_changes_nothing() -> None:
    history = after(History.start(1), [2], [4])
    again = after(history, [3], [3], np.array([False]))
    assert np.array_equal(again.values(NAMES), history.values(NAMES))
    assert np.array_equal(again.record, history.record)
    assert history.values(NAMES)[0].tolist() == pytest.approx([2.0, 0.0, 2.0, 4.0])


def test_values_come_in_the_order_asked_for() -> None:
    history = after(History.start(2), [1, 2], [4, 2])
    assert history.values().dtype == np.float32 and history.values().shape == (2, len(HISTORY_FEATURES))
    assert history.values(("last_verified", "mean_full")).flatten().tolist() == pytest.approx([4.0, 0.0, 2.0, 1.0])
    assert history.values(()).shape == (2, 0)
