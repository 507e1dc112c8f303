"""HISTORY features: running means as a slow loop computes them."""

from __future__ import annotations

import pytest
import torch
from specstop.policies.contract import RoundOutcome
from specstop.policies.history import PAST_WEIGHT, History

NAMES = ("mean_accepted", "mean_full", "last_accepted", "last_verified")


def outcome(active: list[bool], verified: list[int], accepted: list[int], cut: list[bool]) -> RoundOutcome:
    counts = [torch.tensor(x) for x in (verified, verified, accepted)]
    return RoundOutcome(torch.tensor(active), *counts, torch.tensor(cut), torch.zeros(len(active), dtype=torch.float64))


def test_running_means_are_those_of_a_slow_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    streams, rounds = 6, 25
    history = History.start(streams)
    past: list[list[tuple[int, int]]] = [[] for _ in range(streams)]
    for _ in range(rounds):
        active, cut = (torch.rand(2, streams, generator=generator) < torch.tensor([[0.8], [0.3]])).tolist()
        verified = torch.randint(0, 6, (streams,), generator=generator)
        accepted = (verified * torch.rand(streams, generator=generator).round()).long()
        history = history.after(outcome(active, verified.tolist(), accepted.tolist(), cut))
        for s in range(streams):
            if active[s] and not cut[s]:
                past[s].append((int(accepted[s]), int(verified[s])))
        for s, seen in enumerate(past):
            if not seen:
                assert history.values(NAMES)[s].tolist() == [0.0] * 4
                continue
            weights = [PAST_WEIGHT ** (len(seen) - 1 - i) for i in range(len(seen))]
            mean = sum(w * a for w, (a, _) in zip(weights, seen, strict=True)) / sum(weights)
            full = sum(w * (a == k) for w, (a, k) in zip(weights, seen, strict=True)) / sum(weights)
            assert history.values(NAMES)[s].tolist() == pytest.approx([mean, full, *seen[-1]], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(("active", "cut"), [(False, False), (True, True), (False, True)])
def test_a_cut_round_or_none_changes_nothing(active: bool, cut: bool) -> None:
    history = History.start(1).after(outcome([True], [4], [2], [False]))
    again = history.after(outcome([active], [3], [3], [cut]))
    assert torch.equal(again.values(NAMES), history.values(NAMES))
    assert history.values(NAMES)[0].tolist() == pytest.approx([2.0, 0.0, 2.0, 4.0])


def test_values_come_in_the_order_asked_for() -> None:
    history = History.start(2).after(outcome([True, True], [4, 2], [1, 2], [False, False]))
    assert history.values(("last_verified", "mean_full")).flatten().tolist() == pytest.approx([4.0, 0.0, 2.0, 1.0])
    assert history.values(()).shape == (2, 0)
