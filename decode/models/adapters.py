"""PEFT adapters: adapter folders that are applied to their base model on loading, and models that contain adapters.

In float32 and float64, an adapter that changes weights is merged, so that every engine computes the adapted model. In half
precision, rounding would lose small changes. The adapter's layers are then kept, and only engines that call them can be used.
"""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.hub import cached_file
from transformers.utils.import_utils import is_peft_available

from ...policies.errors import PairError
from .placement import ADAPTED, kept_as_is, model_hash

ADAPTER = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_WRAPPED = ("XLORA", "POLY", "SHADOW", "ADAPTION_PROMPT")
"""Adapter types that act outside the layers of the model or depend on more than the inputs of a layer."""
_EXPECTED = "expected one that changes weights, such as LoRA"
_TOLERANCE = 1e-2
"""Largest change of the logits due to merging, relative to the largest logit."""


def check_adapter(where: str, raw: Mapping[str, Any], is_alone: bool) -> str:
    """Return the base model of an adapter whose `adapter_config.json` contains `raw`; `is_alone` if it must name one.

    Raises:
        ValueError: peft is not installed, the base model is missing, or the adapter type is not supported.
    """
    if not is_peft_available():
        raise ValueError(f"its {ADAPTER} needs peft: python -m pip install peft")
    from peft import PeftConfig, PeftType

    if (kind := raw.get("peft_type")) not in list(PeftType):
        raise ValueError(f"{ADAPTER}: expected a peft_type that the installed peft supports, not {str(kind)[:80]!r}")
    if refusal := _refusal(PeftConfig.from_pretrained(where)):
        raise ValueError(refusal)
    base = raw.get("base_model_name_or_path")
    if is_alone and (not base or not isinstance(base, str)):
        raise ValueError(f"{ADAPTER}: expected the base model as base_model_name_or_path, not {base!r}")
    return str(base)


def _refusal(config: Any) -> str:
    """Return why an adapter with this peft configuration cannot be applied, or an empty string."""
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if config.is_prompt_learning:
        return (
            f"its {kind} adapter is a soft prompt, which is not part of the layers; {_EXPECTED}, or call "
            "target.generate(custom_generate=specstop_generate)"
        )
    if getattr(config, "alora_invocation_tokens", None):
        kind = "activated LoRA"
    elif kind not in _WRAPPED:
        return ""
    return f"its {kind} adapter depends on more than the layers' inputs; {_EXPECTED}"


def unwrap(model: Any, role: str) -> PreTrainedModel:
    """Return the base model of a `PeftModel` with its adapter layers. Raises `PairError` if they are not supported."""
    configs = getattr(model, "peft_config", None)
    for config in configs.values() if isinstance(configs, dict) else ():
        if refusal := _refusal(config):
            raise PairError(f"the {role} cannot be run: {refusal}")
    base: PreTrainedModel = model.get_base_model() if _package(model) == "peft" else model
    return base


def apply_adapter(model: PreTrainedModel, where: str) -> PreTrainedModel:
    """Apply an adapter that `check_adapter` accepted to its base model in evaluation mode, in place.

    Raises:
        ValueError: Its weights are missing, have wrong shapes or are not finite, or the model does not support it.
    """
    from peft import PeftConfig, PeftModel

    # peft would dispatch the model again, although all its layers are on the intended devices.
    device_map = vars(model).pop("hf_device_map", {})
    if len(set(device_map.values())) > 1 and {"cpu", "disk"} & set(map(str, device_map.values())):
        raise ValueError(
            "an adapter cannot be applied to offloaded layers; merge it (merge_and_unload) and save the model"
        )
    files = [cached_file(where, name, _raise_exceptions_for_missing_entries=False) for name in (ADAPTER, *_WEIGHTS)]
    if not any(files[1:]):
        raise ValueError(f"the adapter has no {_WEIGHTS[0]}")
    content = b"".join(hashlib.blake2b(Path(file).read_bytes()).digest() for file in files if file is not None)
    digest = hashlib.blake2b(model_hash(model).encode() + content, digest_size=8).hexdigest()
    config = PeftConfig.from_pretrained(where)
    config.inference_mode = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice for training and saving
        wrapped: Any = PeftModel(model, config)
        renamed: Any = getattr(model, "_checkpoint_conversion_mapping", None)
        load_result = wrapped.load_adapter(where, "default", torch_device="cpu", key_mapping=renamed)
        for problem, names in (("lack", load_result.missing_keys), ("have an unknown", load_result.unexpected_keys)):
            if names:
                raise ValueError(f"the adapter's weights {problem} {names[0]}")
        for name, parameter in wrapped.named_parameters():
            if ".default" in name and not bool(parameter.isfinite().all()):
                raise ValueError(f"the adapter's {name} has values that are NaN or infinite")
        adapted = _logits(wrapped.base_model, model)
        if model.dtype in (torch.float32, torch.float64) and not kept_as_is(model):
            # If merging fails, the remaining adapter layers are kept. They compute the same function.
            with contextlib.suppress(ValueError, TypeError, AttributeError, NotImplementedError, RuntimeError):
                wrapped.base_model.merge_and_unload(safe_merge=True)
    model = wrapped.get_base_model()
    if (_logits(model, model) - adapted).abs().max() > _TOLERANCE * adapted.abs().max():
        raise ValueError(f"its {config.peft_type} adapter depends on more than the layers' inputs; {_EXPECTED}")
    if device_map:
        model.hf_device_map = device_map
    setattr(model, ADAPTED, digest)
    model.config.name_or_path = where
    return model


@torch.inference_mode()
def _logits(called: Any, model: PreTrainedModel) -> Tensor:
    """Return the logits [1, n, V] of a few tokens on the CPU."""
    ids = torch.arange(1, 9)[None] % model.config.get_text_config().vocab_size
    logits: Tensor = called(input_ids=ids.to(model.device), use_cache=False).logits
    return logits.double().cpu()


def is_modified(module: nn.Module) -> bool:
    """Whether a module may differ from its class in torch or transformers because of adapters, hooks or patches."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return (
        _package(module) not in ("torch", "transformers", "specstop")
        or "forward" in vars(module)
        or hasattr(module, "parametrizations")
        # The hooks with which transformers collects hidden states do not change the result.
        or any(not str(getattr(hook, "__module__", "")).startswith("transformers.") for hook in hooks)
    )


def modified_module(model: nn.Module) -> str:
    """Return the name and class of the first module for which `is_modified` is true, or an empty string."""
    modified = ((name, module) for name, module in model.named_modules() if name and is_modified(module))
    return next((f"{name}, a {type(module).__name__}" for name, module in modified), "")


def _package(module: Any) -> str:
    return type(module).__module__.partition(".")[0]
