"""Match verification: a candidate is accepted where it is the target's own token under the shared noise. Lossless.

The target's own token is argmax(log p / T + g), g keyed by stream and position; the draft proposes the best of
log q / T + g. At temperature 0 there is no noise: greedy decoding, and greedy tree verification.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..candidates import Candidates
from ..models.transfer import download, upload
from .base import Drawn, Verification
from .noise import Choices

NOTHING = float("-inf")


class Match(Verification):
    """The text of a stream is the same whatever is drafted: plain sampling with the same noise."""

    name, lossless, label = "match", True, "match"

    def draw(
        self, sampled: Tensor, widths: Sequence[int], found: Candidates, feeding: Sequence[int], choices: Choices
    ) -> Drawn:
        """Propose the best scores: without replacement, in falling order; see `Verification.draw`."""
        depth = found.depth[feeding[0]] + 1
        scores = sampled if choices.greedy else torch.log_softmax(sampled, -1) + choices.noise(depth, 1)
        if len(widths) == 1 and widths[0] == 1:
            return Drawn([[int(scores.argmax(-1))]], scores)
        # One more: the best score that was not drawn tells policies how near it came.
        top = scores.topk(min(max(widths) + 1, scores.shape[-1]), -1)
        best, tokens = download(top.values, top.indices)
        return Drawn(_possible(tokens, best, widths), scores, best=best)

    def start(self, sampled: Tensor, count: int, choices: Choices) -> list[int]:
        """Return the target's first own token."""
        scores = sampled if choices.greedy else torch.log_softmax(sampled, -1) + choices.noise(0, 1)[0]
        return [int(scores.argmax(-1))]

    def accept(
        self, found: Candidates, sent: Sequence[int], sampled: Tensor, choices: Choices
    ) -> tuple[list[int], list[int]]:
        """Follow the children that equal the target's own tokens; see `Verification.accept`."""
        scores = sampled
        if not choices.greedy:
            noise = choices.noise(1, found.depth[sent[-1]] + 1)
            if not found.topology.is_chain:
                noise = noise[upload([found.depth[place] for place in sent], noise.device)]
            scores = torch.log_softmax(sampled, -1) + noise
        own = dict(zip(sent, scores.argmax(-1).tolist(), strict=True))
        path = [0]
        while True:
            token = own[path[-1]]
            below = next((c for c in found.children[path[-1]] if c in own and found.tokens[c] == token), None)
            if below is None:
                return path, [token]
            path.append(below)


def best_tokens(scores: Tensor, widths: Sequence[int]) -> list[list[int]]:
    """Return for each row of [R, V] its `widths[row]` best tokens in falling order, none of score -inf."""
    top = scores.topk(min(max(widths), scores.shape[-1]), -1)
    values, tokens = download(top.values, top.indices)
    return _possible(tokens, values, widths)


def _possible(tokens: list[list[int]], best: list[list[float]], widths: Sequence[int]) -> list[list[int]]:
    return [
        row[:w] if values[w - 1] > NOTHING else [t for t, v in zip(row[:w], values[:w], strict=True) if v > NOTHING]
        for row, values, w in zip(tokens, best, [min(w, len(tokens[0])) for w in widths], strict=True)
    ]
