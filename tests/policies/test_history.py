"""HISTORY features: running means as a slow loop computes them."""

from __future__ import annotations

import pytest
import torch
from specstop.policies.history import PAST_WEIGHT, History

NAMES = ("mean_accepted", "mean_full", "last_accepted", "last_verified")


def test_running_means_are_those_of_a_slow_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    streams, rounds = 6, 25
    history = History.start(streams)
    past: list[list[tuple[int, int]]] = [[] for _ in range(streams)]
    for _ in range(rounds):
        counts = torch.rand(streams, generator=generator) < 0.6
        verified = torch.randint(0, 6, (streams,), generator=generator)
        accepted = (verified * torch.rand(streams, generator=generator).round()).long()
        history = history.after(accepted, verified, counts)
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


def test_a_round_that_does_not_count_changes_nothing() -> None:
    history = History.start(1).after(torch.tensor([2]), torch.tensor([4]))
    again = history.after(torch.tensor([3]), torch.tensor([3]), torch.tensor([False]))
    assert torch.equal(again.values(NAMES), history.values(NAMES))
    assert torch.equal(again.weight, history.weight)
    assert history.values(NAMES)[0].tolist() == pytest.approx([2.0, 0.0, 2.0, 4.0])


def test_every_round_counts_unless_told_otherwise() -> None:
    counts = torch.tensor([True, True])
    rounds = [torch.tensor(x) for x in ([1, 2], [4, 2])]
    first, second = History.start(2).after(*rounds), History.start(2).after(*rounds, counts)
    assert torch.equal(first.values(), second.values())


def test_values_come_in_the_order_asked_for() -> None:
    history = History.start(2).after(torch.tensor([1, 2]), torch.tensor([4, 2]))
    assert history.values(("last_verified", "mean_full")).flatten().tolist() == pytest.approx([4.0, 0.0, 2.0, 1.0])
    assert history.values(()).shape == (2, 0)
