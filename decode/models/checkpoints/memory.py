"""Comparison of required and available memory before weights are loaded."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from ....policies.errors import PairError
from ..placement import is_quantised
from .opening import Checkpoint, held_tensors, library_errors

_CGROUP = Path("/sys/fs/cgroup")  # limits of the container; nested cgroups are ignored


def check_memory(sides: Sequence[Checkpoint], device: torch.device, dtype: torch.dtype) -> None:
    """Raise an error if the weights of models exceed the available memory. Loading and decoding require at least that much.

    Args:
        sides: Checkpoints that are loaded entirely on `device`.
        device: Device of the models.
        dtype: Type of the weights. For quantised models, the types in their files are used instead.

    Raises:
        PairError: The models require more memory than is available.
    """
    available = available_bytes(device)
    if available is None or not sides:
        return
    needs = [_file_bytes(side, dtype) for side in sides]
    if sum(needs) <= available:
        return
    # Files may contain weights that the model does not use, such as a vision tower.
    needs = [min(need, _model_bytes(side, dtype)) for side, need in zip(sides, needs, strict=True)]
    if sum(needs) <= available:
        return
    each = ", ".join(f"{side.name} {_text(need)}" for side, need in zip(sides, needs, strict=True))
    half = "--dtype bfloat16, " if dtype.itemsize > 2 else ""
    raise PairError(
        f"{' and '.join(side.option for side in sides)}: {str(dtype).removeprefix('torch.')} weights need "
        f"{_text(sum(needs))} on {device} ({each}), but {_text(available)} of memory are available; use {half}--device-map "
        "auto for the target, or smaller models"
    )


def available_bytes(device: torch.device) -> int | None:
    """Return the bytes that can be allocated on a device, including swap and file caches; None if unknown."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return min(_host_bytes(), default=None) if device.type == "cpu" else None


def _host_bytes() -> Iterator[int]:
    """Yield upper bounds of the bytes that this process can allocate."""
    swap = 0
    with contextlib.suppress(OSError, KeyError):
        raw = Path("/proc/meminfo").read_text()
        sizes = {name: int(size) * 1024 for name, size in re.findall(r"^(\w+): +(\d+) kB", raw, re.MULTILINE)}
        swap = sizes["SwapFree"]
        yield sizes["MemAvailable"] + swap
    with contextlib.suppress(AttributeError, OSError, ValueError):  # not available on every system
        yield os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") + swap
    for limit, used, files in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        with contextlib.suppress(OSError, ValueError):  # "max" is not a number; most machines have only one of the two
            free = int((_CGROUP / limit).read_text()) - int((_CGROUP / used).read_text())
            cached = re.search(r"^(?:file|cache) (\d+)", (_CGROUP / files).read_text(), re.MULTILINE)
            yield max(0, free + (int(cached[1]) if cached else 0)) + swap


def _file_bytes(side: Checkpoint, dtype: torch.dtype) -> int:
    with library_errors(side.option, side.name, "a model"):
        stored = held_tensors(side.where).values()
    quantised = is_quantised(side.config)
    return sum(tensor.numel() * (tensor.dtype if quantised else dtype).itemsize for tensor in stored)


def _model_bytes(side: Checkpoint, dtype: torch.dtype) -> int:
    if is_quantised(side.config):
        return _file_bytes(side, dtype)
    with library_errors(side.option, side.name, "a model"), torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(side.config, dtype=dtype)
    return sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize


def _text(size: int) -> str:
    return f"{size / 1e9:.3g} GB"
