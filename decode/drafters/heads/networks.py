"""Networks that read the target's last hidden state: Medusa's and Hydra's heads.

A state h belongs to a token of the text; the target's own output layer makes the distribution of the next token of it. Head i
(from 0) proposes the token after that, i further on.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from ....policies.errors import InputError

# A folder of somebody else's may say anything: sizes are bounded before a network is built from them.
MOST_DEPTH = 64
_MOST = {
    "hidden": 1 << 16,
    "vocabulary": 1 << 20,
    "depth": MOST_DEPTH,
    "intermediate": 1 << 18,
    "attention_heads": 1 << 10,
}


@dataclass(frozen=True)
class Shape:
    """Sizes of a drafter's network.

    Attributes:
        hidden: H, width of the target's last hidden state.
        vocabulary: V, tokens that the target scores.
        depth: heads, or the depths that the network was trained to propose.
        intermediate, attention_heads: of a transformer layer; 0 where there is none.
    """

    hidden: int
    vocabulary: int
    depth: int = 4
    intermediate: int = 0
    attention_heads: int = 0

    def __post_init__(self) -> None:
        for name, most in _MOST.items():
            value, least = getattr(self, name), 0 if name in ("intermediate", "attention_heads") else 1
            if type(value) is not int or not least <= value <= most:  # True is an int to `isinstance`
                raise InputError(f"{name}: expected a whole number between {least} and {most}, not {value!r}")

    @staticmethod
    def read(raw: Mapping[str, Any]) -> Shape:
        """Return the shape that a JSON object describes, or raise `InputError`."""
        names = {field.name for field in dataclasses.fields(Shape)}
        if set(raw) != names:
            raise InputError(f"shape: expected {', '.join(sorted(names))}, not {', '.join(sorted(map(str, raw)))}")
        return Shape(**raw)


class Heads(nn.Module, ABC):
    """K heads, each a residual block and an output layer of its own.

    Args:
        shape: sizes; `depth` heads.
    """

    kind: ClassVar[str]
    reads_path: ClassVar[bool]

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        inputs = [shape.hidden * self._parts(head) for head in range(shape.depth)]
        self.blocks = nn.ModuleList([nn.Linear(width, shape.hidden) for width in inputs])
        self.outputs = nn.ModuleList([nn.Linear(shape.hidden, shape.vocabulary, bias=False) for _ in inputs])

    def _parts(self, head: int) -> int:
        """Return how many hidden states of width H a head reads."""
        return head + 2 if self.reads_path else 1  # the state, the root, a token for each head before

    @torch.no_grad()
    def start(self, output: Tensor) -> None:
        """Begin with the target's own output layer [V, H] after blocks that add nothing."""
        for weight in self.blocks.parameters():
            weight.zero_()
        for weight in self.outputs.parameters():
            weight.copy_(output)

    @abstractmethod
    def state(self, head: int, hidden: Tensor, path: Tensor | None) -> Tensor:
        """Return [..., H], what a head's output layer reads.

        Args:
            head: its number.
            hidden: [..., H] the target's states.
            path: [..., head + 1, H] embeddings of the tokens since then, if the heads read them.
        """

    def logits(self, head: int, state: Tensor) -> Tensor:
        """Return [..., V] from what `state` gave."""
        out: Tensor = self.outputs[head](state)
        return out


class MedusaHeads(Heads):
    """Heads that are independent given the anchor: h + SiLU(W h + b) (Medusa-1, arXiv 2401.10774)."""

    kind, reads_path = "medusa", False

    def state(self, head: int, hidden: Tensor, path: Tensor | None) -> Tensor:
        """See `Heads.state`."""
        return hidden + functional.silu(self.blocks[head](hidden))


class HydraHeads(Heads):
    """Heads that see the embeddings of the path so far: R x + SiLU(W x + b) of both (Hydra, arXiv 2402.05109)."""

    kind, reads_path = "hydra", True

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        widths = [shape.hidden * self._parts(head) for head in range(shape.depth)]
        self.residuals = nn.ModuleList([nn.Linear(width, shape.hidden, bias=False) for width in widths])

    @torch.no_grad()
    def start(self, output: Tensor) -> None:
        """See `Heads.start`; the residuals pass the state alone."""
        super().start(output)
        for weight in self.residuals.parameters():
            weight.zero_()
            weight[:, : self.shape.hidden].fill_diagonal_(1.0)

    def state(self, head: int, hidden: Tensor, path: Tensor | None) -> Tensor:
        """See `Heads.state`."""
        assert path is not None
        read = torch.cat([hidden, path.flatten(-2)], -1)  # [..., (head + 2) H]
        out: Tensor = self.residuals[head](read) + functional.silu(self.blocks[head](read))
        return out
