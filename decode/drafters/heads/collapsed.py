"""The CTC-drafter's candidates as its released code makes them: a fixed tree of symbols, every path collapsed.

The likeliest symbols of each position stand in Medusa's tree, whichever came before them; equal neighbours of a path are one,
blanks fall away, and what stands there twice is left out (arXiv 2412.00061). Collapsed the tree has another shape in each
round: `ctc-released` of `topology.NAMED` has room for all of them. Unlike the released code positions are those after the
collapse, so that the text is the target's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TypeAlias

import torch

from ...models.pair import Pair
from ...round_state import RoundState, Rows
from ...topology import parse_tree
from ..base import Proposal
from .ctc import CTCDrafter
from .layer_network import CTCNetwork

Trie: TypeAlias = dict[int, "Trie"]
"""By token, what may follow it."""

SYMBOLS = parse_tree("medusa-63")
"""The tree of symbols. A node of depth d and rank r among its siblings is the r-th likeliest symbol of position d."""

WIDEST = max(map(len, SYMBOLS.children))


def collapsed(symbols: Sequence[Sequence[int]], blank: int) -> Trie:
    """Return the candidates that the likeliest symbols of each position give, the likeliest ones first."""
    root: Trie = {}
    paths: dict[int, list[int]] = {0: []}  # by node of the tree of symbols, those down to it
    for parent, children in enumerate(SYMBOLS.children):
        before = paths.get(parent)
        if before is None or len(before) == len(symbols):
            continue
        for child, symbol in zip(children, symbols[len(before)], strict=False):  # fewer in a small vocabulary
            here, paths[child] = root, [*before, symbol]
            for said, _ in groupby(paths[child]):
                if said != blank:
                    here = here.setdefault(said, {})
    return root


def size(trie: Trie) -> int:
    """Return the number of its nodes."""
    return sum(1 + size(below) for below in trie.values())


class ReleasedCTCDrafter(CTCDrafter):
    """Proposes the collapsed candidates and no others; their scores only order them, for greedy matching.

    Args:
        pair: whose target it is.
        network: on the target's device, of as many positions as the tree is deep.
    """

    def __init__(self, pair: Pair, network: CTCNetwork) -> None:
        super().__init__(pair, network)
        self._tries: dict[tuple[int, int], Trie] = {}  # by stream and row

    def propose(self, round: RoundState, depth: int, rows: Rows) -> Proposal:
        """See `Drafter`."""
        keys, streams = [(stream, row) for stream, own in rows for row in own], [stream for stream, _ in rows]
        if depth == 0:
            self._begin(round, rows)
            for _ in range(min(SYMBOLS.deepest, self._ctc.shape.depth) - 1):
                self._go_on(streams)
            positions = torch.cat([self._said[stream].symbols for stream in streams])
            symbols = positions.shape[-1]
            likeliest = positions.topk(min(WIDEST, symbols), -1).indices.tolist()
            tries = [collapsed(some, symbols - 1) for some in likeliest]
        else:
            # After a token that somebody else has drawn it knows nothing.
            parent = round.topology.parent
            tries = [self._tries[stream, parent[row]].get(int(round.tokens[stream, row]), {}) for stream, row in keys]
        self._tries = dict(zip(keys, tries, strict=True))
        # Large sub-tries first, as in the topology that has room for them; of equal ones the likelier first.
        weights = [
            {token: 1 + size(below) - at / 1000 for at, (token, below) in enumerate(trie.items())} for trie in tries
        ]
        return Proposal.of_weights(weights, self._wide, self._device)
