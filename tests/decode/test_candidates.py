"""What a round has drawn: places, paths, what is sent, and how a policy sees it."""

from __future__ import annotations

import numpy as np
from specstop.decode.candidates import draft_tree
from specstop.decode.topology import from_widths, parse_tree
from specstop.decode.verify.given_text import Candidates


def drawn() -> Candidates:
    """A tree 2,2 of which the second branch has one child only, drawn in another order than its rows."""
    found = Candidates.at([7], from_widths([2, 2]))
    first, second = found.add(0, 1, 11), found.add(0, 2, 12)
    found.add(second, 6, 23)
    found.add(first, 3, 21)
    found.add(first, 4, 22)
    return found


def test_places_go_by_the_order_of_drawing() -> None:
    found = drawn()
    assert found.tokens == [7, 11, 12, 23, 21, 22]
    assert found.rows == [0, 1, 2, 6, 3, 4]
    assert found.depth == [0, 1, 1, 2, 2, 2]
    assert found.children == [[1, 2], [4, 5], [3], [], [], []]
    assert (found.roots, found.drafted) == (1, 5)
    assert found.path(3) == [0, 2, 3]
    assert found.tokens_to(3) == [7, 12, 23]


def test_a_policy_sees_the_nodes_in_the_order_of_the_tree() -> None:
    found = drawn()
    sent = np.array([[True, True, False, True, True, False, False]])
    tree = draft_tree([found], sent)
    assert tree.tokens.tolist() == [[11, -1, 21, 22, -1, -1]]
    assert tree.drawn.tolist() == [[True, False, True, True, False, False]]
    assert tree.parent.tolist() == [[-1, -1, 0, 0, 1, 1]]
    assert tree.depth.tolist() == [[1, 1, 2, 2, 2, 2]]
    hidden = draft_tree([found], sent, hide_tokens=True)
    assert hidden.tokens.tolist() == [[-1] * 6]
    assert np.array_equal(hidden.drawn, tree.drawn)


def test_alternatives_to_the_anchor_are_no_nodes() -> None:
    found = Candidates.at([7, 8], parse_tree("2,2").rooted())
    place = found.add(1, 4, 31)
    assert (found.roots, found.drafted) == (2, 1)
    assert found.path(place) == [1, place]
    tree = draft_tree([found], np.array([[True, True, False, False, True, False]]))
    assert tree.tokens.tolist() == [[-1, -1, 31, -1]]
    assert tree.parent.tolist() == [[-1, -1, -1, -1]]
    assert tree.depth.tolist() == [[1, 1, 1, 1]]
