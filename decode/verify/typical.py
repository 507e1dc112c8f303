"""Typical acceptance (Medusa, arXiv 2401.10774), which changes the output distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..models.device import download
from ..round_state import RoundState
from .base import Accepted, Verification, choices_of
from .noise import Purpose


class Typical(Verification):
    """Lossy. Accepts a candidate x if p(x) > min(epsilon, delta exp(-H(p))), and the longest path of such candidates.

    Proposes the best tokens of the draft. The next token is drawn from p. Epsilon and delta are Medusa's defaults.
    """

    name, lossless, label = "typical", False, "typical"
    epsilon, delta = 0.3, 0.09

    def accept_one(self, round: RoundState, stream: int, sent: Sequence[int], sampled: Tensor) -> Accepted:
        """See `Verification.accept_one`. Of equally long paths the most probable one is accepted."""
        tree, tokens = round.topology, round.tokens[stream].tolist()
        p = torch.softmax(sampled.double(), -1)
        index = {row: at for at, row in enumerate(sent)}
        parents = [index[max(tree.parent[row], 0)] for row in sent]
        entropy, prob = download(torch.special.entr(p).sum(-1), p[parents, [tokens[row] for row in sent]])
        log_prob = {0: 0.0}  # by row, of the path to it, if all its candidates are accepted
        for row, parent, chance in zip(sent[1:], parents[1:], prob[1:], strict=True):  # parents precede children
            threshold = min(self.epsilon, self.delta * math.exp(-entropy[parent]))
            if sent[parent] in log_prob and chance > threshold:
                log_prob[row] = log_prob[sent[parent]] + math.log(chance)
        end = max(log_prob, key=lambda row: (tree.depth[row], log_prob[row]))
        number = round.numbers(stream)[end]
        return tree.paths[end], choices_of(round, stream).draw(p[index[end]], number, Purpose.RESIDUAL)
