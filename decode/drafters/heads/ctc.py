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
from typing import TypeAlias

import torch
from torch import Tensor

from ...candidates import Candidates
from ...models.cuda.transfer import upload
from ...models.pair import Pair
from ...topology import parse_tree
from ..base import Proposal
from .layer import LayerReader, Row
from .networks import CTCNetwork

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
        root: by place of a root its number.
        rows: by root, the last one that the layer has read.
        state: [n, H] of the layer there.
        symbols: [n, t, V + 1] the chances of the symbols at t positions.
        best: [n, t] the likeliest of them.
    """

    root: dict[int, int]
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

    def propose(
        self, streams: Sequence[int], found: Sequence[Candidates], feeding: Sequence[Sequence[int]]
    ) -> Proposal:
        """See `Drafter`."""
        depth, most = found[0].depth[feeding[0][0]], self.most
        if depth == 0:
            self._begin(streams, found, feeding)
        while short := [stream for stream in streams if self._drawn(stream) < most and self._reach(stream) <= depth]:
            self._go_on(short)
        paths = [here.path(place) for here, places in zip(found, feeding, strict=True) for place in places]
        owners = [stream for stream, places in zip(streams, feeding, strict=True) for _ in places]
        positions = self._symbols(owners, paths)
        prefixes = Prefixes.empty(positions)
        after = [
            here.tokens_to(place)[1:] for here, places in zip(found, feeding, strict=True) for place in places
        ]  # [R, depth]
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

    def _symbols(self, streams: Sequence[int], paths: Sequence[Sequence[int]]) -> Tensor:
        """Return [R, t, V + 1], what the positions after the roots of R paths say."""
        own = [
            self._said[stream].symbols[self._said[stream].root[path[0]]]
            for stream, path in zip(streams, paths, strict=True)
        ]
        drawn = [len(rows) for rows in own]
        symbols = torch.nn.utils.rnn.pad_sequence(own, batch_first=True)
        return symbols if len({*drawn}) == 1 else first_positions(symbols, upload(drawn, self._device))

    def _begin(self, streams: Sequence[int], found: Sequence[Candidates], feeding: Sequence[Sequence[int]]) -> None:
        """Read the roots, and draw the first position after each."""
        last, roots = self._read_places(streams, found, feeding)
        # A root and the positions after it each have a slot.
        self._cache.grow(max(self._length[s] + self.most * len(own) for s, own in zip(streams, roots, strict=True)))
        for stream, state, rows, places in zip(streams, last, roots, feeding, strict=True):
            none = state.new_zeros(len(rows), 0, self._ctc.shape.vocabulary + 1, dtype=torch.float64)
            root = {place: at for at, place in enumerate(places)}
            self._said[stream] = _Said(root, rows, state, none, none[..., 0].long())
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


Trie: TypeAlias = dict[int, "Trie"]
"""By token, what may follow it."""

SYMBOLS = parse_tree("medusa-63")
"""The tree of symbols. A node of depth d and rank r among its siblings is the r-th likeliest symbol of position d."""

WIDEST = max(map(len, SYMBOLS.children))


def collapsed(symbols: Sequence[Sequence[int]], blank: int) -> Trie:
    """Return the candidates that the likeliest symbols of each position give, the likeliest ones first."""
    root: Trie = {}
    paths: dict[int, list[int]] = {0: []}  # by node of the tree of symbols, those down to it
    for parent, children in enumerate(SYMBOLS.children):
        before = paths.get(parent)
        if before is None or len(before) == len(symbols):
            continue
        for child, symbol in zip(children, symbols[len(before)], strict=False):  # fewer in a small vocabulary
            here, paths[child] = root, [*before, symbol]
            for said, _ in groupby(paths[child]):
                if said != blank:
                    here = here.setdefault(said, {})
    return root


def size(trie: Trie) -> int:
    """Return the number of its nodes."""
    return sum(1 + size(below) for below in trie.values())


class ReleasedCTCDrafter(CTCDrafter):
    """Proposes the collapsed candidates and no others; their scores only order them, for greedy matching.

    Args:
        pair: whose target it is.
        network: on the target's device, of as many positions as the tree is deep.
    """

    def __init__(self, pair: Pair, network: CTCNetwork) -> None:
        super().__init__(pair, network)
        self._tries: dict[tuple[int, int], Trie] = {}  # by stream and place

    def propose(
        self, streams: Sequence[int], found: Sequence[Candidates], feeding: Sequence[Sequence[int]]
    ) -> Proposal:
        """See `Drafter`."""
        keys = [
            (stream, here, place)
            for stream, here, places in zip(streams, found, feeding, strict=True)
            for place in places
        ]
        if found[0].depth[feeding[0][0]] == 0:
            self._begin(streams, found, feeding)
            for _ in range(min(SYMBOLS.deepest, self._ctc.shape.depth) - 1):
                self._go_on(streams)
            positions = torch.cat([self._said[stream].symbols for stream in streams])
            symbols = positions.shape[-1]
            likeliest = positions.topk(min(WIDEST, symbols), -1).indices.tolist()
            tries = [collapsed(some, symbols - 1) for some in likeliest]
        else:
            # After a token that somebody else has drawn it knows nothing.
            tries = [
                self._tries[stream, here.parent[place]].get(here.tokens[place], {}) for stream, here, place in keys
            ]
        self._tries = {(stream, place): trie for (stream, _, place), trie in zip(keys, tries, strict=True)}
        # Large sub-tries first, as in the topology that has room for them; of equal ones the likelier first.
        weights = [
            {token: 1 + size(below) - at / 1000 for at, (token, below) in enumerate(trie.items())} for trie in tries
        ]
        return Proposal.of_weights(weights, self._wide, self._device)
