"""A model's output layer as it makes logits: some models scale or cap what the layer says, and their config says how."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...models.view import layer_view

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
