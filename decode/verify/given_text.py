"""Drafts and acceptances given the text: what rejection and block verification would have made of a text that is known.

A lossless verification leaves the text with the target's law, whatever policy stops the draft. So a text is sampled first,
from the target alone, and what a round drafts and accepts is drawn *given* the text; text and rounds have together the law
of the live loop. Behind the same prefix, with x the text's token and y a candidate:

- speculative sampling: y = x with probability min(1, q(x) / p(x)), which is the acceptance; else y ~ (q - p)+. Several
  candidates: one after the other, with what the ones before have left of p and, without replacement, of q. Behind the
  accepted one and off the text they are drawn from q.
- block verification, w the weight of the path so far, w' = min(1, w p(y) / q(y)): y = x with probability
  min(1, q(x) / (w p(x))); else y ~ (q - w p)+, and so on off the text, which thus takes the target's rows there.

Reason: q(y_1..y_i) times the chance that i tokens are accepted and the next is x is the same whatever stops the draft, as
long as it looks at nothing but the tokens drafted so far (V = 3, exactly: `benchmarks/given_text.py`).

A decoding comes to each place of a text once at most: what it drafted beyond the tokens that it commits lies off the text,
and the draws there belong to the place where it left. So one set of draws a place serves every anchor and every policy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ...policies.counter_rng import GOLDEN, signed
from .noise import choice_uniforms, mix_one
from .rejection import block_chance, block_weight, ratio

GIVEN_TEXT = ("rejection", "rejection_replace", "block")
"""The modes whose rounds are drawn so."""

OFF_TEXT = -1
"""In the place of the text's token where there is none."""

NOTHING_LEFT = -1
"""In the place of a candidate where the draft knows of no further token."""

_SALT = 0x6BADD0FF
_RANKS = 20  # bits


class Draws(Protocol):
    """Random choices for R rows; tests put an enumerator here."""

    def accepts(self, chance: Tensor, rank: int) -> Tensor:
        """Return [R] bool, True with these probabilities [R], for the candidates of a rank."""

    def tokens(self, weights: Tensor, rank: int) -> Tensor:
        """Return [R] tokens drawn by `weights` [R, V], rows of any sum above 0; never one of weight 0."""


DrawsAt = Callable[[Tensor, Tensor], Draws]
"""The choices of rows at (absolute positions [R], rows of the tree [R])."""


class KeyedDraws:
    """Choices made from numbers keyed by position, row of the tree, rank and purpose.

    Args:
        key: of `draw_key`.
        position, node: [R] int64 each.
    """

    def __init__(self, key: int, position: Tensor, node: Tensor) -> None:
        # In the bits below the node's there are two numbers for each rank: one that accepts, one that draws.
        self._key, self._position, self._node = key, position, node << (_RANKS + 1)

    def accepts(self, chance: Tensor, rank: int) -> Tensor:
        """See `Draws`."""
        return self._uniform(2 * rank) < chance

    def tokens(self, weights: Tensor, rank: int) -> Tensor:
        """See `Draws`. By inversion: the first token whose cumulated weight exceeds the uniform's share."""
        mass = weights.cumsum(-1)
        total = mass[:, -1:].contiguous()
        drawn = torch.searchsorted(mass, self._uniform(2 * rank + 1)[:, None] * total, right=True)
        last = torch.searchsorted(mass, total)  # the last one of any weight
        return torch.minimum(drawn, last)[:, 0].clamp_max(weights.shape[-1] - 1)

    def _uniform(self, choice: int) -> Tensor:
        return choice_uniforms(self._key, self._position, self._node + choice)


def draw_key(key: int, draw: int) -> int:
    """Return the key of the choices of a stream in the draw of that number: texts may be drawn with the stream's own."""
    return signed(mix_one(mix_one(key ^ _SALT) + draw * GOLDEN))


@dataclass(frozen=True)
class Candidates:
    """W candidates at each of R prefixes.

    Attributes:
        tokens: [R, W] in the order in which they are tried; `NOTHING_LEFT` where there are fewer.
        kept: [R], which of them is the text's token, accepted; -1 where none is.
        chance: [R, W] that it is accepted, given the prefix and it alone, and that it is tried; 0 elsewhere.
        some: [R] that the first is accepted, before it is drawn; 0 off the text.
        weight: [R, W] of the path that ends with it, of block verification.
    """

    tokens: Tensor
    kept: Tensor
    chance: Tensor
    some: Tensor
    weight: Tensor | None = None


def positive(values: Tensor, otherwise: Tensor) -> Tensor:
    """Return max(values, 0) [R, V]; a row of `otherwise` where nothing is left, which then is never drawn from."""
    left = values.clamp_min(0.0)
    return torch.where(left.sum(-1, keepdim=True) > 0.0, left, otherwise)


def entries(rows: Tensor, token: Tensor) -> Tensor:
    """Return [R], the entries of rows [R, V] at tokens [R]; those below 0 count as 0."""
    return rows.gather(-1, token.clamp_min(0)[:, None])[:, 0]


def rejection_candidates(
    q: Tensor, p: Tensor | None, own: Tensor, width: int, replacement: bool, draws: Draws
) -> Candidates:
    """Draw the candidates of recursive rejection (one: of speculative sampling) given the text.

    Args:
        q: [R, V] float64, what the draft samples from.
        p: [R, V], what the target samples from; None = all rows are off the text.
        own: [R] the text's token there, `OFF_TEXT` where there is none.
        width: W.
        replacement: candidates are drawn independently of each other.
        draws: of these rows.
    """
    tokens = torch.full((len(q), width), NOTHING_LEFT, device=q.device)
    chance, some = q.new_zeros(len(q), width), q.new_zeros(len(q))
    kept, known = torch.full_like(own, -1), torch.ones_like(own, dtype=torch.bool)
    tries = own >= 0 if p is not None else ~known  # on the text, and nothing is accepted so far
    left = q if p is None else p
    if p is not None:
        some = torch.minimum(p, q).sum(-1).clamp_max(1.0) * tries
    for rank in range(width):
        if p is None:
            token = draws.tokens(q, rank)
        else:
            # Off the text `own` is no token: what is looked up for it is void, and `tries` is False.
            takes = tries & draws.accepts(ratio(entries(q, own), entries(left, own)) * tries, rank)
            weights = torch.where(tries[:, None], positive(q - left, q), q)
            token = torch.where(takes, own, draws.tokens(weights, rank))
            chance[:, rank] = ratio(entries(left, token), entries(q, token)) * tries
            kept, tries = torch.where(takes, rank, kept), tries & ~takes
        tokens[:, rank] = torch.where(known, token, NOTHING_LEFT)
        if rank + 1 == width:
            break
        if p is not None:
            # p_(m+1) = (p_m - q_m)+, normalised; without replacement q_(m+1) is q_m without the candidate.
            left = positive(left - q, left)
            left = left / left.sum(-1, keepdim=True)
        if not replacement:
            q = q.scatter(-1, token[:, None], 0.0)
            total = q.sum(-1, keepdim=True)
            known, tries = known & (total[:, 0] > 0.0), tries & (total[:, 0] > 0.0)
            # Anything that can be drawn from, where no token is left: `known` voids what comes of it.
            q = torch.where(total > 0.0, q / total, 1.0)
    return Candidates(tokens, kept, chance, some)


def block_candidates(q: Tensor, p: Tensor | None, own: Tensor, weight: Tensor, draws: Draws) -> Candidates:
    """Draw the next token of a chain under block verification given the text.

    Args:
        q: [R, V] float64, what the draft samples from.
        p: [R, V], what the target samples from, on the text and off it; None = nobody has asked it: off the text all tokens
            are then drawn from q, which is not quite their law.
        own: [R] the text's token there, `OFF_TEXT` off it.
        weight: [R] float64, w of the path.
        draws: of these rows.
    """
    if p is None:
        token = draws.tokens(q, 0)[:, None]
        nothing = q.new_zeros(len(q))
        return Candidates(token, torch.full_like(own, -1), nothing[:, None], nothing, nothing[:, None])
    reached = weight[:, None] * p
    beyond, on_text = (q - reached).clamp_min(0.0), own >= 0
    takes = on_text & draws.accepts(ratio(entries(q, own), entries(reached, own)) * on_text, 0)
    token = torch.where(takes, own, draws.tokens(positive(q - reached, q), 0))
    p_y, q_y = entries(p, token), entries(q, token)
    # Of the tokens y on the text, min(w p, q) are accepted for every R / (R + 1 - w) of (q - w p)+ that are not.
    least, rest = torch.minimum(weight * p_y, q_y), (reached - q).clamp_min(0.0).sum(-1)
    share = block_chance(rest, weight)
    chance = ratio(least, least + share * entries(beyond, token)) * on_text
    # The chance before the token is drawn: sum of min(w p, q), of the w that the path has.
    some = torch.minimum(p, q / weight.clamp_min(torch.finfo(q.dtype).tiny)[:, None]).sum(-1).clamp_max(1.0) * on_text
    kept = torch.where(takes, 0, -1)
    return Candidates(token[:, None], kept, chance[:, None], some, block_weight(weight, p_y, q_y)[:, None])
