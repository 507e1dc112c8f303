"""The CTC-drafter's candidates as its released code makes them, on greedy texts, beside those of the forward algorithm.

The released code places the ten likeliest symbols of each position in Medusa's tree, collapses every path (equal neighbours
are one, blanks fall away) and masks what is left out; the longest path that the target agrees with is accepted. And what a
drafter knows after candidates that are not its first one: CTC's positions are drawn once, after the likeliest symbols.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from specstop.decode.drafters.heads.ctc import Prefixes
from specstop.decode.drafters.heads.layer_network import CTCNetwork
from specstop.decode.topology import Topology
from specstop.train.drafters.acceptance import right_proposals
from specstop.train.drafters.proposals import Module, positions
from specstop.train.drafters.texts import Batch, Text


def second_proposals(network: Any, texts: Iterable[Text], embedding: Module, output: Module) -> tuple[float, float]:
    """Return how often a drafter's second proposal, fed the text's token, is right: where its first one was, where not.

    After the first candidate of a tree the one share counts, after its siblings the other.
    """
    right = torch.cat(list(right_proposals(network, texts, embedding, output)))
    first, second = right[:, 0], right[:, 1].double()
    return float(second[first].mean()), float(second[~first].mean())


@torch.inference_mode()
def tokens_a_call(
    network: CTCNetwork, texts: Iterable[Text], tree: Topology, embedding: Module, output: Module
) -> tuple[float, float]:
    """Return tokens a target call of greedy texts, with the released candidates and with as many of the forward algorithm."""
    tokens, calls = [0, 0], [0, 0]
    for text in texts:
        symbols = positions(network, Batch.of([text]), embedding, output)[0].double().exp()
        said = text.tokens.tolist()
        for which, accepted in enumerate((_released, _by_prefix)):
            at = text.prompt - 1  # the place of the last token that was read; the next one is the root
            while at + 2 < len(said):
                follows = said[at + 2 :]
                step = accepted(symbols[at], follows, tree) + 1
                at, tokens[which], calls[which] = at + step, tokens[which] + min(step, len(follows)), calls[which] + 1
    released, forward = (t / max(c, 1) for t, c in zip(tokens, calls, strict=True))
    return released, forward


def ranks(tree: Topology) -> Iterator[list[int]]:
    """Yield for each node its path as ranks among siblings."""
    paths: list[list[int]] = [[]]
    for row, parent in enumerate(tree.parent[1:], 1):
        paths.append([*paths[parent], tree.children[parent].index(row)])
    yield from paths[1:]


def _released(symbols: torch.Tensor, follows: Sequence[int], tree: Topology) -> int:
    blank = symbols.shape[-1] - 1
    top = symbols[: tree.deepest].topk(max(map(len, tree.children)), -1).indices.tolist()
    longest = 0
    for path in ranks(tree):
        said = [s for s, _ in groupby(top[depth][rank] for depth, rank in enumerate(path)) if s != blank]
        same = next(
            (n for n, (a, b) in enumerate(zip(said, follows, strict=False)) if a != b), min(len(said), len(follows))
        )
        longest = max(longest, same)
    return longest


def _by_prefix(symbols: torch.Tensor, follows: Sequence[int], tree: Topology) -> int:
    row, prefix, places = 0, Prefixes.empty(symbols[None]), symbols[None]
    for depth, token in enumerate(follows[: tree.deepest]):
        wanted = tree.children[row]
        chances = prefix.next(places)[0]
        best = chances.topk(max(len(wanted), 1)).indices[: len(wanted)].tolist()
        if token not in best or not chances[token] > 0.0:
            return depth
        row = wanted[best.index(token)]
        prefix = prefix.extended(torch.zeros(1, dtype=torch.int64), torch.tensor([token]), places)
    return min(tree.deepest, len(follows))
