"""Whether rounds go as deep as they are asked to."""

from __future__ import annotations

import warnings

from ...policies.errors import SpecstopWarning
from ..models.pair import Pair
from ..topology import parse_tree
from .base import Bounded
from .find import find_drafter
from .known import drafts_in_turn, reads_states


def tell_if_cut(pair: Pair, depth: int, tree: str | None = None) -> None:
    """Warn where a tree goes deeper than `--depth`, or a trained drafter less deep.

    Args:
        pair: with its drafter.
        depth: of the rounds that are recorded or timed.
        tree: what `parse_tree` reads; None = a chain.

    Raises:
        InputError: the tree cannot be read, or as `find_drafter`.
    """
    deepest = depth if tree is None else parse_tree(tree).deepest
    if deepest > depth:
        warnings.warn(
            f"--tree {tree}: has nodes down to depth {deepest}, of which those deeper than {depth} are left out; "
            f"give --depth {deepest} for all",
            SpecstopWarning,
            stacklevel=3,
        )
    if not reads_states(pair.drafter):
        return
    drafter, reached = find_drafter(pair.drafter, pair), min(depth, deepest)
    if isinstance(drafter, Bounded) and drafter.most < reached:
        most = f"proposes {drafter.most} tokens at most"
        alone = f"{most}, so that rounds of {reached} stay shorter; give --depth {drafter.most}"
        of_two = f"the second one {most}, so that its rounds of {reached} stay shorter"
        told = of_two if drafts_in_turn(pair.drafter) else alone
        warnings.warn(f"--drafter {pair.drafter}: {told}", SpecstopWarning, stacklevel=3)
