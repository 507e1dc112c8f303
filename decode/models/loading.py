"""Models and tokenizers from folders and hub names. Whatever is wrong with their files is an error of one line.

transformers fills a tensor that the weight files lack with random numbers, and builds whatever a config describes before it
reads the files. Therefore the config is compared with the files first, and the library's report on the tensors afterwards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import is_offline_mode, model_info, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, StrictDataclassError
from torch import Tensor
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
from transformers.modeling_utils import load_state_dict
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from ...policies.errors import PairError
from ...policies.safe_loading import strict_loads
from .adapters import ADAPTER, apply_adapter, check_adapter
from .placement import Places, call_from, is_plain, is_quantised, kept_as_is

_CONFIG = "config.json"
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_SIZES = (
    "vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "max_position_embeddings", "sliding_window", "num_hidden_layers", "n_layer", "n_layers", "num_layers",
)  # fmt: skip
_MOST_LAYERS = 1024  # building a model with millions of layers could take hours
_MARGIN = 1 << 28  # numbers by which parameters and buffers may exceed twice the content of the weight files
_MOST_TEXT = 300  # characters of an error message of the library
_HUB_S = 5.0  # timeout of the request whether a model exists on the hub
_CONVERT = (
    "give the folder of the same model for transformers, or write one with AutoModelForCausalLM.from_pretrained(FOLDER, "
    "gguf_file=FILE).save_pretrained(OUT), and the tokenizer likewise"
)
_OWN_CODE = (
    "it requires custom code (auto_map in its config), and code from a model folder is never run; choose a model that "
    "transformers supports by itself"
)


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

    def errors(self, what: str = "a model") -> contextlib.AbstractContextManager[None]:
        """Convert any error while third-party files are read to a `PairError` with a one-line message."""
        return _library_errors(self.option, self.name, what)

    @cached_property
    def skeleton(self) -> PreTrainedModel:
        """The model on the device `meta`: shapes without numbers. Raises `PairError` if the library cannot build it."""
        with self.errors(), torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(self.config)
        return model

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Return the size of the weights in memory. Raises `PairError` if the model is far larger than its files."""
        with self.errors():
            stored = _stored_tensors(self.where).values()
            if is_quantised(self.config):
                return sum(tensor.numel() * tensor.dtype.itemsize for tensor in stored)
            model = self.skeleton
            held, parameters, buffers = (
                sum(t.numel() for t in of) for of in (stored, model.parameters(), model.buffers())
            )
            if stored and parameters + buffers > 2 * held + _MARGIN:
                raise ValueError(f"{_CONFIG} describes {parameters + buffers} numbers; the weight files hold {held}")
        return parameters * dtype.itemsize


def open_checkpoint(name: str | Path, option: str, takes_adapter: bool = True) -> Checkpoint:
    """Read and validate the config of a model, or of an adapter (unless not `takes_adapter`) and its base model.

    Raises:
        PairError: The folder or model does not exist, its config is invalid, or the adapter cannot be applied.
    """
    where = _locate(name, option)
    with _library_errors(option, name, "a model"):
        adapter, raw = (_read_config(where, file) for file in (ADAPTER, _CONFIG))
        # The library uses the last of duplicate keys and ignores an invalid generation config.
        for file in ("generation_config.json", "tokenizer_config.json", "model.safetensors.index.json"):
            _read_config(where, file)
    if adapter is not None:
        if not takes_adapter:
            raise PairError(
                f"{option}: expected a model, but {name} is an adapter itself; merge it into its model first"
            )
        with _library_errors(option, name, "an adapter"):
            # A config without weights is a copy of the config of the base model.
            is_alone = raw is None or not _stored_tensors(where)
            base = check_adapter(where, adapter, is_alone)
        if is_alone:
            model = open_checkpoint(base, f"{option}: the base model of the adapter {name}", takes_adapter=False)
            return dataclasses.replace(model, option=option, name=f"{name}, an adapter of {base}", adapter=where)
    with _library_errors(option, name, "a model"):
        if raw is None:
            raise ValueError(f"it has no {_CONFIG}")
        if "auto_map" in raw and raw.get("model_type") not in CONFIG_MAPPING:
            raise ValueError(_OWN_CODE)
        text = raw.get("text_config")
        for values in (raw, text if isinstance(text, dict) else {}):
            # Before AutoConfig, which may build a list with an entry for each layer. It checks types and defaults itself.
            _check_sizes({key: value for key, value in values.items() if type(value) is int and value > 0})
        config: PreTrainedConfig = AutoConfig.from_pretrained(where, trust_remote_code=False)
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ValueError(f"{_CONFIG}: model_type: expected a causal language model, not {config.model_type!r}")
        _check_sizes({size: getattr(config.get_text_config(), size, None) for size in _SIZES})
    return Checkpoint(option, str(name), where, config, "" if adapter is None else where)


def _check_sizes(values: dict[str, Any]) -> None:
    """Raise an error for invalid sizes. Missing and per-layer sizes are not checked."""
    for size in _SIZES:
        value, most = values.get(size), _MOST_LAYERS if "layer" in size else (1 << 31) - 1
        if not (value is None or isinstance(value, list | tuple) or (type(value) is int and 1 <= value <= most)):
            why = "; a model without a window has null" if size == "sliding_window" else ""
            raise ValueError(f"{_CONFIG}: {size}: expected a whole number from 1 to {most}, not {value!r}{why}")


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
    if path.is_dir():
        if not any((path / file).is_file() for file in (_CONFIG, ADAPTER)):
            gguf = next((f" but {file.name}: {_CONVERT}" for file in sorted(path.glob("*.gguf"))), "")
            raise PairError(f"{option}: expected a model folder, but {text} has no {_CONFIG}{gguf}")
        return str(path)
    if path.is_file():
        with path.open("rb") as stream:
            if path.suffix.lower() == ".gguf" or stream.read(4) == b"GGUF":
                raise PairError(f"{expected}, but {text} is a GGUF file: {_CONVERT}")
        raise PairError(f"{expected}, but {text} is a file; give the folder that holds it and {_CONFIG}")
    if path.is_absolute() or text.startswith((".", "~")) or text.count("/") != 1:
        raise PairError(f"{expected}, but {text} does not exist")
    cached: list[str] = []
    try:
        cached += [file for name in (_CONFIG, ADAPTER) if isinstance(file := try_to_load_from_cache(text, name), str)]
        if not cached and Path(text).parent.is_dir():
            raise PairError(
                f"{expected}, but {text} does not exist in the folder {Path(text).parent}; hub: hf download {text}"
            )
        if not (cached and is_offline_mode()):
            # Without this request, the library would retry each optional file for half a minute.
            model_info(text, timeout=_HUB_S)
    except (PairError, GatedRepoError) as error:  # for a gated model the error of the library is more precise
        if isinstance(error, PairError):
            raise
    except Exception as error:  # the type depends on the HTTP client of huggingface_hub
        if not cached:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise PairError(f"{expected}; {text} does not exist here, nor is it on the hub: {reason}") from None
        return str(Path(cached[0]).parent)
    return text


@contextlib.contextmanager
def _library_errors(option: str, name: str | Path, what: str) -> Iterator[None]:
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
            text = _OWN_CODE
        line = "".join(c if c.isprintable() else "?" for c in text)
        short = line if len(line) <= _MOST_TEXT else f"{line[:_MOST_TEXT]}..."
        raise PairError(f"{option}: cannot load {what} from {name}: {short}") from None


def _stored_tensors(where: str) -> dict[str, Tensor]:
    """Return the tensors of the weight files by name, without data; empty if there are no known files."""
    for name in _WEIGHTS:
        file = cached_file(where, name, _raise_exceptions_for_missing_entries=False)
        if file is not None:
            files = get_checkpoint_shard_files(where, file)[0] if name.endswith(".json") else [file]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about the protocol of a pickle, which is rejected anyway
                return {key: tensor for part in files for key, tensor in load_state_dict(part, "meta").items()}
    return {}


def check_memory(checkpoints: Sequence[Checkpoint], device: torch.device, dtype: torch.dtype) -> None:
    """Raise `PairError` if the weights of models that are loaded entirely on `device` exceed its available memory."""
    available = available_bytes(device)
    needs = [checkpoint.weight_bytes(dtype) for checkpoint in checkpoints]
    if available is None or sum(needs) <= available:
        return
    sizes = ", ".join(f"{c.name} {need / 1e9:.3g} GB" for c, need in zip(checkpoints, needs, strict=True))
    half = "--dtype bfloat16, " if dtype.itemsize > 2 else ""
    raise PairError(
        f"{' and '.join(c.option for c in checkpoints)}: {str(dtype).removeprefix('torch.')} weights need "
        f"{sum(needs) / 1e9:.3g} GB on {device} ({sizes}), but {available / 1e9:.3g} GB of memory are available; use {half}"
        "--device-map auto for the target, or smaller models"
    )


def available_bytes(device: torch.device) -> int | None:
    """Return the bytes that can be allocated on a device, including swap and file caches; None if unknown."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type != "cpu":
        return None
    limits, cgroup = [], Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, KeyError):  # Linux only
        raw = Path("/proc/meminfo").read_text()
        sizes = {name: int(size) * 1024 for name, size in re.findall(r"^(\w+): +(\d+) kB", raw, re.MULTILINE)}
        limits.append(sizes["MemAvailable"] + sizes["SwapFree"])
    with contextlib.suppress(OSError, ValueError):  # "max" without a limit of the container
        free = int((cgroup / "memory.max").read_text()) - int((cgroup / "memory.current").read_text())
        cached = re.search(r"^file (\d+)", (cgroup / "memory.stat").read_text(), re.MULTILINE)
        limits.append(max(0, free + int(cached[1] if cached else 0)))
    return min(limits, default=None)


def load_tokenizer(checkpoint: Checkpoint) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model. Raises `PairError` if it cannot be loaded."""
    with checkpoint.errors("a tokenizer"):
        # The tokenizer of an adapter may have tokens that its base model lacks.
        own = checkpoint.adapter and _read_config(checkpoint.adapter, "tokenizer_config.json") is not None
        where = checkpoint.adapter if own else checkpoint.where
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(where, trust_remote_code=False)
        tokenizer.get_vocab()
    return tokenizer


def load_model(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    attention: str | None = None,
    places: Places | None = None,
) -> PreTrainedModel:
    """Build a model and load all of its weights.

    Args:
        checkpoint: From `open_checkpoint`.
        device, dtype: Of the model; a quantised one keeps the types it was saved with.
        attention: Attention backend; None = the choice of the library.
        places: Devices of its layers (`placement.check_device_map`) if not `device`, from which it is called nevertheless.

    Raises:
        PairError: A tensor is missing, unexpected, of another shape or not finite, or the library cannot load it.
    """
    library: Any = AutoModelForCausalLM  # with its loading info, it returns a tuple
    model: PreTrainedModel
    quantised = is_quantised(checkpoint.config)
    checkpoint.weight_bytes(dtype)
    with checkpoint.errors():
        model, report = library.from_pretrained(
            checkpoint.where,
            dtype="auto" if quantised else dtype,
            attn_implementation=attention,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are in the report
            device_map={"": device}
            if quantised and places is None
            else places,  # not every quantised model can be moved
            adapter_kwargs={"subfolder": "none"},  # no adapter in the folder of the model: it is applied below
        )
        _check_report(model, report, quantised)
        if places is None and not quantised:
            model = model.to(device)  # type: ignore[arg-type]
        for name, parameter in model.named_parameters():
            kind = parameter.dtype
            checked = kind.is_floating_point and kind.itemsize > 1 and is_plain(parameter) and not parameter.is_meta
            if checked and parameter.numel() and not torch.stack(parameter.detach().aminmax()).isfinite().all():
                raise ValueError(f"{name} has values that are NaN or infinite in {str(kind).removeprefix('torch.')}")
        if checkpoint.adapter:
            model = apply_adapter(model.eval(), checkpoint.adapter)
        call_from(model, device)
    if device.type == "cpu" and not kept_as_is(model):
        for parameter in model.parameters():
            if parameter.data_ptr() % 64:  # weights at odd addresses of a mapped file are read some 5% slower
                parameter.data = parameter.data.clone()
    return model


def _check_report(model: PreTrainedModel, report: dict[str, Any], quantised: bool) -> None:
    """Raise an error if the library has initialised or ignored tensors, except for those of modules that the model lacks."""

    def first(names: Sequence[str]) -> str:
        return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more tensors"

    for name, stored, expected in sorted(report["mismatched_keys"]):
        sizes = f"{list(stored)}, but {_CONFIG} describes {list(expected)}"
        raise ValueError(f"the weight files have {name} of shape {sizes}")
    if missing := sorted(report["missing_keys"]):
        raise ValueError(f"the weight files lack {first(missing)}, which {_CONFIG} describes")
    # Nearly every tensor lies in a top-level module, whether the model uses it or not.
    modules = tuple(f"{name}." for name, _ in model.named_modules() if "." in name)
    unused = sorted(name for name in report["unexpected_keys"] if name.startswith(modules))
    if unused and not quantised:
        raise ValueError(f"the weight files have {first(unused)}, for which {_CONFIG} leaves no place")
    for message in report["error_msgs"]:
        raise ValueError(message)
