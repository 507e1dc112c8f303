"""Keyed random numbers: each depends only on its stream, its position in the text and the token or choice it is for.

Draft and target use the same Gumbel noise. The text of a stream under `match` verification is therefore the same for every
policy, tree and drafter, and equal to plain sampling with the same key.
"""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from ...policies.counter_rng import GOLDEN, keyed_uniform, mix, mix_in_place, signed

_MASK = (1 << 64) - 1
_BLOCK = 16


def stream_key(seed: int, prompt_id: str, sample: int = 0) -> int:
    """Return the 64-bit key of a stream: a hash of the seed, the prompt id and the sample index."""
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
        return uniform_at(key, position[:, None], torch.arange(vocabulary, device=position.device))
    # On the CPU, tensor operations take 6 to 18 times as long as the compiled kernel.
    keys = torch.full_like(position, key) if isinstance(key, int) else key.reshape(-1).contiguous()
    return torch.from_numpy(keyed_uniform(keys.numpy(), position.contiguous().numpy(), vocabulary))


def uniform_at(key: int | Tensor, position: Tensor, index: Tensor) -> Tensor:
    """Return the float64 uniforms that `uniform` has at (position, index), int64 tensors that broadcast."""
    row = mix(mix(position * signed(GOLDEN) + 1) ^ key)  # + 1, because `mix` maps 0 to 0
    bits = mix_in_place(row + (index + 1) * signed(GOLDEN))
    bits = bits.bitwise_right_shift_(11).bitwise_and_((1 << 53) - 1)  # a signed shift copies the sign bit
    uniforms: Tensor = bits.double().mul_(2.0**-53).clamp_min_(2.0**-54)  # 0 has no logarithm
    return uniforms


def gumbel(key: int | Tensor, position: Tensor, vocabulary: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return [R, V] standard Gumbel noise, computed in float64. Arguments as for `uniform`."""
    return uniform(key, position, vocabulary).log_().neg_().log_().neg_().to(dtype)


def mix_one(value: int) -> int:
    """Return `mix` of one 64-bit Python integer; a tensor operation takes longer than the rest of a choice."""
    value &= _MASK
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


class Purpose(enum.IntEnum):
    """Purpose of a random choice, part of its key, so that no number is used twice."""

    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


def fresh_uniform(key: int, round: int, node: int, purpose: Purpose) -> float:
    """Return the uniform in (0, 1) of a choice, with 53 bits.

    Args:
        key: of the stream.
        round: 0 for the prompt, then from 1.
        node: number of the candidate in the round, from 0.
        purpose: see `Purpose`.
    """
    row = mix_one(key ^ mix_one(round * GOLDEN + 1))
    bits = mix_one(mix_one(row + (node + 1) * GOLDEN) + int(purpose) * GOLDEN)
    return max((bits >> 11) * 2.0**-53, 2.0**-54)


class KeyedSource:
    """All random numbers of one stream.

    Args:
        key: of the stream.
        vocabulary: V.
        window: number of positions by which calls of `gumbel` may go back.
        dtype, device: of the noise.
    """

    def __init__(
        self, key: int, vocabulary: int, window: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        self._key, self._window = key, window
        self._noise = torch.empty(0, vocabulary, dtype=dtype, device=device)  # of positions from `_first` on
        self._first = 0

    def gumbel(self, position: int, count: int) -> Tensor:
        """Return [count, V] noise for the tokens at absolute positions `position`, `position` + 1, ..."""
        if not self._first <= position <= self._first + len(self._noise):
            self._first, self._noise = position, self._noise[:0]
        end = self._first + len(self._noise)
        if position + count > end:
            # Several positions at once: a call for one row takes almost as long.
            positions = torch.arange(end, max(end + _BLOCK, position + count), device=self._noise.device)
            new = gumbel(self._key, positions, self._noise.shape[-1], self._noise.dtype)
            keep = max(self._first, position - self._window)
            self._noise = torch.cat([self._noise[keep - self._first :], new])
            self._first = keep
        return self._noise[position - self._first : position - self._first + count]

    def uniform(self, round: int, node: int, purpose: Purpose) -> float:
        """Return the uniform number in (0, 1) of a choice."""
        return fresh_uniform(self._key, round, node, purpose)

    def categorical(self, probs: Tensor, round: int, node: int, purpose: Purpose) -> int:
        """Return a token drawn from `probs` [V] float64, which need not sum to 1, by inversion of the cumulative sum."""
        mass = probs.cumsum(-1)
        share = fresh_uniform(self._key, round, node, purpose) * mass[-1]
        token = int(torch.searchsorted(mass, share, right=True))
        return token if token < len(probs) else int(probs.nonzero()[-1])  # the share may be rounded up to the total

    def bernoulli(self, prob: float, round: int, node: int, purpose: Purpose) -> bool:
        """Return True with probability `prob`."""
        return fresh_uniform(self._key, round, node, purpose) < prob


@dataclass(slots=True)
class Choices:
    """The random choices of one stream in one round.

    Attributes:
        source: of the stream.
        round: 0 for the prompt, then from 1.
        position: of the anchor in the text.
        greedy: temperature 0, nothing is drawn.
    """

    source: KeyedSource
    round: int
    position: int
    greedy: bool

    def noise(self, depth: int, count: int) -> Tensor:
        """Return [count, V] Gumbel noise for the tokens at `depth`, `depth` + 1, ...; the anchor has depth 0."""
        return self.source.gumbel(self.position + depth, count)

    def draw(self, probs: Tensor, node: int, purpose: Purpose) -> int:
        """Return a token drawn from `probs` [V]."""
        return self.source.categorical(probs, self.round, node, purpose)

    def uniform(self, node: int, purpose: Purpose) -> float:
        """Return the uniform number in (0, 1) that `draw` and `accept` compare with."""
        return self.source.uniform(self.round, node, purpose)

    def accept(self, prob: float, node: int) -> bool:
        """Return True with probability `prob`."""
        return self.source.bernoulli(prob, self.round, node, Purpose.ACCEPT)


def token_at(probs: Tensor, uniform: float | Tensor) -> Tensor:
    """Return [1] int64, the token that `KeyedSource.categorical` draws with a uniform number, without a wait."""
    mass = probs.cumsum(-1)
    total = mass[-1:]
    last = torch.searchsorted(
        mass, total
    )  # the last token of positive probability: a share may be rounded up to the total
    return torch.minimum(torch.searchsorted(mass, uniform * total, right=True), last).clamp_max(len(probs) - 1)


def match_scores(sampled: Tensor, noise: Tensor | None) -> Tensor:
    """Return [R, V] log q + noise, or the processed logits at temperature 0. Policies read these scores."""
    # Normalised, because policies compare the scores of different rows.
    return sampled if noise is None else torch.log_softmax(sampled, -1) + noise


def best_of_rows(scores: Tensor) -> Tensor:
    """Return [R] int64, the token with the largest score of each row [R, V], the first one of equal scores."""
    # numpy: for 5 rows of 32,000 scores it takes 9 us on the CPU, torch 200 us.
    if not scores.is_cpu or scores.dtype not in (torch.float32, torch.float64):
        return scores.argmax(-1)
    return torch.from_numpy(scores.numpy().argmax(-1))


def target_tokens(sampled: Tensor, noise: Tensor | None) -> Tensor:
    """Return [R] int64, the tokens that the target draws: argmax of log p + noise, for which p need not be normalised."""
    return best_of_rows(sampled if noise is None else sampled + noise)


def best_scores(scores: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the largest scores of each row [R, V], descending, and their tokens, both [R, count], and [R] whether any tie.

    The tokens of rows with ties are in no particular order; `stable_topk` sorts them.
    """
    values, tokens = scores.topk(min(count + 1, scores.shape[-1]), -1)  # one more, which may tie with the last
    tied = (values[:, 1:] == values[:, :-1]) & (values[:, 1:] > -torch.inf)
    return values[:, :count], tokens[:, :count], tied.any(-1)


def stable_topk(scores: Tensor, count: int) -> Tensor:
    """Return [R, count] tokens with the largest scores, descending. Of equal scores the first token comes first.

    With this order the candidates of a tree include those of any smaller tree.
    """
    return scores.sort(stable=True, dim=-1, descending=True).indices[:, :count]
