"""How a decode loop calls a model: through a copy of its module tree that shares the weights, and with which kinds of calls.

The attention backend, evaluation mode, a wider output layer and buffers that the forward pass updates belong to the copy.
Loops in several threads therefore do not interfere, and the caller's model is not modified.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from .attention import without_cudnn
from .wide_head import widen

_MODULE_ATTRIBUTES = vars(nn.Module())
_Guard = contextlib.AbstractContextManager[None]
_NO_GUARD: _Guard = contextlib.nullcontext()


@dataclass(frozen=True)
class Reading:
    """Kinds of calls for which a model returns correct logits (see `self_check`)."""

    masked: bool = True
    """Calls with masks [B, 1, n, slots] of the loop. If False, only chains, with the mask that the model computes."""
    tree: bool = True
    """Several candidates of the same depth in one call."""
    side_by_side: bool = True
    """Several texts in one call. If False, the texts of a batch are read one after the other."""
    padded: bool = True
    """Masked padding on the left has no effect on the logits. If False, the model reads such prompts by itself."""


READS_ALL = Reading()


class _NotViewableError(Exception):
    """The module refers to itself in a way that a copy cannot reproduce."""


class _Copier:
    """Copy modules and configs, each object once, so that shared references stay shared. Other objects are not copied."""

    def __init__(self) -> None:
        self._copies: dict[int, Any] = {}  # by id of the original

    def copy(self, value: Any) -> Any:
        """Return a module, config, bound method of a module, or container of these as a copy, and any other value itself."""
        if id(value) in self._copies:
            return self._copies[id(value)]
        if isinstance(value, nn.Module):
            return self._module(value)
        if isinstance(value, PreTrainedConfig):
            return self._config(value)
        if isinstance(value, MethodType) and isinstance(value.__self__, nn.Module):
            return MethodType(value.__func__, self.copy(value.__self__))
        if type(value) not in (list, tuple, dict):
            return value
        items = list(value.values()) if type(value) is dict else value
        copies = [self.copy(item) for item in items]
        if all(a is b for a, b in zip(copies, items, strict=True)):
            return value
        return dict(zip(value, copies, strict=True)) if type(value) is dict else type(value)(copies)

    def _module(self, module: nn.Module) -> Any:
        state = dict(vars(module))
        forward = state.get("forward")
        # accelerate and torch.compile replace `forward` with functions that hold the module. FSDP gathers the parameters into
        # the original modules. A script is not a Python object.
        if (
            not (forward is None or (isinstance(forward, MethodType) and isinstance(forward.__self__, nn.Module)))
            or "_hf_hook" in state
            or state.get("_compiled_call_impl") is not None
            or any(base.__module__.startswith("torch.distributed") for base in type(module).__mro__)
            or any(type(state[name]) not in (dict, OrderedDict) for name in ("_parameters", "_buffers", "_modules"))
        ):
            raise _NotViewableError
        copy = self._copies[id(module)] = object.__new__(type(module))
        for name, value in state.items():
            if name not in _MODULE_ATTRIBUTES:
                state[name] = self.copy(value)
            elif isinstance(value, dict | set):  # parameters, buffers, children and hooks, which are mutated in place
                state[name] = value.copy()
        state["_modules"].update((name, self.copy(child)) for name, child in module._modules.items())
        vars(copy).update(state, training=False)
        return copy

    def _config(self, config: PreTrainedConfig) -> Any:
        copy = self._copies[id(config)] = object.__new__(type(config))
        for name, value in vars(config).items():
            vars(copy)[name] = self.copy(value) if isinstance(value, PreTrainedConfig) else value
        return copy


class _Exclusive(contextlib.AbstractContextManager[None]):
    """Lock of a model that cannot be copied: one thread at a time calls it, in evaluation mode."""

    def __init__(self, model: weakref.ref[nn.Module]) -> None:
        self._model, self._lock = model, threading.RLock()
        self._training: list[list[nn.Module]] = []

    def __enter__(self) -> None:
        self._lock.acquire()
        model = self._model()
        self._training.append([module for module in model.modules() if module.training] if model is not None else [])
        for module in self._training[-1]:
            module.training = False

    def __exit__(self, *error: object) -> None:
        for module in self._training.pop():
            module.training = True
        self._lock.release()


_EXCLUSIVE: weakref.WeakKeyDictionary[nn.Module, _Exclusive] = weakref.WeakKeyDictionary()
_TABLE_LOCK = threading.Lock()


def open_view(module: Any, owner: nn.Module | None = None) -> tuple[Any, _Guard]:
    """Return a view of a module, in evaluation mode, and a reentrant context manager to enter for each call.

    The view has the current children and hooks of the module and shares its parameters. A module with accelerate hooks or
    with a compiled or replaced `forward` is returned itself. The context manager then locks the model (`owner` of a layer).
    """
    try:
        return _Copier().copy(module), _NO_GUARD
    except _NotViewableError:
        model = module if owner is None else owner
        with _TABLE_LOCK:
            return module, _EXCLUSIVE.setdefault(model, _Exclusive(weakref.ref(model)))


class ModelView(contextlib.AbstractContextManager[PreTrainedModel]):
    """View of a model for one decode loop. It is a reentrant context manager that returns the model to call."""

    def __init__(self, original: PreTrainedModel, device: torch.device) -> None:
        self.original, self._without_cudnn = original, without_cudnn(device)
        self._opened: tuple[PreTrainedModel, _Guard] | None = None

    def refresh(self) -> None:
        """Discard the view, so that the next call uses the current layers and adapters of the model."""
        self._opened = None

    def _open(self) -> tuple[PreTrainedModel, _Guard]:
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

    def __exit__(self, *error: Any) -> None:
        self._without_cudnn.__exit__(*error)
        self._open()[1].__exit__(*error)


def layer_view(model: PreTrainedModel, layer: Any) -> Callable[[Tensor], Tensor]:
    """Return a function that calls one layer of a model, such as its embeddings, with the guarantees of `open_view`."""
    view, guard = open_view(layer, model)

    def call(x: Tensor) -> Tensor:
        with guard:
            out: Tensor = view(x)
        return out

    return view if guard is _NO_GUARD else call
