"""Models that are more than plain modules on one device: placed by accelerate, quantised, adapted or patched.

The loop computes on one device, that of the draft. A target on other devices, in host memory or on disk is called from there:
the hooks of accelerate move its inputs and outputs.
"""

from __future__ import annotations

import copy
import hashlib
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...policies.errors import InputError, SpecstopWarning
from ...policies.files import strict_loads

DeviceMap = str | dict[str, Any]
"""A strategy of accelerate, or devices (including `cpu` and `disk`) by module name."""

ADAPTED = "specstop_adapted_hash"
"""Attribute of a model with an adapter applied on loading: the hash of both, whether or not the adapter was merged."""

_SAMPLES = 64
_WARNED: weakref.WeakKeyDictionary[PreTrainedModel, set[str]] = weakref.WeakKeyDictionary()


def parse_device_map(value: DeviceMap | None) -> DeviceMap | None:
    """Return a strategy of accelerate, a device, or devices by module, which may be given as JSON.

    Raises:
        InputError: The JSON is invalid. `from_pretrained` checks the rest.
    """
    if not isinstance(value, str) or not value.lstrip().startswith("{"):
        return value
    try:
        return dict(strict_loads(value))
    except ValueError:
        raise InputError(
            "--device-map: expected auto, balanced, balanced_low_0, sequential, a device, or a JSON object of devices by "
            f'module such as {{"model.layers.0": "cuda:0", "": "cuda:1"}}, not {value[:80]!r}'
        ) from None


def is_placed(model: PreTrainedModel) -> bool:
    """Whether accelerate moves the inputs and outputs of a model between devices."""
    return hasattr(model, "_hf_hook")


def calling_device(model: PreTrainedModel) -> torch.device:
    """Return the device from which to call a model."""
    hook: Any = getattr(model, "_hf_hook", None)
    return torch.device(model.device if hook is None else hook.execution_device)


def call_from(model: PreTrainedModel, device: torch.device) -> None:
    """Make a model on other devices, its embeddings and its output layer return outputs on the device of their inputs."""
    if not is_placed(model) and model.device == device:
        return
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    modules: tuple[Any, ...] = (model, model.get_input_embeddings(), model.get_output_embeddings())
    for module in modules:
        if not is_placed(module):
            place = next(module.parameters()).device
            add_hook_to_module(module, AlignDevicesHook(place, skip_keys=model._skip_keys_device_placement))
        module._hf_hook.io_same_device = True


def is_quantised(config: Any) -> bool:
    """Whether the weights of a model with this config are not plain tensors of one type."""
    return bool(getattr(config, "quantization_config", None))


def replacement_refusal(model: PreTrainedModel) -> str:
    """Return why the layers of a model cannot be replaced, or an empty string."""
    if is_placed(model):
        devices = dict.fromkeys(map(str, getattr(model, "hf_device_map", {}).values()))
        return f"accelerate has placed its layers on {', '.join(devices) or 'several devices'}"
    return "its weights are quantised" if is_quantised(model.config) else ""


def is_modified(module: nn.Module) -> bool:
    """Whether a module may differ from its class in torch or transformers because of adapters, hooks or patches."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return (
        type(module).__module__.partition(".")[0] not in ("torch", "transformers", "specstop")
        or "forward" in vars(module)
        or hasattr(module, "parametrizations")
        # The hooks with which transformers collects hidden states do not change the result.
        or any(not str(getattr(hook, "__module__", "")).startswith("transformers.") for hook in hooks)
    )


def modified_module(model: nn.Module) -> str:
    """Return the name and class of the first module for which `is_modified` is true, or an empty string."""
    modified = ((name, module) for name, module in model.named_modules() if name and is_modified(module))
    return next((f"{name}, a {type(module).__name__}" for name, module in modified), "")


def warn_once(model: PreTrainedModel, text: str) -> None:
    """Issue a `SpecstopWarning` once per model."""
    if text not in (texts := _WARNED.setdefault(model, set())):
        texts.add(text)
        warnings.warn(text, SpecstopWarning, stacklevel=4)


def copy_to_host(module: Any) -> Any:
    """Return a float32 copy of a module on the CPU, without the hooks of accelerate."""
    hook = getattr(module, "_hf_hook", None)
    if hook is None:
        return copy.deepcopy(module).float().cpu()
    from accelerate.hooks import ModelHook, remove_hook_from_module
    from accelerate.utils import align_module_device

    with align_module_device(module, torch.device("cpu")):
        duplicate = copy.deepcopy(module, {id(hook): ModelHook()})  # a hook may hold the weights of the whole model
    return remove_hook_from_module(duplicate).float().cpu()


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor stores its own numbers. Tensor subclasses of torchao consist of other tensors."""
    return not hasattr(tensor, "__tensor_flatten__")


def iterate_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the plain tensors of a model by name. Offloaded tensors are loaded, tensor subclasses are split into parts."""

    def parts(name: str, tensor: Any) -> Iterator[tuple[str, Tensor]]:
        if is_plain(tensor):
            yield name, tensor
        else:
            for part in tensor.__tensor_flatten__()[0]:
                yield from parts(f"{name}.{part}", getattr(tensor, part))

    for name, tensor in model.state_dict().items():
        if isinstance(tensor, Tensor) and tensor.is_meta:
            from accelerate.utils import align_module_device

            owner, _, attribute = name.rpartition(".")
            with align_module_device(module := model.get_submodule(owner), torch.device("cpu")):
                tensor = getattr(module, attribute).detach()
        if isinstance(tensor, Tensor):
            yield from parts(name, tensor)


def model_hash(model: PreTrainedModel) -> str:
    """Return a hash of the names, shapes and evenly spaced sample values of all parameters, including those of adapters.

    Values are rounded to bfloat16, so that a checkpoint has the same hash in bfloat16, float32 and float64.
    """
    if stored := getattr(model, ADAPTED, ""):
        return str(stored)
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in iterate_tensors(model):
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // _SAMPLES)][:_SAMPLES]
        if sample.is_floating_point() and sample.dtype.itemsize == 1:
            sample = sample.view(torch.uint8)  # some 8-bit types cannot be converted
        rounded = sample.to("cpu", torch.bfloat16 if sample.is_floating_point() else torch.float32).float()
        digest.update(f"{name} {tuple(tensor.shape)} ".encode() + rounded.numpy().tobytes())
    for name, module in model.named_modules():
        if hasattr(module, "active_adapters") and hasattr(module, "scaling"):  # an adapter layer of peft
            digest.update(f"{name} {module.active_adapters} {module.disable_adapters} {module.scaling}".encode())
    return digest.hexdigest()
