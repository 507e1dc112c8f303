"""CUDA graphs on the CPU: the operations of a function are written down, and done again on the same tensors when played."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from specstop.decode import drafters, model_source
from specstop.decode.models.cuda import CudaGraphModel
from specstop.decode.models.device import Recorder
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICE = torch.device("cuda:1")
"""The device of the simulated recordings, which is not the current one."""


class Tape(TorchDispatchMode):
    """Writes operations down; like a stream that is being captured, it refuses to read a number back."""

    def __init__(self) -> None:
        super().__init__()
        self._done: list[tuple[Any, Any, Any, list[Any]]] = []
        self.needed: Tensor | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        out = func(*args, **(kwargs or {}))
        self._done.append((func, args, kwargs or {}, tree_leaves(out)))
        return out

    def forget_results(self) -> None:
        """Put NaN wherever something was computed: capturing computes nothing."""
        for func, _, _, out in self._done:
            for tensor in out:
                if not func.is_view and not func._schema.is_mutable and tensor.is_floating_point():
                    tensor.fill_(float("nan"))

    @property
    def is_needed(self) -> bool:
        return self.needed is None or bool(self.needed)

    def play(self) -> None:
        """Do everything once more, if it is needed, into the tensors that it made before."""
        for func, args, kwargs, out in self._done if self.is_needed else ():
            for old, new in zip(out, tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():  # else a view, or written in place
                    old.copy_(new)


class Graphs:
    """The parts of `torch.cuda` that recording takes, simulated.

    Attributes:
        recorded: graphs made; `played`: how often they were; `skipped`: how often they were to do nothing.
        pools: given out.
    """

    def __init__(self) -> None:
        self.recorded = self.played = self.skipped = 0
        self.pools: set[Any] = set()
        self.stream = torch.device("cuda:0"), "first"
        self._current = [torch.device("cuda:0")]
        graphs = self

        class Graph:
            def __init__(self) -> None:
                self.tape = Tape()

            def replay(self) -> None:
                assert graphs._current[-1] == DEVICE
                graphs.played += 1
                graphs.skipped += not self.tape.is_needed
                self.tape.play()

            def begin_capture_to_if_node(self, needed: Tensor) -> None:
                self.tape.needed = needed

            def end_capture_to_conditional_node(self) -> None:
                assert self.tape.needed is not None

        self.graph_class = Graph

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self._current.append(device)
        yield
        self._current.pop()

    def graph_pool_handle(self) -> object:
        return object()

    def make_stream(self, device: torch.device) -> tuple[torch.device, str]:
        return device, "of a recorder"

    def current_stream(self, device: torch.device) -> tuple[torch.device, str]:
        return self.stream

    def set_stream(self, stream: tuple[torch.device, str]) -> None:
        self.stream = stream

    @contextlib.contextmanager
    def graph(self, graph: Any, pool: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
        """As torch does, enter the stream that is recorded, and leave it only where the recording can be ended."""
        assert self._current[-1] == DEVICE == stream[0]
        self.pools.add(pool)
        before, self.stream = self.stream, stream
        try:
            with graph.tape:
                yield
        except RuntimeError as error:
            raise RuntimeError("operation failed due to a previous error during capture") from error
        self.stream = before
        graph.tape.forget_results()
        self.recorded += 1


def simulate_graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    """Have `recorder` record simulated graphs."""
    made = Graphs()
    for name in ("device", "graph_pool_handle", "graph", "current_stream", "set_stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(made, name))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", made.graph_class)
    monkeypatch.setattr(torch.cuda, "Stream", made.make_stream)
    return made


def recorder(device: torch.device) -> Recorder:
    """Return a recorder for `DEVICE`, wherever the model lies."""
    return Recorder(DEVICE)


def record_calls(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    """Let loops record the calls of their models as simulated graphs."""
    graphs = simulate_graphs(monkeypatch)
    for module in (model_source, drafters.model):
        monkeypatch.setattr(module, "open_cache", functools.partial(CudaGraphModel, recorder=recorder))
    return graphs
