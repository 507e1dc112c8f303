"""Model folders and hub names: locate a model, validate its config and list the tensors of its weight files."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import get_hf_file_metadata, hf_hub_url, is_offline_mode, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, RepositoryNotFoundError, StrictDataclassError
from torch import Tensor
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedConfig
from transformers.modeling_utils import load_state_dict
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from ....policies.errors import PairError
from ....policies.text import strict_loads
from .adapters import ADAPTER, check_adapter

_CONFIG = "config.json"
_SIZES = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "max_position_embeddings", "sliding_window",
)  # fmt: skip
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_LARGEST = 1 << 31
_LONGEST = 300  # maximum characters of an error message of the library
_HUB_S = 5.0
"""Timeout in seconds of the request whether a model exists on the hub."""

_OWN_CODE = (
    "it requires custom code (auto_map in its config), and code from a model folder is never run; choose a model that "
    "transformers supports by itself"
)


@dataclass(frozen=True)
class Checkpoint:
    """A folder or hub name with a validated config. The config of a folder is also compared with its weight files.

    Attributes:
        option: Command-line option, for messages.
        name: Name for messages. It includes the base model of an adapter.
        where: Folder or hub name of the model, or of the base model of an adapter, for `from_pretrained`.
        config: Config of the model.
        adapter: Folder or hub name of the PEFT adapter to apply; empty if there is none.
    """

    option: str
    name: str
    where: str
    config: PreTrainedConfig
    adapter: str = ""


def open_checkpoint(name: str | Path, option: str, takes_adapter: bool = True) -> Checkpoint:
    """Read and validate the config of a model, or of an adapter and its base model.

    Args:
        name: Folder or hub name.
        option: Command-line option, for messages.
        takes_adapter: Whether an adapter is accepted; False for the base model of an adapter.

    Raises:
        PairError: The folder or model does not exist, its config is invalid, or the adapter cannot be applied.
    """
    where = _locate(name, option)
    with library_errors(option, name, "a model"):
        adapter = read_config(where, ADAPTER)
        raw = read_config(where, _CONFIG)
        # The library uses the last of duplicate keys and ignores an invalid generation config.
        for name_of_file in ("generation_config.json", "tokenizer_config.json", "model.safetensors.index.json"):
            read_config(where, name_of_file)
    if adapter is not None:
        if not takes_adapter:
            raise PairError(
                f"{option}: expected a model, but {name} is an adapter itself; merge it into its model first"
            )
        with library_errors(option, name, "an adapter"):
            # A config without weights is a copy of the config of the base model.
            is_alone = raw is None or not held_tensors(where)
            base = check_adapter(where, adapter, is_alone)
        if is_alone:
            model = open_checkpoint(base, f"{option}: the base model of the adapter {name}", takes_adapter=False)
            return dataclasses.replace(model, option=option, name=f"{name}, an adapter of {base}", adapter=where)
    with library_errors(option, name, "a model"):
        if raw is None:
            raise ValueError(f"it has no {_CONFIG}")
        if "auto_map" in raw and raw.get("model_type") not in CONFIG_MAPPING:
            raise ValueError(_OWN_CODE)
        if Path(where).is_dir():  # before AutoConfig, which may build a list with an entry for each layer
            check_layers(raw, len(held_tensors(where)))
        config: PreTrainedConfig = AutoConfig.from_pretrained(where, trust_remote_code=False)
        _check_sizes(config)
    return Checkpoint(option, str(name), where, config, "" if adapter is None else where)


def read_config(where: str, name: str) -> dict[str, Any] | None:
    """Return the JSON object in a file of a model folder, or None if the file does not exist.

    Raises:
        ValueError: The file is not a JSON object, or a key occurs twice.
    """
    file = cached_file(where, name, _raise_exceptions_for_missing_entries=False)
    if file is None:
        return None
    try:
        raw = strict_loads(Path(str(file)).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"expected a JSON object in {name}")
    return raw


def _locate(name: str | Path, option: str) -> str:
    """Return the folder or hub name for `from_pretrained`. A path must exist. A hub name must be cached or on the hub."""
    text, expected = str(name), f"{option}: expected a model folder or a hub name"
    path = Path(os.path.expanduser(text))
    if path.is_dir():
        if not any((path / file).is_file() for file in (_CONFIG, ADAPTER)):
            gguf = next((f" but {file.name}: {_CONVERT}" for file in sorted(path.glob("*.gguf"))), "")
            raise PairError(f"{option}: expected a model folder, but {text} has no {_CONFIG}{gguf}")
        return str(path)
    if path.exists():
        if _is_gguf(path):
            raise PairError(f"{expected}, but {text} is a GGUF file: {_CONVERT}")
        raise PairError(f"{expected}, but {text} is a file; give the folder that holds it and {_CONFIG}")
    if path.is_absolute() or text.startswith((".", "~")) or text.count("/") != 1:
        raise PairError(f"{expected}, but {text} does not exist")
    try:
        files = [try_to_load_from_cache(text, file) for file in (_CONFIG, ADAPTER)]
    except ValueError as error:
        raise PairError(f"{expected}, but {text!r} is neither: {str(error).splitlines()[0]}") from None
    cached = next((file for file in files if isinstance(file, str)), None)
    folder = text.partition("/")[0]
    if cached is None and Path(folder).is_dir():
        raise PairError(
            f"{expected}, but {text} does not exist in the folder {folder}; if you mean the hub's model of that name, "
            f"download it first: hf download {text}"
        )
    if is_offline_mode():
        if cached is None:
            raise PairError(f"{expected}; {text} does not exist here and the hub is switched off (HF_HUB_OFFLINE)")
        return text
    # Without this check, the library would retry each optional file for half a minute.
    refusal = _hub_refusal(text)
    if refusal and cached is None:
        raise PairError(f"{expected}; {refusal}")
    return str(Path(cached).parent) if refusal and cached is not None else text


def _is_gguf(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return path.is_file() and (path.suffix.lower() == ".gguf" or path.open("rb").read(4) == b"GGUF")
    return False


_CONVERT = (
    "give the folder of the same model for transformers, or write one with AutoModelForCausalLM.from_pretrained(FOLDER, "
    "gguf_file=FILE).save_pretrained(OUT), the tokenizer likewise"
)


def _hub_refusal(name: str) -> str:
    """Return why a model is not available on the hub, or an empty string. Sends one request."""
    try:
        get_hf_file_metadata(hf_hub_url(name, _CONFIG), timeout=_HUB_S)
    except (EntryNotFoundError, GatedRepoError):
        return ""  # may be an adapter; for a gated model the error of the library is more precise
    except RepositoryNotFoundError:
        return f"{name} exists neither here nor on the hub, or it is private (hf auth login)"
    except Exception:  # the type depends on the HTTP client of huggingface_hub
        return f"{name} does not exist here and the hub cannot be reached"
    return ""


@contextlib.contextmanager
def library_errors(option: str, name: str | Path, what: str) -> Iterator[None]:
    """Convert any error while third-party files are read to a `PairError` with a one-line message."""
    try:
        yield
    except pickle.UnpicklingError:
        raise PairError(
            f"{option}: cannot load {what} from {name}: its weights are a pickle of more than tensors; nothing of it was "
            "run: get them as safetensors"
        ) from None
    except Exception as error:  # an invalid config may raise almost any error
        plain = isinstance(error, OSError | ValueError | RuntimeError | StrictDataclassError)
        kind = "" if plain else f"{type(error).__name__}: "
        text = " ".join(str(error).split()) or type(error).__name__
        if "trust_remote_code" in text:  # the advice of the library does not apply
            text = _OWN_CODE
        line = "".join(c if c.isprintable() else "?" for c in kind + text)
        short = line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."
        raise PairError(f"{option}: cannot load {what} from {name}: {short}") from None


def _check_sizes(config: PreTrainedConfig) -> None:
    """Raise an error for other model types and invalid sizes. Missing and per-layer sizes are not checked."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"config.json: model_type: expected a causal language model, not {config.model_type!r}")
    text = config.get_text_config()
    for size in _SIZES:
        value = getattr(text, size, None)
        if value is None or isinstance(value, list | tuple):
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < _LARGEST:
            why = "; a model without a window has null" if size == "sliding_window" else ""
            raise ValueError(
                f"config.json: {size}: expected a whole number from 1 to {_LARGEST - 1}, not {value!r}{why}"
            )


def held_tensors(where: str) -> dict[str, Tensor]:
    """Return the tensors of the weight files by name, without data; empty if there are no known files."""
    for name in _WEIGHTS:
        file = cached_file(where, name, _raise_exceptions_for_missing_entries=False)
        if file is not None:
            files = get_checkpoint_shard_files(where, file)[0] if name.endswith(".json") else [file]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about the protocol of a pickle, which is rejected anyway
                return {key: tensor for part in files for key, tensor in load_state_dict(part, "meta").items()}
    return {}


def check_layers(config: Mapping[str, Any], tensors: int) -> None:
    """Raise an error if there are more layers than tensors. Building such a model could take hours."""
    inner = config.get("text_config")
    for values in (config, inner if isinstance(inner, Mapping) else {}):
        for name in _LAYERS:
            layers = values.get(name)
            if tensors and isinstance(layers, int) and layers > tensors:
                raise ValueError(
                    f"config.json says {name} {layers}, but the weight files hold {tensors} tensors in all"
                )
