"""Candidates after the prefixes of a text that is already complete, and which of them a verification accepts.

Under `match` and `point` the candidates follow from the prefix, and the text says which of them is accepted.

Under `rejection` and `block` candidates and acceptances are random. A lossless mode gives texts the target's distribution
whatever stops the drafts, so the collector samples a text from the target first, and then candidates and acceptances at each
place given that text. Text and rounds have the joint distribution of the live loop (METHODS B14). After a prefix, with the
text's next token x and a candidate y:

- Rejection: y = x, accepted, with probability min(1, q(x) / p(x)); else y ~ (q - p)+. Further siblings use the residuals of p
  and, without replacement, of q. After an accepted sibling and off the text, y ~ q.
- Block, with path weight w: y = x with probability min(1, q(x) / (w p(x))); else y ~ (q - w p)+, on and off the text. The
  weight becomes min(1, w p(y) / q(y)). This requires the target's distribution off the text.

This holds for every stop rule that reads only the tokens drafted so far. A decoding visits each place of a text at most
once, so one draw per place serves all anchors and policies.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..decode.verify.modes import block_chance, ratio
from ..decode.verify.noise import best_scores, mix_one, stable_topk, uniform, uniform_at
from ..policies.contract import Array
from ..policies.counter_rng import GOLDEN, signed
from .schema import NO_TOKEN

OFF_TEXT = -1
"""Next token of the text at prefixes that are not on it."""

_SALT = 0x6BADD0FF
_RANK_BITS = 20
_CONDITIONAL = 0x6B1E55ED
"""Changes the key for noise given a text, which must be independent of the noise that the text was sampled with."""


def gumbel_given(key: int, position: Tensor, logits: Tensor, token: Tensor) -> Tensor:
    """Return [R, V] float64 Gumbel noise conditioned on `token` having the largest log p + noise at each position.

    For a token drawn from p, token and noise have the joint distribution of plain sampling: the largest score M is Gumbel
    with location logsumexp(log p), and the other scores are Gumbel truncated at M (Maddison, Tarlow, Minka 2014, top-down
    construction).

    Args:
        key: of the stream. The noise is independent of texts sampled with the same key.
        position: [R] int64, absolute.
        logits: [R, V] processed: log p up to a constant per row.
        token: [R] int64, of probabilities above 0.
    """
    log_p = logits.double()
    log_u = uniform(key ^ _CONDITIONAL, position, logits.shape[-1]).log_()
    index = token[:, None]
    best = torch.logsumexp(log_p, -1, keepdim=True) - log_u.gather(-1, index).neg().log()
    # The truncated score of token i is -log(e^-M - log(u_i) / p_i). Its noise is that minus log p_i.
    return (log_p - best).exp().sub_(log_u).log_().neg_().scatter_(-1, index, best - log_p.gather(-1, index))


class KeyedDraws:
    """Random choices for R rows, keyed by stream, draw, position, row of the tree, rank and purpose.

    Args:
        key: of the stream. The choices are independent of a text sampled with it.
        draw: number of the draw given the text.
        position, node: [R] int64, absolute positions and rows of the tree.
    """

    def __init__(self, key: int, draw: int, position: Tensor, node: Tensor) -> None:
        self._key = signed(mix_one(mix_one(key ^ _SALT) + draw * GOLDEN))
        # Each rank has two numbers, one for acceptance and one for the token.
        self._position, self._index = position, node << (_RANK_BITS + 1)

    def accepts(self, prob: Tensor, rank: int) -> Tensor:
        """Return [R] bool, True with probabilities [R], for candidates of one rank."""
        return uniform_at(self._key, self._position, self._index + 2 * rank) < prob

    def tokens(self, weights: Tensor, rank: int) -> Tensor:
        """Return [R] tokens drawn with unnormalised weights [R, V], by inversion of the cumulative sum."""
        mass = weights.cumsum(-1)
        total = mass[:, -1:].contiguous()
        share = uniform_at(self._key, self._position, self._index + 2 * rank + 1)[:, None] * total
        token = torch.searchsorted(mass, share, right=True)
        last = torch.searchsorted(mass, total)  # the last token with a weight above 0
        return torch.minimum(token, last)[:, 0].clamp_max(weights.shape[-1] - 1)


@dataclass(frozen=True)
class Candidates:
    """W candidates at each of R prefixes.

    Attributes:
        tokens: [R, W] in the order in which they are tried; `NO_TOKEN` if there are fewer.
        accepted: [R] index of the accepted candidate, which is the text's token; -1 if none is.
        accept_chance: [R, W] probability of acceptance given the prefix and the token; 0 if the candidate is not tried.
        next_chance: [R] probability that the first candidate is accepted, before it is drawn; 0 off the text.
        weight: [R] weight of the path that ends with the candidate, for block verification.
        best: [R, .] the largest noisy scores, descending, under `match`.
    """

    tokens: Tensor
    accepted: Tensor
    accept_chance: Tensor | None = None
    next_chance: Tensor | None = None
    weight: Tensor | None = None
    best: Tensor | None = None


def best_candidates(scores: Tensor, text_token: Tensor, width: int, most: int) -> Candidates:
    """Return the tokens of the largest scores, of which the text's token is accepted.

    Args:
        scores: [R, V], with the shared noise under `match`.
        text_token: [R] the text's next token, negative off the text.
        width: W.
        most: number of scores that are returned, at least W.
    """
    best, tokens, tied = best_scores(scores, most)
    if bool(tied.any()):
        tokens[tied] = stable_topk(scores[tied], most)
    tokens = tokens[:, :width]
    hit = (tokens == text_token[:, None]) & (text_token >= 0)[:, None]
    accepted = torch.where(hit.any(-1), hit.int().argmax(-1), -1)
    return Candidates(tokens.where(best[:, :width] > -torch.inf, NO_TOKEN), accepted, best=best)


def rejection_candidates(
    q: Tensor, p: Tensor | None, text_token: Tensor, width: int, replacement: bool, draws: KeyedDraws
) -> Candidates:
    """Sample the candidates of recursive rejection given the text.

    Args:
        q: [R, V] float64, distribution of the draft.
        p: [R, V], distribution of the target; None = all rows are off the text.
        text_token: [R] the text's next token, negative off the text.
        width: W.
        replacement: whether candidates are drawn independently.
        draws: random choices of these rows.
    """
    tokens = torch.full((len(q), width), NO_TOKEN, device=q.device)
    accepted, possible = torch.full_like(text_token, -1), torch.ones_like(text_token, dtype=torch.bool)
    accept_chance, next_chance = q.new_zeros(len(q), width), q.new_zeros(len(q))
    tried = text_token >= 0  # on the text, and no earlier sibling was accepted
    if p is not None:
        next_chance = torch.minimum(p, q).sum(-1).clamp_max(1.0) * tried
    for rank in range(width):
        if p is None:
            token = draws.tokens(q, rank)
        else:
            # Off the text the entries at `text_token` have no meaning, and `tried` is False.
            hit = tried & draws.accepts(ratio(_entries(q, text_token), _entries(p, text_token)) * tried, rank)
            weights = torch.where(tried[:, None], _positive(q - p, q), q)
            token = torch.where(hit, text_token, draws.tokens(weights, rank))
            accept_chance[:, rank] = ratio(_entries(p, token), _entries(q, token)) * tried
            accepted, tried = torch.where(hit, rank, accepted), tried & ~hit
        tokens[:, rank] = torch.where(possible, token, NO_TOKEN)
        if rank + 1 == width:
            break
        if p is not None:
            p = _positive(p - q, p)
            p = p / p.sum(-1, keepdim=True)
        if not replacement:
            q = q.scatter(-1, token[:, None], 0.0)
            total = q.sum(-1, keepdim=True)
            possible, tried = possible & (total[:, 0] > 0.0), tried & (total[:, 0] > 0.0)
            q = torch.where(total > 0.0, q / total, 1.0)  # any distribution; `possible` discards what is drawn from it
    return Candidates(tokens, accepted, accept_chance, next_chance)


def block_candidates(q: Tensor, p: Tensor, text_token: Tensor, weight: Tensor, draws: KeyedDraws) -> Candidates:
    """Sample the next token of a chain under block verification given the text.

    Args:
        q, p: [R, V] float64, distributions of draft and target, on and off the text.
        text_token: [R] the text's next token, negative off the text.
        weight: [R] float64, w of the path.
        draws: random choices of these rows.
    """
    wp, on_text = weight[:, None] * p, text_token >= 0
    hit = on_text & draws.accepts(ratio(_entries(q, text_token), _entries(wp, text_token)) * on_text, 0)
    token = torch.where(hit, text_token, draws.tokens(_positive(q - wp, q), 0))
    q_y, wp_y = _entries(q, token), weight * _entries(p, token)
    # P(y is the text's token) is proportional to min(w p, q), P(it is another) to (q - w p)+ R / (R + 1 - w).
    overlap, rest = torch.minimum(wp_y, q_y), (wp - q).clamp_min(0.0).sum(-1)
    missed = block_chance(rest, weight) * _entries((q - wp).clamp_min(0.0), token)
    accept_chance = ratio(overlap, overlap + missed) * on_text
    # Sum of min(w p, q) / w.
    next_chance = torch.minimum(p, q / weight.clamp_min(torch.finfo(q.dtype).tiny)[:, None]).sum(-1).clamp_max(1.0)
    accepted = torch.where(hit, 0, -1)
    return Candidates(token[:, None], accepted, accept_chance[:, None], next_chance * on_text, ratio(wp_y, q_y))


def block_states(step: Array, depth: int, anchors: int) -> tuple[Array, Array, Array, Array]:
    """Return the states of block verification on a text: the weights that rounds from any anchor bring to each place.

    A round of weight w at a place has weight min(1, w p / q) at the next one, p and q of the text's token (block
    verification, arXiv 2403.10444). Rounds with weight 1 at the same place continue alike, so there are few states.

    Args:
        step: [P] p / q of the text's token at each place.
        depth: K; a round that begins at place a visits the places a .. a + K - 1, with weight 1 at the first.
        anchors: number of places at which rounds begin, the first ones.

    Returns:
        [P] the state of weight 1 at each place; [U] place of each state, [U] the state that follows it on the text, [U] its
        weight.
    """
    places = len(step)
    weight = np.ones((places, depth))  # by place and tokens of the round before it
    for at in range(1, places):
        weight[at, 1:] = np.minimum(1.0, weight[at - 1, :-1] * step[at - 1])
    begin = np.arange(places)[:, None] - np.arange(depth)  # [P, K] the place where the round began
    place, before = np.nonzero((begin >= 0) & (begin < anchors))
    # Equal bit for bit: weights that were cut to 1 at the same place are multiplied by the same steps from there on.
    pairs = np.stack([place, weight[place, before]], 1)
    distinct, index = np.unique(pairs, axis=0, return_inverse=True)
    state = np.zeros((places, depth), dtype=np.int64)
    state[place, before] = index.ravel()
    after = np.arange(len(distinct))  # the states of rounds that end are followed by themselves
    goes_on = (before + 1 < depth) & (place + 1 < places)
    place, before = place[goes_on], before[goes_on]
    after[state[place, before]] = state[place + 1, before + 1]
    return state[:, 0], distinct[:, 0].astype(np.int64), after, distinct[:, 1]


def _positive(values: Tensor, otherwise: Tensor) -> Tensor:
    """Return max(values, 0) [R, V]; rows that would be 0 everywhere, which are never drawn from, come from `otherwise`."""
    values = values.clamp_min(0.0)
    return torch.where(values.sum(-1, keepdim=True) > 0.0, values, otherwise)


def _entries(rows: Tensor, token: Tensor) -> Tensor:
    """Return [R], the entries of rows [R, V] at tokens [R]; negative tokens count as 0."""
    return rows.gather(-1, token.clamp_min(0)[:, None])[:, 0]
