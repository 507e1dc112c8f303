"""Small drafters of every kind for a given target, with random weights that sometimes agree with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from conftest import VOCABULARY
from specstop.decode import Topology
from specstop.decode.drafters import CTCDrafter, HeadsDrafter, LayerDrafter
from specstop.decode.drafters.ctc import ReleasedCTCDrafter
from specstop.decode.drafters.networks import KINDS, CTCNetwork, Shape
from specstop.decode.drafters.spec import NETWORKS
from specstop.decode.round_state import RoundState
from specstop.train.drafters.fit import initialize
from torch import nn

from specstop import Pair

TRAINED = ("medusa", "hydra", "ctc", "layer")
DRAFTERS = (*TRAINED, "ctc-released")
CLASSES = dict(zip(DRAFTERS, (HeadsDrafter, HeadsDrafter, CTCDrafter, LayerDrafter, ReleasedCTCDrafter), strict=True))


def output_weight(pair: Pair) -> torch.Tensor:
    """Return the output layer [V, H] of a target; a compact one keeps no weight, but its products with units are that."""
    layer = pair.target.get_output_embeddings()
    if layer.weight is not None:
        return layer.weight
    return layer(torch.eye(pair.target.config.hidden_size, dtype=pair.target.dtype)).T.contiguous()


def small_network(
    kind: str, hidden: int, vocabulary: int, output: torch.Tensor, depth: int = 3, noise: float = 0.1, outputs: int = 0
) -> Any:
    """Return a network of float32 beside the output layer [V, H] of a target."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        network = KINDS[kind](Shape(hidden, vocabulary, depth, 2 * hidden, 2, outputs))
        initialize(network, output)
        with torch.no_grad():
            for weight in network.parameters():
                weight.add_(noise * torch.randn(weight.shape))
            if isinstance(network, CTCNetwork):
                network.blank_out.mul_(3.0)
    return network.requires_grad_(False).eval()


def small_drafter(
    kind: str, pair: Pair, depth: int = 3, noise: float = 0.1, place: Callable[[nn.Module], nn.Module] | None = None
) -> Any:
    """Return a drafter of a pair; `place` moves its network to where the pair lies."""
    output = output_weight(pair).cpu().float()
    network = small_network(NETWORKS[kind], output.shape[1], pair.vocabulary, output, depth, noise)
    network = network.to(pair.target.dtype)
    return CLASSES[kind](pair, place(network) if place else network.to(pair.device))


def new_round(anchors: Sequence[int], topology: Topology, tokens: Mapping[int, int] | None = None) -> RoundState:
    """Return a round of streams with these anchors, and `tokens` by row in each of them."""
    none = np.zeros(len(anchors), dtype=np.int64)
    round = RoundState(topology, none == 0, none, none)
    round.tokens[:, 0] = anchors
    for row, token in (tokens or {}).items():
        round.tokens[:, row] = token
    return round


def proposed(drafter: Any, round: RoundState, *rows: int) -> torch.Tensor:
    """Return the dense scores of what a drafter proposes after rows of every stream."""
    fed = [(stream, rows) for stream in range(len(round.tokens))]
    return drafter.propose(round, round.topology.depth[rows[0]], fed).dense(VOCABULARY)
