"""Models as the decode loop sees them: their limits, the calls that they support, and views through which they are called.

A view is a copy of the module tree that shares the weights. The attention backend, evaluation mode, a wider output layer and
buffers that the forward pass updates belong to the copy. Loops in several threads therefore do not interfere, and the
caller's model is not modified.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

ENDLESS = 1 << 30
"""Maximum text length of a model without a limit on positions."""

Guard = Callable[[], contextlib.AbstractContextManager[Any]]
"""Returns the context to enter for a call."""

_MODULE_ATTRIBUTES = vars(nn.Module())


def token_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of a token in the cache of a model."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * width * model.dtype.itemsize)


def scored_tokens(model: PreTrainedModel) -> int:
    """Return the number of tokens that a model scores."""
    size = getattr(model.config.get_text_config(), "vocab_size", None)
    return int(size if isinstance(size, int) else model.get_output_embeddings().weight.shape[0])


def hidden_width(model: PreTrainedModel) -> int:
    """Return H, the input width of a model's output layer."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return int(getattr(head, "in_features", None) or model.config.get_text_config().hidden_size)


def readable(model: PreTrainedModel) -> int:
    """Return the maximum length of a text in tokens."""
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return longest if isinstance(longest, int) and longest > 0 else ENDLESS


def state_key(model: PreTrainedModel) -> str:
    """Return a key of all that a model's calls depend on besides inputs and weights: config, hooks and adapters."""
    layers: list[tuple[Any, ...]] = []
    for module in model.modules():
        layers.append((*module._forward_hooks, *module._forward_pre_hooks))  # handle numbers, which are never reused
        if isinstance(getattr(module, "disable_adapters", None), bool):  # a layer of peft
            layers.append((str(module.active_adapters), module.disable_adapters, str(getattr(module, "scaling", ""))))
    config = model.config
    return repr((model.dtype, model.device, config._attn_implementation, config.to_dict(), layers))


@dataclass(frozen=True)
class LongRope:
    """Length at which a position encoding with two sets of factors changes to the second one.

    Attributes:
        original: Maximum text length, in tokens, for the first set of factors.
        rereads: Whether `generate` recomputes the cache with the second set of factors once the text is longer (Phi-3).
    """

    original: int
    rereads: bool

    def allowed(self, base: int, depth: int) -> int:
        """Return the largest depth, up to `depth`, at which tokens after a root at `base` still use its factors."""
        return min(depth, self.original - 1 - base) if base < self.original else depth


def long_rope(model: PreTrainedModel) -> LongRope | None:
    """Return at which length the position encoding of a model changes; None if it does not."""
    config, field = model.config.get_text_config(), "original_max_position_embeddings"
    rope = getattr(config, "rope_parameters", None)
    for parameters in (rope, *rope.values()) if isinstance(rope, Mapping) else ():
        if isinstance(parameters, Mapping) and parameters.get("rope_type") == "longrope":
            original = parameters.get(field) or getattr(config, "max_position_embeddings", None)
            # Some classes discard the cache in `generate` when the factors change.
            code = inspect.unwrap(getattr(type(model), "prepare_inputs_for_generation")).__code__  # noqa: B009
            rereads = field in (*code.co_names, *code.co_consts) and hasattr(model.config, field)
            return LongRope(int(original), rereads) if original else None
    return None


@dataclass(frozen=True)
class Reading:
    """Kinds of calls for which a model returns correct logits (see `self_check`).

    Attributes:
        masked: Calls with masks [B, 1, n, slots] of the loop. If False, only chains, with the mask that the model computes.
        tree: Several candidates of the same depth in one call.
        side_by_side: Several texts in one call. If False, the texts of a batch are read one after the other.
        padded: Masked padding on the left has no effect on the logits. If False, the model reads such prompts by itself.
    """

    masked: bool = True
    tree: bool = True
    side_by_side: bool = True
    padded: bool = True


READS_ALL = Reading()


class _NotViewableError(Exception):
    """The module refers to itself in a way that a copy cannot reproduce."""


def _copy(value: Any, copies: dict[int, Any]) -> Any:
    """Return a module, config, bound method of a module, or container of these as a copy, and any other value itself.

    `copies` has the existing copies by id of the original: shared references stay shared.
    """
    if id(value) in copies:
        return copies[id(value)]
    if isinstance(value, MethodType) and isinstance(value.__self__, nn.Module):
        return MethodType(value.__func__, _copy(value.__self__, copies))
    if type(value) in (list, tuple, dict):
        items = list(value.values()) if type(value) is dict else value
        copied = [_copy(item, copies) for item in items]
        if all(a is b for a, b in zip(copied, items, strict=True)):
            return value
        return dict(zip(value, copied, strict=True)) if type(value) is dict else type(value)(copied)
    if not isinstance(value, nn.Module | PreTrainedConfig):
        return value
    copy, state, module_attributes = object.__new__(type(value)), dict(vars(value)), {}
    copies[id(value)] = copy
    if isinstance(value, nn.Module):
        _check_viewable(value)
        module_attributes = _MODULE_ATTRIBUTES
    for name, item in state.items():
        if name not in module_attributes:
            state[name] = _copy(item, copies)
        elif isinstance(item, dict | set):  # parameters, buffers, children and hooks, which are mutated in place
            state[name] = item.copy()
    if module_attributes:
        state["_modules"].update({name: _copy(child, copies) for name, child in state["_modules"].items()})
        state["training"] = False
    vars(copy).update(state)
    return copy


def _check_viewable(module: nn.Module) -> None:
    """Raise `_NotViewableError` if a copy of a module would call or change the original."""
    state = vars(module)
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


_EXCLUSIVE = threading.RLock()
"""Held during a call of any model that cannot be copied."""


@contextlib.contextmanager
def _exclusive(model: nn.Module) -> Iterator[None]:
    """Call a model that cannot be copied in one thread at a time, in evaluation mode."""
    with _EXCLUSIVE:
        training = [module for module in model.modules() if module.training]
        for module in training:
            module.training = False
        try:
            yield
        finally:
            for module in training:
                module.training = True


def open_view(module: Any, owner: nn.Module | None = None) -> tuple[Any, Guard]:
    """Return a view of a module, in evaluation mode, and a function that returns the context to enter for each call.

    The view has the current children and hooks of the module and shares its parameters. A module with accelerate hooks or
    with a compiled or replaced `forward` is returned itself. The context then locks the model (`owner` of a layer).
    """
    try:
        return _copy(module, {}), contextlib.nullcontext
    except _NotViewableError:
        return module, lambda: _exclusive(module if owner is None else owner)


def layer_view(model: PreTrainedModel, layer: Any) -> Callable[[Tensor], Tensor]:
    """Return a function that calls one layer of a model, such as its embeddings, with the guarantees of `open_view`."""
    view, guard = open_view(layer, model)

    def call(x: Tensor) -> Tensor:
        with guard():
            out: Tensor = view(x)
        return out

    return view if guard is contextlib.nullcontext else call
