"""P(A >= k) from observed depths: a token that was not drafted was not rejected."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engine_records import DEPTH, at_random, simulated
from specstop.collect.acceptance import FIXED, LENGTHS, VARIED, depth_outcomes
from specstop.collect.schema import NO_TOKEN, Header, chain

Array = np.ndarray[Any, np.dtype[Any]]


def header(topology: tuple[int, ...], collector: str = "live", **facts: str) -> Header:
    return Header("", "", {}, 8, (), 0.0, topology, (), (), 99, 0, 1, 1, "", collector=collector, facts=facts)


def rounds(length: Array, drafted: Array, depth: int, explored: Array | bool = False) -> dict[str, Array]:
    """Return the columns of live rounds of chains that accept `length` tokens at full depth."""
    node = np.arange(depth)
    drawn = node < drafted[:, None]
    accepted = drawn & (node < length[:, None])
    return {
        "accepted_length": accepted.sum(1), "cut": np.zeros(len(length), dtype=bool), "accepted": accepted,
        "observed": drawn & (node <= length[:, None]), "drawn": drawn, "sent": drawn,
        "tokens": np.zeros(drawn.shape, dtype=np.int32), "explored": np.broadcast_to(explored, len(length)),
    }  # fmt: skip


def shares(length: Array, depth: int) -> list[float]:
    return [float((length >= k).mean()) for k in range(1, depth + 1)]


def test_random_lengths_give_the_share_at_full_depth() -> None:
    length = np.concatenate(simulated(at_random, requests=200, rounds=200)[1])
    drafted = np.random.default_rng(1).integers(1, DEPTH + 1, len(length))
    found = depth_outcomes(header(chain(DEPTH)), rounds(length, drafted, DEPTH))
    assert found.survival == pytest.approx(shares(length, DEPTH), rel=0.02)
    assert "assumes that draft lengths do not depend on acceptance" in found.basis


def test_rounds_that_explored_are_the_only_ones_where_there_are_some() -> None:
    """The others stop where the next token would have been rejected, which no product over depths can undo."""
    length = np.concatenate(simulated(at_random)[1])
    explored = np.arange(len(length)) % 5 == 0
    drafted = np.where(explored, DEPTH, np.maximum(length, 1))
    found = depth_outcomes(header(chain(DEPTH)), rounds(length, drafted, DEPTH, explored))
    assert found.survival == pytest.approx(shares(length[explored], DEPTH))
    assert found.row.tolist() == np.flatnonzero(explored).tolist() and "explored" in found.basis


@pytest.mark.parametrize("count", [1, 5, 40])
def test_where_all_depths_were_observed_it_is_the_share(count: int) -> None:
    chance = np.random.default_rng(count)
    length, cut = chance.integers(0, 5, count), chance.random(count) < 0.3
    live = {**rounds(length, np.full(len(length), 4), 4), "cut": cut}
    for collector, columns in (("live", live), ("dense", {"accepted_length": length, "cut": cut})):
        found = depth_outcomes(header(chain(4), collector), columns)
        assert found.basis == ""
        if (~cut).any():
            assert found.survival.tolist() == shares(length[~cut], 4)
            assert found.observed.sum(0).tolist() == [int((length[~cut] >= k - 1).sum()) for k in range(1, 5)]


def test_a_depth_that_nobody_drafted_has_no_value() -> None:
    found = depth_outcomes(header(chain(4)), rounds(np.array([0, 2, 3, 4]), np.full(4, 2), 4))
    assert found.survival[:2].tolist() == [0.75, 0.75] and np.isnan(found.survival[2:]).all()


def test_a_drafter_without_a_token_ends_its_draft() -> None:
    columns = rounds(np.array([2, 1, 0]), np.array([3, 1, 3]), 3)
    columns["tokens"][1, 1:] = NO_TOKEN
    assert depth_outcomes(header(chain(3)), columns).survival == pytest.approx([2 / 3, 1 / 3, 0.0])


@pytest.mark.parametrize(("kind", "known"), [(FIXED, 3), (VARIED, 2)])
def test_lengths_that_vary_identify_what_every_round_drafted(kind: str, known: int) -> None:
    length, drafted = np.array([3, 2, 0, 3, 1]), np.array([3, 2, 2, 3, 3])
    found = depth_outcomes(header(chain(3), **{LENGTHS: kind}), rounds(length, drafted, 3))
    assert np.isfinite(found.survival).tolist() == [k <= known for k in (1, 2, 3)]


def test_of_a_tree_all_candidates_of_a_depth_count() -> None:
    """A depth that counted as observed because one of its few candidates was accepted would always be an acceptance."""
    tree = (-1, -1, 0, 0, 1, 1)  # two candidates, and two after each
    accepted = np.array([[0, 1, 0, 0, 1, 0], [0, 1, 0, 0, 1, 0], [0, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]], dtype=bool)
    drawn = np.array([[1, 1, 0, 0, 1, 1], [1, 1, 0, 0, 1, 0], [1, 1, 0, 0, 1, 1], [1, 1, 0, 0, 0, 0]], dtype=bool)
    columns = {
        "accepted_length": accepted.sum(1), "cut": np.zeros(4, dtype=bool), "accepted": accepted, "drawn": drawn,
        "observed": drawn, "sent": drawn, "tokens": np.zeros((4, 6), dtype=np.int32), "explored": np.zeros(4, dtype=bool),
    }  # fmt: skip
    found = depth_outcomes(header(tree), columns)
    assert found.observed.sum(0).tolist() == [4, 2]
    assert found.survival == pytest.approx([0.75, 0.75 / 2])
