"""Rejection: candidates are drawn from q and accepted so that the output follows p. All modes are lossless.

At temperature 0 they are greedy matching.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..models.device import download
from ..round_state import RoundState, Rows
from .base import Accepted, Draw, Verification, choices_of
from .noise import Purpose


class Rejection(Verification):
    """Recursive rejection without replacement (MCSD, arXiv 2401.06706).

    With one candidate it is speculative sampling (Leviathan et al., arXiv 2211.17192).
    """

    name, lossless, label, hides = "rejection", True, "ratio", True
    replacement = False

    def draw(self, round: RoundState, rows: Rows, sampled: Tensor) -> Draw:
        """See `Verification.draw`. Draws from q, and each further sibling from q without the tokens before it."""
        probs = torch.softmax(sampled.double(), -1)  # float64, because residuals are differences
        tokens: list[list[int]] = []
        for stream, fed in rows:
            choices, number = choices_of(round, stream), round.next_number(stream)
            for row in fed:
                q: Tensor | None = probs[len(tokens)]
                round.draft_probs[stream, row] = probs[len(tokens)]
                siblings: list[int] = []
                width = len(round.topology.children[row])
                while q is not None and len(siblings) < width:
                    siblings.append(choices.draw(q, number + len(siblings), Purpose.DRAFT))
                    if not self.replacement and len(siblings) < width:
                        q = without(q, siblings[-1])
                tokens.append(siblings)
                number += len(siblings)
        return Draw(tokens)

    def accept_one(self, round: RoundState, stream: int, sent: Sequence[int], sampled: Tensor) -> Accepted:
        """See `Verification.accept_one`. Accepts x with probability min(1, p(x) / q(x)), else p becomes norm((p - q)+)."""
        probs = dict(zip(sent, torch.softmax(sampled.double(), -1), strict=True))
        choices, numbers, path = choices_of(round, stream), round.numbers(stream), [0]
        while True:
            row = path[-1]
            p, siblings = probs[row], round.drawn_below(stream, row)
            q: Tensor | None = round.draft_probs.get((stream, row))
            for child in siblings:
                token = int(round.tokens[stream, child])
                assert q is not None
                # A candidate that was not sent is skipped, but its later siblings were drawn without its token.
                if child in probs:
                    if choices.accept(min(1.0, checked(float(p[token] / q[token]))), numbers[child]):
                        path.append(child)
                        break
                    p = residual(p, q)
                if child != siblings[-1] and not self.replacement:
                    q = without(q, token)
            else:
                return path, choices.draw(p, numbers[row], Purpose.RESIDUAL)


class RejectionReplace(Rejection):
    """Recursive rejection of independently drawn candidates, which may be equal (SpecInfer, arXiv 2305.09781)."""

    name, replacement = "rejection_replace", True


class Block(Rejection):
    """Block verification of a chain (Sun et al., arXiv 2403.10444, Algorithm 2). On average it accepts the most tokens."""

    name, label, chains_only = "block", "block", True

    def accept_one(self, round: RoundState, stream: int, sent: Sequence[int], sampled: Tensor) -> Accepted:
        """See `Verification.accept_one`. Each prefix is tested, and the longest that passes is accepted."""
        choices, tokens, last = choices_of(round, stream), round.tokens[stream].tolist(), len(sent) - 1
        p = torch.softmax(sampled.double(), -1)
        q = [round.draft_probs[stream, row] for row in sent[:last]]
        # w_i = min(1, w_(i-1) p / q) and R_i = sum of (w_i p - q)+. Prefix i < k passes with probability
        # R_i / (R_i + 1 - w_i), the whole block with w_k. R_0 is not used.
        weight, rest = [p.new_ones(())], [p.new_zeros(())]
        for i in range(1, last + 1):
            weight.append(block_weight(weight[-1], p[i - 1, tokens[i]], q[i - 1][tokens[i]]))
            if i < last:
                rest.append((weight[i] * p[i] - q[i]).clamp_min(0.0).sum())
        w, chance = download(torch.stack(weight), block_chance(torch.stack(rest), torch.stack(weight[: len(rest)])))
        chance = [*chance[:last], checked(w[-1])]
        passed = [i for i in range(1, last + 1) if choices.accept(chance[i], i)]  # row i of a chain has the number i
        kept = max(passed, default=0)
        rest_p = p[kept] if kept == last else residual(w[kept] * p[kept], q[kept], p[kept])
        return list(sent[: kept + 1]), choices.draw(rest_p, kept, Purpose.RESIDUAL)


def checked(ratio: float) -> float:
    """Return p/q of a token that was drawn from q.

    Raises:
        PairError: it is NaN, as the draft's logits were; NaN would pass for an acceptance.
    """
    if math.isnan(ratio):
        from ..models.outputs import broken  # imports transformers, which replay does not need

        raise broken("draft")
    return ratio


def residual(p: Tensor, q: Tensor, otherwise: Tensor | None = None) -> Tensor:
    """Return norm((p - q)+) [V], or `otherwise` (default: p) if it is 0 everywhere, which has probability 0."""
    rest = (p - q).clamp_min(0.0)
    total = rest.sum()
    return torch.where(total > 0.0, rest / total, p if otherwise is None else otherwise)


def without(q: Tensor, token: int) -> Tensor | None:
    """Return q [V] without a token, normalised, or None if no other token is possible."""
    rest = q.clone()
    rest[token] = 0.0
    total = rest.sum()
    return rest / total if float(total) > 0.0 else None


def ratio(p: Tensor, q: Tensor) -> Tensor:
    """Return min(1, p / q) elementwise; 1 if q is 0, NaN if one of them is."""
    return torch.where(q == 0.0, 1.0, p / q.clamp_min(torch.finfo(q.dtype).tiny)).clamp_max(1.0)


def block_weight(weight: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """Return min(1, w p / q), the weight of a path that continues with a token of probabilities p and q."""
    return ratio(weight * p, q)


def block_chance(rest: Tensor, weight: Tensor) -> Tensor:
    """Return R / (R + 1 - w), the probability that a prefix passes; R is the sum of (w p - q)+."""
    # R = 0 and w = 1: p equals q, and the prefix passes.
    return torch.where(rest > 0.0, rest / (rest + 1.0 - weight), (weight >= 1.0).to(rest.dtype))
