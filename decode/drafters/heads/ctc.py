"""Candidates from a layer that was trained with CTC: what its output positions say of the sequences that they may mean.

The layer draws positions after the root, each fed with the best symbol of the one before (CTC-drafter, arXiv 2412.00061). A
position says a token or a blank; equal tokens side by side are one, blanks fall away. The released code draws all positions,
collapses the paths of a fixed tree so, and masks what is left out. Here candidates are asked for by what they are a prefix
of: the chance of a prefix, over all alignments, is the forward algorithm's. So no candidate stands there twice, each has its
own position, and the scores of the tokens after a path are a distribution. And a position is drawn when a depth is asked for
that those before it, collapsed, do not reach, so that a short draft takes few steps of the layer. A token that follows itself
off the likeliest path is then no candidate mostly, as it takes a blank between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from ...models.cuda.transfer import upload
from ...models.pair import Pair
from ...round_state import RoundState, Rows
from ..base import Proposal
from .layer import LayerReader
from .layer_cache import Row
from .layer_network import CTCNetwork

KEPT = 32
"""Tokens that are proposed after a path at most, the likeliest ones."""


class Prefixes:
    """The chances that T positions begin with a prefix, by the forward algorithm; for R places, all of one depth.

    Attributes:
        blank, token: [R, T + 1] the chance that the first t positions say exactly the prefix, ending in a blank or not.
        last: [R] its last token, -1 of the empty prefix.
    """

    def __init__(self, blank: Tensor, token: Tensor, last: Tensor) -> None:
        self.blank, self.token, self.last = blank, token, last

    @staticmethod
    def empty(positions: Tensor) -> Prefixes:
        """Return the empty prefix of each place; `positions` is [R, T, V + 1], the chances of the symbols."""
        # Nothing but blanks; column 0 stands before the first position.
        silent = torch.cat([torch.ones_like(positions[:, :1, -1]), positions[..., -1].cumprod(1)], 1)
        last = torch.full((len(positions),), -1, dtype=torch.int64, device=positions.device)
        return Prefixes(silent, torch.zeros_like(silent), last)

    def next(self, positions: Tensor) -> Tensor:
        """Return [R, V], the chance that the positions begin with the prefix and one token more."""
        # P(prefix, v, ...) = sum over t of (blank_t + token_t) y_(t+1)(v), y the chances of a position: v is said first at
        # t + 1, whatever comes after it (prefix search decoding, Graves et al., 2006).
        before = (self.blank + self.token)[:, :-1]
        chances: Tensor = (before[:, None] @ positions[..., :-1])[:, 0]
        known = self.last >= 0
        again = positions.gather(2, self.last.clamp_min(0)[:, None, None].expand(-1, positions.shape[1], 1))[..., 0]
        twice = (self.blank[:, :-1] * again).sum(-1, keepdim=True)  # a token again takes a blank between
        return torch.where(known[:, None], chances.scatter(1, self.last.clamp_min(0)[:, None], twice), chances)

    def extended(self, tokens: Tensor, positions: Tensor) -> Prefixes:
        """Return the prefixes with a token [R] more each; `positions` [R, T, V + 1] are theirs."""
        said = positions.gather(2, tokens[:, None, None].expand(-1, positions.shape[1], 1))[..., 0]
        # After an equal token it enters from a blank alone, else both would collapse into one.
        enters = self.blank + self.token * (self.last != tokens)[:, None]
        none = torch.zeros_like(self.blank[:, 0])
        new_blank, new_token = [none], [none]
        # token_(t+1) = y_(t+1)(v) (token_t + enters_t); blank_(t+1) = y_(t+1)(blank) (blank_t + token_t), of the new prefix.
        for t in range(positions.shape[1]):
            new_token.append(said[:, t] * (new_token[t] + enters[:, t]))
            new_blank.append(positions[:, t, -1] * (new_blank[t] + new_token[t]))
        return Prefixes(torch.stack(new_blank, 1), torch.stack(new_token, 1), tokens)


def tokens_said(symbols: Sequence[int], blank: int) -> int:
    """Return how many tokens symbols say, collapsed."""
    return sum(symbol != blank for symbol, _ in groupby(symbols))


def first_positions(symbols: Tensor, drawn: Tensor) -> Tensor:
    """Return [R, T, V + 1] with blanks for certain after the first `drawn` [R] positions: they add nothing to a prefix."""
    after = torch.arange(symbols.shape[1], device=symbols.device) >= drawn[:, None]
    out = symbols.masked_fill(after[..., None], 0.0)
    out[..., -1].masked_fill_(after, 1.0)
    return out


@dataclass(slots=True)
class _Said:
    """What the positions after a stream's roots say so far.

    Attributes:
        rows: by root, the last one that the layer has read.
        state: [n, H] of the layer there.
        symbols: [n, t, V + 1] the chances of the symbols at t positions.
        best: [n, t] the likeliest of them.
    """

    rows: list[Row]
    state: Tensor
    symbols: Tensor
    best: Tensor


class CTCDrafter(LayerReader):
    """A position for each depth, and more where blanks or repetitions are likely; see above.

    A path has no hidden state of its own, so there is none for policies to read.

    Args:
        pair: whose target it is.
        network: on the target's device.

    Attributes:
        most: T, its `depth`: the most positions, and the most tokens.
    """

    def __init__(self, pair: Pair, network: CTCNetwork) -> None:
        self._ctc, self.most = network, network.shape.depth
        self.beyond = self.most  # of one root; `_begin` has room made for those of several
        self._wide = pair.logits_dtype
        self._said: dict[int, _Said] = {}  # by stream, of this round
        super().__init__(pair, network)

    def propose(self, round: RoundState, depth: int, rows: Rows) -> Proposal:
        """See `Drafter`."""
        most, streams = self.most, [stream for stream, _ in rows]
        if depth == 0:
            self._begin(round, rows)
        while short := [stream for stream in streams if self._drawn(stream) < most and self._reach(stream) <= depth]:
            self._go_on(short)
        positions = self._symbols([stream for stream, own in rows for _ in own])
        prefixes = Prefixes.empty(positions)
        after = [round.path_tokens(stream, row)[1:] for stream, own in rows for row in own]  # [R, depth]
        for tokens in upload(after, self._device).T if depth else ():
            prefixes = prefixes.extended(tokens, positions)
        chances = prefixes.next(positions)
        top = chances.topk(min(KEPT, chances.shape[-1]), -1)
        return Proposal(top.values.log().to(self._wide), top.indices)

    def _drawn(self, stream: int) -> int:
        return self._said[stream].symbols.shape[1]

    def _reach(self, stream: int) -> int:
        """Return how many tokens the likeliest symbols after each root say at least."""
        return min(tokens_said(best, self._ctc.shape.vocabulary) for best in self._said[stream].best.tolist())

    def _symbols(self, streams: Sequence[int]) -> Tensor:
        """Return [R, t, V + 1], what the positions after the anchors of streams [R] say."""
        own = [self._said[stream].symbols[0] for stream in streams]
        drawn = [len(rows) for rows in own]
        symbols = torch.nn.utils.rnn.pad_sequence(own, batch_first=True)
        return symbols if len({*drawn}) == 1 else first_positions(symbols, upload(drawn, self._device))

    def _begin(self, round: RoundState, rows: Rows) -> None:
        """Read the anchors, and draw the first position after each."""
        last, roots = self._read_places(round, 0, rows)
        streams = [stream for stream, _ in rows]
        # A root and the positions after it each have a slot.
        self._cache.grow(max(self._length[s] + self.most * len(own) for s, own in zip(streams, roots, strict=True)))
        for stream, state, own in zip(streams, last, roots, strict=True):
            none = state.new_zeros(len(own), 0, self._ctc.shape.vocabulary + 1, dtype=torch.float64)
            self._said[stream] = _Said(own, state, none, none[..., 0].long())
        self._hear(streams, last)

    def _go_on(self, streams: Sequence[int]) -> None:
        """Draw one more position after each root of the streams, fed with the likeliest symbol of the last one."""
        said = [self._said[stream] for stream in streams]
        for stream, own in zip(streams, said, strict=True):
            own.rows = [self._next_row(stream, row) for row in own.rows]
        most = max(len(own.rows) for own in said)
        # Streams with fewer roots than others are filled up with their last one, which is cut off again.
        at = [torch.arange(most, device=self._device).clamp_max(len(own.rows) - 1) for own in said]
        state = torch.stack([own.state[rows] for own, rows in zip(said, at, strict=True)])
        symbols = torch.stack([own.best[rows, -1] for own, rows in zip(said, at, strict=True)])
        out = self._run(self._ctc.embed(symbols, self._embedding), state, [own.rows for own in said], streams)
        self._hear(streams, [rows[: len(own.rows)] for rows, own in zip(out, said, strict=True)])

    def _hear(self, streams: Sequence[int], states: Sequence[Tensor]) -> None:
        """Take in what the layer's states [n, H] of each stream say."""
        every = torch.cat(list(states))
        logits = self._ctc.with_blank(self._output(every), every)
        # Double: a prefix multiplies up to T of them.
        chances, best, first = logits.double().softmax(-1), logits.argmax(-1), 0
        for stream, state in zip(streams, states, strict=True):
            own, end = self._said[stream], first + len(state)
            own.state = state
            own.symbols = torch.cat([own.symbols, chances[first:end, None]], 1)
            own.best = torch.cat([own.best, best[first:end, None]], 1)
            first = end

    def _next_row(self, stream: int, row: Row) -> Row:
        """Return a row one position further, in a slot of its own."""
        fed = self._slot[stream]
        slot = self._length[stream] + len(fed)
        # Under a number below 0, which no place has: it only counts the slots that are taken.
        fed[-1 - len(fed)] = slot
        # Its token and state are never looked at: `_run` is told embeddings and states.
        return Row(0, row.state, slot, row.position + 1, row.sees, (*row.beside, slot))
