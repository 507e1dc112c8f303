"""A transformer layer that goes on from the target's last hidden states, and the same with a blank for CTC.

Its input of a place is the token there and the state of the place before; its output stands for the state of the place, of
which the target's own output layer makes the distribution of the next token (EAGLE, arXiv 2401.15077; the CTC-drafter,
arXiv 2412.00061, has the same layer).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from ....policies.errors import InputError
from .networks import Shape

EPSILON, BASE = 1e-6, 10_000.0  # of the norms and of rotary positions: the defaults of transformers' LlamaConfig

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Takes queries, keys and values [S, n, heads, d] of new places and returns what they attend to, [S, n, heads, d]."""


def normed(x: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return x [..., H] divided by its root mean square."""
    return functional.rms_norm(x, (x.shape[-1],), weight, EPSILON)


class LayerNetwork(nn.Module):
    """One layer of the Llama family after a projection of [token embedding; state].

    Args:
        shape: sizes.

    Raises:
        InputError: the heads do not divide the width evenly.
    """

    kind: ClassVar[str] = "layer"

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, inner, heads = shape.hidden, shape.intermediate, shape.attention_heads
        # Rotary positions turn one half of a head against the other: its width must be even.
        if not inner or not heads or width % (2 * heads):
            raise InputError(f"a layer of width {width} cannot have {heads} heads and {inner} inner units")
        self.shape = shape
        self.enter = nn.Linear(2 * width, width)
        self.qkv, self.leave = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate_up, self.down = nn.Linear(width, 2 * inner, bias=False), nn.Linear(inner, width, bias=False)
        self.before, self.between, self.after = (nn.Parameter(torch.ones(width)) for _ in range(3))

    @torch.no_grad()
    def start(self) -> None:
        """Begin near the identity of the state: the last state is the best guess at the next before anything is learnt."""
        width = self.shape.hidden
        self.enter.weight[:, width:] *= 0.1  # the columns that read the state
        self.enter.weight[:, width:].diagonal().add_(1.0)
        for last in (self.leave, self.down):
            last.weight.mul_(0.1)

    def rotations(self, places: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosine and sine [places, 1, d] of rotary positions, the sign of the rotated half in the sine."""
        half = self.shape.hidden // self.shape.attention_heads // 2
        speed = BASE ** (-torch.arange(half, device=device, dtype=torch.float64) / half)
        angle = torch.arange(places, device=device, dtype=torch.float64)[:, None] * speed
        cos, sin = angle.cos(), angle.sin()
        parts = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
        return parts[0][:, None].to(dtype), parts[1][:, None].to(dtype)

    def forward(self, embedded: Tensor, states: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Return [S, n, H], what stands for the states of n places.

        Args:
            embedded: [S, n, H] the tokens there.
            states: [S, n, H] of the places before.
            rotation: cosine and sine [S or 1, n, 1, d] of their positions.
            attend: to the places that each sees.
        """
        x = self.enter(torch.cat([normed(embedded), normed(states)], -1))
        heads = self.shape.attention_heads
        qkv = self.qkv(normed(x, self.before)).unflatten(-1, (3 * heads, -1))  # [S, n, 3 heads, d]
        cos, sin = rotation
        qk = qkv[:, :, : 2 * heads]
        # x cos + rotate_half(x) sin; the sign of rotate_half lies in the sine, so that a roll is left of it.
        qk = torch.addcmul(qk * cos, qk.roll(cos.shape[-1] // 2, -1), sin)
        seen = attend(qk[:, :, :heads], qk[:, :, heads:], qkv[:, :, 2 * heads :])
        x = x + self.leave(seen.flatten(-2))
        gate, up = self.gate_up(normed(x, self.between)).chunk(2, -1)
        x = x + self.down(functional.silu(gate) * up)
        return normed(x, self.after)


class CTCNetwork(LayerNetwork):
    """The layer with a blank, which it can propose as a token and read as one.

    Attributes:
        blank_in, blank_out: [H] the blank's embedding, and its row of the output layer.
    """

    kind: ClassVar[str] = "ctc"

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.blank_in, self.blank_out = (nn.Parameter(torch.zeros(shape.hidden)) for _ in range(2))

    def with_blank(self, logits: Tensor, states: Tensor) -> Tensor:
        """Return [..., V + 1], the logits of V tokens and that of the blank after them."""
        return torch.cat([logits, (states @ self.blank_out)[..., None]], -1)

    def embed(self, tokens: Tensor, embedding: Callable[[Tensor], Tensor]) -> Tensor:
        """Return [..., H] the embeddings of tokens, of which V is the blank."""
        # The target's embedding has no row for the blank: row 0 is looked up in its place and not used.
        is_blank = tokens == self.shape.vocabulary
        return torch.where(is_blank[..., None], self.blank_in, embedding(tokens.masked_fill(is_blank, 0)))
