"""Trees: their notations, their rows in the cache, what is sent of them; and the records of rounds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings as hypothesis_settings, strategies as st
from specstop.decode.records import Generation, Round, Tally
from specstop.decode.topology import Topology, from_parents, parse_tree
from specstop.policies.arguments import MAX_ROWS
from specstop.policies.errors import InputError

SHAPES = {
    "4,2,2,1": (1 + 4 + 8 + 16 + 16, 4, 16), " 4, 2": (1 + 4 + 8, 2, 8), "8": (9, 1, 8), "fork:4x5": (21, 5, 4),
    "chain:6": (7, 6, 1), "parents:-1,-1,0,0,1": (6, 2, 3), "medusa-63": (64, 4, 28),
    f"chain:{MAX_ROWS - 1}": (MAX_ROWS, MAX_ROWS - 1, 1), str(MAX_ROWS - 1): (MAX_ROWS, 1, MAX_ROWS - 1),
}  # fmt: skip
INVALID = [
    "", "4,", "4;2", "a", "1.5", "fork:4", "fork:4x", "fork:x5", "fork:4x5x6", "chain:", "chain:a", "parents:", "tree:4",
    "parents:-1,x", ":", "0", "4,-1", "fork:0x3", "fork:3x0", "chain:0", "chain:-2", f"chain:{MAX_ROWS}", "32,32,32",
    "9" * 12, "chain:" + "9" * 12, "parents:" + ",".join(["-1"] * MAX_ROWS), "parents:0", "parents:-1,-2", "parents:-1,1,0",
]  # fmt: skip


@pytest.mark.parametrize("text", SHAPES)
def test_a_tree_has_the_rows_depth_and_width_of_its_text(text):
    tree = parse_tree(text)
    assert (len(tree), tree.deepest, tree.width) == SHAPES[text]
    assert tree.is_chain == (tree.width == 1)
    assert [row for level in tree.levels for row in level] == list(range(len(tree)))
    assert parse_tree(tree.name).parent == tree.parent


@pytest.mark.parametrize("tree", [*INVALID, [], [0], [-1, 1], [-1, 0, -1], [-1, 0, 1, 0], [-1, -2]])
def test_an_invalid_tree_is_refused_in_one_line(tree):
    with pytest.raises(InputError, match=r"^tree: ") as error:
        parse_tree(tree) if isinstance(tree, str) else Topology(tree)
    assert "\n" not in str(error.value)


def test_medusas_tree_is_the_published_one():
    tree = parse_tree("medusa-63")

    def path(row: int) -> tuple[int, ...]:
        parent = tree.parent[row]
        return () if parent < 0 else (*path(parent), tree.children[parent].index(row))

    paths = {path(row) for row in range(1, len(tree))}
    last = {(9,), (0, 9), (1, 6), (2, 2), (3, 1), (9, 0), (0, 0, 9), (0, 1, 2), (0, 2, 1), (0, 7, 0), (1, 0, 1)}
    absent = {(1, 7), (2, 3), (3, 2), (4, 1), (0, 8, 0), (0, 3, 1), (1, 1, 0), (2, 0, 1), (0, 1, 0, 0)}
    assert len(paths) == 63 and last <= paths and not absent & paths
    assert {p for p in paths if len(p) == 4} == {(0, 0, 0, 0), (0, 0, 0, 1)}


@given(offsets=st.lists(st.integers(1, 5), min_size=1, max_size=14))
@hypothesis_settings(max_examples=60, deadline=None, derandomize=True)
def test_a_list_of_parents_is_renumbered_by_depth_and_stays_the_same_tree(offsets):
    parents = [max(-1, node - offset) for node, offset in enumerate(offsets)]
    tree = from_parents(parents)

    def path(node: int) -> list[int]:
        return [] if node < 0 else [*path(parents[node]), node]

    order = sorted(range(len(parents)), key=lambda node: (len(path(node)), path(node)))
    row = {-1: 0, **{node: at for at, node in enumerate(order, 1)}}
    assert tree.depth == sorted(tree.depth)
    expected = torch.eye(len(tree), dtype=torch.bool)
    expected[:, 0] = True
    for node, parent in enumerate(parents):
        assert (tree.parent[row[node]], tree.depth[row[node]]) == (row[parent], len(path(node)))
        assert tree.children[row[node]] == sorted(row[n] for n, p in enumerate(parents) if p == node)
        expected[row[node], [row[one] for one in path(node)]] = True
    assert torch.equal(tree.sees, expected), "a row sees its ancestors"
    assert parse_tree(tree.name).parent == tree.parent
    for depth in range(tree.deepest + 2):
        upper = tree.limited(depth)
        rows = [at for at in range(len(tree)) if tree.depth[at] <= depth]
        assert upper.parent == tuple(tree.parent[at] for at in rows)
        assert torch.equal(upper.sees, tree.sees[: len(rows), : len(rows)])


# The state of a round


def make_round(drafted: int, verified: int, accepted: int, cut: bool = False, committed: int = -1) -> Round:
    committed = accepted + 1 if committed < 0 else committed
    return Round(
        1, 5, drafted, verified, accepted, committed, drafted, 1, cut, 0.25, 0.5, 1.0, 0.125, 2.0, deepest=verified
    )


GENERATIONS = [
    Generation(tuple(range(9)), (make_round(4, 4, 2), make_round(3, 2, 2), make_round(2, 2, 1)), 5, 3.0, 10.0),
    Generation((1, 2), (make_round(4, 3, 3, cut=True, committed=1),), 5, 4.0, 7.0),
    Generation((1,), (), 5, 1.0, 1.0),
]


def test_sums_of_rounds():
    tally = Tally(GENERATIONS)
    expected = {
        "texts": 3, "tokens": 12, "seconds": 18.0, "tokens_per_s": 12 / 18, "target_calls": 4,
        "block_efficiency": (3 + 3 + 2 + 1) / 4, "drafted": 13, "verified": 11, "accepted": 8, "wasted": 5,
        "prefill_s": 8.0, "draft_s": 3.0, "verify_s": 4.0, "policy_s": 0.5, "outside_s": 0.5,
        "failed": False,
    }  # fmt: skip
    assert tally.summary() == pytest.approx(expected)
    assert sum(tally.shares().values()) == pytest.approx(8.0 + 4 * 2.0)
    # Cut rounds do not count, and a depth counts the rounds that verified as deep.
    assert tally.acceptance() == [(1, 3 / 3, 3), (2, 2 / 3, 3), (3, 0 / 1, 1), (4, 0 / 1, 1)]
    assert Tally(GENERATIONS[1:]).acceptance() == []
    empty = Tally()
    assert (empty.block_efficiency, empty.tokens_per_s, empty.acceptance()) == (0.0, 0.0, [])
    assert GENERATIONS[0].tokens_per_s == 0.9 and "9 tokens" in repr(GENERATIONS[0])
