"""Models and tokenizers from folders and hub names, with every tensor accounted for: what is amiss is one line that names it.

transformers fills a tensor that the weight files lack with random numbers, and builds whatever a config asks for before it
looks at the files. So the config is held against the files first, and the library's own account is read afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from .checkpoints.adapters import apply_adapter
from .checkpoints.opening import Checkpoint, check_layers, held_tensors, library_errors, read_config
from .placement import Places, call_from, is_plain, is_quantised, kept_as_is

_MORE, _BUFFERS = 1 << 20, 1 << 28
"""Numbers by which a model may exceed twice its files before it is built, and of its buffers."""
_ALIGNMENT = 64  # bytes
_NO_ADAPTER = "none"
"""A folder that no model has: transformers would apply an adapter beside the weights if peft is installed, and only then."""


def load_tokenizer(checkpoint: Checkpoint) -> PreTrainedTokenizerBase:
    """Return the tokenizer beside a model; one that cannot be loaded is a `PairError`."""
    with library_errors(checkpoint.option, checkpoint.name, "a tokenizer"):
        # That of an adapter may have tokens which its base lacks.
        own = checkpoint.adapter and read_config(checkpoint.adapter, "tokenizer_config.json") is not None
        where = checkpoint.adapter if own else checkpoint.where
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(where, trust_remote_code=False)
        tokenizer.get_vocab()
    return tokenizer


def without_weights(checkpoint: Checkpoint, dtype: torch.dtype) -> PreTrainedModel:
    """Return a model's modules on the device `meta`: shapes and no numbers; `PairError` if the library has no such model."""
    with library_errors(checkpoint.option, checkpoint.name, "a model"), torch.device("meta"):
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
    with library_errors(checkpoint.option, checkpoint.name, "a model"):
        held, quantised = held_tensors(where), is_quantised(config)
        options = {
            "dtype": "auto" if quantised else dtype,
            "attn_implementation": attention,
            "trust_remote_code": False,
        }
        if held and not quantised:
            check_layers(config.get_text_config().to_dict(), len(held))
            with torch.device("meta"):
                _check_numbers(AutoModelForCausalLM.from_config(config, **options), held)
        del held
        if quantised and places is None:
            places = {"": device}  # it cannot always be moved later
        library: Any = AutoModelForCausalLM
        model: PreTrainedModel
        # Mismatched sizes are let pass here, since the account names them.
        model, account = library.from_pretrained(
            where,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            device_map=places,
            adapter_kwargs={"subfolder": _NO_ADAPTER},
            **options,
        )
        _check_account(model, account, quantised)
        if places is None:
            model = model.to(device)  # type: ignore[arg-type]
        _check_finite(model)
        if checkpoint.adapter:
            model = apply_adapter(model.eval(), checkpoint.adapter)
        call_from(model, device)
    if device.type == "cpu" and not kept_as_is(model):
        _align(model)
    return model


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
