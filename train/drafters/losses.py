"""What is fitted: the target's own distributions at every depth, or with CTC the tokens that the target goes on with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...decode.drafters.networks import CTCNetwork
from .proposals import Module, positions, proposals
from .texts import Batch

FADE = 0.8
"""Weight of a depth by that of the one before (Medusa)."""

SPARE = 2
"""Positions of the CTC-drafter beyond the tokens that it is fitted to say: room for blanks."""


def loss_of(network: Any) -> Callable[[Batch, Module, Module], Tensor]:
    """Return the loss of a network: of a batch, given the target's embeddings and output layer."""
    fitted = _ctc if isinstance(network, CTCNetwork) else _distilled
    return lambda batch, embedding, output: fitted(network, batch, embedding, output)


def _distilled(network: Any, batch: Batch, embedding: Module, output: Module) -> Tensor:
    """Return the mean cross-entropy of the target's distributions, weighted by depth."""
    with torch.no_grad():
        target = output(batch.states[:, 1:]).softmax(-1)  # [B, n - 1, V]; row s is of token s + 2
    total, weights = batch.states.new_zeros(()), 0.0
    for depth, scores in enumerate(proposals(network, batch, embedding, output)):
        wanted = target[:, depth : depth + scores.shape[1]]  # row s is of token s + 2 + depth
        nats = -(wanted * scores.log_softmax(-1)).sum(-1)
        there = torch.arange(scores.shape[1], device=nats.device) + 2 + depth < batch.length[:, None]
        total = total + FADE**depth * nats[there].mean()
        weights += FADE**depth
    return total / weights


def _ctc(network: CTCNetwork, batch: Batch, embedding: Module, output: Module) -> Tensor:
    """Return the mean CTC loss a token over windows of the text that follow each root, and what the first position lacks.

    The blank is the last symbol. `torch.nn.CTCLoss` sums over all alignments of T positions with the window's tokens. It says
    little where each token stands, so the first position is fitted to the target's distribution of the next token as well
    (the released code distils ten times as much as it aligns).
    """
    symbols = positions(network, batch, embedding, output)
    with torch.no_grad():
        target = output(batch.states[:, 1:-1]).softmax(-1)  # [B, n - 2, V]; row s is of token s + 2
    nats = -(target * symbols[:, :-1, 0, :-1]).sum(-1)
    known = torch.arange(nats.shape[1], device=nats.device) + 2 < batch.length[:, None]
    blank, tokens = symbols.shape[-1] - 1, max(1, network.shape.depth - SPARE)
    windows = batch.tokens[:, 2:].unfold(1, tokens, 1)  # [B, n - 1 - tokens, tokens], row s is of tokens s + 2 and on
    there = torch.arange(windows.shape[1], device=windows.device) + 2 + tokens <= batch.length[:, None]
    rows, wanted = symbols[:, : windows.shape[1]][there], windows[there]
    lengths = torch.full((len(rows),), symbols.shape[2], device=rows.device)
    # Equal tokens side by side need a blank between them: a window with many has no alignment, and an infinite loss that is
    # set to 0.
    loss: Tensor = functional.ctc_loss(
        rows.transpose(0, 1), wanted, lengths, torch.full_like(lengths, tokens), blank=blank, zero_infinity=True
    )
    return loss + nats[known].mean()
