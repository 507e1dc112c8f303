"""The shape of a drafted tree: a parent list and the attention mask built from it.

Rows number the tokens that a round may verify: row 0 is the anchor, the last committed token, then come the candidates in
breadth-first order. A chain is the tree of width 1.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ..policies.contract import Array
from ..policies.errors import InputError
from ..policies.limits import MAX_ROWS

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
    """A tree of candidates below the anchor.

    Args:
        parent: by row, the row of its parent; -1 for row 0. Rows are in breadth-first order, so the list never decreases.

    Attributes:
        depth: by row; 0 for the anchor.
        children: by row, in order; they follow one another.
        deepest: the largest depth.
        levels: by depth, its rows.

    Raises:
        InputError: a row is not below an earlier one, or the rows are not in breadth-first order.
    """

    def __init__(self, parent: Sequence[int]) -> None:
        self.parent = tuple(parent)
        self.depth: list[int] = []
        self.children: list[list[int]] = [[] for _ in self.parent]
        for row, parent_row in enumerate(self.parent):
            if not (0 <= parent_row < row or (row == 0 and parent_row == -1)):
                raise InputError(f"tree: row {row} cannot be below row {parent_row}")
            self.depth.append(0 if parent_row == -1 else self.depth[parent_row] + 1)
            if parent_row >= 0:
                self.children[parent_row].append(row)
        if not self.parent or list(self.parent) != sorted(self.parent):
            raise InputError("tree: expected rows in breadth-first order, at least one")
        self.deepest = self.depth[-1]
        self.levels = [[row for row, d in enumerate(self.depth) if d == level] for level in range(self.deepest + 1)]

    def __len__(self) -> int:
        return len(self.parent)

    def __repr__(self) -> str:
        return f"Topology({self.name})"

    @property
    def nodes(self) -> int:
        """Number of candidates."""
        return len(self.parent) - 1

    @cached_property
    def is_chain(self) -> bool:
        """Whether every level has one row."""
        return len(self.parent) == self.deepest + 1

    @cached_property
    def width(self) -> int:
        """The most candidates of one depth."""
        return max((len(level) for level in self.levels[1:]), default=0)

    @cached_property
    def drafter(self) -> Array:
        """[N] int64 by row: index of the drafter that proposes it; with one drafter all zeros."""
        return np.zeros(len(self), dtype=np.int64)

    @cached_property
    def parents(self) -> Array:
        """[N] int64: `parent`."""
        return np.array(self.parent, dtype=np.int64)

    @cached_property
    def depths(self) -> Array:
        """[N] int64: `depth`."""
        return np.array(self.depth, dtype=np.int64)

    @cached_property
    def paths(self) -> list[list[int]]:
        """By row, the rows from the anchor down to it."""
        paths: list[list[int]] = []
        for row, parent in enumerate(self.parent):
            paths.append([*paths[parent], row] if row else [row])
        return paths

    @cached_property
    def spans(self) -> list[slice]:
        """By depth, its rows as a slice."""
        return [slice(level[0], level[-1] + 1) for level in self.levels]

    @cached_property
    def extends(self) -> list[Array]:
        """By depth, bool by row of that depth: whether it has children."""
        return [np.array([bool(self.children[row]) for row in level]) for level in self.levels]

    @cached_property
    def all_extend(self) -> list[bool]:
        """By depth, whether each of its rows has children."""
        return [bool(rows.all()) for rows in self.extends]

    @cached_property
    def parent_in_level(self) -> list[Array]:
        """By depth and row of that depth: index of its parent within the parent's level; 0 for the anchor."""
        firsts = [0, *(level[0] for level in self.levels)]  # by depth, the first row of the level before
        return [
            np.array([max(self.parent[row] - first, 0) for row in level], dtype=np.int64)
            for first, level in zip(firsts, self.levels, strict=False)
        ]

    @cached_property
    def name(self) -> str:
        """The text that `parse_tree` reads: widths where they suffice, a published name, or the parent list."""
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
        sees = torch.eye(len(self), dtype=torch.bool, device="cpu")
        for row, parent in enumerate(self.parent[1:], 1):
            sees[row] |= sees[parent]  # parents come first, so their rows are complete
        return sees

    def limited(self, depth: int) -> Topology:
        """Return the tree without rows deeper than `depth`."""
        return self if depth >= self.deepest else Topology(self.parent[: self.depth.index(depth + 1)])


def chain(depth: int) -> Topology:
    """Return the tree of width 1."""
    return Topology(range(-1, depth))


def from_widths(widths: Sequence[int]) -> Topology:
    """Return the tree in which every node of depth j has `widths[j]` children, such as MCSD's 4, 2, 2, 1."""
    parent, level = [-1], [0]
    for width in widths:
        if width < 1:
            raise InputError(f"tree: expected widths of 1 or more, not {width}")
        if len(parent) + len(level) * width > MAX_ROWS:
            raise InputError(f"tree: more than {MAX_ROWS} tokens; use smaller widths")
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
    """Return the tree of a parent list: for each node the index of another node in the list, or -1 for the anchor.

    Nodes are renumbered breadth-first, siblings in the order of the list.
    """
    children: dict[int, list[int]] = {node: [] for node in range(-1, len(parents))}
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise InputError(f"tree: node {node} has parent {parent}; expected -1 or a node before it")
        children[parent].append(node)
    if len(parents) >= MAX_ROWS:
        raise InputError(f"tree: more than {MAX_ROWS} tokens")
    order, parent_rows = [-1], [-1]
    for row, node in enumerate(order):  # grows while it is read
        order += children[node]
        parent_rows += [row] * len(children[node])
    return Topology(parent_rows)


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
    if not 1 <= depth < MAX_ROWS:
        raise InputError(f"tree: expected a depth between 1 and {MAX_ROWS - 1}, not {depth}")
    return depth
