"""Weights from an untrusted file: tensors, and nothing else of it.

A `.pt` file is a pickle. It is read by torch's weights-only loader, which builds tensors and plain containers and refuses
everything else before it is called: no code of the file runs.
"""

from __future__ import annotations

import io
import pickle
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from ...policies.contract import Array
from ...policies.errors import InputError, PolicyError
from ...policies.files import MAX_DATA_BYTES

FILES = ("model.safetensors", "pytorch_model.bin")
"""What is looked for in a folder, in this order."""

_GLOBAL = re.compile(r"GLOBAL ([\w.]+)|Trying to (?:load|call) (?:unsupported )?(?:GLOBAL )?([\w.]+)")


def find_weights(path: Path, files: Sequence[str] = FILES, most: int = MAX_DATA_BYTES) -> Path:
    """Return the file of weights: `path`, or one of `files` in the folder `path`.

    Raises:
        InputError: there is none.
        PolicyError: it has more than `most` bytes.
    """
    if path.is_dir():
        for name in files:
            if (path / name).is_file():
                path = path / name
                break
        else:
            raise InputError(f"expected {' or '.join(files)} in the folder {path}, which has neither")
    if not path.is_file():
        raise InputError(f"expected a file of weights, but {path} does not exist")
    if path.stat().st_size > most:
        raise PolicyError(f"{path.name} has {path.stat().st_size} bytes; expected at most {most}")
    return path


def read_state(raw: bytes, path: Path, most: int = MAX_DATA_BYTES) -> dict[str, Array]:
    """Return the state dict as float32 arrays; nothing of a pickle but tensors is built.

    Args:
        raw: the file.
        path: its name, for messages; `.safetensors` says its format.
        most: bytes of the largest tensor.

    Raises:
        PolicyError: it is damaged, or holds anything but a state dict of tensors of numbers.
    """
    try:
        if path.suffix == ".safetensors":
            found: Any = safetensors.torch.load(raw)
        else:
            with warnings.catch_warnings():  # what torch has to say about odd files is said below
                warnings.simplefilter("ignore")
                found = torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        what = next((a or b for a, b in _GLOBAL.findall(str(error))), "")
        raise PolicyError(
            f"{path.name} holds more than tensors{what and f' (it asks for {what})'}, and nothing of it was run; expected a "
            "state dict: torch.save(model.state_dict(), ...)"
        ) from None
    except Exception as error:  # torch raises errors of many classes at a damaged file
        reason = " ".join(str(error).split())[:120]
        raise PolicyError(f"{path.name} cannot be read as weights ({type(error).__name__}: {reason})") from None
    if not isinstance(found, Mapping) or not found or not all(isinstance(key, str) for key in found):
        raise PolicyError(f"{path.name} holds a {type(found).__name__}; expected a state dict, tensors by name")
    for key, value in found.items():
        if not isinstance(value, Tensor) or value.layout != torch.strided or value.device.type != "cpu":
            raise PolicyError(f"{path.name}: {key[:80]!r} is no plain tensor")
        # Counted as float32: an expanded view in a small file may stand for any number of elements.
        if not value.dtype.is_floating_point or value.numel() * 4 > most:
            raise PolicyError(
                f"{path.name}: {key[:80]!r} is {value.dtype} of {list(value.shape)}, which no such head has"
            )
    return {key: value.detach().float().contiguous().numpy() for key, value in found.items()}


def named(names: Sequence[str], most: int = 6) -> str:
    """Return names of tensors for a message, the first few of them."""
    shown = ", ".join(repr(name[:60]) for name in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")
