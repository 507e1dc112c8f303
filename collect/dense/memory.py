"""How much memory dense collection takes for rows as wide as the vocabulary: a share of what the device has free."""

from __future__ import annotations

from pathlib import Path

import torch

_MIB = 1 << 20
_MEMINFO = Path("/proc/meminfo")

SHARE = {"cuda": 1 / 4, "cpu": 1 / 16}
"""Of what is free. Weights and caches lie beside it, on the CPU other processes of the same run too."""

MOST_MIB = {"cuda": 16_384, "cpu": 1_024}
"""Beyond which nothing is gained: all texts of a batch are side by side."""

LEAST_MIB = 64
UNKNOWN_MIB = 256
"""Where nobody says what is free."""


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that a device has free, of the host those that can be had without swapping; None = unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu" or not _MEMINFO.exists():
        return None
    fields = dict(line.split(":", 1) for line in _MEMINFO.read_text(encoding="ascii").splitlines() if ":" in line)
    return int(fields["MemAvailable"].split()[0]) << 10 if "MemAvailable" in fields else None


def budget_mib(device: torch.device) -> int:
    """Return the MiB that collection takes on a device unless it is told: a cautious share of what is free, up to a cap."""
    free = free_bytes(device)
    if free is None:
        return UNKNOWN_MIB
    return max(LEAST_MIB, min(MOST_MIB[device.type], int(free * SHARE[device.type]) // _MIB))
