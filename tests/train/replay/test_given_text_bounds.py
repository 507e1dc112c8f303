"""Bounds of traces whose rounds were drawn given the text: on every draw that there is (V = 3) the best of all lengths."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from drawn_law import drawn_traces, profile
from random_stops import ByTokens
from specstop.policies.contract import Array, DraftStep, RoundOutcome, State, StopPolicy
from specstop.policies.errors import PolicyError
from specstop.policies.tree_rules import Gain
from specstop.train.replay.bounds import oracle_seconds
from specstop.train.replay.run import replay
from text_law import Case

VERIFY_S = (1.0e-3, 1.3e-3, 1.5e-3, 2.1e-3)


class ByRound(StopPolicy):
    """Drafts a length of its own in each round of a text."""

    name, first = "by-round", 0

    def __init__(self, lengths: tuple[int, ...], depth: int) -> None:
        self.lengths, self.max_depth = np.array(lengths), depth

    def start(self, streams: int, keys: Array) -> State:
        return np.zeros(streams, dtype=np.int64)

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        at = np.minimum(np.asarray(state), len(self.lengths) - 1)
        return step.alive & (step.depth < self.lengths[at])[:, None], state

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        return np.asarray(state) + outcome.active


@pytest.mark.parametrize(
    ("mode", "tree"),
    [("rejection", "chain:3"), ("block", "chain:3"), ("rejection", "2,1"), ("rejection_replace", "1,2")],
)
def test_the_oracle_bound_is_the_best_of_all_lengths_on_every_draw(mode: str, tree: str) -> None:
    case = Case(mode, tree, partial(ByTokens, 3, stops=0.5), "mixed", 1, True, new=4)
    texts = [text for text in case.texts() if len(text) > 2][:3]
    draws = 0
    for text in texts:
        arrays, weights = drawn_traces(case, text)
        costs, depth = profile(arrays.tree), arrays.depth
        sides = (replace(side, verify_s=VERIFY_S[: depth + 1]) for side in (costs.low, costs.high))
        costs = replace(costs, **dict(zip(("low", "high"), sides, strict=True)))
        bound = oracle_seconds(arrays, costs)
        every = itertools.product(range(depth + 1), repeat=len(text) - 1)
        seconds = torch.stack([replay(arrays, ByRound(lengths, depth), costs).seconds for lengths in every])
        if arrays.tree.is_chain:
            torch.testing.assert_close(seconds.amin(0), bound, rtol=1e-12, atol=0.0)
        else:  # of a tree it is the price of one path, which no round of whole levels has
            assert bool((seconds.amin(0) >= bound - 1e-12).all())
        assert abs(float(weights.sum()) - 1.0) < 1e-9
        draws += arrays.sequences
    assert draws > 10


def test_a_tree_policy_that_leaves_drawn_tokens_out_is_refused_by_name() -> None:
    case = Case("rejection", "2,1", partial(ByTokens, 3), "mixed", 1, True, new=4)
    arrays, _ = drawn_traces(case, next(text for text in case.texts() if len(text) > 2))
    with pytest.raises(PolicyError, match=r"gain.* rejection; use match"):
        replay(arrays, Gain(max_depth=2), profile(arrays.tree))
