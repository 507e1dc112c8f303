"""Calls of one model by tokens and context, beside the time that their bytes take at the bandwidth of a copy."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from bars import Bars
from specstop.decode.models import attention as attention_module
from specstop.decode.models.attention import Part
from specstop.decode.models.cache import CachedModel
from specstop.decode.models.cuda import KEPT, open_cache
from specstop.decode.models.device import Compiled
from specstop.decode.models.view import token_bytes


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    pair: tuple[str, str]
    device: str
    dtype: torch.dtype
    contexts: tuple[int, ...]
    rows: tuple[int, ...]
    prompt: int
    tokens: int
    prompts: int
    repeats: int


def waited(run: Callable[[], object], device: str, repeats: int) -> float:
    """Return the median seconds of a call, the device's work included."""
    seconds = []
    for number in range(repeats + 3):
        if device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        if number >= 3:
            seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def bandwidth(size: Size) -> float:
    """Return the bytes a second of a copy within the device's memory, those read and those written."""
    count = 1 << (32 if size.device == "cuda" else 24)
    source = torch.empty(count, dtype=torch.uint8, device=size.device).random_()
    copy = torch.empty_like(source)
    return 2 * count / waited(lambda: copy.copy_(source), size.device, size.repeats)


def step_bytes(model: Any, context: int) -> int:
    """Return what a step has to read: every weight but the embedding's, and the cache."""
    weights = sum(p.numel() for p in model.parameters()) - model.get_input_embeddings().weight.numel()
    return int(weights * model.dtype.itemsize + context * token_bytes(model))


@torch.inference_mode()
def steps(model: Any, plain: Any, name: str, size: Size, rate: float, most: float, bars: Bars) -> None:
    """Time calls by tokens and context, beside the time that their bytes take; with single parts left out, too.

    Args:
        model: as the engine runs it; `plain` as the library does.
        name, size, rate, most: of the model, the run, bytes a second, and the most that is allowed.
        bars: see `Bars`.
    """
    figures = bars.figures[name] = {}
    variants: dict[str, contextlib.AbstractContextManager[Any]] = {
        "whole": contextlib.nullcontext(),
        "library's modules": contextlib.nullcontext(),
        "keys undivided": mock.patch.object(attention_module, "is_divided", lambda query, key, mask: False),
        "operations one by one": mock.patch.object(Compiled, "works", False),
        "not recorded": mock.patch(f"{__name__}.open_cache", CachedModel),
    }
    print(
        f"\n{name}: ms a call (times its bytes' time)\n{'':<22}{'context':>8}" + "".join(f"{n:>15}" for n in size.rows)
    )
    for variant, changed in variants.items():
        for context in size.contexts if variant in ("whole", "library's modules") else size.contexts[-1:]:
            floor = step_bytes(plain, context) / rate
            with changed:
                row = calls(plain if variant == "library's modules" else model, context, size)
            figures[f"{variant}, {context}"] = {"floor_ms": 1e3 * floor, **{f"{n}": 1e3 * s for n, s in row.items()}}
            cells = "".join(f"{1e3 * s:>8.3f} ({s / floor:4.2f})" for s in row.values())
            print(f"{variant:<22}{context:>8}{cells}", flush=True)
    middle = size.contexts[len(size.contexts) // 2]
    reached = figures[f"whole, {middle}"]
    times = reached["1"] / reached["floor_ms"]
    text = f"{times:.2f} of bytes over bandwidth at {middle} tokens; at most {most}"
    if size.device == "cuda":
        bars.add(f"{name} step", times, times <= most, text)


def calls(model: Any, context: int, size: Size) -> dict[int, float]:
    """Return the seconds of a call by its tokens, after `context` tokens."""
    KEPT.clear()  # what another variant has recorded
    cache = open_cache(model, context + max(size.rows), model.config.vocab_size)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(model.config.vocab_size, (1, context), generator=generator).to(size.device)
    cache.read(tokens, 1)
    found = {}
    for count in size.rows:

        def call(count: int = count) -> None:
            cache.roll_back(context)
            cache.read_parts([Part(0, tokens[0, :count])])

        found[count] = waited(call, size.device, size.repeats)
    return found
