"""A compact forward for models built like Llama: what they compute, in few operations.

Small models spend most of their time between the matrix products, and on a GPU large ones a third of it. Here query, key and
value are one product, gate and up another; norms are four operations, on a GPU one; a rotation is three for all heads; the
cache is written in place.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from .adapters import modified_module
from .attention import grouped_attention
from .cpu.products import Product
from .cuda.fused import fused
from .reading.layer_masks import LayerMasks
from .wide_head import can_widen, wide_linear

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_ROTATIONS = ("default", "linear", "llama3", "yarn")  # others depend on the length of the text
_TABLE = 4096  # positions whose rotations are tabulated to begin with


def compact_refusal(model: PreTrainedModel) -> str:
    """Return why a model cannot have the compact forward, or nothing."""
    config = model.config
    if config.model_type not in _FAMILIES or not hasattr(model, "lm_head"):
        return f"a compact forward exists for {', '.join(_FAMILIES)}, not for {config.model_type}"
    if model.device.type not in ("cpu", "cuda"):
        return "the compact forward is for CPUs and CUDA"
    # On a CPU its norms are composed of operations that would each round to half.
    if model.device.type == "cpu" and model.dtype not in (torch.float32, torch.float64):
        return f"on a CPU the compact forward computes in float32 or float64, not {str(model.dtype).removeprefix('torch.')}"
    if config._attn_implementation != "sdpa":
        return f"the compact forward attends by sdpa, not {config._attn_implementation}"
    if LayerMasks.of(model) is not None:
        return "the compact forward has no sliding windows"
    rotation = config.rope_parameters["rope_type"]
    if rotation not in _ROTATIONS or config.hidden_act != "silu":
        return f"the compact forward does not know {rotation} rotations with {config.hidden_act}"
    if modified := modified_module(model):
        return f"the compact forward reads plain layers, not {modified}"
    if any(type(p) is not nn.Linear for p in (model.lm_head, *_linears(model.model.layers[0]))):
        return "its linear layers are not plain ones"
    return ""


def _linears(layer: Any) -> list[Any]:
    attention, mlp = layer.self_attn, layer.mlp
    projections = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    return [*projections, mlp.gate_proj, mlp.up_proj, mlp.down_proj]


class _Layer:
    """The weights of one layer."""

    def __init__(self, layer: Any) -> None:
        q, k, v, out, gate, up, down = _linears(layer)
        self.qkv, self.out = _joined(q, k, v), _joined(out)
        self.gate_up, self.down = _joined(gate, up), _joined(down)
        attention = layer.self_attn
        self.before, self.between = _Norm(layer.input_layernorm), _Norm(layer.post_attention_layernorm)
        self.q_norm = _Norm(attention.q_norm) if hasattr(attention, "q_norm") else None
        self.k_norm = _Norm(attention.k_norm) if hasattr(attention, "k_norm") else None


def _joined(*linears: nn.Linear) -> Product:
    """Return several linear layers of one input as a single one; their own weights become views of its weight."""
    biases = [linear.bias.data for linear in linears if linear.bias is not None]
    bias = torch.cat(biases) if biases else None
    if len(linears) == 1:
        return Product(linears[0].weight.data, bias)
    weight = torch.cat([linear.weight.data for linear in linears])
    # Else all of a model would be on the device twice while it is loaded, and later wherever the library's is kept.
    for linear, own in zip(linears, weight.split([linear.out_features for linear in linears]), strict=True):
        linear.weight.data = own
    return Product(weight, bias)


@fused
def _rotated(qk: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return [B, heads, n, width] of queries and keys [B, n, heads, width]: x cos + rotate_half(x) sin.

    The sign of rotate_half lies in the sine (`_rotation`).
    """
    return torch.addcmul(qk * cos, qk.roll(qk.shape[-1] // 2, -1), sin).transpose(1, 2)


@fused
def _rotation(frequencies: Tensor, positions: Tensor, scaling: float) -> Tensor:
    """Return [..., 2, 1, width] of positions [...]: cosine, and sine whose first half has rotate_half's sign."""
    half = positions[..., None].float() * frequencies.float()
    cos, sin = half.cos() * scaling, half.sin() * scaling
    return torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], -2)[..., None, :]


@fused
def _gated(both: Tensor) -> Tensor:
    """Return silu(gate) * up of [..., gate and up]."""
    gate, up = both.chunk(2, -1)
    return functional.silu(gate) * up


@fused
def _added(x: Tensor, more: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x + more, and its root mean square norm."""
    total = x + more
    wide = total.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return total, (scaled * weight).to(x.dtype)


class _Norm:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis.

    torch's `rms_norm` is one operation on a GPU. On a CPU it is a dozen and takes twice as long as this: |x| / sqrt(n) is the
    root of the mean of n squares, and a hypotenuse adds eps under it.
    """

    def __init__(self, norm: Any) -> None:
        weight, size = norm.weight.data, len(norm.weight)
        self._plain, self._eps = weight, norm.variance_epsilon
        self._weight = weight * size**0.5
        self._floor = torch.tensor(norm.variance_epsilon * size, dtype=weight.dtype, device=weight.device).sqrt()

    def added(self, x: Tensor, more: Tensor) -> tuple[Tensor, Tensor]:
        """Return x + more, and that normed."""
        if x.device.type == "cuda" and x.dtype != torch.float64:
            return _added(x, more, self._plain, self._eps)
        total = x + more
        return total, self(total)

    def __call__(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu":
            return functional.rms_norm(x, self._plain.shape, self._plain, self._eps)
        length = torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), self._floor)
        out: Tensor = (x * self._weight).div_(length)
        return out


class CompactModel(nn.Module):
    """Stands in for a model of the Llama family wherever it is only called: same arguments, same logits.

    Args:
        model: from `from_pretrained`. Its weights are shared: projections that are joined here become views there.

    Attributes:
        config, generation_config, device, dtype: the model's.
    """

    takes_no_mask = True  # None means causal, so that a single token needs no mask at all
    attends_packed = True  # as the cache says, whatever the config does

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
        self._head = _joined(model.lm_head)
        self._rotary = inner.rotary_emb
        # What is tabulated lies elsewhere once it has grown, and recorded calls would read where it lay.
        self._tabulated = self.device.type == "cpu"
        self._rotations = self._angles(torch.arange(min(_TABLE, config.max_position_embeddings), device=self.device))
        self._wide = can_widen(self.device, self.dtype)
        self._grouped = self.device.type == "cuda"
        self.eval()

    def get_input_embeddings(self) -> Any:
        """Return what embeds tokens, for drafters that read them; as of a `PreTrainedModel`."""
        return lambda tokens: functional.embedding(tokens, self._embed)

    def get_output_embeddings(self) -> Any:
        """Return the output layer, for drafters that make their distributions by it; as of a `PreTrainedModel`."""
        return self._head

    @property
    def products(self) -> list[Product]:
        """The products with weights, layer by layer."""
        each = [product for layer in self._layers for product in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        return [*each, self._head]

    def _angles(self, positions: Tensor) -> Tensor:
        """Return [B, n, 2, 1, width] of positions [B, n]: cosine, and sine with the rotated half's sign."""
        rotary = self._rotary
        return _rotation(rotary.inv_freq, positions, rotary.attention_scaling).to(self.dtype)

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
        """Return `logits` [B, rows, V], and `hidden_states`, [B, n, H] before each layer and after the last, if asked for.

        Args:
            input_ids: [1, n].
            attention_mask: [1, 1, n, length + n] additive or boolean, of a packed call that of its rectangle; None = causal.
            position_ids: [1, n].
            past_key_values: a cache of `KVLayer`s, which gets the new states and says whether the call is a packed one.
            use_cache: always.
            logits_to_keep: how many of the last rows are wanted, 0 = all; or which ones, [rows].
            output_hidden_states: also return the hidden states.
        """
        count = input_ids.shape[1]
        start, packing = past_key_values.get_seq_length(), past_key_values.layers[0].packing
        end = start + count if packing is None else packing.seen
        if self._tabulated and end > len(self._rotations):
            longest = min(2 * end, max(end, self.config.max_position_embeddings))
            self._rotations = self._angles(torch.arange(longest, device=self.device))
        # The triangle of `is_causal` begins at the first key: after a prefix sdpa must be told what is seen.
        if attention_mask is None and count > 1 and start:
            seen = torch.ones(count, start + count, dtype=torch.bool, device=input_ids.device).tril_(start)
            attention_mask = seen[None, None]
        angles = self._rotations[position_ids] if self._tabulated else self._angles(position_ids)
        cos, sin = angles.unbind(2)
        x = functional.embedding(input_ids, self._embed)
        causal = count > 1 and not start
        states, more = [], x
        for number, (layer, kv) in enumerate(zip(self._layers, past_key_values.layers, strict=True)):
            x, normed = layer.before.added(x, more) if number else (x, layer.before(x))
            # Only where they are asked for: all of them at once are gigabytes of a long prompt.
            if output_hidden_states:
                states.append(x)
            x, normed = layer.between.added(
                x, self._attend(layer, kv, layer.qkv(normed), cos, sin, attention_mask, causal)
            )
            more = layer.down(_gated(layer.gate_up(normed)))
        wanted = logits_to_keep if isinstance(logits_to_keep, Tensor) else slice(-logits_to_keep, None)  # -0: all
        if not output_hidden_states:
            x, more = x[:, wanted], more[:, wanted]
        _, kept = self._norm.added(x, more)
        read = kept[:, wanted] if output_hidden_states else kept
        logits = wide_linear(read, self._head.weights, self._head.bias) if self._wide else self._head(read)
        return SimpleNamespace(logits=logits, hidden_states=(*states, kept) if output_hidden_states else None)

    def _attend(
        self, layer: _Layer, kv: Any, qkv: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, causal: bool
    ) -> Tensor:
        """Return [B, n, H] from the projections [B, n, .]."""
        batch, count, _ = qkv.shape
        heads, groups, width = self._heads, self._groups, self._width
        qkv = qkv.view(batch, count, heads + 2 * groups, width)  # queries, keys, values by head
        qk = qkv[:, :, : heads + groups]
        if layer.q_norm is not None and layer.k_norm is not None:
            qk = torch.cat([layer.q_norm(qk[:, :, :heads]), layer.k_norm(qk[:, :, heads:])], 2)
        qk = _rotated(qk, cos, sin)  # [B, heads + groups, n, width]
        keys, values = kv.update(qk[:, heads:], qkv[:, :, heads + groups :].transpose(1, 2))
        q, packing = qk[:, :heads], kv.packing
        q = q if packing is None else packing.spread(q)
        if self._grouped and mask is not None:
            out, _ = grouped_attention(self, q, keys, values, mask)
        else:
            causal = causal and mask is None
            out = functional.scaled_dot_product_attention(
                q, keys, values, mask, is_causal=causal, enable_gqa=heads != groups
            ).transpose(1, 2)
        if packing is not None:
            out = packing.gather(out)
        return layer.out(out.reshape(batch, count, heads * width))
