"""Models larger than one device: accelerate places their layers, and carries what goes from one device to another.

The loop computes on one device, the draft's. A target that lies elsewhere, or on several devices, on the host or on disk, is
called from there all the same: its hooks take over what it is given, and bring back what it answers.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.import_utils import is_accelerate_available

from ...policies.errors import InputError, SpecstopWarning
from ...policies.text import strict_loads

STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")
"""How accelerate shares layers out by itself."""

Places = str | dict[str, Any]
"""A strategy, or devices (`cpu` and `disk` among them) by name of module."""

_TOLD: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()


def check_device_map(text: str | None) -> Places | None:
    """Return what `--device-map` asks for: a strategy, one device for all, or a JSON object of devices by module.

    Raises:
        InputError: it is none of these, or accelerate is not installed.
    """
    if text is None:
        return None
    if not is_accelerate_available():
        raise InputError("--device-map: this needs accelerate: python -m pip install 'specstop[accelerate]'")
    if text in STRATEGIES:
        return text
    try:
        found = strict_loads(text) if text.lstrip().startswith("{") else {"": text}
        for device in found.values():
            if type(device) is not int and device != "disk":
                torch.device(device)
    except (ValueError, RuntimeError, TypeError):
        raise InputError(
            f"--device-map: expected {', '.join(STRATEGIES)}, a device, or a JSON object of devices by module such as "
            f'{{"model.layers.0": "cuda:0", "": "cuda:1"}}, not {text[:80]!r}'
        ) from None
    return dict(found)


def is_placed(model: PreTrainedModel) -> bool:
    """Whether accelerate carries a model's inputs and outputs between devices."""
    return hasattr(model, "_hf_hook")


def place_of(model: PreTrainedModel) -> torch.device:
    """Return the device that a model is best called from."""
    hook: Any = getattr(model, "_hf_hook", None)
    return torch.device(model.device if hook is None else hook.execution_device)


def call_from(model: PreTrainedModel, device: torch.device) -> None:
    """Have a model, its embeddings and its output layer answer where they are called from, if they lie elsewhere."""
    if not is_placed(model) and model.device == device:
        return
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    modules: tuple[Any, ...] = (model, model.get_input_embeddings(), model.get_output_embeddings())
    for module in modules:
        hook: Any = getattr(module, "_hf_hook", None)
        if hook is None:
            place = next(module.parameters()).device
            hook = AlignDevicesHook(place, skip_keys=model._skip_keys_device_placement)
            add_hook_to_module(module, hook)
        hook.io_same_device = True  # what it returns goes back to where its input was


def kept_as_is(model: PreTrainedModel) -> str:
    """Return why a model's layers must stay as the library has made them, or nothing."""
    if is_placed(model):
        devices = dict.fromkeys(map(str, getattr(model, "hf_device_map", {}).values()))
        return f"accelerate has placed its layers on {', '.join(devices) or 'several devices'}"
    if is_quantised(model.config):
        return "its weights are quantised"
    return ""


def is_quantised(config: Any) -> bool:
    """Whether a model of this config has weights that are no plain tensors of one type."""
    return bool(getattr(config, "quantization_config", None))


def tell_once(role: str, model: PreTrainedModel) -> None:
    """Warn, once a model, of what it does without where its layers stay as they are."""
    why = kept_as_is(model)
    if why and model not in _TOLD and (is_placed(model) or model.device.type == "cpu"):
        _TOLD.add(model)
        text = f"the {role} runs as it is, neither packed nor recorded as CUDA graphs: {why}"
        warnings.warn(text, SpecstopWarning, stacklevel=3)


def own_copy(module: Any) -> Any:
    """Return a copy of a module, float32 on the CPU, that accelerate has nothing to do with."""
    hook = getattr(module, "_hf_hook", None)
    if hook is None:
        return copy.deepcopy(module).float().cpu()
    from accelerate.hooks import ModelHook, remove_hook_from_module
    from accelerate.utils import align_module_device

    with align_module_device(module, torch.device("cpu")):
        twin = copy.deepcopy(module, {id(hook): ModelHook()})  # a hook may hold the weights of the whole model
    return remove_hook_from_module(twin).float().cpu()


def tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's plain tensors by name: what is offloaded is fetched, what is quantised taken apart."""
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, Tensor):
            yield from _parts(name, _fetched(model, name) if tensor.is_meta else tensor)


def _fetched(model: nn.Module, name: str) -> Tensor:
    from accelerate.utils import align_module_device

    where, _, own = name.rpartition(".")
    module = model.get_submodule(where)
    with align_module_device(module, torch.device("cpu")):
        tensor: Tensor = getattr(module, own).detach()
    return tensor


def _parts(name: str, tensor: Any) -> Iterator[tuple[str, Tensor]]:
    if is_plain(tensor):
        yield name, tensor
        return
    for part in tensor.__tensor_flatten__()[0]:
        yield from _parts(f"{name}.{part}", getattr(tensor, part))


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor holds its numbers itself; torchao's stand for others."""
    return not hasattr(tensor, "__tensor_flatten__")
