"""The shape of a drafted tree: a parent list and the attention mask built from it.

Rows number the tokens that a round may verify: row 0 is the anchor, the last committed token, then come the candidates in
breadth-first order. A chain is the tree of width 1.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import repeat
from typing import TYPE_CHECKING

import numpy as np

from ..policies.arguments import MAX_ROWS
from ..policies.contract import Array
from ..policies.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

READINGS = ("path", "all", "nothing")
"""Values of `Drafter.reading`."""

NAMED = {
    "medusa-63": (
        (10,),
        (10, 7, 3, 2, 1, 1, 1, 1, 1, 1),
        (10, 3, 2, 1, 1, 1, 1, 1, 0, 0, 2, 0, 0, 0, 0, 0, 0, 1),
        (2,),
    ),
    "ctc-released": (
        (29,),
        (20, 10, 5, 4, 4, 3, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1),
        (11, 3, 2, 1, 1, 1, 1, 1, *[0] * 12, 2, *[0] * 9, 1, *[0] * 4, 1),
        (2,),
    ),
}
"""Trees by name: by depth, the number of children of each node, in order; the last ones have none. `medusa-63` is the tree of
Medusa and the CTC-drafter for 7B models. `ctc-released` contains every result of the CTC-drafter's collapse of that tree."""


class Topology:
    """A tree of candidates below the anchor.

    With several drafters, each has its own sub-tree below the anchor, and policies see one branch per drafter at depth 0.

    Args:
        parent: by row, the row of its parent; -1 for row 0. Rows are in breadth-first order, so the list never decreases.
        drafter: by row of depth 1, index of its drafter, ascending from 0; None = one drafter.

    Attributes:
        depth: by row; 0 for the anchor.
        children: by row, consecutive rows in order.
        drafter: by row, index of its drafter; 0 for the anchor.
        drafters: number of drafters, D.
        drafter_of: `drafter` as [N] int64 array.
        roots: by drafter, its rows of depth 1.
        deepest: the largest depth.
        levels: by depth, its rows.
        spans: by depth, its rows as a slice.
        parents, depths: `parent` and `depth` as [N] int64 arrays.
        branches: by depth, number of branches that a policy decides about: the drafters at depth 0, rows at other depths.
        is_chain: whether every level has one row.
        width: largest number of candidates of one depth.

    Raises:
        InputError: the parents are not a tree in breadth-first order, or a drafter has no rows.
    """

    def __init__(self, parent: Sequence[int], drafter: Sequence[int] | None = None) -> None:
        self.parent = tuple(parent)
        self.depth: list[int] = []
        self.children: list[list[int]] = [[] for _ in self.parent]
        for row, parent_row in enumerate(self.parent):
            if not (0 <= parent_row < row or (row == 0 and parent_row == -1)):
                raise InputError(f"tree: row {row} cannot be below row {parent_row}")
            self.depth.append(self.depth[parent_row] + 1 if row else 0)
            if row:
                self.children[parent_row].append(row)
        if not self.parent or list(self.parent) != sorted(self.parent):
            raise InputError("tree: expected rows in breadth-first order, at least one")
        self.deepest = self.depth[-1]
        first = [0] * len(self.children[0]) if drafter is None else list(drafter)
        self.drafters = first[-1] + 1 if first else 1
        if len(first) != len(self.children[0]) or first != sorted(first) or len({*first, 0}) != self.drafters:
            raise InputError(
                f"tree: expected an ascending drafter for each of {len(self.children[0])} rows, got {first}"
            )
        self.drafter = [0, *first]
        self.drafter += [0] * (len(self.parent) - len(self.drafter))
        for row in range(len(first) + 1, len(self.parent)):
            self.drafter[row] = self.drafter[self.parent[row]]
        self.roots = [[row for row in self.children[0] if self.drafter[row] == one] for one in range(self.drafters)]
        self.levels: list[list[int]] = [[] for _ in range(self.deepest + 1)]
        for row, depth in enumerate(self.depth):
            self.levels[depth].append(row)
        self.spans = [slice(level[0], level[-1] + 1) for level in self.levels]
        self.parents, self.depths = np.array(self.parent, dtype=np.int64), np.array(self.depth, dtype=np.int64)
        self.drafter_of = np.array(self.drafter, dtype=np.int64)
        self.branches = [self.drafters, *map(len, self.levels[1:])]
        self.is_chain = len(self.parent) == self.deepest + 1
        self.width = max(map(len, self.levels[1:]), default=0)

    def __len__(self) -> int:
        return len(self.parent)

    def __repr__(self) -> str:
        return f"Topology({self.name})"

    def below(self, row: int, drafter: int) -> list[int]:
        """Return the children of a row that a drafter draws."""
        return self.children[row] if row else self.roots[drafter]

    @property
    def nodes(self) -> int:
        """Number of candidates."""
        return len(self.parent) - 1

    @cached_property
    def paths(self) -> list[list[int]]:
        """By row, the rows from the anchor down to it."""
        paths: list[list[int]] = [[0]]
        for row, parent in enumerate(self.parent[1:], 1):
            paths.append([*paths[parent], row])
        return paths

    @cached_property
    def leaves(self) -> list[Array | None]:
        """By depth, bool by branch: whether it has no children; None if none of these branches is a leaf."""
        masks = [np.array([not self.children[row] for row in level]) for level in self.levels]
        masks[0] = masks[0].repeat(self.drafters)
        return [mask if mask.any() else None for mask in masks]

    @cached_property
    def parent_in_level(self) -> list[Array]:
        """By depth and branch: index of its parent among the branches of the depth above; 0 at depth 0."""
        above = [self.spans[0], *self.spans]
        parents = [np.maximum(self.parents[span] - up.start, 0) for up, span in zip(above, self.spans, strict=False)]
        parents[0] = np.zeros(self.drafters, dtype=np.int64)
        return [*parents[:1], *(self.drafter_of[span] for span in self.spans[1:2]), *parents[2:]]

    @cached_property
    def drafter_of_branch(self) -> list[Array]:
        """By depth and branch, index of its drafter."""
        return [np.arange(self.drafters), *(self.drafter_of[span] for span in self.spans[1:])]

    @cached_property
    def trees(self) -> list[Topology]:
        """The tree of each drafter."""
        if self.drafters == 1:
            return [self]
        rows = [[0] for _ in self.roots]  # by drafter and row of its tree, the row here
        for row in range(1, len(self)):
            rows[self.drafter[row]].append(row)
        return [Topology([-1, *(own.index(self.parent[row]) for row in own[1:])]) for own in rows]

    @cached_property
    def name(self) -> str:
        """The text that `parse_tree` reads: widths if they suffice, a published name, or the parent list.

        The trees of several drafters are separated by `|`. A tree without candidates has the name `0`, which is not read.
        """
        if self.drafters > 1:
            return "|".join(tree.name for tree in self.trees)
        widths = [{len(self.children[row]) for row in level} for level in self.levels[:-1]]
        if all(len(counts) == 1 for counts in widths):
            return ",".join(str(counts.pop()) for counts in widths) or "0"
        for name, counts in NAMED.items():
            if self.parent == from_counts(counts).parent:
                return name
        return "parents:" + ",".join(str(parent - 1) for parent in self.parent[1:])

    @cached_property
    def sees(self) -> Tensor:
        """[N, N] bool: row i attends to row j, itself or an ancestor."""
        import torch  # slow to import, and reading a trace does not need it

        sees = torch.eye(len(self), dtype=torch.bool, device="cpu")
        for row, parent in enumerate(self.parent[1:], 1):
            sees[row] |= sees[parent]
        return sees

    def limited(self, depth: int) -> Topology:
        """Return the tree without rows deeper than `depth`."""
        if depth >= self.deepest:
            return self
        drafter = [self.drafter[row] for row in self.children[0]] if depth else None
        return Topology(self.parent[: self.depth.index(depth + 1)], drafter)


def fork(trees: Sequence[Topology]) -> Topology:
    """Return the tree of several drafters, given the tree of each.

    If none of them has a candidate, the result is a tree of one drafter.
    """
    if len(trees) == 1:
        return trees[0]
    rows = [[0] * len(tree) for tree in trees]  # by tree and row, the row of the result
    parent, drafter = [-1], []
    for depth in range(1, max(tree.deepest for tree in trees) + 1):
        for index, tree in enumerate(trees):
            for row in tree.levels[depth] if depth <= tree.deepest else ():
                rows[index][row] = len(parent)
                parent.append(rows[index][tree.parent[row]])
                drafter += [index] if depth == 1 else []
    if len(parent) > MAX_ROWS:
        raise InputError(f"tree: more than {MAX_ROWS} tokens; use smaller trees")
    return Topology(parent, drafter)


def with_drafters(tree: Topology, drafters: int) -> Topology:
    """Return a tree of several drafters; the same for each of them unless the tree has several.

    Raises:
        InputError: the tree has another number of drafters.
    """
    if tree.drafters == drafters:
        return tree
    if tree.drafters > 1:
        raise InputError(f"tree: expected one for each of {drafters} drafters, got {tree.drafters}")
    return fork([tree] * drafters)


def chain(depth: int) -> Topology:
    """Return the tree of width 1."""
    return Topology(range(-1, depth))


def from_widths(widths: Sequence[int]) -> Topology:
    """Return the tree in which every node of depth j has `widths[j]` children, such as MCSD's 4, 2, 2, 1."""
    if min(widths, default=1) < 1:
        raise InputError(f"tree: expected widths of 1 or more, not {min(widths)}")
    return from_counts([repeat(width) for width in widths])


def from_counts(levels: Sequence[Iterable[int]]) -> Topology:
    """Return the tree with these numbers of children by depth and node; nodes that are not listed have none."""
    parent, level = [-1], range(1)
    for counts in levels:
        first, children = len(parent), list(zip(level, counts, strict=False))
        if first + sum(count for _, count in children) > MAX_ROWS:
            raise InputError(f"tree: more than {MAX_ROWS} tokens; use smaller widths")
        parent.extend(row for row, count in children for _ in range(count))
        level = range(first, len(parent))
    return Topology(parent)


def from_parents(parents: Sequence[int]) -> Topology:
    """Return the tree of a parent list: for each node the index of another node in the list, or -1 for the anchor.

    Nodes are renumbered breadth-first, siblings in the order of the list.
    """
    if len(parents) >= MAX_ROWS:
        raise InputError(f"tree: more than {MAX_ROWS} tokens")
    children: list[list[int]] = [[] for _ in range(len(parents) + 1)]  # the last one is of the anchor, node -1
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise InputError(f"tree: node {node} has parent {parent}; expected -1 or a node before it")
        children[parent].append(node)
    order, parent_rows = [-1], [-1]
    for row, node in enumerate(order):  # grows while it is read
        order += children[node]
        parent_rows += [row] * len(children[node])
    return Topology(parent_rows)


def parse_tree(text: str) -> Topology:
    """Return the tree that `text` describes.

    `4,2,2,1`: children by depth; `8`: eight candidates for the next token; `fork:4x5`: four branches of five tokens;
    `chain:6`; `parents:-1,-1,0,0,1`: a parent list; `medusa-63`: a published tree. `chain:6|4,2`: a tree for each drafter.

    Raises:
        InputError: `text` is none of these, or the tree has more than `MAX_ROWS` rows.
    """
    compact = text.replace(" ", "") if isinstance(text, str) else ""
    if "|" in compact:
        return fork([parse_tree(part) for part in compact.split("|")])
    if compact in NAMED:
        return from_counts(NAMED[compact])
    # Python converts at most 4,300 digits to an integer.
    if form := re.fullmatch(r"(?:chain:|fork:(\d{1,9})x)(-?\d{1,9})", compact):
        width, depth = int(form[1] or 1), int(form[2])
        if not 1 <= depth < MAX_ROWS:
            raise InputError(f"tree: expected a depth between 1 and {MAX_ROWS - 1}, not {depth}")
        return from_widths([width, *[1] * (depth - 1)])
    if re.fullmatch(r"(parents:)?[+-]?\d{1,9}(,[+-]?\d{1,9})*", compact):
        kind, _, numbers = compact.rpartition(":")
        return (from_parents if kind else from_widths)([int(part) for part in numbers.split(",")])
    raise InputError(
        f"--tree: expected widths such as 4,2,2,1, fork:4x5, chain:6, {', '.join(NAMED)} or parents:-1,-1,0, not {text!r:.80}"
    )
