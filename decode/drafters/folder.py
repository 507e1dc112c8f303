"""The folder of a trained drafter: `drafter.json`, `weights.safetensors`, `README.md`. Loading runs no code.

As with policy folders, everything is validated before any of it is used (`policies.files`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pydantic
import safetensors.torch
import torch
from pydantic.dataclasses import dataclass as validated_dataclass
from safetensors import SafetensorError

from ...policies.display import markdown_table, training_facts
from ...policies.errors import InputError, SpecstopError
from ...policies.files import (
    CARD_FILE,
    MAX_TEXT_BYTES,
    WEIGHTS_FILE,
    digest,
    read_signed_json,
    read_weights,
    staged_folder,
    write_atomic,
    write_json,
)
from ..models.engine import pack_weights, packed_refusal
from ..models.pair import Pair
from ..models.view import hidden_width
from .networks import KINDS, LayerNetwork, MedusaHeads, Shape

DRAFTER_FILE = "drafter.json"


@validated_dataclass(frozen=True, config=pydantic.ConfigDict(strict=True, extra="forbid"))
class DrafterFile:
    """The contents of `drafter.json`."""

    schema: int
    kind: Literal["medusa", "hydra", "ctc", "layer"]
    shape: Shape
    target: str
    files: dict[str, str]
    provenance: dict[str, Any]
    metrics: dict[str, Any]
    sha256: str


@dataclasses.dataclass(frozen=True)
class TrainedDrafter:
    """Contents of a folder.

    Attributes:
        kind: name of the network.
        network: with its weights.
        target: hash of the target that it was trained for (`Pair.fingerprint`).
        provenance, metrics: metadata for the model card.
        identity: short hash of the folder's contents, by which traces and policies refer to it; "" before it is saved.
    """

    kind: str
    network: MedusaHeads | LayerNetwork
    target: str
    provenance: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    identity: str = ""

    def describe(self) -> dict[str, Any]:
        """Return a summary: the network, acceptance by depth, provenance and metrics."""
        shape, shares = dataclasses.asdict(self.network.shape), self.metrics.get("acceptance")
        by_depth = enumerate(shares if isinstance(shares, list) else [], 1)
        return {
            "kind": "drafter",
            "network": self.kind,
            "depth": shape.pop("depth"),
            "target": self.target,
            "hash": self.identity,
            "weights": sum(tensor.numel() for tensor in self.network.state_dict().values()),
            **{name.replace("_", " "): size for name, size in shape.items() if size},
            **{f"acceptance, depth {depth}": share for depth, share in by_depth},
            **training_facts(self.provenance, self.metrics),
        }

    def network_for(self, pair: Pair) -> Any:
        """Return the network with the device and data type of the pair's target.

        Raises:
            InputError: it was trained for another target.
        """
        target, shape = pair.fingerprint["target"], self.network.shape
        if self.target != target or (shape.hidden, shape.vocabulary) != (hidden_width(pair.target), pair.vocabulary):
            raise InputError(
                f"--drafter: it was trained for the target {self.target}, not for {target}; train one for this target "
                "(specstop train-drafter)"
            )
        network = self.network.to(pair.device, pair.target.dtype).requires_grad_(False).eval()
        if not packed_refusal(pair.device, pair.target.dtype):
            pack_weights(network)  # in place: this network cannot be saved any more
        return network


def save_drafter(trained: TrainedDrafter, path: str | Path) -> Path:
    """Write the folder of a drafter atomically.

    Raises:
        InputError: the folder contains files that specstop did not write.
    """
    tensors = trained.network.state_dict()
    weights = safetensors.torch.save({
        name: x.detach().to("cpu", torch.float32 if x.is_floating_point() else x.dtype).contiguous()
        for name, x in tensors.items()
    })  # fmt: skip
    raw = {
        "schema": 1,
        "kind": trained.kind,
        "shape": dataclasses.asdict(trained.network.shape),
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


def load_drafter(path: str | Path, *, kind: str | None = None, weights: bool = True) -> TrainedDrafter:
    """Read and validate the folder of a drafter.

    Args:
        path: of the folder.
        kind: expected kind of the network; None = any.
        weights: False = the network has no weights, and those in the folder are not validated.

    Raises:
        InputError: a file is missing, was changed, or does not match `drafter.json`.
    """
    folder = Path(os.path.expanduser(path))
    try:
        if not (folder / DRAFTER_FILE).exists():
            raise InputError(f"expected the folder of a drafter with the file {DRAFTER_FILE}, which does not exist")
        raw = read_signed_json(folder / DRAFTER_FILE, 1, lambda _: DrafterFile.__dataclass_fields__)
        header = pydantic.TypeAdapter(DrafterFile).validate_json(json.dumps(raw))
        if kind not in (None, header.kind):
            raise InputError(f"it is a drafter of the kind {header.kind}; write {header.kind}:{path}")
        if header.shape.outputs and header.kind != "layer":
            raise InputError(f"a drafter of the kind {header.kind} proposes all tokens, but its shape has outputs")
        with torch.device("meta"):  # nothing is allocated for sizes that the file does not confirm
            network = KINDS[header.kind](header.shape)
        if weights:
            _load_weights(network, folder, header.files)
    except (ValueError, RuntimeError, OSError, SafetensorError) as error:  # `SpecstopError` is a `ValueError`
        reason = error.command_line if isinstance(error, SpecstopError) else " ".join(str(error).split())[:200]
        raise InputError(f"--drafter: {path}: {reason}") from None
    identity = header.sha256[:16]
    return TrainedDrafter(header.kind, network, header.target, header.provenance, header.metrics, identity)


def _load_weights(network: MedusaHeads | LayerNetwork, folder: Path, files: Mapping[str, str]) -> None:
    """Load the weights after validating file names, size, checksum, types and shapes."""
    sizes = (x.element_size() * math.prod(x.shape) for x in network.state_dict().values())
    size = MAX_TEXT_BYTES + sum(sizes)  # header and numbers
    weights = read_weights(folder, DRAFTER_FILE, files, size)
    network.load_state_dict(safetensors.torch.load(weights), assign=True)
    tensors = network.state_dict()
    kept = tensors.pop("kept", torch.arange(0))
    bounded = torch.cat([torch.tensor([-1]), kept, torch.tensor([network.shape.vocabulary])])
    if kept.dtype != torch.int64 or not bool((bounded.diff() > 0).all()):
        raise InputError("weights: kept: expected tokens of the target in ascending order")
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float32 or not bool(tensor.isfinite().all()):
            raise InputError(f"weights: {name}: expected finite numbers of float32")


def _card(trained: TrainedDrafter) -> str:
    """Return the folder's README."""
    facts = {name: value for name, value in trained.describe().items() if name not in ("kind", "hash")}
    table = markdown_table(("", ""), facts.items())
    return (
        "---\nlibrary_name: specstop\ntags: [speculative-decoding, drafter]\n---\n\n"
        f"# A {trained.kind} drafter\n\nProposes tokens for one target from its hidden states; it needs no "
        f"draft model. Under lossless verification it never changes the text.\n\n{table}\n"
        "Acceptance is the share of held-out positions at which the next tokens, up to each depth, are proposed.\n\n"
        f"Use: `specstop decode --target <its target> --drafter {trained.kind}:<this folder>`.\n"
    )
