"""How a model computes: the library's modules, the same with packed weights, or a compact forward.

| engine | what | for |
|---|---|---|
| `plain` | transformers' modules as they are | everything; the reference |
| `packed` | the same, with the weights of linear layers reordered for oneDNN | CPU, float32 and bfloat16 |
| `compact` | one forward of few operations, on a CPU with reordered weights | Llama family, `sdpa`, CPU, CUDA |

All engines give the library's logits within float rounding. For 2 to 8 rows, stock matrix products on a CPU read the weights
several times. A reordered weight is read once, so that verifying costs little more than one step. Small models spend most of
their time between the matrix products, and large ones on a GPU a third of it. In the compact forward, query, key and value
are one product, gate and up another, and the cache is written in place.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ...policies.errors import InputError
from .attention import LayerMasks, attend, backend_mask, causal, grouped_attention, grouped_mask
from .device import can_widen, fused, wide_linear
from .placement import is_modified, modified_module, replacement_refusal

ENGINES = ("auto", "plain", "packed", "compact")

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_ROTATIONS = ("default", "linear", "llama3", "yarn")  # others depend on the length of the text

_ROWS = 16
"""Number of rows for which oneDNN chooses the order; measured best or equal for 1 to 24."""

_SMALL = 100_000
"""Elements of a weight with an axis below 256 up to which it is not reordered: a call of oneDNN takes 10 us, more than it."""


def choose_engine(model: PreTrainedModel, engine: str = "auto") -> str:
    """Return the engine for a model; `auto` is the fastest that can run it.

    Raises:
        InputError: The engine is unknown or cannot run this model.
    """
    if engine not in ENGINES:
        raise InputError(f"--engine: expected one of {', '.join(ENGINES)}, not {engine!r}")
    kept = replacement_refusal(model)
    refusals = {"packed": kept or packed_refusal(model.device, model.dtype), "compact": kept or compact_refusal(model)}
    if engine == "auto":
        if not refusals["compact"] and (model.device.type == "cuda" or not refusals["packed"]):
            return "compact"
        return "plain" if refusals["packed"] else "packed"
    if refusals.get(engine):
        raise InputError(f"--engine {engine}: {refusals[engine]}")
    return engine


def speed_up(model: PreTrainedModel, engine: str) -> PreTrainedModel:
    """Return the model under a chosen engine. A packed one is changed in place: it can no longer be saved or trained."""
    if engine == "compact":
        return CompactModel(model)  # type: ignore[return-value]
    if engine == "packed":
        pack_weights(model)
    return model


def packed_refusal(device: torch.device, dtype: torch.dtype) -> str:
    """Return why weights of this kind cannot be reordered, or an empty string."""
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return f"weights are reordered for the CPU in float32 and bfloat16, not for {device.type} in {dtype}"
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return "this build of torch has no oneDNN"
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "this processor has no fast bfloat16"
    return ""


def compact_refusal(model: PreTrainedModel) -> str:
    """Return why a model cannot have the compact forward, or an empty string."""
    config, device, dtype = model.config, model.device.type, model.dtype
    if config.model_type not in _FAMILIES or not hasattr(model, "lm_head"):
        return f"a compact forward exists for {', '.join(_FAMILIES)}, not for {config.model_type}"
    # On a CPU its norms are composed of operations that would each round to half.
    if device != "cuda" and (device != "cpu" or dtype not in (torch.float32, torch.float64)):
        return f"the compact forward is for CUDA, and for the CPU in float32 and float64, not for {device} in {dtype}"
    rotation = config.rope_parameters["rope_type"]
    if LayerMasks.of(model) is not None or config._attn_implementation != "sdpa":
        return "the compact forward attends by sdpa, with no sliding windows"
    if rotation not in _ROTATIONS or config.hidden_act != "silu":
        return f"the compact forward does not support {rotation} rotations with {config.hidden_act}"
    if modified := modified_module(model):
        return f"the compact forward reads plain layers, not {modified}"
    if any(type(p) is not nn.Linear for p in (model.lm_head, *_linears(model.model.layers[0]))):
        return "its linear layers are not plain ones"
    return ""


class PackedLinear(nn.Module):
    """A linear layer, with a reordered weight if possible.

    Args:
        weight: [out, in].
        bias: [out] or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        is_small = min(weight.shape) < 256 and weight.numel() <= _SMALL
        self.is_packed = not is_small and not packed_refusal(weight.device, weight.dtype)
        # Plain attributes: neither is a parameter, so the module has no state to save.
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS) if self.is_packed else weight
        self.bias = bias
        self._product = torch.ops.mkldnn._linear_pointwise.default if self.is_packed else None

    def forward(self, input: Tensor) -> Tensor:
        """Return [..., out]."""
        if self._product is None:
            return functional.linear(input, self.weight, self.bias)
        out: Tensor = self._product(input, self.weight, self.bias, "none", [], "")
        return out

    __call__ = forward  # hooks, which are never set here, take longer than a small product


def pack_weights(module: nn.Module) -> None:
    """Replace every plain linear layer in a module, in place: it can no longer be saved, trained or moved."""
    # Some modules read the weights of their layers themselves, such as routers of experts.
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    reads_weights = code is not None and "weight" in code.co_names
    for name, child in module.named_children():
        if is_modified(child) or (isinstance(child, nn.Linear) and type(child) is not nn.Linear):
            continue  # quantised, adapted or patched: it computes something else
        if not isinstance(child, nn.Linear | Conv1D):
            pack_weights(child)
        elif not reads_weights:
            weight = child.weight.data.t().contiguous() if isinstance(child, Conv1D) else child.weight.data
            setattr(module, name, PackedLinear(weight, None if child.bias is None else child.bias.data))


def _linears(layer: Any) -> list[Any]:
    attention, mlp = layer.self_attn, layer.mlp
    projections = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    return [*projections, mlp.gate_proj, mlp.up_proj, mlp.down_proj]


class _Layer:
    """The weights of one layer."""

    def __init__(self, layer: Any) -> None:
        q, k, v, out, gate, up, down = _linears(layer)
        self.qkv, self.out = _join_linears(q, k, v), _join_linears(out)
        self.gate_up, self.down = _join_linears(gate, up), _join_linears(down)
        attention = layer.self_attn
        self.before, self.between = _Norm(layer.input_layernorm), _Norm(layer.post_attention_layernorm)
        self.q_norm = _Norm(attention.q_norm) if hasattr(attention, "q_norm") else None
        self.k_norm = _Norm(attention.k_norm) if hasattr(attention, "k_norm") else None


def _join_linears(*linears: nn.Linear) -> PackedLinear:
    """Return several linear layers of one input as a single one. Their own weights become views of its weight."""
    biases = [linear.bias.data for linear in linears if linear.bias is not None]
    bias = torch.cat(biases) if biases else None
    if len(linears) == 1:
        return PackedLinear(linears[0].weight.data, bias)
    weight = torch.cat([linear.weight.data for linear in linears])
    # Otherwise a model would be on the device twice while it is loaded, and as long as the library's model is kept.
    for linear, view in zip(linears, weight.split([linear.out_features for linear in linears]), strict=True):
        linear.weight.data = view
    return PackedLinear(weight, bias)


@fused
def _rotate(qk: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return [B, heads, n, width] of queries and keys [B, n, heads, width]: x cos + rotate_half(x) sin."""
    out = torch.addcmul(qk * cos, qk.roll(qk.shape[-1] // 2, -1), sin).transpose(1, 2)
    return out.contiguous() if out.is_cuda else out  # in the same kernel


@fused
def _rotation(positions: Tensor, frequencies: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Return cosine and sine [B, n, 1, width] of positions [B, n]. The first half of the sine has rotate_half's sign."""
    angle = positions[..., None, None].float() * frequencies
    cos, sin = angle.cos(), angle.sin()
    return (cos, sin) if scaling == 1.0 else (cos * scaling, sin * scaling)


@fused
def _gate(both: Tensor) -> Tensor:
    """Return silu(gate) * up of [..., gate and up]."""
    gate, up = both.chunk(2, -1)
    return functional.silu(gate) * up


@fused
def _add_norm(x: Tensor, more: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x + more and its root mean square norm."""
    total = x + more
    wide = total.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return total, (scaled * weight).to(x.dtype)


class _Norm:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis."""

    def __init__(self, norm: Any) -> None:
        weight, size = norm.weight.data, len(norm.weight)
        self._plain, self._eps = weight, norm.variance_epsilon
        self._weight = weight * size**0.5
        self._floor = torch.tensor(self._eps * size, dtype=weight.dtype, device=weight.device).sqrt()

    def add(self, x: Tensor, more: Tensor) -> tuple[Tensor, Tensor]:
        """Return x + more and its norm."""
        if x.device.type == "cuda" and x.dtype != torch.float64:
            return _add_norm(x, more, self._plain, self._eps)
        total = x + more
        return total, self(total)

    def __call__(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu":
            return functional.rms_norm(x, self._plain.shape, self._plain, self._eps)
        # `rms_norm` is a dozen operations on a CPU: 2 to 5% of a round. |x| / sqrt(n) is the root mean square.
        length = torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), self._floor)
        out: Tensor = (x * self._weight).div_(length)
        return out


class CompactModel(nn.Module):
    """Stands in for a model of the Llama family wherever it is only called: same arguments, same logits.

    Args:
        model: Model from `from_pretrained`. Its weights are shared: projections that are joined here become views there.

    Attributes:
        config, generation_config, device, dtype: The model's.
    """

    attends_packed = True  # reads the packed call from the cache

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        inner, config = model.model, model.config
        self.config, self.generation_config = config, model.generation_config
        self.device, self.dtype = model.device, model.dtype
        self._heads, self._groups = config.num_attention_heads, config.num_key_value_heads
        self._width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._embed = inner.embed_tokens.weight.data
        self._layers = [_Layer(layer) for layer in inner.layers]
        self._norm = _Norm(inner.norm)
        self._head = _join_linears(model.lm_head)
        frequencies = inner.rotary_emb.inv_freq.float()
        self._frequencies = torch.cat([-frequencies, frequencies])  # the cosine is even
        self._scaling = float(inner.rotary_emb.attention_scaling)
        self._wide = can_widen(self.device, self.dtype)
        self._grouped = self.device.type == "cuda"
        self.eval()

    def get_input_embeddings(self) -> Any:
        """Return the embedding of tokens, as of a `PreTrainedModel`."""
        return lambda tokens: functional.embedding(tokens, self._embed)

    def get_output_embeddings(self) -> Any:
        """Return the output layer, as of a `PreTrainedModel`."""
        return self._head

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor,
        past_key_values: Any,
        use_cache: bool = True,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool = False,
    ) -> SimpleNamespace:
        """Return `logits` [B, R, V] and, if requested, `hidden_states`: [B, n, H] before each layer and after the last.

        Args:
            input_ids: [1, n].
            attention_mask: [1, 1, n, length + n] additive, of a packed call [S, 1, n, slots]; None = causal.
            position_ids: [1, n].
            past_key_values: A cache of `KVLayer`s.
            use_cache: Always True.
            logits_to_keep: Number of last rows of logits, 0 = all; or rows [R].
            output_hidden_states: Whether to return hidden states.
        """
        count, start = input_ids.shape[1], past_key_values.get_seq_length()
        # `is_causal` starts at the first key, so a prefix needs a mask.
        if attention_mask is None and count > 1 and start:
            attention_mask = backend_mask(causal(start, count, self.device), self.dtype)
        if attention_mask is not None and self._grouped:
            attention_mask = grouped_mask(attention_mask, self._heads, self._groups)
        rotation = _rotation(position_ids, self._frequencies, self._scaling)
        cos, sin = (part.to(self.dtype) for part in rotation)
        x = functional.embedding(input_ids, self._embed)
        states, more = [], x
        for number, (layer, kv) in enumerate(zip(self._layers, past_key_values.layers, strict=True)):
            x, normed = layer.before.add(x, more) if number else (x, layer.before(x))
            if output_hidden_states:  # all of them are gigabytes for a long prompt
                states.append(x)
            x, normed = layer.between.add(x, self._attend(layer, kv, layer.qkv(normed), cos, sin, attention_mask))
            more = layer.down(_gate(layer.gate_up(normed)))
        rows = logits_to_keep if isinstance(logits_to_keep, Tensor) else slice(-logits_to_keep, None)  # -0: all
        if not output_hidden_states:
            x, more = x[:, rows], more[:, rows]
        _, last = self._norm.add(x, more)
        read = last[:, rows] if output_hidden_states else last
        logits = wide_linear(read, self._head.weight, self._head.bias) if self._wide else self._head(read)
        return SimpleNamespace(logits=logits, hidden_states=(*states, last) if output_hidden_states else None)

    def _attend(self, layer: _Layer, kv: Any, qkv: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        """Return [B, n, H] from the projections [B, n, .]."""
        batch, count, _ = qkv.shape
        heads, groups, width = self._heads, self._groups, self._width
        qkv = qkv.view(batch, count, heads + 2 * groups, width)  # queries, keys, values by head
        qk = qkv[:, :, : heads + groups]
        if layer.q_norm is not None and layer.k_norm is not None:
            qk = torch.cat([layer.q_norm(qk[:, :, :heads]), layer.k_norm(qk[:, :, heads:])], 2)
        qk = _rotate(qk, cos, sin)  # [B, heads + groups, n, width]
        keys, values = kv.update(qk[:, heads:], qkv[:, :, heads + groups :].transpose(1, 2))
        q, call = qk[:, :heads], kv.kv.call
        q = q if call is None else call.spread(q)
        if self._grouped and mask is not None:
            out, _ = grouped_attention(self, q, keys, values, mask)
        else:
            out = attend(q, keys, values, mask, is_causal=mask is None and count > 1).transpose(1, 2)
        out = out if call is None else call.gather(out)
        return layer.out(out.reshape(batch, count, heads * width))
