"""Trees: how they are written, numbered, cut and masked."""

from __future__ import annotations

import random

import pytest
import torch
from specstop.decode.topology import Topology, chain, from_parents, from_widths, parse_tree
from specstop.policies.arguments import MAX_ROWS
from specstop.policies.errors import InputError


def random_parents(seed: int) -> list[int]:
    """A parent list in no particular order of depth."""
    draw = random.Random(seed)
    return [draw.randint(max(-1, node - 5), node - 1) for node in range(draw.randint(1, 14))]


def ancestors(parent: tuple[int, ...], row: int) -> set[int]:
    return set() if row < 0 else {row} | ancestors(parent, parent[row])


SHAPES = {
    "4,2,2,1": (1 + 4 + 8 + 16 + 16, 4, 16),
    " 4, 2": (1 + 4 + 8, 2, 8),
    "8": (9, 1, 8),
    "1": (2, 1, 1),
    "fork:4x5": (21, 5, 4),
    "fork:3x1": (4, 1, 3),
    "chain:6": (7, 6, 1),
    "parents:-1,-1,0,0,1": (6, 2, 3),
    "parents:-1": (2, 1, 1),
    "medusa-63": (64, 4, 28),
}


@pytest.mark.parametrize("text", SHAPES)
def test_a_written_tree_has_the_rows_depth_and_width_it_says(text: str) -> None:
    tree = parse_tree(text)
    assert (len(tree), tree.deepest, tree.width) == SHAPES[text]
    assert tree.nodes == len(tree) - 1
    assert tree.is_chain == (tree.width == 1)
    assert [row for level in tree.levels for row in level] == list(range(len(tree)))


def test_medusas_tree_is_the_published_one() -> None:
    """Its paths, as children are numbered by rank: the last child of each list, and the only ones four deep."""
    tree = parse_tree("medusa-63")
    assert tree.name == "medusa-63", "in messages and files too, not as 63 parents"

    def path(row: int) -> tuple[int, ...]:
        parent = tree.parent[row]
        return () if parent < 0 else (*path(parent), tree.children[parent].index(row))

    paths = {path(row) for row in range(1, len(tree))}
    assert len(paths) == 63 and {len(p) for p in paths} == {1, 2, 3, 4}
    assert {p for p in paths if len(p) == 4} == {(0, 0, 0, 0), (0, 0, 0, 1)}
    assert {
        (9,),
        (0, 9),
        (1, 6),
        (2, 2),
        (3, 1),
        (9, 0),
        (0, 0, 9),
        (0, 1, 2),
        (0, 2, 1),
        (0, 7, 0),
        (1, 0, 1),
    } <= paths
    assert not {(1, 7), (2, 3), (3, 2), (4, 1), (0, 8, 0), (0, 3, 1), (1, 1, 0), (2, 0, 1), (0, 1, 0, 0)} & paths


def test_a_fork_is_branches_beside_each_other() -> None:
    tree = parse_tree("fork:3x4")
    assert [len(c) for c in tree.children] == [3, *[1] * 9, *[0] * 3]
    ends = [ancestors(tree.parent, row) for row in tree.levels[-1]]
    assert all(len(path) == 5 for path in ends)
    assert set.intersection(*ends) == {0}


@pytest.mark.parametrize(
    "text",
    ["", "4,", "4;2", "a", "4,2,x", "1.5", "fork:4", "fork:4x", "fork:x5", "fork:4x5x6", "chain:", "chain:a", "parents:",
     "tree:4", "widths:4,2", "parents:-1,x", ":", "::4"],
)  # fmt: skip
def test_what_is_no_tree_is_refused_with_what_is_expected(text: str) -> None:
    with pytest.raises(InputError, match=r"tree: expected widths such as 4,2,2,1, fork:4x5, chain:6") as error:
        parse_tree(text)
    assert repr(text) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0", "expected widths of 1 or more, not 0"),
        ("4,0,2", "expected widths of 1 or more, not 0"),
        ("4,-1", "expected widths of 1 or more, not -1"),
        ("fork:0x3", "expected widths of 1 or more, not 0"),
        ("fork:3x0", "expected a depth between 1 and"),
        ("chain:0", "expected a depth between 1 and"),
        ("chain:-2", "expected a depth between 1 and"),
        (f"chain:{MAX_ROWS}", f"expected a depth between 1 and {MAX_ROWS - 1}"),
        ("chain:" + "9" * 12, "expected a depth between 1 and"),
        ("32,32,32", f"more than {MAX_ROWS} tokens"),
        ("9" * 12, f"more than {MAX_ROWS} tokens"),
        ("parents:" + ",".join(["-1"] * MAX_ROWS), f"more than {MAX_ROWS} tokens"),
        ("parents:0", "node 0 has parent 0; expected -1 or a node before it"),
        ("parents:-1,-2", "node 1 has parent -2"),
        ("parents:-1,1,0", "node 1 has parent 1"),
    ],
)
def test_a_tree_that_cannot_be_is_refused_with_its_reason(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        parse_tree(text)
    assert "\n" not in str(error.value)


def test_the_largest_trees_are_made() -> None:
    assert len(parse_tree(f"chain:{MAX_ROWS - 1}")) == MAX_ROWS
    assert len(parse_tree(str(MAX_ROWS - 1))) == MAX_ROWS
    assert len(from_parents([-1] * (MAX_ROWS - 1))) == MAX_ROWS


@pytest.mark.parametrize("parent", [[], [0], [-1, 1], [-1, 0, -1], [-1, 0, 1, 0], [-1, -2]])
def test_rows_out_of_order_are_refused(parent: list[int]) -> None:
    with pytest.raises(InputError, match="tree: "):
        Topology(parent)


@pytest.mark.parametrize("seed", range(30))
def test_a_parent_list_is_renumbered_by_depth_and_stays_the_same_tree(seed: int) -> None:
    parents = random_parents(seed)
    tree = from_parents(parents)

    def depth(node: int) -> int:
        return 0 if node < 0 else 1 + depth(parents[node])

    def path(node: int) -> list[int]:
        return [] if node < 0 else [*path(parents[node]), node]

    order = sorted(range(len(parents)), key=lambda node: (depth(node), path(node)))  # siblings in the order of the list
    row = {-1: 0, **{node: at for at, node in enumerate(order, 1)}}
    assert tree.depth == sorted(tree.depth)
    for node, parent in enumerate(parents):
        assert tree.parent[row[node]] == row[parent]
        assert tree.depth[row[node]] == depth(node)
    for parent in range(-1, len(parents)):
        assert tree.children[row[parent]] == sorted(row[n] for n, p in enumerate(parents) if p == parent)


@pytest.mark.parametrize("seed", range(30))
def test_the_mask_is_the_matrix_of_ancestors(seed: int) -> None:
    tree = from_parents(random_parents(seed))
    expected = torch.zeros(len(tree), len(tree), dtype=torch.bool)
    for row in range(len(tree)):
        expected[row, list(ancestors(tree.parent, row))] = True
    assert torch.equal(tree.sees, expected)
    assert tree.sees.sum(1).tolist() == [d + 1 for d in tree.depth]


@pytest.mark.parametrize("text", [*SHAPES, *(f"seed {s}" for s in range(30))])
def test_a_name_says_the_tree_again(text: str) -> None:
    tree = from_parents(random_parents(int(text[5:]))) if text.startswith("seed") else parse_tree(text)
    assert parse_tree(tree.name).parent == tree.parent
    assert repr(tree) == f"Topology({tree.name})"


def test_a_name_is_short_where_widths_say_it_all() -> None:
    assert [parse_tree(t).name for t in ("chain:3", "fork:4x3", "parents:-1,-1,0,0,1,1", "4,2,2,1")] == [
        "1,1,1", "4,1,1", "2,2", "4,2,2,1",
    ]  # fmt: skip
    assert parse_tree("parents:-1,-1,1,0").name == "2,1", "rows are renumbered breadth-first"


@pytest.mark.parametrize("seed", range(10))
def test_a_limited_tree_is_its_upper_levels(seed: int) -> None:
    tree = from_parents(random_parents(seed))
    for depth in range(tree.deepest + 2):
        cut = tree.limited(depth)
        rows = [row for row in range(len(tree)) if tree.depth[row] <= depth]
        assert cut.parent == tuple(tree.parent[row] for row in rows)
        assert torch.equal(cut.sees, tree.sees[: len(rows), : len(rows)])
    assert tree.limited(tree.deepest) is tree
    assert len(tree.limited(0)) == 1


def test_widths_multiply() -> None:
    assert from_widths([3, 2]).parent == (-1, 0, 0, 0, 1, 1, 2, 2, 3, 3)
    assert from_widths([]).parent == chain(0).parent == (-1,)
    assert chain(3).parent == (-1, 0, 1, 2)
