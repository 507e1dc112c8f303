"""What streams drafted: what is sent of it, and the sums."""

from __future__ import annotations

import numpy as np
from specstop.decode.drafted import Drafted
from specstop.decode.topology import from_widths, parse_tree


def marked(drafted: Drafted, name: str, *rows: list[int]) -> None:
    for stream, at in enumerate(rows):
        getattr(drafted, name)[stream, at] = True


def test_what_stands_below_a_dropped_node_is_not_sent() -> None:
    """Three streams draft the tree 2,2 but for one node; two of them drop some."""
    found = Drafted(3, from_widths([2, 2]))
    marked(found, "drawn", *[[1, 2, 3, 4, 6]] * 3)
    marked(found, "dropped", [], [1], [1, 6])
    found.count()
    assert [np.flatnonzero(row).tolist() for row in found.sent] == [[0, 1, 2, 3, 4, 6], [0, 2, 6], [0, 2]]
    assert found.drafted.tolist() == [5, 5, 5]
    assert found.verified.tolist() == [5, 2, 1]


def test_decisions_are_counted_by_depth_and_steps_by_row() -> None:
    found = Drafted(2, from_widths([2, 2]))
    marked(found, "asked", [0, 1, 2], [1])
    marked(found, "fed", [0, 1, 2], [0])
    found.count()
    assert found.decisions.tolist() == [2, 1]
    assert found.steps.tolist() == [[1, 2], [1, 0]]
    assert found.fed_by_step is found.steps
    assert Drafted(1, parse_tree("chain:3")).fed_by_step is None


def test_alternatives_to_the_anchor_are_sent_and_not_counted() -> None:
    found = Drafted(1, parse_tree("2,2").rooted())
    marked(found, "drawn", [2, 4])
    found.count()
    assert found.sent.tolist() == [[True, True, True, False, True, False]]
    assert (found.drafted.tolist(), found.verified.tolist()) == ([2], [2])
