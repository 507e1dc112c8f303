"""Typical acceptance, which changes the output distribution: a candidate passes if the target finds it likely enough for its
entropy, the longest path wins (Medusa, arXiv 2401.10774)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..models.device import download
from ..round_state import RoundState, Rows
from .base import Accepted, Draw, Verification, choices_of
from .match import _widths, best_tokens
from .noise import Purpose


class Typical(Verification):
    """Lossy. Accepts a candidate x if p(x) > min(epsilon, delta exp(-entropy of p)); the next token is drawn from p.

    Epsilon 0.3 and delta 0.09 are the defaults of Medusa's functions. The candidates are the draft's best tokens.
    """

    name, lossless, label = "typical", False, "typical"
    epsilon, delta = 0.3, 0.09

    def draw(self, round: RoundState, rows: Rows, sampled: Tensor) -> Draw:
        """Propose the draft's best tokens; see `Verification.draw`."""
        return Draw(best_tokens(sampled, _widths(round, rows)))

    def accept_one(self, round: RoundState, stream: int, sent: Sequence[int], sampled: Tensor) -> Accepted:
        """Return the longest path of typical tokens, the likeliest of equals; see `Verification.accept_one`."""
        tree, tokens = round.topology, round.tokens[stream].tolist()
        p = torch.softmax(sampled.double(), -1)
        index = {row: at for at, row in enumerate(sent)}
        chances = [p[index[tree.parent[row]], tokens[row]] for row in sent[1:]]
        # The 1 is there so that something can be stacked where no candidate was sent.
        entropy, probs = download(torch.special.entr(p).sum(-1), torch.stack([p.new_ones(()), *chances]))
        likely: dict[int, float] = {0: 0.0}  # log-probability of each typical path
        for row, prob in zip(sent[1:], probs[1:], strict=True):  # parents come before their children
            parent = tree.parent[row]
            if parent in likely and prob > min(self.epsilon, self.delta * math.exp(-entropy[index[parent]])):
                likely[row] = likely[parent] + math.log(prob)
        end = max(likely, key=lambda row: (tree.depth[row], likely[row]))
        number = round.numbers(stream)[end]
        return tree.paths[end], choices_of(round, stream).draw(p[index[end]], number, Purpose.RESIDUAL)
