"""The rejection family: candidates drawn from q, accepted so that the output follows p. All lossless.

- `rejection`: recursive rejection without replacement (MCSD, arXiv 2401.06706), for one candidate speculative sampling
  (Leviathan et al., arXiv 2211.17192);
- `rejection_replace`: the same with candidates drawn independently (SpecInfer, arXiv 2305.09781);
- `block`: block verification of a chain (Sun et al., arXiv 2403.10444).

At temperature 0 all of them are greedy matching.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..models.device import download
from ..models.outputs import broken
from ..round_state import RoundState, Rows
from .base import Accepted, Draw, Verification, choices_of
from .noise import Choices, Purpose


class Rejection(Verification):
    """Tries the candidates of a node one after the other, each against what the ones before have left of p."""

    name, lossless, label, hides = "rejection", True, "ratio", True
    replacement = False

    def draw(self, round: RoundState, rows: Rows, sampled: Tensor) -> Draw:
        """Draw from q, each candidate from what the ones before have left of it; see `Verification.draw`."""
        probs = torch.softmax(sampled.double(), -1)  # double: what is left of p is a difference
        tokens: list[list[int]] = []
        for stream, own in rows:
            number = round.next_number(stream)  # keys the choices, so that no two candidates share one
            for row in own:
                q = round.draft_probs[stream, row] = probs[len(tokens)]
                width = len(round.topology.children[row])
                tokens.append(self._draw_below(q, width, number, choices_of(round, stream)))
                number += len(tokens[-1])
        return Draw(tokens)

    def _draw_below(self, q: Tensor, width: int, node: int, choices: Choices) -> list[int]:
        """Return the candidates of one place, numbered from `node` on."""
        tokens: list[int] = []
        left: Tensor | None = q
        while left is not None and len(tokens) < width:  # else every token that q knows is a candidate already
            tokens.append(choices.draw(left, node + len(tokens), Purpose.DRAFT))
            if not self.replacement and len(tokens) < width:
                left = without(left, tokens[-1])
        return tokens

    def accept_one(self, round: RoundState, stream: int, sent: Sequence[int], sampled: Tensor) -> Accepted:
        """Go down from the anchor; see `Verification.accept_one`."""
        probs = dict(zip(sent, torch.softmax(sampled.double(), -1), strict=True))
        ratios, numbers, path = first_ratios(round, stream, probs), round.numbers(stream), [0]
        while True:
            below, left = self._try(round, stream, path[-1], probs, ratios, numbers)
            if below is None:
                return path, choices_of(round, stream).draw(left, numbers[path[-1]], Purpose.RESIDUAL)
            path.append(below)

    def _try(
        self, round: RoundState, stream: int, row: int, probs: dict[int, Tensor], ratios: dict[int, float],
        numbers: Sequence[int],
    ) -> tuple[int | None, Tensor]:  # fmt: skip
        """Return the accepted child of `row`, or None, and the distribution to draw from then."""
        left, choices = probs[row], choices_of(round, stream)
        q: Tensor | None = round.draft_probs.get((stream, row))
        children = round.drawn_below(stream, row)
        for child in children:
            token = int(round.tokens[stream, child])
            assert q is not None
            # One that was left out is not tried, but those after it were drawn without its token all the same.
            if child in probs:
                ratio = ratios[child] if child in ratios else checked([float(left[token] / q[token])])[0]
                if choices.accept(min(1.0, ratio), numbers[child]):
                    return child, left
                left = residual(left, q)
            if child != children[-1] and not self.replacement:
                q = without(q, token)
        return None, left


class RejectionReplace(Rejection):
    """The same with candidates that are drawn independently of each other, so that one may come twice."""

    name, replacement = "rejection_replace", True


class Block(Rejection):
    """Accepts the longest prefix that the block's joint probability allows: never shorter on average, chains only."""

    name, label, chains_only = "block", "block", True

    def accept_one(self, round: RoundState, stream: int, sent: Sequence[int], sampled: Tensor) -> Accepted:
        """Test every prefix, and keep the longest that passes (Algorithm 2 of the paper); see `Verification.accept_one`."""
        choices, tokens = choices_of(round, stream), round.tokens[stream].tolist()
        q_below = [round.draft_probs[stream, row] for row in sent if (stream, row) in round.draft_probs]
        p = torch.softmax(sampled.double(), -1)
        # w_i = min(1, w_(i-1) p / q), R_i = sum of (w_i p - q)+: a prefix passes with chance R_i / (R_i + 1 - w_i), the
        # whole block with w_k (R_0 is not used).
        weight, rest, taken, last = [p.new_ones(())], [p.new_zeros(())], 0, len(sent) - 1
        for i in range(1, last + 1):
            token, q = tokens[i], q_below[i - 1]
            weight.append(block_weight(weight[-1], p[i - 1, token], q[token]))
            if i < last:
                rest.append((weight[-1] * p[i] - q_below[i]).clamp_min(0.0).sum())
        joint = torch.stack(weight)
        weights, chances = download(joint, block_chance(torch.stack(rest), joint[: len(rest)]))
        checked(weights)
        for i in range(1, last + 1):  # the number of row i of a chain is i
            if choices.accept(chances[i] if i < last else weights[i], i):
                taken = i
        # Everything kept: one more token from p. Else from what the prefix leaves of it, norm((w p - q)+).
        after = p[taken]
        if taken < last:
            after = residual(weights[taken] * after, q_below[taken], after)
        return list(sent[: taken + 1]), choices.draw(after, taken, Purpose.RESIDUAL)


def checked(ratios: list[float]) -> list[float]:
    """Return p/q of tokens drawn from q; a q that is NaN is a `PairError`, lest NaN pass for acceptance."""
    if any(map(math.isnan, ratios)):
        raise broken("draft")
    return ratios


def first_ratios(round: RoundState, stream: int, probs: dict[int, Tensor]) -> dict[int, float]:
    """Return p/q of the first candidate below each row sent: none of them depends on what others leave of p."""
    children = round.topology.children
    first = [children[row][0] for row in probs if children[row] and children[row][0] in probs]
    if not first:
        return {}
    ratios = []
    for child in first:
        row, token = round.topology.parent[child], round.tokens[stream, child]
        ratios.append(probs[row][token] / round.draft_probs[stream, row][token])
    return dict(zip(first, checked(download(torch.stack(ratios))[0]), strict=True))


def residual(p: Tensor, q: Tensor, otherwise: Tensor | None = None) -> Tensor:
    """Return norm((p - q)_+) [V]; `otherwise` (or p) where nothing is left, which then happens with probability 0."""
    left = (p - q).clamp_min(0.0)
    total = left.sum()
    return torch.where(total > 0.0, left / total, p if otherwise is None else otherwise)


def without(q: Tensor, token: int) -> Tensor | None:
    """Return q [V] with `token` taken out and renormalised, or None where nothing is left."""
    left = q.clone()
    left[token] = 0.0
    total = left.sum()
    return left / total if float(total) > 0.0 else None


def ratio(above: Tensor, below: Tensor) -> Tensor:
    """Return min(1, above / below) of numbers that are not negative; 1 where `below` is 0, NaN where one of them is."""
    return torch.where(below == 0.0, 1.0, above / below.clamp_min(torch.finfo(below.dtype).tiny)).clamp_max(1.0)


def block_weight(weight: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """Return min(1, w p / q), the weight of a path that goes on with a token of these probabilities; all [R]."""
    return ratio(weight * p, q)


def block_chance(rest: Tensor, weight: Tensor) -> Tensor:
    """Return [R] R / (R + 1 - w), the chance that block verification keeps a prefix by itself, R = sum of (w p - q)+."""
    # R = 0 with w = 1: q is p there, and the prefix is kept.
    return torch.where(rest > 0.0, rest / (rest + 1.0 - weight), (weight >= 1.0).to(rest.dtype))
