"""The shape of a drafted tree: a parent list, and the attention mask that is built from it once and sliced.

Rows number the tokens that a round may verify: first the roots (the anchor, or the alternatives to it), then the nodes
in order of depth. A chain is the tree of width 1.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ..policies.errors import InputError
from ..policies.limits import MOST_ROWS
from ..policies.typing import Array

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
"""Published trees: by depth how many children each node has, in order; the last ones have none. Medusa's is the one of 63
nodes that its authors and those of the CTC-drafter use for 7B models. `ctc-released` is no tree of theirs: it has room for
what the CTC-drafter's collapse makes of Medusa's, whatever the symbols are, and most of it stays empty."""


class Topology:
    """A forest of candidates.

    Args:
        parent: by row, the row that it is a child of; -1 for the roots, which come first. Rows are in order of depth.

    Attributes:
        depth: by row; 0 for the roots.
        children: by row, in order.
        roots: their number.
        deepest: the largest depth.
    """

    def __init__(self, parent: Sequence[int]) -> None:
        self.parent = tuple(parent)
        self.depth: list[int] = []
        self.children: list[list[int]] = [[] for _ in self.parent]
        for row, parent_row in enumerate(self.parent):
            if not -1 <= parent_row < row or (parent_row == -1 and any(self.depth)):
                raise InputError(f"tree: row {row} cannot stand below row {parent_row}")
            self.depth.append(0 if parent_row == -1 else self.depth[parent_row] + 1)
            if parent_row >= 0:
                self.children[parent_row].append(row)
        if not self.parent or self.depth != sorted(self.depth):
            raise InputError("tree: expected rows in order of depth, at least one")
        self.roots = self.depth.count(0)
        self.deepest = self.depth[-1]
        self.levels = [[row for row, d in enumerate(self.depth) if d == level] for level in range(self.deepest + 1)]

    def __len__(self) -> int:
        return len(self.parent)

    def __repr__(self) -> str:
        return f"Topology({self.name})"

    @property
    def nodes(self) -> int:
        """Rows that are drafted."""
        return len(self.parent) - self.roots

    @cached_property
    def is_chain(self) -> bool:
        """Whether every level has one row."""
        return len(self.parent) == self.deepest + 1

    @cached_property
    def width(self) -> int:
        """The most rows of one depth that are drafted."""
        return max((len(level) for level in self.levels[1:]), default=0)

    @cached_property
    def node_parents(self) -> Array:
        """[N] int64 by node, counted from the first one after the roots: the parent, -1 below a root."""
        return np.array([max(parent - self.roots, -1) for parent in self.parent[self.roots :]], dtype=np.int64)

    @cached_property
    def node_depths(self) -> Array:
        """[N] int64 by node: its depth."""
        return np.array(self.depth[self.roots :], dtype=np.int64)

    @cached_property
    def parents(self) -> Array:
        """[rows] int64: `parent`."""
        return np.array(self.parent, dtype=np.int64)

    @cached_property
    def depths(self) -> Array:
        """[rows] int64: `depth`."""
        return np.array(self.depth, dtype=np.int64)

    @cached_property
    def spans(self) -> list[slice]:
        """By depth, its rows: they follow one another."""
        return [slice(level[0], level[-1] + 1) for level in self.levels]

    @cached_property
    def extends(self) -> list[Array]:
        """By depth, bool by row of that depth: whether anything may be drawn below it."""
        return [np.array([bool(self.children[row]) for row in level]) for level in self.levels]

    @cached_property
    def all_extend(self) -> list[bool]:
        """By depth, whether something may be drawn below each of its rows."""
        return [bool(rows.all()) for rows in self.extends]

    @cached_property
    def parent_in_level(self) -> list[Array]:
        """By depth and row of that depth: the place of its parent in that one's own level; 0 for the roots."""
        firsts = [0, *(level[0] for level in self.levels)]  # by depth, the first row of the level before
        return [
            np.array([max(self.parent[row] - first, 0) for row in level], dtype=np.int64)
            for first, level in zip(firsts, self.levels, strict=False)
        ]

    @cached_property
    def name(self) -> str:
        """How `parse_tree` would be told: widths where they say it all, a published name, else the parent list."""
        if self.roots > 1:  # alternatives are named as candidates for the next token, which is what they are
            return Topology([-1, *(parent + 1 for parent in self.parent)]).name
        widths = [{len(self.children[row]) for row in level} for level in self.levels[:-1]]
        # Widths also say that the rows of a level come in the order of their parents.
        if all(len(kinds) == 1 for kinds in widths) and list(self.parent) == sorted(self.parent):
            return ",".join(str(kinds.pop()) for kinds in widths) or "0"
        for name, counts in NAMED.items():
            if self.parent == from_counts(counts).parent:
                return name
        return "parents:" + ",".join(str(parent - 1) for parent in self.parent[1:])

    @cached_property
    def sees(self) -> Tensor:
        """[rows, rows] bool: row i attends to row j, itself or an ancestor."""
        sees = torch.eye(len(self), dtype=torch.bool, device="cpu")
        # In order of depth, so that what the parent sees is complete.
        for row, parent in enumerate(self.parent):
            if parent >= 0:
                sees[row] |= sees[parent]
        return sees

    def limited(self, depth: int) -> Topology:
        """Return the tree without what is deeper than `depth`."""
        return self if depth >= self.deepest else Topology(self.parent[: self.depth.index(depth + 1)])

    def rooted(self) -> Topology:
        """Return the forest whose roots are this tree's nodes of depth 1: its first level is not drafted."""
        if self.roots != 1 or self.deepest == 0:
            raise InputError("tree: expected one root with candidates below it")
        return Topology([parent - 1 for parent in self.parent[1:]])  # 0, the root that goes, becomes -1


def chain(depth: int) -> Topology:
    """Return the tree of width 1."""
    return Topology(range(-1, depth))


def from_widths(widths: Sequence[int]) -> Topology:
    """Return the tree in which every node of depth j has `widths[j]` children, such as MCSD's 4, 2, 2, 1."""
    parent, level = [-1], [0]
    for width in widths:
        if width < 1:
            raise InputError(f"tree: expected widths of 1 or more, not {width}")
        if len(parent) + len(level) * width > MOST_ROWS:
            raise InputError(f"tree: more than {MOST_ROWS} tokens; use smaller widths")
        first = len(parent)
        parent.extend(row for row in level for _ in range(width))
        level = list(range(first, len(parent)))
    return Topology(parent)


def from_counts(levels: Sequence[Sequence[int]]) -> Topology:
    """Return the tree whose nodes of depth j have so many children each; nodes that are not listed have none."""
    parent, level = [-1], [0]
    for counts in levels:
        first = len(parent)
        parent.extend(row for row, count in zip(level, counts, strict=False) for _ in range(count))
        level = list(range(first, len(parent)))
    return Topology(parent)


def from_parents(parents: Sequence[int]) -> Topology:
    """Return the tree of a list of parents: for each node the index of another one in the list, or -1 for the anchor.

    The nodes are renumbered by depth, siblings in the order of the list.
    """
    depth: list[int] = []
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise InputError(f"tree: node {node} has parent {parent}; expected -1 or a node before it")
        depth.append(0 if parent < 0 else depth[parent] + 1)
    if len(depth) >= MOST_ROWS:
        raise InputError(f"tree: more than {MOST_ROWS} tokens")
    order = sorted(range(len(parents)), key=lambda node: depth[node])
    row = {-1: 0, **{node: 1 + at for at, node in enumerate(order)}}
    return Topology([-1, *(row[parents[node]] for node in order)])


def parse_tree(text: str) -> Topology:
    """Return the tree that `text` describes.

    `4,2,2,1`: children by depth; `8`: eight candidates for the next token; `fork:4x5`: four branches of five tokens;
    `chain:6`; `parents:-1,-1,0,0,1`: a parent list; `medusa-63`: a published one by name.
    """
    if text in NAMED:
        return from_counts(NAMED[text])
    kind, _, rest = text.replace(" ", "").rpartition(":")
    try:
        if kind == "chain":
            return chain(_counted(rest))
        if kind == "fork" and (fork := re.fullmatch(r"(\d+)x(\d+)", rest)):
            width, depth = int(fork[1]), _counted(fork[2])
            return from_widths([width, *[1] * (depth - 1)])
        if kind in ("", "parents"):
            numbers = [int(part) for part in rest.split(",")]
            return from_parents(numbers) if kind else from_widths(numbers)
    except InputError:  # a ValueError too, with a message of its own
        raise
    except ValueError:  # not numbers
        pass
    raise InputError(
        f"--tree: expected widths such as 4,2,2,1, fork:4x5, chain:6, {', '.join(NAMED)} or parents:-1,-1,0, not {text!r}"
    ) from None


def _counted(text: str) -> int:
    depth = int(text)
    if not 1 <= depth < MOST_ROWS:
        raise InputError(f"tree: expected a depth between 1 and {MOST_ROWS - 1}, not {depth}")
    return depth
