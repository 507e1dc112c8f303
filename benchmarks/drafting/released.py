"""The CTC-drafter with the candidates that its released code makes, beside it with ours; and what heads know of siblings.

CTC's positions are drawn once for all paths, as deep as they are asked for, after the likeliest symbols: candidates that are
not the first share what follows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from specstop.decode import Pair, Settings, Speculator, Tally, with_drafter
from specstop.decode.benchmark import Ratio, run_alternating
from specstop.decode.drafters.networks import CTCNetwork
from specstop.policies import FixedLength
from specstop.train.drafters.proposals import Module, positions, positions_for, right_proposals
from specstop.train.drafters.texts import Batch, Text
from specstop.train.evaluate.statistics import Resamples

DEPTH, TREE, ROOM = 4, "medusa-63", "ctc-released"
"""Depth of the released tree of symbols; the tree that ours drafts; what has room for the former, collapsed."""


def second_proposals(network: Any, texts: Iterable[Text], embedding: Module, output: Module) -> tuple[float, float]:
    """Return how often a drafter's second proposal, fed the text's token, is right: where its first one was, where not.

    After the first candidate of a tree the one share counts, after its siblings the other.
    """
    right = torch.cat(list(right_proposals(network, texts, embedding, output)))
    first, second = right[:, 0], right[:, 1].double()
    return float(second[first].mean()), float(second[~first].mean())


@torch.no_grad()
def positions_drawn(network: CTCNetwork, texts: Iterable[Text], embedding: Module, output: Module) -> list[float]:
    """Return how many positions are drawn for 1, 2, ... tokens, in the mean over the roots of recorded texts."""
    blank, drawn = network.shape.vocabulary, []
    for text in texts:
        symbols = positions(network, Batch.of([text]), embedding, output)[0, max(0, text.prompt - 1) :]
        drawn += [
            [positions_for(count, best, blank) for count in range(1, DEPTH + 1)] for best in symbols.argmax(-1).tolist()
        ]
    return np.mean(drawn, 0).tolist()


def as_released(
    pair: Pair, folder: str, prompts: Sequence[tuple[str, Sequence[int]]], tokens: int
) -> tuple[float, float, Ratio, int]:
    """Decode prompts greedily with both sorts of candidates and plainly, in turns.

    Returns:
        Tokens a target call with the released candidates and with ours, the former's speed over the latter's with an
        interval over prompts, and how many of its texts equal plain decoding.
    """
    runs = [
        Speculator(with_drafter(pair, f"{kind}:{folder}"), FixedLength(DEPTH), Settings(0.0, tokens, DEPTH, tree=tree))
        for kind, tree in (("ctc-released", ROOM), ("ctc", TREE))
    ]
    plain = Speculator(pair, FixedLength(0), Settings(0.0, tokens, DEPTH))
    theirs, ours, own = run_alternating([*runs, plain], prompts)
    samples = Resamples([name for name, _ in prompts])
    spent = [samples.total([text.seconds for text in texts]) for texts in (theirs, ours)]
    same = sum(a.tokens == b.tokens for a, b in zip(theirs, own, strict=True))
    calls = [Tally(texts).block_efficiency for texts in (theirs, ours)]
    return calls[0], calls[1], samples.interval(spent[1] / spent[0]), same
