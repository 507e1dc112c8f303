"""What a network proposes at every position of known texts: all of them at once, each going on by itself.

At position s the target has read token s and drawn token s + 1, the root. A drafter that stands there proposes tokens s + 2,
s + 3 and so on. Fed with the text's own tokens, it is asked what it would be asked live as long as its candidates are
accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ...decode.drafters.networks import CTCNetwork, LayerNetwork, MedusaHeads
from .texts import Batch

Module = Callable[[Tensor], Tensor]
"""The target's embeddings, or its output layer."""


def proposals(network: Any, batch: Batch, embedding: Module, output: Module) -> Iterator[Tensor]:
    """Yield by depth j, from 0, the scores [B, n - 2 - j, V] of token s + 2 + j at positions s.

    Args:
        network: Medusa's or Hydra's heads, or the layer.
        batch: texts.
        embedding, output: of the target.
    """
    if isinstance(network, MedusaHeads):
        yield from _by_heads(network, batch, embedding)
        return
    for depth, states in enumerate(unrolled(network, batch, embedding, None)):
        yield output(states[:, : batch.tokens.shape[1] - 2 - depth])


def _by_heads(network: MedusaHeads, batch: Batch, embedding: Module) -> Iterator[Tensor]:
    count = batch.tokens.shape[1]
    embedded = embedding(batch.tokens) if network.reads_path else None
    for head in range(min(network.shape.depth, count - 2)):
        known = count - 2 - head
        path = None
        if embedded is not None:
            # Of tokens s + 1 .. s + 1 + head: [B, known, head + 1, H].
            path = torch.stack([embedded[:, 1 + at : 1 + at + known] for at in range(head + 1)], 2)
        yield network.outputs[head](network.state(head, batch.states[:, :known], path))


def positions(network: CTCNetwork, batch: Batch, embedding: Module, output: Module) -> Tensor:
    """Return [B, n - 1, T, V + 1] the log-probabilities of the symbols at T positions after each root."""

    def next_symbols(states: Tensor) -> Tensor:
        symbols.append(network.with_blank(output(states), states).log_softmax(-1))
        return network.embed(symbols[-1].argmax(-1), embedding)

    symbols: list[Tensor] = []
    for depth, states in enumerate(unrolled(network, batch, embedding, next_symbols), 1):
        if depth == network.shape.depth:  # nothing reads on from there
            next_symbols(states)
    return torch.stack(symbols, 2)


def unrolled(network: LayerNetwork, batch: Batch, embedding: Module, next_read: Module | None) -> Iterator[Tensor]:
    """Yield by depth the layer's states [B, n - 1, H], each position reading its own of the depth before.

    Args:
        network: the layer.
        batch: texts.
        embedding: of the target.
        next_read: makes of the states the embeddings to read next; None = those of the text's own tokens.
    """
    count, beside = batch.tokens.shape[1] - 1, _Beside()
    cos, sin = network.rotations(count + network.shape.depth, batch.states.device, batch.states.dtype)
    own = embedding(torch.nn.functional.pad(batch.tokens, (0, network.shape.depth)))
    # Position s reads the state of token s with token s + 1, its root; at each further depth one token on.
    states, read = batch.states[:, :-1], own[:, 1 : 1 + count]
    for depth in range(network.shape.depth):
        rotation = cos[depth : depth + count], sin[depth : depth + count]
        states = network(read, states, rotation, beside.attend)
        if depth + 1 == network.shape.depth:
            yield states
            return
        read = own[:, 2 + depth : 2 + depth + count] if next_read is None else next_read(states)
        yield states


class _Beside:
    """Attention of positions that see the text before them, and of later depths what they read there themselves."""

    def __init__(self) -> None:
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """See `networks.Attend`; called once a depth."""
        self._keys.append(keys)
        self._values.append(values)
        scale = queries.shape[-1] ** -0.5
        count = queries.shape[1]
        late = torch.ones(count, count, dtype=torch.bool, device=queries.device).triu(1)
        text = torch.einsum("bqhd,bkhd->bhqk", queries, self._keys[0]).masked_fill(late, -torch.inf)  # [B, heads, n, n]
        if len(self._keys) == 1:
            return torch.einsum("bhqk,bkhd->bqhd", (text * scale).softmax(-1), values)
        # Of later depths a position sees its own keys alone, one a depth: [B, heads, n, depths].
        own = torch.stack([(queries * k).sum(-1).transpose(1, 2) for k in self._keys[1:]], -1)
        weights = (torch.cat([text, own], -1) * scale).softmax(-1)
        out = torch.einsum("bhqk,bkhd->bqhd", weights[..., :count], self._values[0])
        for at, value in enumerate(self._values[1:]):
            out = out + weights[..., count + at].transpose(1, 2)[..., None] * value
        return out
