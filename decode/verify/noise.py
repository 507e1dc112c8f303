"""Keyed Gumbel noise: a number for each (stream, absolute position, token), the same for draft and target.

Because the noise does not depend on who asks or in which order, the text of a stream under `match` verification is the
same for every policy, tree and drafter, and equal to plain sampling with that key.
"""

from __future__ import annotations

import enum
import hashlib
from typing import Protocol

import torch
from torch import Tensor

from ...policies.counter_rng import GOLDEN, keyed_uniform, mix as mix, mix_in_place, signed

_MASK = (1 << 64) - 1
_BLOCK = 16


def stream_key(seed: int, prompt_id: str, sample: int = 0) -> int:
    """Return the 64-bit key of a stream: a hash of the seed, the prompt's id and the sample index."""
    text = f"{seed}\0{prompt_id}\0{sample}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)


def uniform(key: int | Tensor, position: Tensor, vocabulary: int) -> Tensor:
    """Return [R, V] float64 uniforms with 53 bits in (0, 1) for each absolute position and token.

    Args:
        key: the stream's key, or one per row [R, 1].
        position: [R] int64.
        vocabulary: V.
    """
    if position.device.type != "cpu":
        return uniform_on_device(key, position, vocabulary)
    keys = torch.full_like(position, key) if isinstance(key, int) else key.reshape(-1).contiguous()
    return torch.from_numpy(keyed_uniform(keys.numpy(), position.contiguous().numpy(), vocabulary))


def uniform_on_device(key: int | Tensor, position: Tensor, vocabulary: int) -> Tensor:
    """`uniform` as tensor operations: the same bits, and on the host at 6 to 18 times the time of one pass over memory."""
    # Counted from 1, as 0 stays 0 when it is mixed.
    row = mix(mix(position[:, None] * signed(GOLDEN) + 1) ^ key)  # [R, 1]
    tokens = torch.arange(1, vocabulary + 1, device=row.device) * signed(GOLDEN)
    return _unit(mix_in_place(row + tokens))


def _unit(bits: Tensor) -> Tensor:
    """Return float64 uniforms in (0, 1) of 53 bits from scrambled int64 values, whose memory is used up."""
    bits = bits.bitwise_right_shift_(11).bitwise_and_((1 << 53) - 1)  # a signed shift fills up with the sign
    return bits.double().mul_(2.0**-53).clamp_min_(2.0**-54)  # 0 has no logarithm


def choice_uniforms(key: int, position: Tensor, choice: Tensor) -> Tensor:
    """Return [R] float64 uniforms with 53 bits in (0, 1), one for each choice [R] at an absolute position [R], all int64."""
    # The numbers that `uniform` has for this key: choices beside noise take a key of their own (`given_text.draw_key`).
    row = mix(mix(position * signed(GOLDEN) + 1) ^ key)
    return _unit(mix_in_place(row + (choice + 1) * signed(GOLDEN)))


def gumbel(key: int | Tensor, position: Tensor, vocabulary: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return [R, V] standard Gumbel noise; computed in float64, then cast. Arguments as in `uniform`."""
    return uniform(key, position, vocabulary).log_().neg_().log_().neg_().to(dtype)


_GIVEN = 0x6B1E55ED
"""Sets the uniforms of noise given a text apart from those that this text may have been drawn with."""


def gumbel_given(key: int, position: Tensor, logits: Tensor, token: Tensor) -> Tensor:
    """Return [R, V] float64 Gumbel noise, drawn given that `token` is the best of log p + noise at each position.

    Of a token that was drawn from p, token and noise have together the law of plain sampling: the best score M is Gumbel with
    location logsumexp(log p), and the others are Gumbel, cut off at M (Maddison, Tarlow, Minka 2014, top-down construction).

    Args:
        key: of the stream; a text sampled with the same key is no less independent of what is drawn here.
        position: [R] int64, absolute.
        logits: [R, V] processed: log p up to a constant by row; -inf for what cannot be drawn.
        token: [R], each of a probability above 0.
    """
    log_p = logits.double()
    log_u = uniform(key ^ _GIVEN, position, logits.shape[-1]).log_()
    own = token[:, None]
    best = torch.logsumexp(log_p, -1, keepdim=True) - log_u.gather(-1, own).neg().log()
    # Cut off at M, the score of token i is -log(e^-M - log(u_i) / p_i), its noise that less log p_i.
    return (log_p - best).exp().sub_(log_u).log_().neg_().scatter_(-1, own, best - log_p.gather(-1, own))


def mix_one(value: int) -> int:
    """Return `mix` of one 64-bit pattern, as a Python number: a tensor operation would cost more than the choice."""
    value &= _MASK
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


class Purpose(enum.IntEnum):
    """What a fresh number is for; with (stream, round, node) it makes the number's key, so none is drawn twice."""

    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


def fresh_uniform(key: int, round: int, node: int, purpose: Purpose) -> float:
    """Return the uniform in (0, 1) of a choice, 53 bits.

    Args:
        key: of the stream.
        round: 0 while the prompt is read, then from 1.
        node: which candidate of the round, from 0.
        purpose: see `Purpose`.
    """
    row = mix_one(key ^ mix_one(round * GOLDEN + 1))
    bits = mix_one(mix_one(row + (node + 1) * GOLDEN) + int(purpose) * GOLDEN)
    return max((bits >> 11) * 2.0**-53, 2.0**-54)


class Source(Protocol):
    """Where the loop takes every random number from; tests put an enumerator here."""

    def gumbel(self, position: int, count: int) -> Tensor:
        """Return [count, V] noise for the tokens at absolute positions `position`, `position` + 1, ..."""

    def categorical(self, probs: Tensor, round: int, node: int, purpose: Purpose) -> int:
        """Return a token drawn from `probs` [V] float64, which need not sum to 1; never one of probability 0."""

    def bernoulli(self, prob: float, round: int, node: int, purpose: Purpose) -> bool:
        """Return True with probability `prob`."""


class KeyedSource:
    """The noise of one stream, computed in blocks of positions and kept as long as a round may ask again."""

    def __init__(
        self, key: int, vocabulary: int, window: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        self._key, self._vocabulary, self._dtype, self._device = key, vocabulary, dtype, device
        # Larger than the window, so that a block computed ahead never covers what the round may ask for again.
        self._size = window + 2 * _BLOCK
        self._ring: Tensor | None = None  # not every mode asks for noise
        self._low = self._high = 0

    def categorical(self, probs: Tensor, round: int, node: int, purpose: Purpose) -> int:
        """Return a token; see `Source`. By inversion: the first whose cumulated mass exceeds the uniform's share."""
        mass = probs.cumsum(-1)
        share = fresh_uniform(self._key, round, node, purpose) * mass[-1]
        token = int(torch.searchsorted(mass, share, right=True))
        return token if token < len(probs) else int(probs.nonzero()[-1])  # rounded up, the share is all of the mass

    def bernoulli(self, prob: float, round: int, node: int, purpose: Purpose) -> bool:
        """Return True with probability `prob`; see `Source`."""
        return fresh_uniform(self._key, round, node, purpose) < prob

    def gumbel(self, position: int, count: int) -> Tensor:
        """Return [count, V]; see `Source`. Positions may go back by at most the window given."""
        if self._ring is None:
            self._ring = torch.empty(self._size, self._vocabulary, dtype=self._dtype, device=self._device)
        # Not kept any more, or with a gap between: begin anew from there.
        if position < self._low or position > self._high:
            self._low = self._high = position
        if position + count > self._high:
            new = max(_BLOCK, position + count - self._high)
            at = torch.arange(self._high, self._high + new, device=self._device)
            self._ring[at % self._size] = gumbel(self._key, at, self._vocabulary, self._dtype)
            self._high += new
            self._low = max(self._low, self._high - self._size)
        first = position % self._size
        if first + count <= self._size:
            return self._ring[first : first + count]
        return self._ring[torch.arange(position, position + count, device=self._device) % self._size]


class Choices:
    """The random choices of one round of one stream.

    Args:
        source: of the stream.
        round: 0 while the prompt is read, then from 1.
        position: of the roots in the text.
        greedy: temperature 0; nothing is drawn.
    """

    def __init__(self, source: Source, round: int, position: int, greedy: bool) -> None:
        self.source, self.round, self.position, self.greedy = source, round, position, greedy

    def noise(self, depth: int, count: int) -> Tensor:
        """Return [count, V] keyed noise for the tokens at `depth`, `depth` + 1, ..., roots being at depth 0."""
        return self.source.gumbel(self.position + depth, count)

    def draw(self, probs: Tensor, node: int, purpose: Purpose) -> int:
        """Return a token drawn from `probs` [V]."""
        return self.source.categorical(probs, self.round, node, purpose)

    def accept(self, prob: float, node: int) -> bool:
        """Return True with probability `prob`."""
        return self.source.bernoulli(prob, self.round, node, Purpose.ACCEPT)


def match_scores(sampled: Tensor, noise: Tensor | None) -> Tensor:
    """Return [R, V], what drafts take the best of and policies read: log q + g; at T = 0, without noise, processed logits."""
    # Normalised because policies read the scores; which one is best does not depend on it.
    return sampled if noise is None else torch.log_softmax(sampled, -1) + noise


def own_tokens(sampled: Tensor, noise: Tensor | None) -> Tensor:
    """Return [R] int64, the target's own tokens: where log p + g is largest, for which log p need not be normalised."""
    return best_of_rows(sampled if noise is None else sampled + noise)


def best_of_rows(scores: Tensor) -> Tensor:
    """Return [R] int64, the token of the largest score of each row [R, V], the first one of several.

    On the host numpy compares many scores at once where torch compares one by one: five rows of 32,000 take 9 us, not 200.
    """
    if not scores.is_cpu or scores.dtype not in (torch.float32, torch.float64):
        return scores.argmax(-1)
    return torch.from_numpy(scores.numpy().argmax(-1))


def best_scores(scores: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the largest scores of each row [R, V] in falling order, their tokens, [R, count] each, and [R] where some tie.

    Tokens whose scores tie come in no order: see `in_order`.
    """
    found = scores.topk(min(count + 1, scores.shape[-1]), -1)  # one more tells whether the last one is alone
    tied = (found.values[:, 1:] == found.values[:, :-1]) & (found.values[:, 1:] > -torch.inf)
    return found.values[:, :count], found.indices[:, :count], tied.any(-1)


def in_order(scores: Tensor, count: int) -> Tensor:
    """Return the tokens [R, count] of the largest scores, of equal ones the first as `best_of_rows` does.

    A tree's candidates are those of a larger tree that holds it, and a chain's among them, only if all go by one order.
    """
    return scores.sort(stable=True, dim=-1, descending=True).indices[:, :count]
