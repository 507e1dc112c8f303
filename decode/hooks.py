"""Hooks, with which collectors, benchmarks and tests observe the loop, and the timer of its phases."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

import torch

from .round_state import RoundState


class Hook:
    """Observes the rounds of a loop. Subclasses override the methods that they need and are passed to `Speculator`.

    Tensors of a round may be kept but not changed. The measured time of a round includes `on_draft_step` and `on_verified`,
    so they must be fast. It does not include the other methods.
    """

    def on_draft_step(self, round: RoundState, depth: int) -> None:
        """Observe the candidates of a depth, just drawn from `round.levels[depth - 1]`."""

    def on_verified(self, round: RoundState) -> None:
        """Observe the accepted paths, before they are committed."""

    def on_round_end(self, round: RoundState) -> None:
        """Observe the round after its tokens were committed and its `records` were written."""


class Timer:
    """Seconds by phase of a round: draft, verify, policy.

    On CUDA a lap is the time between two events, for which the host does not wait. Rounds are timed by the host's clock,
    without a wait either: a round contains the wait for its accepted path, and what is left of it counts to the next round.

    Args:
        device: device to time; None = no timing.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device, self._on_cuda = device, device is not None and device.type == "cuda"
        self._laps: defaultdict[str, list[float]] = defaultdict(list)
        self._pending: list[tuple[str, Any, Any]] = []
        self._begun = 0.0

    def now(self) -> float:
        """Return the time of the host's clock."""
        return time.perf_counter()

    def wait(self) -> float:
        """Wait for the device and return the time."""
        if self._on_cuda:
            torch.cuda.synchronize(self._device)
        return self.now()

    def mark(self, on_host: bool = False) -> Any:
        """Return the start of a lap, for `add`. The host's clock times laps `on_host`, which use no device."""
        return self._event() if self._on_cuda and not on_host else self.now()

    def add(self, phase: str, mark: Any) -> None:
        """Add the lap since `mark` to a phase."""
        if not isinstance(mark, float):
            self._pending.append((phase, mark, self._event()))
        elif self._device is not None:
            self._laps[phase].append(self.now() - mark)

    def restart(self) -> None:
        """Discard all laps and begin a round."""
        self._pending.clear()
        self._laps.clear()
        self._begun = self.now()

    def elapsed(self) -> float:
        """Return the seconds since `restart`."""
        return self.now() - self._begun

    @property
    def laps(self) -> defaultdict[str, list[float]]:
        """Seconds of each lap since `restart`, by phase."""
        if self._pending and not self._pending[-1][2].query():
            self._pending[-1][2].synchronize()  # events of a stream complete in order
        for phase, begin, end in self._pending:
            self._laps[phase].append(begin.elapsed_time(end) * 1e-3)
        self._pending.clear()
        return self._laps

    def _event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


NO_TIMER = Timer()
