"""How a model computes: the library's modules, the same with reordered weights, or a compact forward.

| engine | what | for |
|---|---|---|
| `plain` | transformers' modules as they are | everything; the reference |
| `packed` | the same, every linear's weight in the layout that multiplies fastest here | CPU, float32 and bfloat16 |
| `compact` | one forward of few operations, fused projections, on a CPU those layouts | Llama family, `sdpa`, CPU, CUDA |

Stock matrix products on a CPU read the weights several times for 2 to 8 rows; in oneDNN's order a weight is read once, so
that verifying costs little more than one step, on most processors (`layouts` measures which). All three give the library's
logits within float rounding.
"""

from __future__ import annotations

import inspect
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ...policies.errors import InputError
from .adapters import is_modified
from .cache import CachedModel
from .compact import CompactModel, compact_refusal
from .cpu.layouts import choose_layouts
from .cpu.products import Product, can_pack
from .cpu.steps import ORDER, Step
from .kv_cache import scored_tokens
from .placement import kept_as_is
from .view import READS_ALL, Reading

ENGINES = ("auto", "plain", "packed", "compact")

BEFORE = 64
"""Tokens of the text after which steps are timed."""


_NO_CODE = compile("", "", "exec")


class PackedLinear(nn.Module):
    """A linear layer whose weight is kept in the layout that multiplies fastest.

    Args:
        weight: [out, in].
        bias: [out] or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.product = Product(weight, bias)
        self.out_features, self.in_features = weight.shape

    def forward(self, input: Tensor) -> Tensor:
        """Return [..., out]."""
        return self.product(input)


def choose_engine(model: PreTrainedModel, engine: str = "auto") -> str:
    """Return the engine for a model; `auto` is the fastest that can run it.

    Raises:
        InputError: unknown, or one that cannot run this model; the message says why.
    """
    if engine not in ENGINES:
        raise InputError(f"--engine: expected one of {', '.join(ENGINES)}, not {engine!r}")
    kept = kept_as_is(model)
    unpackable, uncompact = kept or can_pack(model.device, model.dtype), kept or compact_refusal(model)
    if engine == "auto":
        # Both are reasons why not; empty ones say that it can. A GPU has no use for layouts.
        if not uncompact and (not unpackable or model.device.type == "cuda"):
            return "compact"
        return "plain" if unpackable else "packed"
    refusal = {"packed": unpackable, "compact": uncompact}.get(engine)
    if refusal:
        raise InputError(f"--engine {engine}: {refusal}")
    return engine


def speed_up(model: PreTrainedModel, engine: str, reading: Reading = READS_ALL) -> PreTrainedModel:
    """Return the model under a chosen engine. A packed one is changed in place: it can no longer be saved or trained.

    Args:
        model: in evaluation mode.
        engine: from `choose_engine`.
        reading: how it can be read.
    """
    if engine == "compact":
        compact = CompactModel(model)
        if compact.device.type == "cpu":
            choose_layouts(compact.products, partial(_steps_of, compact))
        return compact  # type: ignore[return-value]
    if engine == "packed":
        pack(model, partial(_steps_of, model, reading))
    return model


@torch.inference_mode()
def _steps_of(model: Any, reading: Reading = READS_ALL) -> Step:
    """Return what takes a step of a model after a short text, and its seconds."""
    config = model.config.get_text_config()
    longest = max(ORDER)
    reads = getattr(config, "max_position_embeddings", None) or BEFORE + longest
    before = max(1, min(BEFORE, reads - longest))
    vocabulary = scored_tokens(model)
    tokens = torch.arange(before + longest)[None] % vocabulary
    cache = CachedModel(model, before + longest, vocabulary, reading=reading)
    cache.read(tokens[:, :before], 1)

    def step(rows: int) -> float:
        begin = time.perf_counter()
        cache.read(tokens[:, before : before + rows])
        seconds = time.perf_counter() - begin
        cache.roll_back(before)
        return seconds

    return step


def layouts_of(model: PreTrainedModel) -> str:
    """Return in which layouts a model multiplies, for people: by class of rows, and how many of its products do."""
    products = model.products if isinstance(model, CompactModel) else []
    products = products or _packed(model)
    counts = Counter("/".join(dict.fromkeys(product.layouts)) for product in products)
    return ", ".join(f"{layouts} ({count})" for layouts, count in counts.most_common()) or "linear"


def pack(module: nn.Module, steps: Callable[[], Step] | None = None) -> None:
    """Have every linear layer multiply in the fastest layout, in place: the module cannot be saved, trained or moved then.

    Args:
        module: a model, or a part of one.
        steps: see `choose_layouts`.
    """
    _pack(module)
    choose_layouts(_packed(module), steps)


def _packed(module: nn.Module) -> list[Product]:
    return [layer.product for layer in module.modules() if isinstance(layer, PackedLinear)]


def _reads_weights(module: nn.Module) -> bool:
    """Whether the forward of a module reads the weight of a layer in it, as some routers of experts do."""
    return "weight" in getattr(inspect.unwrap(type(module).forward), "__code__", _NO_CODE).co_names


def _pack(module: nn.Module) -> None:
    reads_weights = _reads_weights(module)
    for name, child in module.named_children():
        if is_modified(child) or (isinstance(child, nn.Linear) and type(child) is not nn.Linear):
            continue  # quantised, adapted or patched: it computes something else, and may read the weights inside it
        if reads_weights and isinstance(child, nn.Linear | Conv1D):
            continue
        if type(child) is nn.Linear:
            setattr(module, name, PackedLinear(child.weight.data, None if child.bias is None else child.bias.data))
        elif isinstance(child, Conv1D):  # GPT-2 keeps its weights transposed
            setattr(module, name, PackedLinear(child.weight.data.t().contiguous(), child.bias.data))
        else:
            _pack(child)
