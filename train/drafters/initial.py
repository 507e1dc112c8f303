"""Weights of a drafter's network before training."""

from __future__ import annotations

import torch
from torch import Tensor

from ...decode.drafters.networks import HydraHeads, LayerNetwork, MedusaHeads


@torch.no_grad()
def initialize(network: MedusaHeads | LayerNetwork, output: Tensor) -> None:
    """Initialize a network near the best prediction without training.

    The output layers of heads are the target's, after blocks that pass the state. A layer is near the identity of the state.

    Args:
        network: with random weights.
        output: [V, H] weights of the target's output layer.
    """
    width = network.shape.hidden
    if isinstance(network, LayerNetwork):
        network.enter.weight[:, width:] *= 0.1  # the columns that read the state
        network.enter.weight[:, width:].diagonal().add_(1.0)
        for layer in (network.leave, network.down):
            layer.weight.mul_(0.1)
        return
    for weight in network.blocks.parameters():
        weight.zero_()
    for weight in network.outputs.parameters():
        weight.copy_(output)
    if isinstance(network, HydraHeads):
        for weight in network.residuals.parameters():
            weight.zero_()
            weight[:, :width].fill_diagonal_(1.0)
