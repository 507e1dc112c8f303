"""Support for GPUs: transfers without waiting, compiled elementwise functions, CUDA graphs and logits in float32."""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from ...policies.errors import SpecstopWarning

if TYPE_CHECKING:  # verification modes use this module in replay, which does without transformers
    from transformers import PreTrainedModel

Args = ParamSpec("Args")
Out = TypeVar("Out")


def upload(values: Any, device: torch.device) -> Tensor:
    """Return an array, or nested lists of integers, as a tensor on the device, without waiting for the device."""
    if device.type == "cpu":  # three times as fast as `torch.tensor`
        return torch.from_numpy(np.array(values, dtype=None if isinstance(values, np.ndarray) else np.int64))
    host = torch.from_numpy(values) if isinstance(values, np.ndarray) else torch.tensor(values, device="cpu")
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


def to_host(*tensors: Tensor) -> list[Tensor]:
    """Return tensors on one device as tensors on the host, which waits once for all of them."""
    if tensors[0].device.type == "cpu":
        return list(tensors)
    # Float64 holds float32 and token ids exactly.
    packed = torch.cat([tensor.flatten().to(torch.float64) for tensor in tensors]).cpu()
    parts = packed.split([tensor.numel() for tensor in tensors])
    return [part.to(tensor.dtype).view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def download(*tensors: Tensor) -> list[list[Any]]:
    """Return tensors on one device as nested lists. The host waits once for all of them."""
    return [tensor.tolist() for tensor in to_host(*tensors)]


class Compiled:
    """State shared by all fused functions: whether torch can compile (it needs Triton and a C compiler)."""

    works = True


def fused(function: Callable[Args, Out]) -> Callable[Args, Out]:
    """Compile an elementwise function to one kernel if its first argument is on a GPU; elsewhere it runs as it is.

    Each small operation takes a GPU two microseconds. Between two products of a layer there are a dozen.
    """

    @functools.cache
    def compiled() -> Callable[Args, Out]:
        return torch.compile(function, dynamic=True)  # importing the compiler takes seconds

    @functools.wraps(function)
    def run(*args: Args.args, **kwargs: Args.kwargs) -> Out:
        if not (Compiled.works and isinstance(args[0], Tensor) and args[0].device.type == "cuda"):
            return function(*args, **kwargs)
        try:
            return compiled()(*args, **kwargs)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # of torch, Triton or the C compiler
            out = function(*args, **kwargs)  # raises if the function itself is at fault
            Compiled.works = False
            reason = str(error).strip().partition("\n")[0]
            warnings.warn(f"torch cannot compile for this GPU; decoding is slower ({reason})", SpecstopWarning, 2)
            return out

    return run


class Copy:
    """A copy of a tensor to the host, which is not waited for until `wait`."""

    def __init__(self, values: Tensor) -> None:
        self._values = values.to("cpu", non_blocking=True)
        self._copied = torch.cuda.current_stream(values.device).record_event() if values.is_cuda else None

    def has_arrived(self) -> bool:
        """Whether the copy is complete."""
        return self._copied is None or self._copied.query()

    def wait(self) -> Tensor:
        """Return the copy."""
        if self._copied is not None and not self._copied.query():
            self._copied.synchronize()
        return self._values


_RECORDING = threading.Lock()
"""A process records one graph at a time."""


class Recorder:
    """Records functions as CUDA graphs on one device. All graphs share one memory pool.

    Attributes:
        works: Whether the device is a GPU and no recording has failed.
        skips: Whether a recording does nothing while its flag is false; None = not tried yet.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self.works = device, device.type == "cuda"
        self.skips: bool | None = None if hasattr(torch.cuda.CUDAGraph, "begin_capture_to_if_node") else False
        self._pool: Any = None
        self._stream: Any = None  # torch's default stream belongs to the device that recorded first

    def can_skip(self, device: torch.device) -> bool:
        """Return whether recordings on tensors of `device` can be skipped, which depends on CUDA, its driver and torch."""
        if self.works and self.skips is None:
            count, needed = torch.zeros((), device=device), torch.zeros((), dtype=torch.bool, device=device)
            if play := self._capture(lambda: count.add_(1.0), needed):
                count.zero_()
                for flag in (False, True):
                    needed.fill_(flag)
                    play()
            self.skips = count.item() == 1.0
        return self.works and bool(self.skips)

    def record(self, run: Callable[[], Out], needed: Tensor | None = None) -> Callable[[], Out] | None:
        """Return a function that repeats `run` and returns the same tensors each time; None, with a warning, if it fails.

        Args:
            run: must have been called before, so that workspaces are allocated. It must not read from the device.
            needed: [] bool on the device. While it is false the recording does nothing, if the recorder `skips`.
        """
        if needed is not None and self.skips:
            if play := self._capture(run, needed):
                return play
            self.skips = False
        return self._capture(run)

    def _capture(self, run: Callable[[], Out], needed: Tensor | None = None) -> Callable[[], Out] | None:
        with _RECORDING, torch.cuda.device(self._device):
            before = torch.cuda.current_stream(self._device)
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            self._stream = self._stream or torch.cuda.Stream(self._device)
            graph = torch.cuda.CUDAGraph()
            try:
                # Other threads may allocate memory during the recording.
                with (
                    torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
                    contextlib.ExitStack() as body,
                ):
                    if needed is not None:
                        graph.begin_capture_to_if_node(needed)
                        body.callback(graph.end_capture_to_conditional_node)
                    out = run()
            except RuntimeError as error:
                torch.cuda.set_stream(before)  # torch stays in the stream of a failed recording
                if needed is not None:
                    return None
                self.works = False
                reason = str(error.__context__ or error).strip().partition("\n")[0]
                text = f"calls on {self._device} cannot be recorded as CUDA graphs; decoding is slower ({reason})"
                warnings.warn(text, SpecstopWarning, stacklevel=2)
                return None

        def play() -> Out:
            with torch.cuda.device(self._device):
                graph.replay()
            return out

        return play


@dataclass(kw_only=True)
class Recorded(Generic[Out]):
    """Calls of one shape: the first runs as it is, the second is recorded, all later ones are played.

    Attributes:
        not_replayed: Number of calls of all shapes so far that were not played.
    """

    not_replayed: ClassVar[int] = 0
    used: bool = False
    play: Callable[[], Out] | None = None

    def run_or_replay(self, recorder: Recorder, forward: Callable[[], Out], needed: Tensor | None = None) -> Out:
        """Run a call; see `Recorder.record`. The next call of this shape overwrites the returned tensors."""
        if self.play is None:
            Recorded.not_replayed += 1
            self.play = recorder.record(forward, needed) if self.used else None
        self.used = True
        return forward() if self.play is None else self.play()


def round_up_size(count: int) -> int:
    """Return the next recorded size: powers of two up to 8, steps of 8 up to 64, then four sizes per power of two."""
    if count <= 8:
        return 1 << (count - 1).bit_length()
    step = max(8, 1 << ((count - 1).bit_length() - 3))
    return -(-count // step) * step


def can_widen(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products of half-precision tensors can be returned in float32."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return device.type == "cuda" and dtype in (torch.float16, torch.bfloat16) and version >= (2, 8)


def wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + b in float32. In bfloat16, logits near 16 are rounded to multiples of 1/8 and the best two tie."""
    out = torch.mm(x.reshape(-1, x.shape[-1]), weight.t(), torch.float32)
    wide: Tensor = (out if bias is None else out + bias).view(*x.shape[:-1], len(weight))
    return wide


def widen(view: PreTrainedModel) -> None:
    """Let a view return float32 logits if half precision would round them. Other output layers stay as they are."""
    from .placement import is_plain

    head: Any = getattr(view, "get_output_embeddings", lambda: None)()
    plain = type(head) is nn.Linear and is_plain(head.weight) and "forward" not in vars(head)
    if plain and can_widen(view.device, view.dtype):
        # The module is the view's copy.
        head.forward = functools.partial(wide_linear, weight=head.weight, bias=head.bias)
