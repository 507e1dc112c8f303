"""Networks of trained drafters, which read the target's last hidden state.

The target's output layer computes the distribution of the next token from the state of a token. Depth 1 of a drafter proposes
the token after that one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from ....policies.errors import InputError
from ...models.view import layer_view

MOST_DEPTH = 64
# Sizes in a folder are not trusted: they are bounded before a network is built.
_BOUNDS = {
    "hidden": (1, 1 << 16),
    "vocabulary": (1, 1 << 20),
    "depth": (1, MOST_DEPTH),
    "intermediate": (0, 1 << 18),
    "attention_heads": (0, 1 << 10),
}


@dataclass(frozen=True)
class Shape:
    """Sizes of a drafter's network.

    Attributes:
        hidden: H, width of the target's last hidden state.
        vocabulary: V, tokens that the target scores.
        depth: number of heads, or of depths that the network was trained for.
        intermediate, attention_heads: of a transformer layer; 0 = no such layer.

    Raises:
        InputError: a size is out of bounds.
    """

    hidden: int
    vocabulary: int
    depth: int = 4
    intermediate: int = 0
    attention_heads: int = 0

    def __post_init__(self) -> None:
        for name, (least, most) in _BOUNDS.items():
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:  # excludes bool
                raise InputError(f"{name}: expected a whole number between {least} and {most}, not {value!r}")

    @staticmethod
    def read(raw: Mapping[str, Any]) -> Shape:
        """Return the shape in a JSON object, or raise `InputError`."""
        if set(raw) != set(_BOUNDS):
            raise InputError(f"shape: expected {', '.join(sorted(_BOUNDS))}, not {', '.join(sorted(map(str, raw)))}")
        return Shape(**raw)


class Heads(nn.Module, ABC):
    """K heads, each a residual block and an output layer of its own; `shape.depth` is K."""

    kind: ClassVar[str]
    reads_path: ClassVar[bool]

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.blocks = nn.ModuleList([nn.Linear(width, shape.hidden) for width in self._input_widths()])
        self.outputs = nn.ModuleList([nn.Linear(shape.hidden, shape.vocabulary, bias=False) for _ in self.blocks])

    def _input_widths(self) -> list[int]:
        """Return by head the width of its input: the state, and embeddings of the path from the anchor if it reads them."""
        return [self.shape.hidden * (head + 2 if self.reads_path else 1) for head in range(self.shape.depth)]

    @torch.no_grad()
    def start(self, output: Tensor) -> None:
        """Initialize with the target's output layer [V, H] after blocks that add nothing."""
        for weight in self.blocks.parameters():
            weight.zero_()
        for weight in self.outputs.parameters():
            weight.copy_(output)

    @abstractmethod
    def state(self, head: int, hidden: Tensor, path: Tensor | None) -> Tensor:
        """Return [..., H], the input of a head's output layer.

        Args:
            head: index of the head.
            hidden: [..., H] states of the target.
            path: [..., head + 1, H] embeddings of the tokens since then, if `reads_path`.
        """

    def logits(self, head: int, state: Tensor) -> Tensor:
        """Return [..., V] from the result of `state`."""
        out: Tensor = self.outputs[head](state)
        return out


class MedusaHeads(Heads):
    """Heads that are independent given the state: h + SiLU(W h + b) (Medusa-1, arXiv 2401.10774)."""

    kind, reads_path = "medusa", False

    def state(self, head: int, hidden: Tensor, path: Tensor | None) -> Tensor:
        """See `Heads.state`."""
        return hidden + functional.silu(self.blocks[head](hidden))


class HydraHeads(Heads):
    """Heads that also read the embeddings of the path: R x + SiLU(W x + b) of both (Hydra, arXiv 2402.05109)."""

    kind, reads_path = "hydra", True

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.residuals = nn.ModuleList([nn.Linear(width, shape.hidden, bias=False) for width in self._input_widths()])

    @torch.no_grad()
    def start(self, output: Tensor) -> None:
        """See `Heads.start`; the residuals pass the state only."""
        super().start(output)
        for weight in self.residuals.parameters():
            weight.zero_()
            weight[:, : self.shape.hidden].fill_diagonal_(1.0)

    def state(self, head: int, hidden: Tensor, path: Tensor | None) -> Tensor:
        """See `Heads.state`."""
        assert path is not None
        x = torch.cat([hidden, path.flatten(-2)], -1)  # [..., (head + 2) H]
        out: Tensor = self.residuals[head](x) + functional.silu(self.blocks[head](x))
        return out


EPSILON, BASE = 1e-6, 10_000.0  # of norms and rotary positions: the defaults of transformers' LlamaConfig

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Takes queries, keys and values [S, n, heads, d]; returns the attention output [S, n, heads, d]."""


def normed(x: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return the RMS norm of x [..., H]."""
    return functional.rms_norm(x, (x.shape[-1],), weight, EPSILON)


class LayerNetwork(nn.Module):
    """One layer of the Llama architecture after a projection of [token embedding; state].

    Raises:
        InputError: the heads do not divide the width evenly.
    """

    kind: ClassVar[str] = "layer"

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

    @torch.no_grad()
    def start(self) -> None:
        """Initialize near the identity of the state, the best prediction of the next state before training."""
        width = self.shape.hidden
        self.enter.weight[:, width:] *= 0.1  # the columns that read the state
        self.enter.weight[:, width:].diagonal().add_(1.0)
        for layer in (self.leave, self.down):
            layer.weight.mul_(0.1)

    def rotations(self, positions: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosine and sine [positions, 1, d] of rotary positions; the sine has the sign of the rotated half."""
        half = self.shape.hidden // self.shape.attention_heads // 2
        speed = BASE ** (-torch.arange(half, device=device, dtype=torch.float64) / half)
        angle = torch.arange(positions, device=device, dtype=torch.float64)[:, None] * speed
        cos, sin = angle.cos(), angle.sin()
        parts = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
        return parts[0][:, None].to(dtype), parts[1][:, None].to(dtype)

    def forward(self, embedded: Tensor, states: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Return [S, n, H], predicted states of n tokens.

        Args:
            embedded: [S, n, H] embeddings of the tokens.
            states: [S, n, H] states of the tokens before.
            rotation: cosine and sine [S or 1, n, 1, d] of their positions.
            attend: attention.
        """
        x = self.enter(torch.cat([normed(embedded), normed(states)], -1))
        heads = self.shape.attention_heads
        qkv = self.qkv(normed(x, self.before)).unflatten(-1, (3 * heads, -1))  # [S, n, 3 heads, d]
        cos, sin = rotation
        qk = qkv[:, :, : 2 * heads]
        # x cos + rotate_half(x) sin: with the sign in the sine, rotate_half is a roll.
        qk = torch.addcmul(qk * cos, qk.roll(cos.shape[-1] // 2, -1), sin)
        attended = attend(qk[:, :, :heads], qk[:, :, heads:], qkv[:, :, 2 * heads :])
        x = x + self.leave(attended.flatten(-2))
        gate, up = self.gate_up(normed(x, self.between)).chunk(2, -1)
        x = x + self.down(functional.silu(gate) * up)
        return normed(x, self.after)


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

    def embed(self, symbols: Tensor, embedding: Callable[[Tensor], Tensor]) -> Tensor:
        """Return [..., H] the embeddings of symbols, given the target's embedding of tokens."""
        is_blank = symbols == self.shape.vocabulary
        return torch.where(is_blank[..., None], self.blank_in, embedding(symbols.masked_fill(is_blank, 0)))


_FACTORS = ("logit_scale", "output_multiplier", "lm_head_multiplier")  # Cohere, Muse, Falcon-H1
_DIVISOR, _MULTIPLIES = "logits_scaling", "hyperclovax"  # Granite and MiniCPM3 divide by it, HyperCLOVAX multiplies
_CAPS = ("final_logit_softcapping", "logits_soft_cap")  # Gemma and its descendants, RecurrentGemma


@dataclass(frozen=True)
class OutputTransform:
    """Logits from the result x of a model's output layer: cap tanh(factor x / cap), or factor x if `cap` is 0."""

    factor: float = 1.0
    cap: float = 0.0

    @staticmethod
    def of(config: Any) -> OutputTransform:
        """Return the transform of a model with this config."""
        text = config.get_text_config()

        def number(name: str) -> float:
            value = getattr(text, name, None)
            return float(value) if isinstance(value, int | float) else 0.0

        factor = 1.0
        for name in _FACTORS:
            factor *= number(name) or 1.0
        if scaling := number(_DIVISOR):
            multiplies = str(getattr(text, "model_type", "")).startswith(_MULTIPLIES)
            factor *= scaling if multiplies else 1.0 / scaling
        return OutputTransform(factor, next(filter(None, map(number, _CAPS)), 0.0))

    def __call__(self, x: Tensor) -> Tensor:
        """Return logits [..., V]."""
        if self.factor != 1.0:
            x = x * self.factor
        return torch.tanh(x / self.cap) * self.cap if self.cap else x


class TransformedLayer(nn.Module):
    """An output layer followed by a transform."""

    def __init__(self, layer: Callable[[Tensor], Tensor], transform: OutputTransform) -> None:
        super().__init__()
        self.layer, self.transform = layer, transform

    def forward(self, states: Tensor) -> Tensor:
        """Return logits [..., V] of states [..., H]."""
        return self.transform(self.layer(states))


def with_transform(layer: Any, config: Any) -> Any:
    """Return an output layer, or a copy of one, with the transform of a model of this config."""
    transform = OutputTransform.of(config)
    return layer if transform == OutputTransform() else TransformedLayer(layer, transform)


def output_layer(model: PreTrainedModel) -> Any:
    """Return the function from a model's last hidden states [..., H] to its logits [..., V]."""
    return with_transform(layer_view(model, model.get_output_embeddings()), model.config)
