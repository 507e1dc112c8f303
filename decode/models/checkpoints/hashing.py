"""Short hashes that identify a model in traces, policies and drafters."""

from __future__ import annotations

import hashlib

import torch
from transformers import PreTrainedModel

from ..placement import tensors

ADAPTED = "specstop_adapted_hash"
"""Attribute of a model with an adapter applied on loading: the hash of both, whether or not the adapter was merged."""

_SAMPLES = 64


def model_hash(model: PreTrainedModel) -> str:
    """Return a hash of the names, shapes and evenly spaced sample values of all parameters, including those of adapters.

    Values are rounded to bfloat16, so that a checkpoint has the same hash in bfloat16, float32 and float64. In float16 its
    hash may differ, because conversion to float16 loses information.
    """
    if stored := getattr(model, ADAPTED, ""):
        return str(stored)
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in tensors(model):
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // _SAMPLES)][:_SAMPLES]
        if sample.is_floating_point() and sample.dtype.itemsize == 1:
            sample = sample.view(torch.uint8)  # some 8-bit types cannot be converted
        rounded = sample.to("cpu", torch.bfloat16 if sample.is_floating_point() else torch.float32).float()
        digest.update(f"{name} {tuple(tensor.shape)} ".encode() + rounded.numpy().tobytes())
    for name, module in model.named_modules():
        if hasattr(module, "active_adapters") and hasattr(module, "scaling"):  # an adapter layer of peft
            digest.update(f"{name} {module.active_adapters} {module.disable_adapters} {module.scaling}".encode())
    return digest.hexdigest()
