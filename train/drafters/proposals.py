"""Proposals of a drafter's network at every position of known texts, and its loss.

At position s the target has read token s and drawn token s + 1, the root. A drafter there proposes tokens s + 2, s + 3, ...
It is fed with the tokens of the text, which is what it reads in decoding as long as its candidates are accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...decode.drafters.networks import CTCNetwork, LayerNetwork, MedusaHeads
from .texts import Batch

FADE = 0.8
"""Weight of a depth relative to the one before (Medusa)."""

SPARE = 2
"""Positions of the CTC-drafter beyond the tokens that it is fitted to propose: room for blanks."""

Module = Callable[[Tensor], Tensor]
"""The target's embeddings, or its output layer."""


def proposals(network: Any, batch: Batch, embedding: Module, output: Module) -> Iterator[Tensor]:
    """Yield by depth j, from 0, the scores [B, n - 2 - j, V] of token s + 2 + j at positions s; of a layer with an output
    layer of its own [B, n - 2 - j, outputs].

    Args:
        network: Medusa's or Hydra's heads, or the layer.
        batch: texts.
        embedding, output: of the target.
    """
    count = batch.tokens.shape[1]
    if not isinstance(network, MedusaHeads):
        score = network.output if network.shape.outputs else output
        for depth, states in enumerate(unroll(network, batch, embedding, None)):
            yield score(states[:, : count - 2 - depth])
        return
    embedded = embedding(batch.tokens) if network.reads_path else None
    for head in range(min(network.shape.depth, count - 2)):
        rows, path = count - 2 - head, None
        if embedded is not None:
            # Of tokens s + 1 .. s + 1 + head: [B, rows, head + 1, H].
            path = torch.stack([embedded[:, 1 + at : 1 + at + rows] for at in range(head + 1)], 2)
        yield network.outputs[head](network.state(head, batch.states[:, :rows], path))


def position_log_probs(network: CTCNetwork, batch: Batch, embedding: Module, output: Module) -> Tensor:
    """Return [B, n - 1, T, V + 1], the log-probabilities of the symbols at T positions after each root."""

    def next_symbols(states: Tensor) -> Tensor:
        symbols.append(network.with_blank(output(states), states).log_softmax(-1))
        return network.embed(symbols[-1].argmax(-1), embedding)

    symbols: list[Tensor] = []
    for depth, states in enumerate(unroll(network, batch, embedding, next_symbols), 1):
        if depth == network.shape.depth:  # the last one has no successor that calls it
            next_symbols(states)
    return torch.stack(symbols, 2)


def unroll(network: LayerNetwork, batch: Batch, embedding: Module, next_read: Module | None) -> Iterator[Tensor]:
    """Yield by depth the layer's states [B, n - 1, H], where each position reads its own state of the depth before.

    Args:
        network: the layer.
        batch: texts.
        embedding: of the target.
        next_read: returns the embeddings to read next, from the states; None = those of the text's own tokens.
    """
    count, attention = batch.tokens.shape[1] - 1, _TextAttention()
    cos, sin = network.rotations(count + network.shape.depth, batch.states.device, batch.states.dtype)
    embedded = embedding(functional.pad(batch.tokens, (0, network.shape.depth)))
    # Position s reads the state of token s with token s + 1, its root; at each further depth the next token.
    states, read = batch.states[:, :-1], embedded[:, 1 : 1 + count]
    for depth in range(network.shape.depth):
        rotation = cos[depth : depth + count], sin[depth : depth + count]
        states = network(read, states, rotation, attention.attend)
        if depth + 1 < network.shape.depth:
            read = embedded[:, 2 + depth : 2 + depth + count] if next_read is None else next_read(states)
        yield states


class _TextAttention:
    """Attention of positions that see the text before them, and at later depths what they read there themselves."""

    def __init__(self) -> None:
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """See `networks.Attend`; called once per depth."""
        self._keys.append(keys)
        self._values.append(values)
        scale, count = queries.shape[-1] ** -0.5, queries.shape[1]
        late = torch.ones(count, count, dtype=torch.bool, device=queries.device).triu(1)
        text = torch.einsum("bqhd,bkhd->bhqk", queries, self._keys[0]).masked_fill(late, -torch.inf)  # [B, heads, n, n]
        # Of later depths a position sees its own keys only, one per depth: [B, heads, n, depths].
        previous = [(queries * k).sum(-1).transpose(1, 2)[..., None] for k in self._keys[1:]]
        weights = (torch.cat([text, *previous], -1) * scale).softmax(-1)
        out = torch.einsum("bhqk,bkhd->bqhd", weights[..., :count], self._values[0])
        for at, value in enumerate(self._values[1:]):
            out = out + weights[..., count + at].transpose(1, 2)[..., None] * value
        return out


# Losses


def drafter_loss(network: Any, batch: Batch, embedding: Module, output: Module) -> Tensor:
    """Return the loss of a network on a batch, given the target's embeddings and output layer.

    It is the mean cross-entropy with the target's own distributions, of the tokens that the network can propose, weighted
    by depth; of the CTC-drafter see `_ctc_loss`.
    """
    if isinstance(network, CTCNetwork):
        return _ctc_loss(network, batch, embedding, output)
    with torch.no_grad():
        target = output(batch.states[:, 1:]).softmax(-1)  # [B, n - 1, V]; row s is of token s + 2
        if network.shape.outputs:
            target = target[..., network.kept]
    total, weights = batch.states.new_zeros(()), 0.0
    for depth, scores in enumerate(proposals(network, batch, embedding, output)):
        expected = target[:, depth : depth + scores.shape[1]]  # row s is of token s + 2 + depth
        nats = -(expected * scores.log_softmax(-1)).sum(-1)
        exists = torch.arange(scores.shape[1], device=nats.device) + 2 + depth < batch.length[:, None]
        total = total + FADE**depth * nats[exists].mean()
        weights += FADE**depth
    return total / weights


def _ctc_loss(network: CTCNetwork, batch: Batch, embedding: Module, output: Module) -> Tensor:
    """Return the mean CTC loss per token over windows of the text after each root, and the loss of the first position.

    The blank is the last symbol. `torch.nn.CTCLoss` sums over all alignments of T positions with the window's tokens. It
    hardly determines where each token stands, so the first position is also fitted to the target's distribution of the next
    token (the released code distils ten times as much as it aligns).
    """
    symbols = position_log_probs(network, batch, embedding, output)
    with torch.no_grad():
        target = output(batch.states[:, 1:-1]).softmax(-1)  # [B, n - 2, V]; row s is of token s + 2
    nats = -(target * symbols[:, :-1, 0, :-1]).sum(-1)
    exists = torch.arange(nats.shape[1], device=nats.device) + 2 < batch.length[:, None]
    blank, tokens = symbols.shape[-1] - 1, max(1, network.shape.depth - SPARE)
    windows = batch.tokens[:, 2:].unfold(1, tokens, 1)  # [B, n - 1 - tokens, tokens], row s is of tokens from s + 2 on
    whole = torch.arange(windows.shape[1], device=windows.device) + 2 + tokens <= batch.length[:, None]
    rows = symbols[:, : windows.shape[1]][whole]
    lengths = torch.full((len(rows),), symbols.shape[2], device=rows.device)
    # Equal neighbours need a blank between them: a window with many has no alignment, and an infinite loss that is set to 0.
    loss: Tensor = functional.ctc_loss(
        rows.transpose(0, 1), windows[whole], lengths, torch.full_like(lengths, tokens), blank=blank, zero_infinity=True
    )
    return loss + nats[exists].mean()
