"""Short hashes by which traces, policies and drafters know a model."""

from __future__ import annotations

import hashlib

import torch
from transformers import PreTrainedModel

from ..placement import tensors

ADAPTED = "specstop_adapted_hash"
"""Attribute of a model whose adapter was applied on loading: the hash of both, however the adapter was applied."""

_SAMPLES = 64


def model_hash(model: PreTrainedModel) -> str:
    """Return a hash of a model's parameter names and shapes and of a spread sample of their values, adapters included.

    Values are rounded to bfloat16, so that a checkpoint has one hash loaded in that, in float32 or in float64. In float16 it
    has another one: what that loses of a value cannot be had again.
    """
    if known := getattr(model, ADAPTED, ""):
        return str(known)
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in tensors(model):
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // _SAMPLES)][:_SAMPLES]
        if sample.is_floating_point() and sample.dtype.itemsize == 1:
            sample = sample.view(torch.uint8)  # not every type of eight bits can be converted
        rounded = sample.to("cpu", torch.bfloat16 if sample.is_floating_point() else torch.float32).float()
        digest.update(f"{name} {tuple(tensor.shape)} ".encode() + rounded.numpy().tobytes())
    for name, module in model.named_modules():
        if hasattr(module, "active_adapters") and hasattr(module, "scaling"):  # a layer of peft
            digest.update(f"{name} {module.active_adapters} {module.disable_adapters} {module.scaling}".encode())
    return digest.hexdigest()
