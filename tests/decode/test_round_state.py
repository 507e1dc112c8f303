"""A round: what is sent, the sums, paths, and how a policy sees it."""

from __future__ import annotations

import numpy as np
from specstop.decode.round_state import RoundState
from specstop.decode.topology import parse_tree


def round_of(tree: str, streams: int = 1, **marks: list[list[int]]) -> RoundState:
    """Return a round with rows marked, by stream."""
    ones = np.ones(streams, dtype=np.int64)
    round = RoundState(parse_tree(tree), ones > 0, ones, ones)
    for name, rows in marks.items():
        for stream, own in enumerate(rows):
            getattr(round, name)[stream, own] = True
    round.count()
    return round


def test_what_is_below_a_dropped_candidate_is_not_sent() -> None:
    """Three streams draft the tree 2,2 but for one candidate; two of them drop some."""
    round = round_of("2,2", 3, drawn=[[1, 2, 3, 4, 6]] * 3, dropped=[[], [1], [1, 6]])
    assert [np.flatnonzero(row).tolist() for row in round.sent] == [[0, 1, 2, 3, 4, 6], [0, 2, 6], [0, 2]]
    assert round.drafted.tolist() == [5, 5, 5]
    assert round.verified.tolist() == [5, 2, 1]


def test_decisions_are_counted_by_depth_and_steps_by_row() -> None:
    round = round_of("2,2", 2, decided=[[0, 1, 2], [1]], fed=[[0, 1, 2], [0]])
    assert round.decisions.tolist() == [2, 1]
    assert round.steps.tolist() == [[1, 2], [1, 0]]
    assert round.fed_by_step is round.steps
    assert round_of("chain:3").fed_by_step is None


def test_paths_and_the_order_of_drawing() -> None:
    round = round_of("2,2", drawn=[[1, 2, 3, 6]], on_path=[[0, 2, 6]])
    round.tokens[0] = [7, 11, 12, 21, -1, -1, 23]
    assert round.path(0) == [0, 2, 6]
    assert round.path_tokens(0, 6) == [7, 12, 23]
    assert round.numbers(0) == [0, 1, 2, 3, 3, 3, 4]
    assert round.next_number(0) == 5
    assert [round.drawn_below(0, row) for row in (0, 1, 3)] == [[1, 2], [3], []]


def test_a_policy_sees_the_candidates_in_the_order_of_the_tree() -> None:
    round = round_of("2,2", drawn=[[1, 2, 3, 4, 5]], dropped=[[2]])
    round.tokens[0, :6] = [7, 11, 12, 21, 22, 23]
    tree = round.draft_tree()
    assert tree.tokens.tolist() == [[11, -1, 21, 22, -1, -1]]
    assert tree.drawn.tolist() == [[True, False, True, True, False, False]]
    assert tree.parent.tolist() == [[-1, -1, 0, 0, 1, 1]]
    assert tree.depth.tolist() == [[1, 1, 2, 2, 2, 2]]
    hidden = round.draft_tree(hide_tokens=True)
    assert hidden.tokens.tolist() == [[-1] * 6]
    assert np.array_equal(hidden.drawn, tree.drawn)
