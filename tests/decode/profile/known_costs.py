"""Simulated clocks: one advances by known costs of the models, the other by a tick whenever it is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from specstop.decode.hooks import Timer
from specstop.decode.model_source import ModelSource
from specstop.decode.models.attention import Part
from specstop.decode.models.cache import CachedModel
from specstop.decode.models.pair import Pair
from specstop.decode.verify.sampler import Sampler

DEPTH, PROMPTS = 4, [[6 + (7 * i + j) % 40 for j in range(12)] for i in range(5)]
TICK = 1e-5
EXACT = 1e-6  # rounding of sums and differences near 1 s
STEP, ROUND, DRAFT, SECOND, FURTHER, TARGET, ROW = 3e-5, 2e-4, 1e-3, 3e-4, 2e-5, 4e-3, 1e-4
STREAM, DRAFT_TOKEN = 2e-4, 5e-5


def _advance_on_commit(now: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    commit = ModelSource.commit

    def timed_commit(self: ModelSource, *args: Any) -> Any:
        now[0] += ROUND
        return commit(self, *args)

    monkeypatch.setattr(Timer, "now", lambda self: now[0])
    monkeypatch.setattr(ModelSource, "commit", timed_commit)


def known_clock(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the clock of single texts. Its second entry is the target's cost of a token of context."""
    now = [0.0, 0.0]
    read, call = CachedModel.read, Sampler.__call__

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

    _advance_on_commit(now, monkeypatch)
    monkeypatch.setattr(CachedModel, "read", timed_read)
    monkeypatch.setattr(Sampler, "__call__", timed_call)
    return now


def known_batch_clock(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let verifications cost by streams and tokens, and draft steps by tokens."""
    now = [0.0]

    def timed(method: str) -> None:
        stock = getattr(CachedModel, method)

        def read(self: CachedModel, parts: Any) -> torch.Tensor:
            reads: Sequence[Part] = [parts] if isinstance(parts, Part) else parts
            tokens = sum(len(part.tokens) for part in reads)
            is_target = self.original is pair.target
            now[0] += TARGET + STREAM * len(reads) + ROW * tokens if is_target else DRAFT + DRAFT_TOKEN * tokens
            return stock(self, parts)

        monkeypatch.setattr(CachedModel, method, read)

    _advance_on_commit(now, monkeypatch)
    timed("_read_packed")
    timed("_read_alone")


def ticking_clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a clock that advances by `TICK` with each reading."""
    now = [0.0]

    def read_clock(self: Timer) -> float:
        now[0] += TICK
        return now[0]

    monkeypatch.setattr(Timer, "now", read_clock)
    return now
