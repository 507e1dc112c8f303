"""Clocks that only known work moves, and what it costs on them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from specstop.decode.hooks import Timer
from specstop.decode.model_source import ModelSource
from specstop.decode.models.cache import CachedModel
from specstop.decode.models.pair import Pair
from specstop.decode.verify.sampler import Sampler

DEPTH = 4
PROMPTS = [[6 + (7 * i + j) % 40 for j in range(12)] for i in range(5)]
TICK = 1e-5
EXACT = 1e-6  # sums and differences of a clock near 1 s
STEP, ROUND, DRAFT, SECOND, FURTHER, TARGET, ROW = 3e-5, 2e-4, 1e-3, 3e-4, 2e-5, 4e-3, 1e-4


def known_clock(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a clock that only known work moves; its second entry is the price of a token of context to the target."""
    now = [0.0, 0.0]
    read, call, commit = CachedModel.read, Sampler.__call__, ModelSource.commit

    def timed_read(self: CachedModel, tokens: torch.Tensor, *args: object, **more: object) -> torch.Tensor:
        count = tokens.shape[1]
        if self.original is pair.target:
            now[0] += TARGET + ROW * count + now[1] * self.length
        else:
            now[0] += DRAFT + (SECOND if count > 1 else 0.0) + FURTHER * max(0, count - 2)
        return read(self, tokens, *args, **more)

    def timed_call(self: Sampler, *args: object) -> torch.Tensor:
        now[0] += STEP
        return call(self, *args)

    def timed_commit(self: ModelSource, *args: Any) -> Any:
        now[0] += ROUND
        return commit(self, *args)

    monkeypatch.setattr(Timer, "now", lambda self: now[0])
    monkeypatch.setattr(CachedModel, "read", timed_read)
    monkeypatch.setattr(Sampler, "__call__", timed_call)
    monkeypatch.setattr(ModelSource, "commit", timed_commit)
    return now


def ticking_clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a clock that goes on by `TICK` with each look at it, as a real one does however short the work."""
    now = [0.0]

    def look(self: Timer) -> float:
        now[0] += TICK
        return now[0]

    monkeypatch.setattr(Timer, "now", look)
    return now
