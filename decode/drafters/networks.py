"""Networks of trained drafters, which read the target's last hidden state.

The target's output layer computes the distribution of the next token from the state of a token. Depth 1 of a drafter proposes
the token after that one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, ClassVar

import torch
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from ...policies.errors import InputError
from ..models.view import layer_view

MAX_DEPTH = 64


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class Shape:
    """Sizes of a drafter's network. They are bounded, because those in a folder are not trusted.

    Attributes:
        hidden: H, width of the target's last hidden state.
        vocabulary: V, tokens that the target scores.
        depth: number of heads, or of depths that the network was trained for.
        intermediate, attention_heads: of a transformer layer; 0 = no such layer.
        outputs: number of tokens that a layer can propose; 0 = all.
    """

    hidden: Annotated[int, Field(ge=1, le=1 << 16)]
    vocabulary: Annotated[int, Field(ge=1, le=1 << 20)]
    depth: Annotated[int, Field(ge=1, le=MAX_DEPTH)] = 4
    intermediate: Annotated[int, Field(ge=0, le=1 << 18)] = 0
    attention_heads: Annotated[int, Field(ge=0, le=1 << 10)] = 0
    outputs: Annotated[int, Field(ge=0, le=1 << 20)] = 0


class MedusaHeads(nn.Module):
    """Heads that are independent given the state: h + SiLU(W h + b) and an output layer (Medusa-1, arXiv 2401.10774).

    Subclasses may also read the embeddings of the path from the anchor (`reads_path`). `shape.depth` is the number of heads.
    """

    kind: ClassVar[str] = "medusa"
    reads_path: ClassVar[bool] = False

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.widths = [shape.hidden * (head + 2 if self.reads_path else 1) for head in range(shape.depth)]
        self.blocks = nn.ModuleList([nn.Linear(width, shape.hidden) for width in self.widths])
        self.outputs = nn.ModuleList([nn.Linear(shape.hidden, shape.vocabulary, bias=False) for _ in self.blocks])

    def state(self, head: int, hidden: Tensor, path: Tensor | None) -> Tensor:
        """Return [..., H], the input of a head's output layer.

        Args:
            head: index of the head.
            hidden: [..., H] states of the target.
            path: [..., head + 1, H] embeddings of the tokens since then, if `reads_path`.
        """
        return hidden + functional.silu(self.blocks[head](hidden))


class HydraHeads(MedusaHeads):
    """Heads that also read the embeddings of the path: R x + SiLU(W x + b) of both (Hydra, arXiv 2402.05109)."""

    kind, reads_path = "hydra", True

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.residuals = nn.ModuleList([nn.Linear(width, shape.hidden, bias=False) for width in self.widths])

    def state(self, head: int, hidden: Tensor, path: Tensor | None) -> Tensor:
        """See `MedusaHeads.state`."""
        assert path is not None
        x = torch.cat([hidden, path.flatten(-2)], -1)  # [..., (head + 2) H]
        out: Tensor = self.residuals[head](x) + functional.silu(self.blocks[head](x))
        return out


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Takes queries, keys and values [S, n, heads, d]; returns the attention output [S, n, heads, d]."""


def rms_norm(x: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return the RMS norm of x [..., H], with the default epsilon of transformers' LlamaConfig."""
    return functional.rms_norm(x, (x.shape[-1],), weight, 1e-6)


class LayerNetwork(nn.Module):
    """One layer of the Llama architecture after a projection of [token embedding; state].

    With `shape.outputs` it has an output layer of its own, for the tokens `kept` [outputs] int64 only (EAGLE-3, arXiv
    2503.01840).

    Raises:
        InputError: the heads do not divide the width evenly.
    """

    kind: ClassVar[str] = "layer"
    kept: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, inner, heads = shape.hidden, shape.intermediate, shape.attention_heads
        if not inner or not heads or width % (2 * heads):  # rotary positions need heads of even width
            raise InputError(f"a layer of width {width} cannot have {heads} heads and {inner} inner units")
        self.shape = shape
        self.enter = nn.Linear(2 * width, width)
        self.qkv, self.leave = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate_up, self.down = nn.Linear(width, 2 * inner, bias=False), nn.Linear(inner, width, bias=False)
        self.before, self.between, self.after = (nn.Parameter(torch.ones(width)) for _ in range(3))
        if shape.outputs:
            self.output = nn.Linear(width, shape.outputs, bias=False)
            self.register_buffer("kept", torch.arange(shape.outputs))

    def embed(self, tokens: Tensor, embedding: Callable[[Tensor], Tensor]) -> Tensor:
        """Return [..., H] the embeddings of tokens, given the target's embedding."""
        return embedding(tokens)

    def rotations(self, positions: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosine and sine [positions, 1, d] of rotary positions; the sine has the sign of the rotated half."""
        half = self.shape.hidden // self.shape.attention_heads // 2
        speed = 10_000.0 ** (-torch.arange(half, device=device, dtype=torch.float64) / half)
        angle = torch.arange(positions, device=device, dtype=torch.float64)[:, None] * speed
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        return torch.cat([cos, cos], -1).to(dtype), torch.cat([-sin, sin], -1).to(dtype)

    def forward(self, embedded: Tensor, states: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Return [S, n, H], predicted states of n tokens.

        Args:
            embedded: [S, n, H] embeddings of the tokens.
            states: [S, n, H] states of the tokens before.
            rotation: cosine and sine [S or 1, n, 1, d] of their positions.
            attend: attention.
        """
        x = self.enter(torch.cat([rms_norm(embedded), rms_norm(states)], -1))
        heads = self.shape.attention_heads
        qkv = self.qkv(rms_norm(x, self.before)).unflatten(-1, (3 * heads, -1))  # [S, n, 3 heads, d]
        cos, sin = rotation
        qk = qkv[:, :, : 2 * heads]
        # x cos + rotate_half(x) sin: with the sign in the sine, rotate_half is a roll.
        qk = torch.addcmul(qk * cos, qk.roll(cos.shape[-1] // 2, -1), sin)
        attended = attend(qk[:, :, :heads], qk[:, :, heads:], qkv[:, :, 2 * heads :])
        x = x + self.leave(attended.flatten(-2))
        gate, up = self.gate_up(rms_norm(x, self.between)).chunk(2, -1)
        x = x + self.down(functional.silu(gate) * up)
        return rms_norm(x, self.after)


class CTCNetwork(LayerNetwork):
    """The layer with a blank symbol, which has number V.

    Attributes:
        blank_in, blank_out: [H] the blank's embedding, and its row of the output layer.
    """

    kind: ClassVar[str] = "ctc"

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.blank_in, self.blank_out = (nn.Parameter(torch.zeros(shape.hidden)) for _ in range(2))

    def with_blank(self, logits: Tensor, states: Tensor) -> Tensor:
        """Return [..., V + 1], logits [..., V] and that of the blank after them."""
        return torch.cat([logits, (states @ self.blank_out)[..., None]], -1)

    def embed(self, tokens: Tensor, embedding: Callable[[Tensor], Tensor]) -> Tensor:
        """See `LayerNetwork.embed`; the tokens may be blanks."""
        is_blank = tokens == self.shape.vocabulary
        return torch.where(is_blank[..., None], self.blank_in, embedding(tokens.masked_fill(is_blank, 0)))


KINDS: dict[str, Callable[[Shape], MedusaHeads | LayerNetwork]] = {
    network.kind: network for network in (MedusaHeads, HydraHeads, CTCNetwork, LayerNetwork)
}
"""Networks by name."""


def output_scale(config: Any) -> tuple[float, float]:
    """Return factor f and cap c of a model: logits are c tanh(f x / c), of the output layer's x; c = 0 is no cap."""
    text = config.get_text_config()

    def number(name: str) -> float:
        value = getattr(text, name, None)
        return float(value) if isinstance(value, int | float) else 0.0

    factors = ("logit_scale", "output_multiplier", "lm_head_multiplier")  # Cohere, Muse, Falcon-H1
    factor = math.prod(number(name) or 1.0 for name in factors)
    if scaling := number("logits_scaling"):  # Granite and MiniCPM3 divide by it, HyperCLOVAX multiplies
        factor *= scaling if str(getattr(text, "model_type", "")).startswith("hyperclovax") else 1.0 / scaling
    # Gemma and its descendants; RecurrentGemma.
    return factor, number("final_logit_softcapping") or number("logits_soft_cap")


class ScaledOutput(nn.Module):
    """An output layer followed by the factor and the cap of `output_scale`."""

    def __init__(self, layer: Callable[[Tensor], Tensor], factor: float, cap: float) -> None:
        super().__init__()
        self.layer, self.factor, self.cap = layer, factor, cap

    def forward(self, states: Tensor) -> Tensor:
        """Return logits [..., V] of states [..., H]."""
        x = self.layer(states) * self.factor
        return torch.tanh(x / self.cap) * self.cap if self.cap else x


def scale_output(layer: Any, config: Any) -> Any:
    """Return an output layer that computes the logits of a model with this config."""
    factor, cap = output_scale(config)
    return layer if (factor, cap) == (1.0, 0.0) else ScaledOutput(layer, factor, cap)


def output_layer(model: PreTrainedModel) -> Any:
    """Return the function from a model's last hidden states [..., H] to its logits [..., V]."""
    return scale_output(layer_view(model, model.get_output_embeddings()), model.config)
