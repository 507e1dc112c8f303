"""Verification modes that change the output distribution. Both are published; both say *lossy* wherever they are named.

- `target_init`: the roots of a round are several tokens drawn from the target, the longest accepted branch wins (DynaSD,
  arXiv 2409.10644). Roots with a predictable continuation are emitted too often. Its exact form is the ordinary loop, whose
  one root is the target's own token.
- `typical`: a candidate passes if the target finds it likely enough for its entropy, the longest path wins (Medusa,
  arXiv 2401.10774).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..candidates import Candidates
from ..models.device import download
from .base import Accepted, Drawn, Turn, Verification
from .match import best_tokens
from .noise import Choices, Purpose
from .rejection import Rejection, first_ratios, without


class TargetInit(Rejection):
    """Lossy. Draws its roots from the target without replacement (greedy: the best ones).

    Below a root it is speculative sampling, the residual included (the published code leaves it out, which biases even a
    single root); so with one root it is lossless.
    """

    name, lossless, deferred, hides = "target_init", False, True, False

    def draw(self, sampled: Tensor, widths: Sequence[int], turns: Sequence[Turn]) -> Drawn:
        """Draw from q (greedy: the best); see `Verification.draw`."""
        if turns[0].choices.greedy:
            return Drawn(best_tokens(sampled, widths))
        return super().draw(sampled, widths, turns)

    def start(self, sampled: Tensor, count: int, choices: Choices) -> list[int]:
        """Return `count` roots, or as many tokens as there are."""
        return self._roots(sampled if choices.greedy else torch.softmax(sampled.double(), -1), count, choices)

    def accept_one(self, turn: Turn, sampled: Tensor) -> Accepted:
        """Return the longest accepted branch, the first of equals; see `Verification.accept_one`."""
        found, sent, choices = turn.found, turn.places, turn.choices
        probs = dict(zip(sent, sampled if choices.greedy else torch.softmax(sampled.double(), -1), strict=True))
        ratios = {} if choices.greedy else first_ratios(found, probs)
        best: list[int] = []
        after = sampled[0]  # until the first root's branch takes its place
        for root in range(found.roots):
            path, left = self._branch(found, root, probs, ratios, choices)
            if len(path) > len(best):
                best, after = path, left
        return best, self._roots(after, found.topology.roots, choices)

    def _branch(
        self, found: Candidates, root: int, probs: dict[int, Tensor], ratios: dict[int, float], choices: Choices
    ) -> tuple[list[int], Tensor]:
        """Return the accepted path below one root, and what the next roots are drawn from."""
        path = [root]
        while True:
            if choices.greedy:
                own = int(probs[path[-1]].argmax())
                below = next((c for c in found.children[path[-1]] if c in probs and found.tokens[c] == own), None)
                left = probs[path[-1]]
            else:
                below, left = self._try(found, path[-1], probs, ratios, choices)
            if below is None:
                return path, left
            path.append(below)

    def _roots(self, weights: Tensor, count: int, choices: Choices) -> list[int]:
        """Return `count` different tokens: drawn from `weights` [V], or its best if greedy."""
        if choices.greedy:
            return best_tokens(weights[None], [count])[0]
        roots: list[int] = []
        left: Tensor | None = weights
        while left is not None and len(roots) < count:
            roots.append(choices.draw(left, len(roots), Purpose.RESIDUAL))
            left = without(left, roots[-1])
        return roots


class Typical(Verification):
    """Lossy. Accepts a candidate x if p(x) > min(epsilon, delta exp(-entropy of p)); the next token is drawn from p.

    Epsilon 0.3 and delta 0.09 are the defaults of Medusa's functions. The candidates are the draft's best tokens.
    """

    name, lossless, label = "typical", False, "typical"
    epsilon, delta = 0.3, 0.09

    def draw(self, sampled: Tensor, widths: Sequence[int], turns: Sequence[Turn]) -> Drawn:
        """Propose the draft's best tokens; see `Verification.draw`."""
        return Drawn(best_tokens(sampled, widths))

    def accept_one(self, turn: Turn, sampled: Tensor) -> Accepted:
        """Return the longest path of typical tokens, the likeliest of equals; see `Verification.accept_one`."""
        found, sent, choices = turn.found, turn.places, turn.choices
        p = torch.softmax(sampled.double(), -1)
        row = {place: at for at, place in enumerate(sent)}
        tried = [place for place in sent if found.parent[place] in row]
        chances = [p[row[found.parent[place]], found.tokens[place]] for place in tried]
        # The 1 is there so that something can be stacked where no candidate was sent.
        entropy, probs = download(torch.special.entr(p).sum(-1), torch.stack([p.new_ones(()), *chances]))
        likely: dict[int, float] = {0: 0.0}  # log-probability of each typical path
        # Places are in order of depth: a parent has been judged before its children.
        for place, prob in zip(tried, probs[1:], strict=True):
            parent = found.parent[place]
            if parent in likely and prob > min(self.epsilon, self.delta * math.exp(-entropy[row[parent]])):
                likely[place] = likely[parent] + math.log(prob)
        end = max(likely, key=lambda place: (found.depth[place], likely[place]))
        return found.path(end), [choices.draw(p[row[end]], end, Purpose.RESIDUAL)]
