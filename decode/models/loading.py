"""Models and tokenizers from folders and hub names, with every tensor accounted for: what is amiss is one line that names it.

transformers fills a tensor that the weight files lack with random numbers, and builds whatever a config asks for before it
looks at the files. So the config is held against the files first, and the library's own account is read afterwards.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import (
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
from .placement import Places, call_from, is_plain, is_quantised, kept_as_is

_SIZES = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "max_position_embeddings", "sliding_window",
)  # fmt: skip
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_MORE, _BUFFERS = 1 << 20, 1 << 28
"""Numbers by which a model may exceed twice its files before it is built, and of its buffers."""
_LARGEST = 1 << 31
_LONGEST = 300  # characters of a message of the library
_ALIGNMENT = 64  # bytes


@dataclass(frozen=True)
class Checkpoint:
    """A folder or hub name whose config was read, and held against the weight files where they are at hand.

    Attributes:
        option: of the command line, for messages.
        name: as given.
        where: as the library wants it.
        config: of the model.
    """

    option: str
    name: str
    where: str
    config: PreTrainedConfig


def open_checkpoint(name: str | Path, option: str) -> Checkpoint:
    """Read and check the config of a model.

    Raises:
        PairError: there is no such folder or model, or its config asks for what no model has.
    """
    where = _found(name, option)
    with _library(option, name, "a model"):
        file = cached_file(where, "config.json")
        raw = json.loads(Path(str(file)).read_text(encoding="utf-8"))
        if not isinstance(raw, dict):
            raise ValueError("expected a JSON object in config.json")
        if Path(where).is_dir():  # first: a config may list its layers one by one
            _check_layers(raw, len(_held(where)))
        config: PreTrainedConfig = AutoConfig.from_pretrained(where, trust_remote_code=False)
        _check_sizes(config)
    return Checkpoint(option, str(name), where, config)


def load_tokenizer(checkpoint: Checkpoint) -> PreTrainedTokenizerBase:
    """Return the tokenizer beside a model; one that cannot be loaded is a `PairError`."""
    with _library(checkpoint.option, checkpoint.name, "a tokenizer"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(checkpoint.where, trust_remote_code=False)
        tokenizer.get_vocab()
    return tokenizer


def without_weights(checkpoint: Checkpoint, dtype: torch.dtype) -> PreTrainedModel:
    """Return a model's modules on the device `meta`: shapes and no numbers; `PairError` if the library has no such model."""
    with _library(checkpoint.option, checkpoint.name, "a model"), torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(checkpoint.config, dtype=dtype)
    return model


def load_model(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    attention: str | None = None,
    places: Places | None = None,
) -> PreTrainedModel:
    """Build a model and load its weights, all of them.

    Args:
        checkpoint: from `open_checkpoint`.
        device, dtype: of the model; a quantised one keeps the types it was saved with.
        attention: backend; None = the library's choice.
        places: where its layers lie (`placement.check_device_map`) if not on `device`, from which it is called all the same.

    Raises:
        PairError: a tensor is missing, unexpected, of another shape or not finite, or the library cannot load it.
    """
    config, where = checkpoint.config, checkpoint.where
    with _library(checkpoint.option, checkpoint.name, "a model"):
        held, quantised = _held(where), is_quantised(config)
        options = {
            "dtype": "auto" if quantised else dtype,
            "attn_implementation": attention,
            "trust_remote_code": False,
        }
        if held and not quantised:
            _check_layers(config.get_text_config().to_dict(), len(held))
            with torch.device("meta"):
                _check_numbers(AutoModelForCausalLM.from_config(config, **options), held)
        del held
        if quantised and places is None:
            places = {"": device}  # it cannot always be moved later
        library: Any = AutoModelForCausalLM
        model: PreTrainedModel
        # Mismatched sizes are let pass here, since the account names them.
        model, account = library.from_pretrained(
            where, output_loading_info=True, ignore_mismatched_sizes=True, device_map=places, **options
        )
        _check_account(model, account, quantised)
        if places is None:
            model = model.to(device)  # type: ignore[arg-type]
        _check_finite(model)
        call_from(model, device)
    if device.type == "cpu" and not kept_as_is(model):
        _align(model)
    return model


def _found(name: str | Path, option: str) -> str:
    """Return the name as `from_pretrained` wants it; a path that looks local must exist."""
    text = str(name)
    path = Path(os.path.expanduser(text))
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise PairError(f"{option}: expected a model folder, but {text} has no config.json")
        return str(path)
    if path.is_absolute() or text.startswith((".", "~")) or text.count("/") != 1:
        raise PairError(f"{option}: expected a model folder or a hub name, but {text} does not exist")
    return text


@contextlib.contextmanager
def _library(option: str, name: str | Path, what: str) -> Iterator[None]:
    """Turn whatever goes wrong inside, with files of somebody else's making, into a `PairError` of one line."""
    try:
        yield
    except pickle.UnpicklingError:
        raise PairError(
            f"{option}: cannot load {what} from {name}: its weights are a pickle of more than tensors; nothing of it was "
            "run: get them as safetensors"
        ) from None
    except Exception as error:  # the library raises nearly everything on a broken config
        plain = isinstance(error, OSError | ValueError | RuntimeError | StrictDataclassError)
        kind = "" if plain else f"{type(error).__name__}: "
        text = " ".join(str(error).split()) or type(error).__name__
        line = "".join(c if c.isprintable() else "?" for c in kind + text)
        short = line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."
        raise PairError(f"{option}: cannot load {what} from {name}: {short}") from None


def _check_sizes(config: PreTrainedConfig) -> None:
    """Refuse what is no language model, and sizes that are none; what a config leaves out or has by layer stays."""
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


def _held(where: str) -> dict[str, Tensor]:
    """Return the tensors of the weight files by name, without their data; nothing where there are no known files."""
    for name in _WEIGHTS:
        file = cached_file(where, name, _raise_exceptions_for_missing_entries=False)
        if file is not None:
            files = get_checkpoint_shard_files(where, file)[0] if name.endswith(".json") else [file]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the protocol of a pickle that is refused anyway
                return {key: tensor for part in files for key, tensor in load_state_dict(part, "meta").items()}
    return {}


def _check_layers(config: Mapping[str, Any], tensors: int) -> None:
    """Refuse more layers than there are tensors: such a model would take hours to build."""
    inner = config.get("text_config")
    for values in (config, inner if isinstance(inner, Mapping) else {}):
        for name in _LAYERS:
            layers = values.get(name)
            if tensors and isinstance(layers, int) and layers > tensors:
                raise ValueError(
                    f"config.json says {name} {layers}, but the weight files hold {tensors} tensors in all"
                )


def _check_numbers(model: PreTrainedModel, held: Mapping[str, Tensor]) -> None:
    """Refuse a model, built without data, that is far larger than its weight files."""
    wanted, buffers = (sum(t.numel() for t in of) for of in (model.parameters(), model.buffers()))
    there = sum(tensor.numel() for tensor in held.values())
    if wanted > 2 * there + _MORE or buffers > max(there, _BUFFERS):
        for name, parameter in model.named_parameters():
            if name in held and held[name].shape != parameter.shape:
                raise _misshapen(name, held[name].shape, parameter.shape)
        raise ValueError(f"config.json describes {wanted + buffers} numbers, but the weight files hold {there}")


def _misshapen(name: str, file: Any, model: Any) -> ValueError:
    return ValueError(f"the weight files have {name} of shape {list(file)}, but config.json describes {list(model)}")


def _check_account(model: PreTrainedModel, account: Mapping[str, Any], quantised: bool) -> None:
    """Refuse what the library filled in or left out, naming a tensor.

    A tensor that the model has no module for (a second head, a vision tower) is left out by right; so may be what quantised
    weights bring beside them.
    """
    for name, file, wanted in sorted(account["mismatched_keys"]):
        raise _misshapen(name, file, wanted)
    if missing := sorted(account["missing_keys"]):
        raise ValueError(f"the weight files lack {_some(missing)}, which config.json describes")
    # Not those at the top: nearly every tensor lies in one of them, wanted or not.
    modules = {name for name, _ in model.named_modules() if "." in name}
    odd = sorted(n for n in account["unexpected_keys"] if any(n.startswith(f"{m}.") for m in _parents(n) & modules))
    if odd and not quantised:
        raise ValueError(f"the weight files have {_some(odd)}, for which config.json leaves no place")
    for message in account["error_msgs"]:
        raise ValueError(message)


def _parents(name: str) -> set[str]:
    """Return the names of the modules that a tensor of this name could lie in."""
    parts = name.split(".")
    return {".".join(parts[:end]) for end in range(1, len(parts))}


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more tensors"


def _check_finite(model: PreTrainedModel) -> None:
    """Refuse weights that are NaN or infinite, by name; quantised ones have neither, offloaded ones stay where they are."""
    named = [
        (name, p.detach())
        for name, p in model.named_parameters()
        if p.is_floating_point() and p.dtype.itemsize > 1 and is_plain(p) and not p.is_meta
    ]
    if not named:
        return
    # A sum is finite unless a weight is not, or all together are too large: only then each is looked at.
    each = [p.sum(dtype=torch.promote_types(p.dtype, torch.float32)).double() for _, p in named]
    sums = torch.stack([one.to(each[0].device) for one in each])
    for at in (~sums.isfinite()).nonzero()[:, 0].tolist():
        name, parameter = named[at]
        if not bool(parameter.isfinite().all()):
            kind = str(parameter.dtype).removeprefix("torch.")
            raise ValueError(f"{name} has values that are NaN or infinite in {kind}")


def _align(model: PreTrainedModel) -> None:
    """Copy weights that lie on odd addresses of a mapped file: matrix products read them some 5% slower there."""
    for parameter in model.parameters():
        if parameter.data_ptr() % _ALIGNMENT:
            parameter.data = parameter.data.clone()
