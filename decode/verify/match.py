"""Match verification: a candidate is accepted where it is the target's own token under the shared noise. Lossless.

The target's own token is argmax(log p / T + g), g keyed by stream and position; the draft proposes the best of
log q / T + g. At temperature 0 there is no noise: greedy decoding, and greedy tree verification.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..models.device import download, upload
from .base import Accepted, Drawn, Turn, Verification
from .noise import Choices, best_of_rows, best_scores, in_order, match_scores, own_tokens

NOTHING = float("-inf")


class Match(Verification):
    """The text of a stream is the same whatever is drafted: plain sampling with the same noise."""

    name, lossless, label = "match", True, "match"

    def draw(self, sampled: Tensor, widths: Sequence[int], turns: Sequence[Turn]) -> Drawn:
        """Propose the best scores: without replacement, in falling order; see `Verification.draw`."""
        scores = sampled
        if not turns[0].choices.greedy:
            # The places of a call are of one depth, so that all tokens of a stream stand at one position and share its noise.
            noise = [turn.choices.noise(turn.found.depth[turn.places[0]] + 1, 1) for turn in turns]
            scores = match_scores(sampled, _stacked(noise, [len(turn.places) for turn in turns]))
        if max(widths) == 1:
            tokens = best_of_rows(scores).tolist()
            best = scores.amax(-1).tolist() if len(tokens) > 1 else [0.0]
            return Drawn([[t] if v > NOTHING else [] for t, v in zip(tokens, best, strict=True)], scores)
        # One more: the best score that was not drawn tells policies how near it came.
        best, tokens = _ranked(scores, max(widths) + 1)
        return Drawn(_possible(tokens, best, widths), scores, best=best)

    def start(self, sampled: Tensor, count: int, choices: Choices) -> list[int]:
        """Return the target's first own token."""
        return [int(own_tokens(sampled[None], None if choices.greedy else choices.noise(0, 1)))]

    def accept(self, turns: Sequence[Turn], sampled: Tensor) -> list[Accepted]:
        """Look up the target's own tokens in one go; see `Verification.accept`."""
        noise = None
        if not turns[0].choices.greedy:
            each = [_noise_at(turn) for turn in turns]
            noise = each[0] if len(each) == 1 else torch.cat(each)
        own = own_tokens(sampled, noise).tolist()
        found, first = [], 0
        for turn in turns:
            end = first + len(turn.places)
            found.append(_follow(turn, own[first:end]))
            first = end
        return found

    def accept_one(self, turn: Turn, sampled: Tensor) -> Accepted:
        """Follow the children that equal the target's own tokens; see `Verification.accept_one`."""
        return self.accept([turn], sampled)[0]


def _stacked(noise: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
    """Return the noise [1, V] of each stream as often as it has rows; a single one as it is, which all rows share."""
    if len(noise) == 1:
        return noise[0]
    return torch.cat([own.expand(count, -1) for own, count in zip(noise, rows, strict=True)])


def _noise_at(turn: Turn) -> Tensor:
    """Return the noise [n, V] of the tokens to come after each place."""
    depth = turn.found.depth
    # Row d for the tokens at depth d + 1; the last place is one of the deepest.
    noise = turn.choices.noise(1, depth[turn.places[-1]] + 1)
    if turn.found.topology.is_chain:
        return noise
    return noise[upload([depth[place] for place in turn.places], noise.device)]


def _follow(turn: Turn, tokens: Sequence[int]) -> Accepted:
    """Return the path of candidates that are the target's own tokens, given by place."""
    found, own = turn.found, dict(zip(turn.places, tokens, strict=True))
    path = [0]
    while True:
        token = own[path[-1]]
        # The candidates after a place all differ: at most one of them is the target's token.
        below = next((c for c in found.children[path[-1]] if c in own and found.tokens[c] == token), None)
        if below is None:
            return path, [token]
        path.append(below)


def best_tokens(scores: Tensor, widths: Sequence[int]) -> list[list[int]]:
    """Return for each row of [R, V] its `widths[row]` best tokens in falling order, none of score -inf."""
    values, tokens = _ranked(scores, max(widths))
    return _possible(tokens, values, widths)


def _ranked(scores: Tensor, count: int) -> tuple[list[list[float]], list[list[int]]]:
    """Return the `count` best scores of each row in falling order, and their tokens, of equal scores the first."""
    values, tokens, tied = download(*best_scores(scores, count))
    if rows := [row for row, ties in enumerate(tied) if ties]:  # a frequency, or a number in half precision
        for row, ordered in zip(rows, in_order(scores[rows], count).tolist(), strict=True):
            tokens[row] = ordered
    return values, tokens


def _possible(tokens: list[list[int]], best: list[list[float]], widths: Sequence[int]) -> list[list[int]]:
    return [
        # Scores fall: where the last one that is wanted is possible, all are.
        row[:w] if values[w - 1] > NOTHING else [t for t, v in zip(row[:w], values[:w], strict=True) if v > NOTHING]
        for row, values, w in zip(tokens, best, [min(w, len(tokens[0])) for w in widths], strict=True)
    ]
