"""CUDA graphs: what a function has a device do is recorded once and played again, one launch in the place of hundreds."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch

from ....policies.errors import SpecstopWarning

Out = TypeVar("Out")

_RECORDING = threading.Lock()
"""A process records one graph at a time."""


class Recorder:
    """Records functions for one device, whichever is the current one; all of them share one pool of memory.

    Attributes:
        works: whether there is something to record on, and no recording has failed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self.works = device, device.type == "cuda"
        self._pool: Any = None
        self._stream: Any = None  # torch's own lies on whichever device was the current one when it first recorded

    def record(self, run: Callable[[], Out]) -> Callable[[], Out] | None:
        """Return what does as `run` does and returns the very same tensors each time; None, with a warning, where it cannot.

        `run` has been called before: by then kernels are chosen and their workspaces allocated. It must wait for nothing and
        read nothing back, so a model that does (experts that count their tokens, say) cannot be recorded.
        """
        with _RECORDING, torch.cuda.device(self._device):
            before = torch.cuda.current_stream(self._device)
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            self._stream = self._stream or torch.cuda.Stream(self._device)
            graph = torch.cuda.CUDAGraph()
            try:
                # A server's other threads go on allocating while this one records.
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                    out = run()
            except RuntimeError as error:
                torch.cuda.set_stream(before)  # torch stays in the stream of a recording that it cannot end
                self.works = False
                # What ended it comes first; that it could not be ended, in its place.
                reason = str(error.__context__ or error).strip().partition("\n")[0]
                warnings.warn(
                    f"calls on {self._device} cannot be recorded and run as they are, which is slower ({reason})",
                    SpecstopWarning,
                    stacklevel=2,
                )
                return None

        def play() -> Out:
            with torch.cuda.device(self._device):
                graph.replay()
            return out

        return play


@dataclass(kw_only=True)
class Recorded(Generic[Out]):
    """Calls of one shape: the first is made as it is, which warms up; the next is recorded, and played from then on.

    Attributes:
        fresh: calls of all shapes so far that were not merely played.
    """

    fresh: ClassVar[int] = 0
    used: bool = False
    play: Callable[[], Out] | None = None
    inherited: bool = False  # recorded for an earlier `CudaGraphModel`
    size: int = 0  # bytes of the tensors that it keeps

    def answer(self, recorder: Recorder, forward: Callable[[], Out]) -> Out:
        """Make a call, whose tensors the next one of this shape writes to again."""
        if self.play is None:
            Recorded.fresh += 1
            self.play = recorder.record(forward) if self.used else None
        self.used = True
        return forward() if self.play is None else self.play()


def filled_up(count: int) -> int:
    """Return the next of the few sizes that are recorded, of tokens in a call or of rows that are read.

    Powers of two up to 8, steps of 8 up to 64, and beyond them four sizes between a power of two and the next.
    """
    if count <= 8:
        return 1 << (count - 1).bit_length()
    step = max(8, 1 << ((count - 1).bit_length() - 3))
    return -(-count // step) * step
