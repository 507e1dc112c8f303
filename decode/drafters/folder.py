"""The folder of a trained drafter: `drafter.json`, `weights.safetensors`, `README.md`. Loading runs no code.

As with policy folders all of it is looked at before any of it is used (`policies.storage.safe_loading`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from ...policies.errors import InputError, PolicyError
from ...policies.files import RUN_FILE, staged_folder, write_atomic, write_json
from ...policies.safe_loading import MOST_TEXT, check_digest, check_folder, digest, parse_json, read_plain
from ...policies.text import markdown_cell
from ..models.cpu.products import can_pack
from ..models.engine import pack
from ..models.hidden import hidden_width
from ..models.pair import Pair
from .heads.layer_network import CTCNetwork, LayerNetwork
from .heads.networks import HydraHeads, MedusaHeads, Shape

T = TypeVar("T")

DRAFTER_SCHEMA = 1
IDENTITY = 16
"""Characters of a folder's hash by which a drafter is known."""

DRAFTER_FILE, WEIGHTS_FILE, CARD_FILE = "drafter.json", "weights.safetensors", "README.md"
KINDS: Mapping[str, Callable[[Shape], nn.Module]] = {
    network.kind: network for network in (MedusaHeads, HydraHeads, CTCNetwork, LayerNetwork)
}
"""The networks by name."""

_TYPES: Mapping[str, type] = {
    "schema": int,
    "kind": str,
    "shape": dict,
    "target": str,
    "files": dict,
    "provenance": dict,
    "metrics": dict,
    "sha256": str,
}


@dataclass(frozen=True)
class TrainedDrafter:
    """What a folder holds.

    Attributes:
        kind: name of the network.
        network: with its weights.
        target: hash of the target that it was trained for (`Pair.fingerprint`).
        provenance, metrics: for people.
        identity: short hash of what the folder says and holds, by which traces and policies know it; "" before it is saved.
    """

    kind: str
    network: nn.Module
    target: str
    provenance: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    identity: str = ""

    def network_for(self, pair: Pair) -> Any:
        """Return the network where the pair's target is, and as it computes.

        Raises:
            InputError: it was trained for another target.
        """
        theirs = pair.fingerprint["target"]
        shape: Any = self.network.shape
        if self.target != theirs or (shape.hidden, shape.vocabulary) != (hidden_width(pair.target), pair.vocabulary):
            raise InputError(
                f"it was trained for the target {self.target}, not for {theirs}; train one for this target "
                "(specstop train-drafter)"
            )
        network = self.network.to(pair.device, pair.target.dtype).requires_grad_(False).eval()
        # `can_pack` returns why not. Packing is in place: from then on this network cannot be saved.
        if not can_pack(pair.device, pair.target.dtype):
            pack(network)
        return network


def save_drafter(trained: TrainedDrafter, path: str | Path) -> Path:
    """Write the folder of a drafter, whole or not at all.

    Raises:
        InputError: the folder holds files that specstop did not write.
    """
    network: Any = trained.network
    tensors = {
        name: value.detach().to("cpu", torch.float32).contiguous() for name, value in network.state_dict().items()
    }
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
        write_atomic(folder / CARD_FILE, card(trained))
    return Path(path)


def load_drafter(path: str | Path) -> TrainedDrafter:
    """Read the folder of a drafter, strictly.

    Raises:
        InputError: a file is missing, was changed, or is not what `drafter.json` says.
    """
    return _strictly(path, _read)


def drafter_identity(path: str | Path) -> str:
    """Return the `identity` of the drafter in a folder, without a look at its weights.

    Raises:
        InputError: as `load_drafter`, but for the weights.
    """
    return _strictly(path, lambda folder: str(_facts(folder)["sha256"])[:IDENTITY])


def _strictly(path: str | Path, read: Callable[[Path], T]) -> T:
    """Return what is read of a folder; all that may be wrong with it is an `InputError`."""
    folder = Path(os.path.expanduser(path))
    try:
        if not folder.is_dir():
            raise InputError("expected the folder of a drafter, which does not exist")
        return read(folder)
    except (InputError, PolicyError) as error:
        raise InputError(f"--drafter: {path}: {error.command_line}") from None
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError, OSError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"--drafter: {path}: {DRAFTER_FILE} lacks or mangles {reason}") from None


def _facts(folder: Path) -> dict[str, Any]:
    """Return what `drafter.json` says, once its keys, types and checksum are in order."""
    if not (folder / DRAFTER_FILE).exists():
        raise InputError(f"expected the file {DRAFTER_FILE}, which does not exist")
    raw = parse_json(read_plain(folder / DRAFTER_FILE, MOST_TEXT), DRAFTER_FILE)
    # True equals 1.
    if raw.get("schema") != DRAFTER_SCHEMA or isinstance(raw.get("schema"), bool):
        raise InputError(f"it has schema {raw.get('schema')!r}, but this specstop reads {DRAFTER_SCHEMA}")
    if odd := sorted(set(raw) ^ set(_TYPES)):
        raise InputError(f"{DRAFTER_FILE} has keys missing or unknown: {', '.join(map(repr, odd))}")
    for name, kind in _TYPES.items():
        if not isinstance(raw[name], kind):
            raise InputError(f"{name}: {str(raw[name])[:80]!r} is not what is expected there")
    check_digest(raw, DRAFTER_FILE)
    if raw["kind"] not in KINDS:
        raise InputError(f"kind: expected one of {', '.join(KINDS)}, not {raw['kind']!r}")
    return raw


def _read(folder: Path) -> TrainedDrafter:
    raw = _facts(folder)
    # Built without memory, the checked tensors assigned: nothing is allocated for sizes that the file does not bear out.
    with torch.device("meta"):
        network = KINDS[raw["kind"]](Shape.read(raw["shape"]))
    network.load_state_dict(_checked_weights(folder, raw["files"], network.state_dict()), assign=True)
    return TrainedDrafter(
        raw["kind"], network, raw["target"], raw["provenance"], raw["metrics"], raw["sha256"][:IDENTITY]
    )


def _checked_weights(folder: Path, files: Mapping[str, Any], expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors, once names, sizes, checksum and shapes of what is there are in order."""
    if set(files) != {WEIGHTS_FILE} or not (folder / WEIGHTS_FILE).exists():
        raise InputError(f"expected the weights in {WEIGHTS_FILE} and nowhere else")
    check_folder(folder, (DRAFTER_FILE, WEIGHTS_FILE, CARD_FILE, RUN_FILE), (), DRAFTER_FILE, (CARD_FILE, RUN_FILE))
    # The header, and the numbers in float32.
    most = MOST_TEXT + sum(4 * math.prod(tensor.shape) for tensor in expected.values())
    data = read_plain(folder / WEIGHTS_FILE, most)
    if hashlib.sha256(data).hexdigest() != files[WEIGHTS_FILE]:
        raise InputError(
            f"{WEIGHTS_FILE} is not the file that {DRAFTER_FILE} was written with (its checksum differs); train or copy "
            "it again"
        )
    tensors = safetensors.torch.load(data)
    for name in sorted(set(tensors) | set(expected)):
        there, wanted = (list(of[name].shape) if name in of else None for of in (tensors, expected))
        if there != wanted or tensors[name].dtype != torch.float32:
            raise InputError(f"weights: {name} has the shape {there} where {wanted} of float32 is expected")
        if not bool(tensors[name].isfinite().all()):
            raise InputError(f"weights: {name} has numbers that are not finite")
    return tensors


def card(trained: TrainedDrafter) -> str:
    """Return the folder's README: what the drafter is, whose target it was trained for, how it did."""
    network: Any = trained.network
    weights = sum(tensor.numel() for tensor in network.state_dict().values())
    rows: list[tuple[str, Any]] = [
        ("kind", trained.kind),
        ("target", trained.target),
        ("weights", f"{weights:,}"),
        *dataclasses.asdict(network.shape).items(),
        *trained.provenance.items(),
        *((name, value) for name, value in trained.metrics.items() if not isinstance(value, list)),
    ]
    table = "\n".join(f"| {name.replace('_', ' ')} | {markdown_cell(str(value))} |" for name, value in rows)
    depths = trained.metrics.get("acceptance")
    shown = ""
    if isinstance(depths, list):
        lines = "\n".join(f"| {depth} | {share:.3f} |" for depth, share in enumerate(depths, 1))
        title = "Held-out positions whose first so many greedy tokens it proposes:"
        shown = f"\n{title}\n\n| depth | share |\n|---|---|\n{lines}\n"
    return (
        "---\nlibrary_name: specstop\ntags: [speculative-decoding, drafter]\n---\n\n"
        f"# A {trained.kind} drafter\n\nProposes tokens for one target from the target's own hidden states; it needs no "
        f"draft model. Under lossless verification it never changes the text.\n\n| | |\n|---|---|\n{table}\n{shown}\n"
        f"Use: `specstop decode --target <its target> --drafter {trained.kind}:<this folder>`.\n"
    )
