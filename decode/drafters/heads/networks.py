"""Networks that read the target's last hidden state: Medusa's and Hydra's heads.

A state h belongs to a token of the text; the target's own output layer makes the distribution of the next token of it. Head i
(from 0) proposes the token after that, i further on.
"""

from __future__ import annotations

import dataclasses
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


_FACTORS = ("logit_scale", "output_multiplier", "lm_head_multiplier")
"""What configs call a factor: Cohere, Muse, Falcon-H1."""

_DIVISOR, _MULTIPLIES = "logits_scaling", "hyperclovax"
"""Granite and MiniCPM3 divide by it; one family multiplies by what it calls the same."""

_CAPS = ("final_logit_softcapping", "logits_soft_cap")
"""What configs call a soft cap: Gemma and what is built like it, RecurrentGemma."""


@dataclass(frozen=True)
class OutputTransform:
    """What a model makes of the numbers x of its output layer: cap tanh(factor x / cap), or factor x without a cap.

    Attributes:
        factor: 1 = none.
        cap: 0 = none.
    """

    factor: float = 1.0
    cap: float = 0.0

    @staticmethod
    def of(config: Any) -> OutputTransform:
        """Return the transform of a model of this config."""
        text = config.get_text_config()
        factor = 1.0
        for name in _FACTORS:
            factor *= _number(text, name) or 1.0
        if scaling := _number(text, _DIVISOR):
            multiplies = str(getattr(text, "model_type", "")).startswith(_MULTIPLIES)
            factor *= scaling if multiplies else 1.0 / scaling
        return OutputTransform(factor, next(filter(None, (_number(text, name) for name in _CAPS)), 0.0))

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the logits that the numbers of an output layer become."""
        if self.factor != 1.0:
            rows = rows * self.factor
        return torch.tanh(rows / self.cap) * self.cap if self.cap else rows


def _number(config: Any, name: str) -> float:
    """Return a number of a config, 0 where there is none."""
    value = getattr(config, name, None)
    return float(value) if isinstance(value, int | float) else 0.0


class TransformedLayer(nn.Module):
    """An output layer and what its model makes of it.

    Args:
        layer: takes states [..., H].
        transform: of its model.
    """

    def __init__(self, layer: Callable[[Tensor], Tensor], transform: OutputTransform) -> None:
        super().__init__()
        self.layer, self.transform = layer, transform

    def forward(self, states: Tensor) -> Tensor:
        """Return logits [..., V]."""
        return self.transform(self.layer(states))


def with_transform(layer: Any, config: Any) -> Any:
    """Return what makes the logits of a model of this config, given its output layer or a copy: often the layer itself."""
    transform = OutputTransform.of(config)
    return layer if transform == OutputTransform() else TransformedLayer(layer, transform)


def output_layer(model: PreTrainedModel) -> Any:
    """Return what makes a model's logits [..., V] of its last hidden states [..., H]."""
    return with_transform(layer_view(model, model.get_output_embeddings()), model.config)
