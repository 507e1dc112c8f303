"""The pair of models that ships with the package, as folders that `from_pretrained` loads.

The package holds int8 weights with one scale per row. When they are first used they are expanded to float32 in the cache
folder.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ..policies.errors import InputError
from ..policies.files import cache_folder, read_json, sha256, staged_folder, write_json

if TYPE_CHECKING:
    from torch import Tensor

DATA = Path(__file__).parent / "shipped"
"""Package data: `target/`, `draft/`, one tokenizer, prompts, `pair.json` and the model card."""

WEIGHTS = "model.int8.safetensors"
_SCALE = ".scale"
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_CHECKSUMS = "checksums.json"


def quantize_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return matrices as int8 with one bfloat16 scale per row, and the other weights as they are.

    A scale has 8 significant bits and a quantized weight 7, so that their product is exact in float32. Quantizing expanded
    weights again therefore returns the same integers and scales. An output layer that is equal to the embedding is omitted.
    """
    import torch

    quantized: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if name == _HEAD and torch.equal(weight, weights[_EMBEDDING]):
            continue
        if weight.ndim == 2:
            scale = (weight.abs().amax(1) / 127).clamp_min(1e-12).bfloat16()  # [rows]
            integers = (weight / scale.float()[:, None]).round().clamp(-127, 127)
            quantized |= {name: integers.to(torch.int8), name + _SCALE: scale}
        else:
            quantized[name] = weight.float().contiguous()
    return quantized


def expand_weights(quantized: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the float32 weights of `quantize_weights`, with the output layer tied to the embedding if it is absent."""
    expanded = {}
    for name, weight in quantized.items():
        if name.endswith(_SCALE):
            continue
        scale = quantized.get(name + _SCALE)
        expanded[name] = weight.clone() if scale is None else weight.float() * scale.float()[:, None]
    expanded.setdefault(_HEAD, expanded[_EMBEDDING])
    return expanded


def shipped_pair() -> Path:
    """Return the folder of the shipped pair, expanding it into the cache folder when it is missing there or damaged.

    The environment variable `SPECSTOP_CACHE` overrides the default cache folder of the user.

    Returns:
        A folder with `target/`, `draft/`, `prompts-train.jsonl`, `prompts-test.jsonl`, `pair.json` and `README.md`.

    Raises:
        InputError: The package data is missing.
        OSError: The cache folder cannot be written.
    """
    if not (DATA / "pair.json").is_file():
        raise InputError(
            f"expected the shipped pair in {DATA}; install the package again, or give --target and --draft"
        )
    folder = cache_folder() / f"pair-{_digest(DATA)}"
    if not _is_complete(folder):
        try:
            _expand(folder)
        except (OSError, InputError):
            if not _is_complete(folder):  # otherwise another process has expanded it meanwhile
                raise
    return folder


def check_pair(folder: str | Path) -> Path:
    """Return the folder of a pair as an absolute path.

    Raises:
        InputError: A model or a file of prompts is missing.
    """
    path = Path(folder).resolve()
    for name in ("target/config.json", "draft/config.json", "prompts-train.jsonl", "prompts-test.jsonl"):
        if not (path / name).is_file():
            raise InputError(
                f"--pair: expected {name} in {folder}, which does not exist; see benchmarks/tools/make_pair.py"
            )
    return path


def _digest(folder: Path) -> str:
    """Return a short name for the contents of a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _expand(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    with staged_folder(folder) as stage:
        for name in ("target", "draft"):
            (stage / name).mkdir()
            weights = expand_weights(load_file(DATA / name / WEIGHTS))
            if weights[_HEAD] is weights[_EMBEDDING]:
                del weights[_HEAD]  # tied: `from_pretrained` restores it
            save_file(weights, stage / name / "model.safetensors", metadata={"format": "pt"})
            for path in (*(DATA / name).glob("*.json"), *DATA.glob("tokenizer*.json")):
                shutil.copyfile(path, stage / name / path.name)
        for name in ("prompts-train.jsonl", "prompts-test.jsonl", "pair.json", "README.md"):
            shutil.copyfile(DATA / name, stage / name)
        files = sorted(path for path in stage.rglob("*") if path.is_file())
        write_json(stage / _CHECKSUMS, {path.relative_to(stage).as_posix(): sha256(path) for path in files})


def _is_complete(folder: Path) -> bool:
    """Return whether all files of an expanded pair are there with the bytes that were written."""
    try:
        checksums = read_json(folder / _CHECKSUMS, "the expanded pair")
        return bool(checksums) and all(sha256(folder / name) == digest for name, digest in checksums.items())
    except (InputError, OSError, AttributeError):
        return False
