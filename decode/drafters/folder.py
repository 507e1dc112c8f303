"""The folder of a trained drafter: `drafter.json`, `weights.safetensors`, `README.md`. Loading runs no code.

As with policy folders, everything is validated before any of it is used (`policies.storage.safe_loading`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from ...policies.display import markdown_cell
from ...policies.errors import InputError, PolicyError
from ...policies.files import staged_folder, write_atomic, write_json
from ...policies.safe_loading import (
    CARD_FILE,
    MAX_TEXT_BYTES,
    WEIGHTS_FILE,
    digest,
    read_files,
    read_signed_json,
)
from ..models.engine import pack_weights, packed_refusal
from ..models.pair import Pair
from ..models.view import hidden_width
from .heads.networks import CTCNetwork, HydraHeads, LayerNetwork, MedusaHeads, Shape

DRAFTER_SCHEMA = 1
IDENTITY_LENGTH = 16

DRAFTER_FILE = "drafter.json"
KINDS: Mapping[str, Callable[[Shape], nn.Module]] = {
    network.kind: network for network in (MedusaHeads, HydraHeads, CTCNetwork, LayerNetwork)
}
"""Networks by name."""

_TYPES = {"kind": str, "shape": dict, "target": str, "files": dict, "provenance": dict, "metrics": dict}


@dataclass(frozen=True)
class TrainedDrafter:
    """Contents of a folder.

    Attributes:
        kind: name of the network.
        network: with its weights.
        target: hash of the target that it was trained for (`Pair.fingerprint`).
        provenance, metrics: for people.
        identity: short hash of the folder's contents, by which traces and policies refer to it; "" before it is saved.
    """

    kind: str
    network: nn.Module
    target: str
    provenance: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    identity: str = ""

    def network_for(self, pair: Pair) -> Any:
        """Return the network with the device and data type of the pair's target.

        Raises:
            InputError: it was trained for another target.
        """
        target = pair.fingerprint["target"]
        shape: Any = self.network.shape
        if self.target != target or (shape.hidden, shape.vocabulary) != (hidden_width(pair.target), pair.vocabulary):
            raise InputError(
                f"it was trained for the target {self.target}, not for {target}; train one for this target "
                "(specstop train-drafter)"
            )
        network = self.network.to(pair.device, pair.target.dtype).requires_grad_(False).eval()
        if not packed_refusal(pair.device, pair.target.dtype):
            pack_weights(network)  # in place: this network cannot be saved any more
        return network


def save_drafter(trained: TrainedDrafter, path: str | Path) -> Path:
    """Write the folder of a drafter atomically.

    Raises:
        InputError: the folder holds files that specstop did not write.
    """
    network: Any = trained.network
    tensors = {name: x.detach().to("cpu", torch.float32).contiguous() for name, x in network.state_dict().items()}
    weights = safetensors.torch.save(tensors)
    raw = {
        "schema": DRAFTER_SCHEMA,
        "kind": trained.kind,
        "shape": dataclasses.asdict(network.shape),
        "target": trained.target,
        "files": {WEIGHTS_FILE: hashlib.sha256(weights).hexdigest()},
        "provenance": dict(trained.provenance),
        "metrics": dict(trained.metrics),
    }
    with staged_folder(path) as folder:
        write_atomic(folder / WEIGHTS_FILE, weights)
        write_json(folder / DRAFTER_FILE, {**raw, "sha256": digest(raw)})
        write_atomic(folder / CARD_FILE, _card(trained))
    return Path(path)


def load_drafter(path: str | Path, *, weights: bool = True) -> TrainedDrafter:
    """Read and validate the folder of a drafter.

    Args:
        path: of the folder.
        weights: False = the network has no weights, and those in the folder are not validated.

    Raises:
        InputError: a file is missing, was changed, or does not match `drafter.json`.
    """
    folder = Path(os.path.expanduser(path))
    try:
        if not folder.is_dir():
            raise InputError("expected the folder of a drafter, which does not exist")
        raw = _read_header(folder)
        with torch.device("meta"):  # nothing is allocated for sizes that the file does not confirm
            network = KINDS[raw["kind"]](Shape.read(raw["shape"]))
        if weights:
            network.load_state_dict(_read_weights(folder, raw["files"], network.state_dict()), assign=True)
    except (InputError, PolicyError) as error:
        raise InputError(f"--drafter: {path}: {error.command_line}") from None
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError, OSError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"--drafter: {path}: {DRAFTER_FILE} lacks or mangles {reason}") from None
    identity = raw["sha256"][:IDENTITY_LENGTH]
    return TrainedDrafter(raw["kind"], network, raw["target"], raw["provenance"], raw["metrics"], identity)


def _read_header(folder: Path) -> dict[str, Any]:
    raw = read_signed_json(folder / DRAFTER_FILE, DRAFTER_SCHEMA, _TYPES)
    for name, kind in _TYPES.items():
        if not isinstance(raw[name], kind):
            raise InputError(f"{name}: expected a {kind.__name__}, not {str(raw[name])[:80]!r}")
    if raw["kind"] not in KINDS:
        raise InputError(f"kind: expected one of {', '.join(KINDS)}, not {raw['kind']!r}")
    return raw


def _read_weights(folder: Path, files: Mapping[str, Any], expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors after validating file names, sizes, checksum and shapes."""
    if set(files) != {WEIGHTS_FILE}:
        raise InputError(f"expected the weights in {WEIGHTS_FILE} only")
    max_bytes = MAX_TEXT_BYTES + sum(4 * math.prod(tensor.shape) for tensor in expected.values())  # header and numbers
    tensors = safetensors.torch.load(read_files(folder, DRAFTER_FILE, files, max_bytes)[WEIGHTS_FILE])
    for name in sorted(set(tensors) | set(expected)):
        shape, expected_shape = (list(of[name].shape) if name in of else None for of in (tensors, expected))
        if shape != expected_shape or tensors[name].dtype != torch.float32:
            raise InputError(f"weights: {name} has the shape {shape} where {expected_shape} of float32 is expected")
        if not bool(tensors[name].isfinite().all()):
            raise InputError(f"weights: {name} has numbers that are not finite")
    return tensors


def _card(trained: TrainedDrafter) -> str:
    """Return the folder's README."""
    network: Any = trained.network
    metrics = dict(trained.metrics)
    shares = metrics.pop("acceptance", None)
    weights = sum(tensor.numel() for tensor in network.state_dict().values())
    rows: dict[str, Any] = {"kind": trained.kind, "target": trained.target, "weights": f"{weights:,}"}
    rows |= dataclasses.asdict(network.shape) | {**trained.provenance} | metrics
    table = "\n".join(f"| {name.replace('_', ' ')} | {markdown_cell(str(value))} |" for name, value in rows.items())
    acceptance = ""
    if isinstance(shares, list):
        acceptance = "\nShare of held-out positions whose next tokens, up to a depth, it proposes:\n\n"
        acceptance += "| depth | share |\n|---|---|\n"
        acceptance += "".join(f"| {depth} | {share:.3f} |\n" for depth, share in enumerate(shares, 1))
    return (
        "---\nlibrary_name: specstop\ntags: [speculative-decoding, drafter]\n---\n\n"
        f"# A {trained.kind} drafter\n\nProposes tokens for one target from the target's own hidden states; it needs no "
        f"draft model. Under lossless verification it never changes the text.\n\n| | |\n|---|---|\n{table}\n{acceptance}\n"
        f"Use: `specstop decode --target <its target> --drafter {trained.kind}:<this folder>`.\n"
    )
