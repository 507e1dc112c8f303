"""Candidates from a layer that was trained with CTC (CTC-drafter, arXiv 2412.00061).

The layer predicts positions after the anchor, each from the best symbol of the one before. A position is a distribution over
tokens and a blank; equal adjacent symbols are one token, and blanks are removed. The released code collapses the paths of a
fixed tree of symbols (`ReleasedCTCDrafter`). `CTCDrafter` scores a token after a path by the probability that the positions
begin with both, over all alignments, so that no candidate occurs twice and the scores after a path are a distribution. A
position is predicted when the best symbols before it collapse to fewer tokens than the depth requires.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..models.attention import Part
from ..models.device import upload
from ..models.pair import Pair
from ..round_state import RoundState, Rows
from ..topology import parse_tree
from .base import Proposal
from .layer import LayerReader
from .networks import CTCNetwork

MAX_PROPOSED = 32
"""Maximum number of tokens proposed after a path."""


@dataclass
class Prefixes:
    """Probabilities that T positions begin with a prefix, by the forward algorithm; R prefixes of one length.

    Attributes:
        blank, token: [R, T + 1] the probability that the first t positions collapse to the prefix, ending in a blank or not.
        last: [R] its last token, -1 of the empty prefix.
    """

    blank: Tensor
    token: Tensor
    last: Tensor

    @staticmethod
    def empty(positions: Tensor) -> Prefixes:
        """Return R empty prefixes; `positions` is [R, T, V + 1], the probabilities of the symbols."""
        blank = torch.cat([torch.ones_like(positions[:, :1, -1]), positions[..., -1].cumprod(1)], 1)
        last = torch.full((len(positions),), -1, dtype=torch.int64, device=positions.device)
        return Prefixes(blank, torch.zeros_like(blank), last)

    def next(self, positions: Tensor) -> Tensor:
        """Return [R, V], the probability that the positions begin with the prefix and one more token."""
        # P(prefix, v, ...) = sum over t of (blank_t + token_t) y_(t+1)(v): v is first emitted at t + 1, whatever comes after
        # it (prefix search decoding, Graves et al., 2006).
        before = (self.blank + self.token)[:, :-1]
        scores: Tensor = (before[:, None] @ positions[..., :-1])[:, 0]
        last = self.last.clamp_min(0)
        repeated = (self.blank[:, :-1] * _emitted(positions, last)).sum(-1, keepdim=True)  # needs a blank between
        return torch.where((self.last >= 0)[:, None], scores.scatter(1, last[:, None], repeated), scores)

    def extended(self, tokens: Tensor, positions: Tensor) -> Prefixes:
        """Return the prefixes with one more token [R] each."""
        emitted = _emitted(positions, tokens)
        enters = self.blank + self.token * (self.last != tokens)[:, None]
        blank, token = [torch.zeros_like(self.blank[:, 0])], [torch.zeros_like(self.blank[:, 0])]
        # token_(t+1) = y_(t+1)(v) (token_t + enters_t); blank_(t+1) = y_(t+1)(blank) (blank_t + token_t), of the new prefix.
        for t in range(positions.shape[1]):
            token.append(emitted[:, t] * (token[t] + enters[:, t]))
            blank.append(positions[:, t, -1] * (blank[t] + token[t]))
        return Prefixes(torch.stack(blank, 1), torch.stack(token, 1), tokens)


def _emitted(positions: Tensor, tokens: Tensor) -> Tensor:
    """Return [R, T], the probability of a token [R] at each position."""
    return positions.gather(2, tokens[:, None, None].expand(-1, positions.shape[1], 1))[..., 0]


def collapsed_length(symbols: Sequence[int], blank: int) -> int:
    """Return the number of tokens that symbols collapse to."""
    return sum(symbol != blank for symbol, _ in groupby(symbols))


def first_positions(positions: Tensor, counts: Tensor) -> Tensor:
    """Return [R, T, V + 1] with certain blanks after the first `counts` [R] positions: they do not change a prefix."""
    is_after = torch.arange(positions.shape[1], device=positions.device) >= counts[:, None]
    out = positions.masked_fill(is_after[..., None], 0.0)
    out[..., -1].masked_fill_(is_after, 1.0)
    return out


class _Position(NamedTuple):
    """A position that the layer has predicted."""

    probs: Tensor  # [V + 1] float64, of the symbols
    best: int  # the most likely symbol
    state: Tensor  # [1, H], of the layer


class CTCDrafter(LayerReader):
    """Scores candidates by the forward algorithm over the positions of a CTC layer. It has no states for policies.

    Args:
        pair: target that the network was trained for.
        network: on the target's device; its depth is the maximum number of positions, and so of tokens.
    """

    _network: CTCNetwork

    def __init__(self, pair: Pair, network: CTCNetwork) -> None:
        self._blank, self._depth = network.shape.vocabulary, network.shape.depth
        self.max_depth = self._depth
        self._positions: dict[int, list[_Position]] = {}  # by stream
        super().__init__(pair, network)

    def propose(self, round: RoundState, depth: int, rows: Rows) -> Proposal:
        """See `Drafter`."""
        if depth == 0:
            self._start(round, rows)
        while short := [stream for stream, _ in rows if self._needs_position(stream, depth)]:
            self._add_position(short)
        probs = {stream: self._probs(stream) for stream, _ in rows}
        parts = [probs[stream] for stream, stream_rows in rows for _ in stream_rows]
        counts, positions = [len(part) for part in parts], pad_sequence(parts, batch_first=True)
        if min(counts) < max(counts):
            positions = first_positions(positions, upload(counts, self._device))
        prefixes = Prefixes.empty(positions)
        if depth:
            paths = [round.path_tokens(stream, row)[1:] for stream, stream_rows in rows for row in stream_rows]
            for tokens in upload(paths, self._device).T:  # [depth, R]
                prefixes = prefixes.extended(tokens, positions)
        scores = prefixes.next(positions)
        top = scores.topk(min(MAX_PROPOSED, scores.shape[-1]), -1)
        return Proposal(top.values.log().to(self._dtype), top.indices)

    def _probs(self, stream: int) -> Tensor:
        """Return [t, V + 1], the probabilities of the symbols at t positions."""
        return torch.stack([position.probs for position in self._positions[stream]])

    def _needs_position(self, stream: int, depth: int) -> bool:
        best = [position.best for position in self._positions[stream]]
        return len(best) < self._depth and collapsed_length(best, self._blank) <= depth

    def _start(self, round: RoundState, rows: Rows) -> None:
        """Read the anchors, and predict the first position after each."""
        self._positions |= {stream: [] for stream, _ in rows}
        self._append([stream for stream, _ in rows], self._read_anchors(round, rows))

    def _add_position(self, streams: Sequence[int]) -> None:
        """Predict one more position of each stream, from the best symbol of the last one."""
        last = [self._positions[stream][-1] for stream in streams]
        parts = [Part(stream, [position.best]) for stream, position in zip(streams, last, strict=True)]
        self._append(streams, self._run(parts, [position.state for position in last]))

    def _append(self, streams: Sequence[int], states: Tensor) -> None:
        """Add the position of each stream that the layer's states [S, H] predict."""
        logits = self._network.with_blank(self._output(states), states)
        probs = logits.double().softmax(-1)  # double, because a prefix multiplies up to T of them
        best = logits.argmax(-1).tolist()
        for at, stream in enumerate(streams):
            self._positions[stream].append(_Position(probs[at], best[at], states[at, None]))


Trie: TypeAlias = dict[int, "Trie"]
"""Candidates: by token, those after it."""

SYMBOLS = parse_tree("medusa-63")
"""The tree of symbols. A row of depth d and rank r among its siblings is the r-th best symbol of position d."""

_RANKS = {row: rank for children in SYMBOLS.children for rank, row in enumerate(children)}


def collapse_symbols(symbols: Sequence[Sequence[int]], blank: int) -> Trie:
    """Return the candidates that the best symbols of each position collapse to, in descending order."""
    root: Trie = {}
    for path in SYMBOLS.paths[1:]:
        ranks = [_RANKS[row] for row in path[1:]]
        # A small vocabulary has fewer symbols.
        if len(ranks) > len(symbols) or any(rank >= len(best) for rank, best in zip(ranks, symbols, strict=False)):
            continue
        node = root
        for token, _ in groupby(best[rank] for rank, best in zip(ranks, symbols, strict=False)):
            if token != blank:
                node = node.setdefault(token, {})
    return root


def count_candidates(trie: Trie) -> int:
    """Return the number of candidates."""
    return sum(1 + count_candidates(children) for children in trie.values())


class ReleasedCTCDrafter(CTCDrafter):
    """Proposes the collapsed candidates of the released code only. Scores are their order, for greedy matching."""

    def propose(self, round: RoundState, depth: int, rows: Rows) -> Proposal:
        """See `Drafter`."""
        if depth == 0:
            streams = [stream for stream, _ in rows]
            self._start(round, rows)
            for _ in range(min(SYMBOLS.deepest, self._depth) - 1):
                self._add_position(streams)
            probs = torch.stack(list(map(self._probs, streams)))  # [S, T, V + 1]
            best = probs.topk(min(max(map(len, SYMBOLS.children)), self._blank + 1), -1).indices.tolist()
            self._tries = {
                stream: collapse_symbols(symbols, self._blank) for stream, symbols in zip(streams, best, strict=True)
            }
        weights = []
        for stream, stream_rows in rows:
            for row in stream_rows:
                trie = self._tries[stream]
                for token in round.path_tokens(stream, row)[1:]:
                    trie = trie.get(token, {})  # empty after tokens that are not candidates, such as resampled ones
                # Large tries first, as the topology `ctc-released` has room for them; ties in descending order.
                sizes = enumerate(trie.items())
                weights.append({token: 1 + count_candidates(children) - at / 1000 for at, (token, children) in sizes})
        return Proposal.of_weights(weights, self._dtype, self._device)
