"""What a reader wants to know of how a measurement was made."""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import Any

import torch

from ..decode.drafters.spec import parse_spec
from ..decode.models.pair import Pair


def facts(pair: Pair) -> dict[str, Any]:
    """Return the device, the models' setup, the packages and the time, for the header of a trace or a profile."""
    packages = ("specstop", "torch", "transformers")
    return {
        "device": torch.cuda.get_device_name(pair.device) if pair.device.type == "cuda" else str(pair.device),
        "dtype": str(pair.target.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        **({} if pair.drafter == "model" else _of_drafter(pair)),
        "versions": {name: version(name) for name in packages},
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _of_drafter(pair: Pair) -> dict[str, Any]:
    parts = parse_spec(pair.drafter)
    reading = parts[-1].attribute("reading")  # only the last drafter of a spec may have a backlog
    facts = {"drafter": pair.drafter, "draft model": pair.draft_name, "reading": reading}
    return {**facts, "in turn": True} if len(parts) > 1 else facts
