"""Draft lengths that follow the tokens are detected; others are detected no more often than the level says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from engine_records import all_or_none, at_random, by_confidence, by_load, fixed, simulated
from specstop.collect.acceptance import DEPENDENT, FIXED, INDEPENDENT
from specstop.collect.engines.vllm_records import LEVEL, lengths_kind

SEEDS = 30


def measured(choose: Callable[..., Any], seed: int, requests: int = 40) -> tuple[str, float]:
    records, _ = simulated(choose, requests, 40, seed)
    counts = [record["metrics"]["speculative_decoding"] for record in records]
    accepted, drafted = (
        np.concatenate([c[name] for c in counts]) for name in ("per_step_accepted", "per_step_drafted")
    )
    request = np.repeat(np.arange(requests), 40)
    first = np.diff(request, prepend=-1) > 0
    return lengths_kind(accepted, drafted, request, np.roll(first, -1), ~first)


@pytest.mark.parametrize("choose", [by_load, at_random])
def test_independent_lengths_are_rarely_rejected(choose: Callable[..., Any]) -> None:
    results = [measured(choose, seed) for seed in range(SEEDS)]
    # P(more than 3 of 30) is 0.0001 at a level of 1%, and P(fewer than 4 of 30 below one half) as small.
    assert sum(kind == DEPENDENT for kind, _ in results) <= 3
    assert all((kind == DEPENDENT) == (p < LEVEL) for kind, p in results)
    assert sum(p < 0.5 for _, p in results) <= 25, "p-values are those of a test, or too large"


# Whether drafts that were not made would have failed shows in the round before alone: that takes more rounds.
@pytest.mark.parametrize(("choose", "requests"), [(by_confidence, 10), (by_confidence, 40), (all_or_none, 100)])
def test_lengths_by_confidence_are_detected(choose: Callable[..., Any], requests: int) -> None:
    assert all(measured(choose, seed, requests)[0] == DEPENDENT for seed in range(10))


def test_equal_lengths_need_no_test() -> None:
    assert measured(fixed, 0) == (FIXED, 1.0)


@pytest.mark.parametrize(
    ("accepted", "drafted"), [([1, 0], [1, 2]), ([0, 0], [0, 2]), ([1, 1, 1], [1, 2, 1]), ([2, 2], [2, 3])]
)
def test_a_few_rounds_show_nothing(accepted: list[int], drafted: list[int]) -> None:
    size = len(accepted)
    first = np.arange(size) == 0
    found = lengths_kind(
        np.array(accepted), np.array(drafted), np.zeros(size, dtype=np.int64), np.zeros(size, dtype=bool), ~first
    )
    assert found == (INDEPENDENT, 1.0)
