"""Match verification: a candidate is accepted where it is the target's own token under the shared noise. Lossless.

The target's own token is argmax(log p / T + g), g keyed by stream and position; the draft proposes the best of
log q / T + g. At temperature 0 there is no noise: greedy decoding, and greedy tree verification.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..models.device import download, upload
from ..round_state import RoundState, Rows
from .base import Accepted, Draw, Verification, choices_of
from .noise import Choices, best_of_rows, best_scores, in_order, match_scores, own_tokens

NOTHING = float("-inf")


class Match(Verification):
    """The text of a stream is the same whatever is drafted: plain sampling with the same noise."""

    name, lossless, label = "match", True, "match"

    def draw(self, round: RoundState, rows: Rows, sampled: Tensor) -> Draw:
        """Propose the best scores: without replacement, in descending order; see `Verification.draw`."""
        scores, depth = sampled, round.topology.depth[rows[0][1][0]]
        if not choices_of(round, rows[0][0]).greedy:
            # All rows have one depth, so that the candidates of a stream stand at one position and share its noise.
            noise = [choices_of(round, stream).noise(depth + 1, 1) for stream, _ in rows]
            scores = match_scores(sampled, _stacked(noise, [len(own) for _, own in rows]))
        widths = _widths(round, rows)
        if max(widths) == 1:
            return Draw(best_of_rows(scores), scores)
        # One more: the best score that was not drawn tells policies how near it came.
        best, tokens = _ranked(scores, max(widths) + 1)
        return Draw(_possible(tokens, best, widths), scores, best)

    def start(self, sampled: Tensor, choices: Choices) -> int:
        """Return the target's first own token."""
        return int(own_tokens(sampled[None], None if choices.greedy else choices.noise(0, 1)))

    def accept(self, round: RoundState, rows: Rows, sampled: Tensor) -> list[Accepted]:
        """Look up the target's own tokens in one go; see `Verification.accept`."""
        noise = None
        if not choices_of(round, rows[0][0]).greedy:
            each = [_noise_at(round, stream, sent) for stream, sent in rows]
            noise = each[0] if len(each) == 1 else torch.cat(each)
        own, accepted, first = round.fetch(own_tokens(sampled, noise)), [], 0
        for stream, sent in rows:
            accepted.append(_follow(round, stream, sent, own[first : first + len(sent)]))
            first += len(sent)
        return accepted

    def accept_one(self, round: RoundState, stream: int, sent: Sequence[int], sampled: Tensor) -> Accepted:
        """Follow the children that equal the target's own tokens; see `Verification.accept_one`."""
        return self.accept(round, [(stream, sent)], sampled)[0]


def _widths(round: RoundState, rows: Rows) -> list[int]:
    """Return how many candidates are wanted below each fed row."""
    children = round.topology.children
    return [len(children[row]) for _, own in rows for row in own]


def _stacked(noise: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
    """Return the noise [1, V] of each stream as often as it has rows; a single one as it is, which all rows share."""
    if len(noise) == 1:
        return noise[0]
    return torch.cat([own.expand(count, -1) for own, count in zip(noise, rows, strict=True)])


def _noise_at(round: RoundState, stream: int, sent: Sequence[int]) -> Tensor:
    """Return the noise [n, V] of the tokens to come after each row."""
    depth = round.topology.depth
    # Row d for the tokens at depth d + 1; the last row is one of the deepest.
    noise = choices_of(round, stream).noise(1, depth[sent[-1]] + 1)
    return noise if round.topology.is_chain else noise[upload([depth[row] for row in sent], noise.device)]


def _follow(round: RoundState, stream: int, sent: Sequence[int], own: Sequence[int]) -> Accepted:
    """Return the path of candidates that are the target's own tokens, given by row sent."""
    children, tokens, after = round.topology.children, round.tokens[stream].tolist(), dict(zip(sent, own, strict=True))
    path = [0]
    while True:
        token = after[path[-1]]
        # The candidates below a row all differ: at most one of them is the target's token.
        below = next((row for row in children[path[-1]] if row in after and tokens[row] == token), None)
        if below is None:
            return path, token
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
