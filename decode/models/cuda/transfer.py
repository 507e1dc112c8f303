"""Numbers from the host to a device without waiting for it, and from a device to the host waiting once."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def upload(values: Any, device: torch.device) -> Tensor:
    """Return an array, or nested lists of whole numbers, as a tensor on the device.

    `torch.tensor(values, device="cuda")` waits until the device has done all it was given before; from pinned memory the copy
    takes its turn, and the host goes on.
    """
    if device.type == "cpu":
        return torch.from_numpy(np.array(values, dtype=np.int64))  # in a third of the time that `torch.tensor` takes
    # Pinned afterwards: torch refuses to make a pinned tensor of an array.
    host = torch.from_numpy(values) if isinstance(values, np.ndarray) else torch.tensor(values, device="cpu")
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


def download(*tensors: Tensor) -> list[list[Any]]:
    """Return tensors on one device as nested lists; however many there are, the host waits for it once."""
    if tensors[0].device.type == "cpu":
        return [tensor.tolist() for tensor in tensors]
    # Float64 holds float32 and token ids exactly.
    packed = torch.cat([tensor.flatten().to(torch.float64) for tensor in tensors]).cpu()
    parts = packed.split([tensor.numel() for tensor in tensors])
    return [part.to(tensor.dtype).view(tensor.shape).tolist() for part, tensor in zip(parts, tensors, strict=True)]
