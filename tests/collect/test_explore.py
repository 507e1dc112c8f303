"""A policy that explores a share of its rounds drafts in the others as it would by itself."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from specstop.collect.live import exploring
from specstop.policies.contract import Array, DraftStep, DraftTree, State, StopPolicy

DEPTH = 5


class AlwaysOn(StopPolicy):
    """Drafts on whenever it is asked, which from two streams on it is not."""

    name, first, max_depth = "always-on", 3, DEPTH
    unasked: Mapping[int, int] = {2: 1, 3: 2}

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        return step.alive.copy(), state


def drafted(share: float, streams: int, batch: list[int]) -> list[int]:
    """Return how many tokens each stream drafts."""
    policy = exploring(AlwaysOn(), share, DEPTH)
    state = policy.start(streams, np.arange(streams))
    alive, length = np.ones((streams, 1), dtype=bool), np.zeros(streams, dtype=np.int64)
    alive[:, 0] = np.array(batch) >= 0
    for depth in range(DEPTH):
        if depth >= policy.first:
            features = np.zeros((streams, 1, 0), dtype=np.float32)
            step = DraftStep(depth, alive, np.zeros((streams, 1), dtype=np.int64), features, {}, np.array(batch))
            alive, state = policy.keep(step, state)
        length += alive[:, 0]
    return length.tolist()


@pytest.mark.parametrize(
    ("batch", "expected"),
    [([0], [5]), ([0, 0], [1, 1]), ([0, 0, 0], [2, 2, 2]), ([0, -1, 0], [1, 0, 1]), ([0] * 4, [5] * 4)],
)
def test_what_is_not_asked_about_is_drafted_as_without_exploring(batch: list[int], expected: list[int]) -> None:
    assert drafted(0.0, len(batch), batch) == expected


class DropsUnlessAsked(AlwaysOn):
    """Sends only what it was asked about."""

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        return step.alive.copy(), np.ones(len(step.alive))

    def select(self, tree: DraftTree, state: State) -> Array | None:
        return tree.drawn & (np.zeros(len(tree.drawn)) if state is None else state > 0)[:, None].astype(bool)


@pytest.mark.parametrize(("batch", "asked"), [([0], True), ([0, 0], False)])
def test_a_policy_selects_nothing_of_what_it_was_not_asked_about(batch: list[int], asked: bool) -> None:
    policy, streams = exploring(DropsUnlessAsked(), 0.0, DEPTH), len(batch)
    alive, features = np.ones((streams, 1), dtype=bool), np.zeros((streams, 1, 0), dtype=np.float32)
    step = DraftStep(3, alive, np.zeros((streams, 1), dtype=np.int64), features, {}, np.array(batch))
    _, state = policy.keep(step, policy.start(streams, np.arange(streams)))
    nodes = np.zeros((streams, 2), dtype=np.int64)
    mask = policy.select(DraftTree(nodes, nodes - 1, nodes + 1, np.ones((streams, 2), dtype=bool)), state)
    assert (mask is not None and mask.all()) if asked else mask is None


def test_rounds_that_explore_are_drafted_to_full_depth_whatever_is_asked() -> None:
    assert drafted(1.0, 3, [0, 0, 0]) == [DEPTH] * 3
