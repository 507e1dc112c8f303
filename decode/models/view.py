"""Views of models: each decode loop calls a copy of the module tree that shares the weights of the caller's model.

The attention backend, evaluation mode, a wider output layer and buffers that the forward pass updates belong to the copy.
Loops in several threads therefore do not interfere, and the caller's model is not modified.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from types import MethodType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from .attention import without_cudnn
from .device import widen

_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""Attributes of every module."""

_CONTAINERS = tuple(name for name, value in vars(nn.Module()).items() if isinstance(value, dict | set))
"""Attributes that are mutated in place: parameters, buffers, children, hooks."""


class _NotViewableError(Exception):
    """A module refers to itself in a way that a copy cannot reproduce."""


class _Copier:
    """Copy modules and configs, each object once, so that shared references stay shared. All other objects are not copied."""

    def __init__(self) -> None:
        self._copies: dict[int, Any] = {}  # by id of the original
        self._sharded: dict[type, bool] = {}

    def module(self, module: nn.Module) -> Any:
        """Return the copy of a module and its submodules.

        Raises:
            _NotViewableError: The module cannot be copied.
        """
        if (existing := self._copies.get(id(module))) is not None:
            return existing
        state = dict(vars(module))
        self._check(module, state)
        copy = self._copies[id(module)] = object.__new__(type(module))
        for name in _CONTAINERS:
            if name in state:  # modules pickled by older versions of torch lack some of them
                state[name] = state[name].copy()
        children = state["_modules"]
        for name, child in children.items():
            if child is not None:
                children[name] = self.module(child)
        for name, value in state.items():
            if name not in _MODULE_ATTRIBUTES:
                state[name] = self._value(value)
        state["training"] = False
        vars(copy).update(state)
        return copy

    def _check(self, module: nn.Module, state: dict[str, Any]) -> None:
        kind = type(module)
        if kind not in self._sharded:
            # FSDP gathers the parameters into the original modules.
            self._sharded[kind] = any(base.__module__.startswith("torch.distributed") for base in kind.__mro__)
        forward = state.get("forward")
        bound = forward is None or (isinstance(forward, MethodType) and isinstance(forward.__self__, nn.Module))
        # accelerate and torch.compile replace `forward` with functions that hold the module; a script is not a Python object.
        if (
            not bound
            or "_hf_hook" in state
            or state.get("_compiled_call_impl") is not None
            or self._sharded[kind]
            or any(type(state[name]) not in (dict, OrderedDict) for name in ("_parameters", "_buffers", "_modules"))
        ):
            raise _NotViewableError

    def _value(self, value: Any) -> Any:
        """Return an attribute of a module or an entry of a container, copied if it is or contains a module or a config."""
        if isinstance(value, nn.Module):
            return self.module(value)
        if isinstance(value, PreTrainedConfig):
            return self._config(value)
        if isinstance(value, MethodType) and isinstance(value.__self__, nn.Module):
            return MethodType(value.__func__, self.module(value.__self__))
        kind = type(value)
        if kind is list or kind is tuple:
            copies = kind(self._value(item) for item in value)
            return copies if any(a is not b for a, b in zip(copies, value, strict=True)) else value
        if kind is dict:
            copied = {key: self._value(item) for key, item in value.items()}
            return copied if any(copied[key] is not item for key, item in value.items()) else value
        return value

    def _config(self, config: PreTrainedConfig) -> Any:
        """Return the copy of a config, including its sub-configs."""
        if (existing := self._copies.get(id(config))) is not None:
            return existing
        copy = self._copies[id(config)] = object.__new__(type(config))
        for name, value in vars(config).items():
            vars(copy)[name] = self._config(value) if isinstance(value, PreTrainedConfig) else value
        return copy


class _Exclusive(contextlib.AbstractContextManager[None]):
    """Lock held during calls of a model that cannot be copied: one thread at a time, in evaluation mode.

    Args:
        model: Weak reference, so that the table of locks does not keep the model alive.
    """

    def __init__(self, model: weakref.ref[nn.Module]) -> None:
        self._model, self._lock, self._depth = model, threading.RLock(), 0
        self._training: list[nn.Module] = []

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1
        if self._depth == 1 and (model := self._model()) is not None:
            self._training = [module for module in model.modules() if module.training]
            for module in self._training:
                module.training = False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if not self._depth:
            for module in self._training:
                module.training = True
            self._training = []
        self._lock.release()


_EXCLUSIVE: weakref.WeakKeyDictionary[nn.Module, _Exclusive] = weakref.WeakKeyDictionary()
_TABLE_LOCK = threading.Lock()
_NO_LOCK: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


def _exclusive(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    with _TABLE_LOCK:
        if model not in _EXCLUSIVE:
            _EXCLUSIVE[model] = _Exclusive(weakref.ref(model))
        return _EXCLUSIVE[model]


def open_view(model: PreTrainedModel) -> tuple[PreTrainedModel, contextlib.AbstractContextManager[None]]:
    """Return a view of a model, in evaluation mode, and a context manager to enter for each call.

    The view has the current modules and hooks of the model and shares its parameters. A model with accelerate hooks or with a
    compiled or replaced `forward` is returned itself. The context manager then locks the model and sets evaluation mode.
    """
    try:
        return _Copier().module(model), _NO_LOCK
    except _NotViewableError:
        return model, _exclusive(model)


class ModelView(contextlib.AbstractContextManager[PreTrainedModel]):
    """View of a model for one decode loop. It is a reentrant context manager that returns the model to call.

    Args:
        original: The caller's model.
        device: Device of the calls.
    """

    def __init__(self, original: PreTrainedModel, device: torch.device) -> None:
        self.original, self._without_cudnn = original, without_cudnn(device)
        self._opened: tuple[PreTrainedModel, contextlib.AbstractContextManager[None]] | None = None

    def refresh(self) -> None:
        """Discard the view, so that the next call uses the current layers and adapters of the model."""
        self._opened = None

    def _open(self) -> tuple[PreTrainedModel, contextlib.AbstractContextManager[None]]:
        """Return the view, which is created on first use, and the context manager of a call."""
        if self._opened is None:
            self._opened = open_view(self.original)
            if self._opened[0] is not self.original:
                widen(self._opened[0])
        return self._opened

    @property
    def model(self) -> PreTrainedModel:
        """The model to call."""
        return self._open()[0]

    def __enter__(self) -> PreTrainedModel:
        model, guard = self._open()
        guard.__enter__()
        self._without_cudnn.__enter__()
        return model

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._without_cudnn.__exit__(kind, error, trace)
        self._open()[1].__exit__(kind, error, trace)


def layer_view(model: PreTrainedModel, layer: Any) -> Callable[[Tensor], Tensor]:
    """Return a function that calls one layer of a model, such as its embeddings, with the guarantees of `open_view`."""
    if not isinstance(layer, nn.Module):
        return layer  # type: ignore[no-any-return]
    try:
        view: Callable[[Tensor], Tensor] = _Copier().module(layer)
    except _NotViewableError:
        guard = _exclusive(model)

        def guarded(x: Tensor) -> Tensor:
            with guard:
                out: Tensor = layer(x)
            return out

        return guarded
    return view
