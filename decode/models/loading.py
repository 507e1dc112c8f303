"""Models, PEFT adapters and tokenizers from folders and hub names. Errors in their files are reported in one line.

transformers builds whatever a config describes before it reads the files, and fills tensors that these lack with random
numbers. Therefore sizes and memory are checked first, and the library's report on the tensors afterwards.

In float32 and float64, an adapter that changes weights is merged, so that every engine computes the adapted model. In half
precision, rounding would lose small changes. The adapter's layers are then kept, and only engines that call them can be used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import pickle
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
import torch
from huggingface_hub import is_offline_mode, model_info, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, StrictDataclassError
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.hub import cached_file, get_checkpoint_shard_files
from transformers.utils.import_utils import is_peft_available

from ...policies.errors import PairError
from ...policies.files import strict_loads
from .placement import ADAPTED, DeviceMap, call_from, is_plain, is_quantised, model_hash, replacement_refusal

ADAPTER = "adapter_config.json"
_CONFIG = "config.json"
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_SIZES = (
    "vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "max_position_embeddings", "sliding_window", "num_hidden_layers", "n_layer", "n_layers", "num_layers",
)  # fmt: skip
_MAX_LAYERS = 1024  # building a model with millions of layers could take hours
_MAX_TEXT = 300  # characters of an error message of the library
_HUB_S = 5.0  # timeout of the request whether a model exists on the hub
_CUSTOM_CODE = (
    "it requires custom code (auto_map in its config), and code from a model folder is never run; choose a model that "
    "transformers supports by itself"
)
_BEYOND_LAYERS = ("XLORA", "POLY", "SHADOW", "ADAPTION_PROMPT")
"""Adapter types that act outside the layers of the model or depend on more than the inputs of a layer."""


@contextlib.contextmanager
def _library_errors(option: str, name: str | Path, what: str = "a model") -> Iterator[None]:
    """Convert any error while third-party files are read to a `PairError` with a one-line message."""
    try:
        yield
    except PairError:
        raise
    except Exception as error:  # an invalid config may raise almost any error
        plain = isinstance(error, OSError | ValueError | RuntimeError | StrictDataclassError)
        text = ("" if plain else f"{type(error).__name__}: ") + (" ".join(str(error).split()) or type(error).__name__)
        if isinstance(error, pickle.UnpicklingError):
            text = "its weights are a pickle of more than tensors; nothing of it was run: get them as safetensors"
        elif "trust_remote_code" in text:  # the advice of the library does not apply
            text = _CUSTOM_CODE
        line = "".join(c if c.isprintable() else "?" for c in text)
        short = line if len(line) <= _MAX_TEXT else f"{line[:_MAX_TEXT]}..."
        raise PairError(f"{option}: cannot load {what} from {name}: {short}") from None


@dataclass(frozen=True)
class Checkpoint:
    """A model with a validated config.

    Attributes:
        option, name: Command-line option and description of the model, for messages.
        where: Folder or hub name of the model, or of the base model of an adapter, for `from_pretrained`.
        adapter: Folder or hub name of the PEFT adapter to apply; empty if there is none.
    """

    option: str
    name: str
    where: str
    config: PreTrainedConfig
    adapter: str = ""

    @cached_property
    def skeleton(self) -> PreTrainedModel:
        """The model on the device `meta`: shapes without numbers. Raises `PairError` if the library cannot build it."""
        with _library_errors(self.option, self.name), torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(self.config)
        return model

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Return the size of the weights in memory."""
        if is_quantised(self.config):
            return sum(Path(file).stat().st_size for file in _weight_files(self.where))
        return sum(parameter.numel() for parameter in self.skeleton.parameters()) * dtype.itemsize


def open_checkpoint(name: str | Path, option: str, allow_adapter: bool = True) -> Checkpoint:
    """Read and validate the config of a model, or of an adapter (if allowed) and its base model.

    Raises:
        PairError: The folder or model does not exist, its config is invalid, or the adapter cannot be applied.
    """
    where = _locate(name, option)
    with _library_errors(option, name):
        adapter, raw = (_read_config(where, file) for file in (ADAPTER, _CONFIG))
        # The library uses the last of duplicate keys and ignores an invalid generation config.
        for file in ("generation_config.json", "tokenizer_config.json", "model.safetensors.index.json"):
            _read_config(where, file)
    if adapter is not None:
        if not allow_adapter:
            raise PairError(
                f"{option}: expected a model, but {name} is an adapter itself; merge it into its model first"
            )
        with _library_errors(option, name, "an adapter"):
            # A config without weights is a copy of the config of the base model.
            is_alone = raw is None or not _weight_files(where)
            base = _check_adapter(where, adapter, is_alone)
        if is_alone:
            model = open_checkpoint(base, f"{option}: the base model of the adapter {name}", allow_adapter=False)
            return dataclasses.replace(model, option=option, name=f"{name}, an adapter of {base}", adapter=where)
    with _library_errors(option, name):
        if raw is None:
            raise ValueError(f"it has no {_CONFIG}")
        if "auto_map" in raw and raw.get("model_type") not in CONFIG_MAPPING:
            raise ValueError(_CUSTOM_CODE)
        text_config = raw.get("text_config")
        # Before AutoConfig, which may build a list with an entry for each layer. It checks types itself.
        for values in (raw, text_config if isinstance(text_config, dict) else {}):
            for size in _SIZES:
                limit = _MAX_LAYERS if "layer" in size else (1 << 31) - 1
                if type(value := values.get(size)) is int and not 1 <= value <= limit:
                    raise ValueError(f"{_CONFIG}: {size}: expected a whole number from 1 to {limit}, not {value}")
        config: PreTrainedConfig = AutoConfig.from_pretrained(where, trust_remote_code=False)
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ValueError(f"{_CONFIG}: model_type: expected a causal language model, not {config.model_type!r}")
    return Checkpoint(option, str(name), where, config, "" if adapter is None else where)


def _read_config(where: str, name: str) -> dict[str, Any] | None:
    """Return the JSON object in a file of a model folder, or None if the file does not exist."""
    file = cached_file(where, name, _raise_exceptions_for_missing_entries=False)
    try:
        raw = {} if file is None else strict_loads(Path(str(file)).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"expected a JSON object in {name}")
    return None if file is None else raw


def _locate(name: str | Path, option: str) -> str:
    """Return the folder or hub name for `from_pretrained`. A path must exist. A hub name must be cached or on the hub."""
    text, expected = str(name), f"{option}: expected a model folder or a hub name"
    path = Path(os.path.expanduser(text))
    if os.path.isdir(path) and any((path / file).is_file() for file in (_CONFIG, ADAPTER)):
        return str(path)
    if os.path.exists(path):  # unlike `Path.exists`, False for a name that is too long
        has_gguf = path.suffix == ".gguf" or any(path.glob("*.gguf"))
        hint = "; convert a GGUF file: AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file=FILE)" if has_gguf else ""
        raise PairError(f"{expected}, but {text} has no {_CONFIG}{hint}")
    if path.is_absolute() or text.startswith((".", "~")) or text.count("/") != 1:
        raise PairError(f"{expected}, but {text} does not exist")
    cached: list[str] = []
    try:
        cached += [file for name in (_CONFIG, ADAPTER) if isinstance(file := try_to_load_from_cache(text, name), str)]
        if not cached and path.parent.is_dir():
            raise FileNotFoundError(f"the folder {path.parent} does not contain it")
        if not (cached and is_offline_mode()):
            # Without this request, the library would retry each optional file for half a minute.
            model_info(text, timeout=_HUB_S)
    except GatedRepoError:  # the error of the library is more precise
        pass
    except Exception as error:  # the type depends on the HTTP client of huggingface_hub
        if not cached:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise PairError(f"{expected}; {text} does not exist here, nor is it on the hub: {reason}") from None
        return str(Path(cached[0]).parent)
    return text


def _weight_files(where: str) -> list[str]:
    """Return the weight files of a model; empty if there are none of a known name."""
    for name in _WEIGHTS:
        if file := cached_file(where, name, _raise_exceptions_for_missing_entries=False):
            return list(get_checkpoint_shard_files(where, file)[0]) if name.endswith(".json") else [str(file)]
    return []


def check_memory(checkpoints: Sequence[Checkpoint], device: torch.device, dtype: torch.dtype) -> None:
    """Raise `PairError` if the weights of models that are loaded entirely on `device` exceed its available memory."""
    available = available_bytes(device)
    needs = [checkpoint.weight_bytes(dtype) for checkpoint in checkpoints]
    if available is not None and sum(needs) > available:
        sizes = ", ".join(f"{c.name} {need / 1e9:.3g} GB" for c, need in zip(checkpoints, needs, strict=True))
        half = "--dtype bfloat16, " if dtype.itemsize > 2 else ""
        raise PairError(
            f"{' and '.join(c.option for c in checkpoints)}: {str(dtype).removeprefix('torch.')} weights need more than the "
            f"{available / 1e9:.3g} GB available on {device} ({sizes}); use {half}--device-map auto for the target, or "
            "smaller models"
        )


def available_bytes(device: torch.device) -> int | None:
    """Return the bytes that can be allocated on a device, including swap and file caches; None if unknown."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type != "cpu":
        return None
    available = int(psutil.virtual_memory().available + psutil.swap_memory().free)
    with contextlib.suppress(OSError, ValueError):  # no container, or "max" for one without a limit
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        cached = re.search(r"^file (\d+)", Path("/sys/fs/cgroup/memory.stat").read_text(), re.MULTILINE)
        available = min(available, max(0, limit - used + int(cached[1] if cached else 0)))
    return available


def load_tokenizer(checkpoint: Checkpoint) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model. Raises `PairError` if it cannot be loaded."""
    with _library_errors(checkpoint.option, checkpoint.name, "a tokenizer"):
        # The tokenizer of an adapter may have tokens that its base model lacks.
        in_adapter = checkpoint.adapter and _read_config(checkpoint.adapter, "tokenizer_config.json") is not None
        where = checkpoint.adapter if in_adapter else checkpoint.where
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(where, trust_remote_code=False)
        tokenizer.get_vocab()
    return tokenizer


def load_model(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    attention: str | None = None,
    device_map: DeviceMap | None = None,
) -> PreTrainedModel:
    """Build a model and load all of its weights.

    Args:
        checkpoint: From `open_checkpoint`.
        device, dtype: Of the model; a quantised one keeps the types it was saved with.
        attention: Attention backend; None = the choice of the library.
        device_map: Devices of its layers (`placement.DeviceMap`); None = `device`, from which it is always called.

    Raises:
        PairError: A tensor is missing, unexpected, of another shape or not finite, or the library cannot load it.
    """
    library: Any = AutoModelForCausalLM  # with its loading info, it returns a tuple
    model: PreTrainedModel
    quantised, is_mapped = is_quantised(checkpoint.config), device_map is not None
    if quantised and not is_mapped:
        device_map = {"": device}  # quantised models may not be movable
    with _library_errors(checkpoint.option, checkpoint.name):
        model, report = library.from_pretrained(
            checkpoint.where,
            dtype="auto" if quantised else dtype,
            attn_implementation=attention,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are in the report
            device_map=device_map,
            adapter_kwargs={"subfolder": "none"},  # no adapter in the folder of the model: it is applied below
        )
        _check_report(model, report, quantised)
        if not is_mapped and not quantised:
            model = model.to(device)  # type: ignore[arg-type]
        if checkpoint.adapter:
            model = _apply_adapter(model.eval(), checkpoint.adapter)
        for name, parameter in model.named_parameters():
            kind = parameter.dtype
            checked = kind.is_floating_point and kind.itemsize > 1 and is_plain(parameter) and not parameter.is_meta
            if checked and parameter.numel() and not torch.stack(parameter.detach().aminmax()).isfinite().all():
                raise ValueError(f"{name} has values that are NaN or infinite in {str(kind).removeprefix('torch.')}")
        call_from(model, device)
    return model


def _check_report(model: PreTrainedModel, report: dict[str, Any], quantised: bool) -> None:
    """Raise an error if the library has initialised or ignored tensors, except for those of modules that the model lacks."""
    for name, stored, expected in sorted(report["mismatched_keys"]):
        sizes = f"{list(stored)}, but {_CONFIG} describes {list(expected)}"
        raise ValueError(f"the weight files have {name} of shape {sizes}")
    # Nearly every tensor lies in a top-level module, whether the model uses it or not.
    modules = tuple(f"{name}." for name, _ in model.named_modules() if "." in name)
    unused = [name for name in report["unexpected_keys"] if name.startswith(modules) and not quantised]
    for problem, names in (("lack", report["missing_keys"]), ("have unexpected", unused)):
        if names:
            more = f" and {len(names) - 1} more tensors" if len(names) > 1 else ""
            raise ValueError(f"the weight files {problem} {min(names)}{more}, unlike {_CONFIG}")
    for message in report["error_msgs"]:
        raise ValueError(message)


def _check_adapter(where: str, raw: Mapping[str, Any], is_alone: bool) -> str:
    """Return the base model of an adapter with `raw` in its `adapter_config.json`; `is_alone` if it must name one."""
    if not is_peft_available():
        raise ValueError(f"its {ADAPTER} needs peft: python -m pip install peft")
    from peft import PeftConfig, PeftType

    if (kind := raw.get("peft_type")) not in list(PeftType):
        raise ValueError(f"{ADAPTER}: expected a peft_type that the installed peft supports, not {str(kind)[:80]!r}")
    if refusal := _adapter_refusal(PeftConfig.from_pretrained(where)):
        raise ValueError(refusal)
    base = raw.get("base_model_name_or_path")
    if is_alone and (not base or not isinstance(base, str)):
        raise ValueError(f"{ADAPTER}: expected the base model as base_model_name_or_path, not {base!r}")
    return str(base)


def _adapter_refusal(config: Any) -> str:
    """Return why an adapter with this peft configuration cannot be applied, or an empty string."""
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if getattr(config, "alora_invocation_tokens", None):
        kind = "activated LoRA"
    elif not config.is_prompt_learning and kind not in _BEYOND_LAYERS:
        return ""
    other = ", or call target.generate(custom_generate=specstop_generate)" if config.is_prompt_learning else ""
    return f"its {kind} adapter is more than a change of layers; expected one that changes weights, such as LoRA{other}"


def unwrap(model: Any, role: str) -> PreTrainedModel:
    """Return the base model of a `PeftModel` with its adapter layers. Raises `PairError` if they are not supported."""
    configs = getattr(model, "peft_config", None)
    for config in configs.values() if isinstance(configs, dict) else ():
        if refusal := _adapter_refusal(config):
            raise PairError(f"the {role} cannot be run: {refusal}")
    base: PreTrainedModel = model.get_base_model() if type(model).__module__.startswith("peft.") else model
    return base


def _apply_adapter(model: PreTrainedModel, where: str) -> PreTrainedModel:
    """Apply an adapter that `_check_adapter` accepted to its base model in evaluation mode, in place."""
    from peft import PeftConfig, PeftModel

    # peft would dispatch the model again, although all its layers are on the intended devices.
    device_map = vars(model).pop("hf_device_map", {})
    if len(set(device_map.values())) > 1 and {"cpu", "disk"} & set(map(str, device_map.values())):
        raise ValueError(
            "an adapter cannot be applied to offloaded layers; merge it (merge_and_unload) and save the model"
        )
    names = (ADAPTER, *_ADAPTER_WEIGHTS)
    files = [cached_file(where, name, _raise_exceptions_for_missing_entries=False) for name in names]
    if not any(files[1:]):
        raise ValueError(f"the adapter has no {_ADAPTER_WEIGHTS[0]}")
    content = b"".join(hashlib.blake2b(Path(file).read_bytes()).digest() for file in files if file is not None)
    digest = hashlib.blake2b(model_hash(model).encode() + content, digest_size=8).hexdigest()
    config = PeftConfig.from_pretrained(where)
    config.inference_mode = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice for training and saving
        wrapped: Any = PeftModel(model, config)
        renamed: Any = getattr(model, "_checkpoint_conversion_mapping", None)
        load_result = wrapped.load_adapter(where, "default", torch_device="cpu", key_mapping=renamed)
        for problem, keys in (("lack", load_result.missing_keys), ("have an unknown", load_result.unexpected_keys)):
            if keys:
                raise ValueError(f"the adapter's weights {problem} {keys[0]}")
        if model.dtype in (torch.float32, torch.float64) and not replacement_refusal(model):
            # If merging fails, the remaining adapter layers are kept. They compute the same function.
            with contextlib.suppress(ValueError, TypeError, AttributeError, NotImplementedError, RuntimeError):
                wrapped.base_model.merge_and_unload(safe_merge=True)
    model = wrapped.get_base_model()
    if device_map:
        model.hf_device_map = device_map
    setattr(model, ADAPTED, digest)
    model.config.name_or_path = where
    return model
