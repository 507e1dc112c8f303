"""Verification by shared noise. Both modes are lossless.

The target draws argmax(log p / T + g), with noise g keyed by stream and position. A candidate is accepted if it is that
token, so the text of a stream does not depend on the candidates. Without noise, at temperature 0, this is greedy decoding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..models.device import upload
from ..round_state import RoundState, Rows
from .base import Accepted, Draw, Verification, best_tokens, candidate_counts, choices_of
from .noise import Choices, best_of_rows, match_scores, target_tokens


class Match(Verification):
    """Proposes the best tokens of log q / T + g: draws from q without replacement that are coupled to the target's draw."""

    name, lossless, label = "match", True, "match"

    def draw(self, round: RoundState, rows: Rows, sampled: Tensor) -> Draw:
        """See `Verification.draw`."""
        scores, depth = sampled, round.topology.depth[rows[0][1][0]]
        if not choices_of(round, rows[0][0]).greedy:
            # All rows have one depth, so the candidates of a stream share the noise of one position.
            noise = [choices_of(round, stream).noise(depth + 1, 1).expand(len(fed), -1) for stream, fed in rows]
            scores = match_scores(sampled, noise[0] if len(noise) == 1 else torch.cat(noise))
        counts = candidate_counts(round, rows)
        if max(counts) == 1:
            return Draw(best_of_rows(scores)[:, None].tolist(), scores)
        # One more score: policies compare the candidates with the best token that was not drawn.
        tokens, best = best_tokens(scores, counts, extra=1)
        return Draw(tokens, scores, best)

    def start(self, sampled: Tensor, choices: Choices) -> int:
        """See `Verification.start`."""
        return int(target_tokens(sampled[None], None if choices.greedy else choices.noise(0, 1)))

    def accept(self, round: RoundState, rows: Rows, sampled: Tensor) -> list[Accepted]:
        """See `Verification.accept`."""
        noise = None
        if not choices_of(round, rows[0][0]).greedy:
            parts = [_noise_after(round, stream, sent) for stream, sent in rows]
            noise = parts[0] if len(parts) == 1 else torch.cat(parts)
        next_tokens = iter(target_tokens(sampled, noise).tolist())
        return [_follow(round, stream, {row: next(next_tokens) for row in sent}) for stream, sent in rows]


class Point(Match):
    """Proposes the best tokens of q, as engines do that keep no draft probabilities. The text is that of `match`.

    A candidate x is accepted with probability p(x): speculative sampling for a draft that is certain of x.
    """

    name, label = "point", "point"
    draw = Verification.draw


def _noise_after(round: RoundState, stream: int, sent: Sequence[int]) -> Tensor:
    """Return the noise [n, V] for the tokens after each row."""
    depth = round.topology.depth
    noise = choices_of(round, stream).noise(1, depth[sent[-1]] + 1)  # the last row is one of the deepest
    return noise if round.topology.is_chain else noise[upload([depth[row] for row in sent], noise.device)]


def _follow(round: RoundState, stream: int, target: dict[int, int]) -> Accepted:
    """Return the path of candidates that equal the target's token after their parent, given by row sent."""
    children, tokens, path = round.topology.children, round.tokens[stream].tolist(), [0]
    while True:
        token = target[path[-1]]
        # Siblings differ, so at most one of them is the target's token.
        child = next((row for row in children[path[-1]] if row in target and tokens[row] == token), None)
        if child is None:
            return path, token
        path.append(child)
