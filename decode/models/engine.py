"""How a model computes: the library's modules, the same with reordered weights, or a compact forward.

| engine | what | for |
|---|---|---|
| `plain` | transformers' modules as they are | everything; the reference |
| `packed` | the same, every linear's weight reordered once for oneDNN | CPU, float32 and bfloat16 |
| `compact` | one forward of few operations, fused projections, reordered weights | CPU, Llama family, `sdpa` |

Stock matrix products on a CPU read the weights several times for 2 to 8 rows; a reordered weight is read once, so that
verifying costs little more than one step. All three give the library's logits within float rounding.
"""

from __future__ import annotations

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ...policies.errors import InputError
from .compact import CompactModel, compact_refusal
from .packing import Packed, can_pack

ENGINES = ("auto", "plain", "packed", "compact")


class PackedLinear(nn.Module):
    """A linear layer whose weight is kept in the order that oneDNN reads.

    Args:
        weight: [out, in].
        bias: [out] or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.packed = Packed(weight, bias)
        self.out_features, self.in_features = weight.shape

    def forward(self, input: Tensor) -> Tensor:
        """Return [..., out]."""
        return self.packed(input)


def choose_engine(model: PreTrainedModel, engine: str = "auto") -> str:
    """Return the engine for a model; `auto` is the fastest that can run it.

    Raises:
        InputError: unknown, or one that cannot run this model; the message says why.
    """
    if engine not in ENGINES:
        raise InputError(f"--engine: expected one of {', '.join(ENGINES)}, not {engine!r}")
    unpackable, uncompact = can_pack(model.device, model.dtype), compact_refusal(model)
    if engine == "auto":
        return "compact" if not uncompact and not unpackable else "plain" if unpackable else "packed"
    refusal = {"packed": unpackable, "compact": uncompact}.get(engine)
    if refusal:
        raise InputError(f"--engine {engine}: {refusal}")
    return engine


def speed_up(model: PreTrainedModel, engine: str) -> PreTrainedModel:
    """Return the model under a chosen engine. A packed one is changed in place: it can no longer be saved or trained.

    Args:
        model: in evaluation mode.
        engine: from `choose_engine`.
    """
    if engine == "compact":
        return CompactModel(model)  # type: ignore[return-value]
    if engine == "packed":
        pack(model)
    return model


def pack(module: nn.Module) -> None:
    """Reorder the weight of every linear layer, in place: the module can no longer be saved, trained or moved."""
    for name, child in module.named_children():
        if type(child) is nn.Linear:
            setattr(module, name, PackedLinear(child.weight.data, None if child.bias is None else child.bias.data))
        elif isinstance(child, Conv1D):  # GPT-2 keeps its weights transposed
            setattr(module, name, PackedLinear(child.weight.data.t().contiguous(), child.bias.data))
        else:
            pack(child)
