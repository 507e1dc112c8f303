"""Candidates from a layer that was trained with CTC: what its output positions say of the sequences that they may mean.

The layer draws T positions after the root, each fed with the best symbol of the one before (CTC-drafter, arXiv 2412.00061).
A position says a token or a blank; equal tokens side by side are one, blanks fall away. The released code collapses the paths
of a fixed tree so, and masks what is left out. Here candidates are asked for by what they are a prefix of: the chance of a
prefix, over all alignments, is the forward algorithm's. So no candidate stands there twice, each has its own position, and
the scores of the tokens after a path are a distribution.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...candidates import Candidates
from ...models.cuda.transfer import upload
from ...models.pair import Pair
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

    def extended(self, rows: Tensor, tokens: Tensor, positions: Tensor) -> Prefixes:
        """Return the prefixes `rows` [R'] with a token [R'] more each; `positions` [R', T, V + 1] are theirs."""
        blank, token, last = self.blank[rows], self.token[rows], self.last[rows]
        said = positions.gather(2, tokens[:, None, None].expand(-1, positions.shape[1], 1))[..., 0]
        # After an equal token it enters from a blank alone, else both would collapse into one.
        enters = blank + token * (last != tokens)[:, None]
        new_blank, new_token = [torch.zeros_like(blank[:, 0])], [torch.zeros_like(blank[:, 0])]
        # token_(t+1) = y_(t+1)(v) (token_t + enters_t); blank_(t+1) = y_(t+1)(blank) (blank_t + token_t), of the new prefix.
        for t in range(positions.shape[1]):
            new_token.append(said[:, t] * (new_token[t] + enters[:, t]))
            new_blank.append(positions[:, t, -1] * (new_blank[t] + new_token[t]))
        return Prefixes(torch.stack(new_blank, 1), torch.stack(new_token, 1), tokens)


class CTCDrafter(LayerReader):
    """All depths from one pass: what is asked for later is worked out from the positions drawn at the roots.

    A path has no hidden state of its own, so there is none for policies to read.

    Args:
        pair: whose target it is.
        network: on the target's device; its `depth` is T.
    """

    def __init__(self, pair: Pair, network: CTCNetwork) -> None:
        self._ctc = network
        self.beyond = network.shape.depth  # of one root; `_draw` has room made for those of several
        self._wide = pair.logits_dtype
        self._row_of: dict[tuple[int, int], int] = {}  # by stream and place that of the prefixes
        super().__init__(pair, network)

    def propose(
        self, streams: Sequence[int], found: Sequence[Candidates], feeding: Sequence[Sequence[int]]
    ) -> Proposal:
        """See `Drafter`."""
        depth = found[0].depth[feeding[0][0]]
        keys = [(stream, place) for stream, places in zip(streams, feeding, strict=True) for place in places]
        if depth == 0:
            self._positions = self._draw(streams, found, feeding, self._ctc.shape.depth)
            self._of = list(range(len(keys)))  # by place its root's row of the positions
            self._prefixes = Prefixes.empty(self._positions)
        else:
            of = dict(zip(streams, found, strict=True))
            rows = [self._row_of[stream, of[stream].parent[place]] for stream, place in keys]
            self._of = [self._of[row] for row in rows]
            tokens = upload([of[stream].tokens[place] for stream, place in keys], self._device)
            positions = self._positions[upload(self._of, self._device)]
            self._prefixes = self._prefixes.extended(upload(rows, self._device), tokens, positions)
        self._row_of = {key: row for row, key in enumerate(keys)}
        chances = self._prefixes.next(self._positions[upload(self._of, self._device)])
        top = chances.topk(min(KEPT, chances.shape[-1]), -1)
        return Proposal(top.values.log().to(self._wide), top.indices)

    def _draw(
        self, streams: Sequence[int], found: Sequence[Candidates], feeding: Sequence[Sequence[int]], count: int
    ) -> Tensor:
        """Return [R, count, V + 1], the chances of the symbols at the positions after each of R roots."""
        last, roots = self._read_places(streams, found, feeding)
        # A root and the positions after it each have a slot.
        self._cache.grow(max(self._length[s] + count * len(own) for s, own in zip(streams, roots, strict=True)))
        most, counts = max(map(len, roots)), [len(own) for own in roots]
        # Streams with fewer roots than others are filled up with their last one, which is cut off again at the end.
        state = torch.stack([torch.cat([some, some[-1:].expand(most - len(some), -1)]) for some in last])
        drawn = []
        for _ in range(count):
            logits = self._ctc.with_blank(self._output(state), state)
            drawn.append(logits.double().softmax(-1))  # double: a prefix multiplies up to T of them
            if len(drawn) == count:
                break
            roots = [self._go_on(stream, own) for stream, own in zip(streams, roots, strict=True)]
            state = self._run(self._ctc.embed(logits.argmax(-1), self._embedding), state, roots, streams)
        positions = torch.stack(drawn, 2)  # [S, roots, T, V + 1]
        return torch.cat([own[:count] for own, count in zip(positions, counts, strict=True)])

    def _go_on(self, stream: int, rows: Sequence[Row]) -> list[Row]:
        """Return rows one position further, each in a slot of its own."""
        fed, out = self._slot[stream], []
        for row in rows:
            slot = self._length[stream] + len(fed)
            # Under a number below 0, which no place has: it only counts the slots that are taken.
            fed[-1 - len(fed)] = slot
            # Its token and state are never looked at: `_run` is told embeddings and states.
            out.append(Row(0, row.state, slot, row.position + 1, row.sees, (*row.beside, slot)))
        return out
