"""How many of a drafter's greedy proposals the target would accept, by depth, at every position of recorded texts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...decode.drafters.ctc import Prefixes, collapsed_length, first_positions
from ...decode.drafters.networks import CTCNetwork
from .proposals import Module, positions, proposals
from .texts import Batch, Text


class Accepted(NamedTuple):
    """What becomes of a drafter's greedy proposals.

    Attributes:
        shares: by depth, of all positions those whose first so many proposals are the tokens that follow.
        tokens_a_call: of rounds of full depth from the first position on, each of which skips what it commits.
    """

    shares: list[float]
    tokens_a_call: float


@torch.no_grad()
def acceptance(network: Any, texts: Iterable[Text], embedding: Module, output: Module) -> Accepted | None:
    """Return how much of what a drafter proposes is accepted; None where no text goes on for as long as it proposes.

    Args:
        network: of a drafter.
        texts: those decoded greedily count, after their prompts.
        embedding, output: of the target.
    """
    hits = [right.cumprod(1) for right in right_proposals(network, texts, embedding, output)]
    if not hits:
        return None
    rounds = [round for own in hits for round in _rounds((own.sum(1) + 1).tolist())]
    return Accepted(torch.cat(hits).double().mean(0).tolist(), sum(rounds) / len(rounds))


def _rounds(committed: Sequence[int]) -> Iterator[int]:
    """Yield what each round of a text commits, from what a round at every position would."""
    at = 0
    while at < len(committed):
        yield committed[at]
        at += committed[at]


@torch.no_grad()
def right_proposals(network: Any, texts: Iterable[Text], embedding: Module, output: Module) -> Iterator[Tensor]:
    """Yield by text [P, K] bool: at P positions, whether each depth's proposal is the text's, fed the tokens before it."""
    best = _by_prefix if isinstance(network, CTCNetwork) else _by_scores
    for text in texts:
        if not text.greedy or len(text.tokens) < max(text.prompt, network.shape.depth) + 3:
            continue  # at none of its positions can all depths be compared
        right, first = [], max(0, text.prompt - 1)  # the first root that the target has drawn
        for depth, tokens in enumerate(best(network, Batch.of([text]), embedding, output)):
            known = len(text.tokens) - 2 - depth
            right.append(tokens[:known] == text.tokens[2 + depth :])  # position s proposes token s + 2 + depth
        last = min(map(len, right))  # positions at which all depths can be compared
        if first < last:
            yield torch.stack([row[first:last] for row in right], 1)


def _by_scores(network: Any, batch: Batch, embedding: Module, output: Module) -> Iterator[Tensor]:
    for scores in proposals(network, batch, embedding, output):
        yield scores[0].argmax(-1)


def _by_prefix(network: CTCNetwork, batch: Batch, embedding: Module, output: Module) -> Iterator[Tensor]:
    """Yield by depth the likeliest token after the prefix that the text itself goes on with."""
    symbols = positions(network, batch, embedding, output)[0].double().exp()  # [N, T, V + 1]
    best, blank = symbols.argmax(-1).tolist(), network.shape.vocabulary
    # Past the end of the text the prefixes mean nothing; `right_proposals` leaves those positions out.
    upcoming = torch.nn.functional.pad(batch.tokens[0], (0, symbols.shape[1]))
    for depth in range(symbols.shape[1]):
        drawn = torch.tensor([positions_for(depth + 1, own, blank) for own in best])
        known = first_positions(symbols, drawn)
        prefixes = Prefixes.empty(known)
        for before in range(depth):
            prefixes = prefixes.extended(upcoming[2 + before : 2 + before + len(known)], known)
        best_next = prefixes.next(known).argmax(-1)
        del known, prefixes  # as large as the text times the vocabulary: not two at once
        yield best_next


def positions_for(tokens: int, best: list[int], blank: int) -> int:
    """Return how many positions are drawn for so many tokens, if these are the likeliest symbols."""
    enough = (count for count in range(1, len(best)) if collapsed_length(best[:count], blank) >= tokens)
    return next(enough, len(best))
