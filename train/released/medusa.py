"""Medusa's heads as others have released them, brought into the folder of a drafter.

Nothing but tensors is read of a file (`state_dicts`). Their names, with `medusa_head.` before them or without, and shapes:

| head I | names | shapes |
|---|---|---|
| its block | `I.0.linear.weight`, `I.0.linear.bias` | [H, H], [H] |
| its output layer | `I.1.weight` | [V, H]; no head has one where all of them share the target's |

Source: github.com/FasterDecoding/Medusa, `medusa/model/medusa_model.py` and `medusa_model_legacy.py` (`MedusaModel`).
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...decode.drafters.folder import TrainedDrafter, save_drafter
from ...decode.drafters.networks import MAX_DEPTH, MedusaHeads, Shape
from ...decode.models.pair import Pair
from ...decode.models.view import hidden_width
from ...policies.contract import Array
from ...policies.errors import InputError, PolicyError
from ...policies.files import prepare_output_dir
from .state_dicts import find_weights, named, read_state

FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
"""What is looked for in a folder, in this order."""

MOST = 64 << 30
"""Bytes of a file: five heads of a model of 70B weights have 6 GB in half precision."""

PREFIX = "medusa_head."

_KEY = re.compile(r"(\d{1,3})\.(?:0\.linear\.(weight|bias)|1\.(weight))")


def import_medusa(weights: str | Path, pair: Pair, out: str | Path, *, overwrite: bool = False) -> TrainedDrafter:
    """Bring Medusa's released heads into a folder that `--drafter medusa:FOLDER` takes.

    Args:
        weights: `medusa_lm_head.pt` or `.safetensors`, a folder with one of them, or a checkpoint that holds such heads.
        pair: whose target they were trained for, loaded with `engine="plain"`; a draft is not needed.
        out: the folder to write.
        overwrite: replace what is in `out`.

    Raises:
        InputError: the file does not exist, the heads have other sizes than the target, a folder that is not empty.
        PolicyError: the file holds anything but the tensors of such heads.
    """
    path = find_weights(Path(os.path.expanduser(weights)), FILES, MOST)
    folder = prepare_output_dir(out, overwrite=overwrite, inputs=[weights, path])
    raw, hidden, vocabulary = path.read_bytes(), hidden_width(pair.target), pair.vocabulary
    state = read_state(raw, path, 4 * hidden * max(vocabulary, hidden))
    mine = {key.removeprefix(PREFIX): value for key, value in state.items() if key.startswith(PREFIX)} or state
    tensors = medusa_tensors(mine, pair, path.name)
    with torch.device("meta"):
        network = MedusaHeads(Shape(hidden, vocabulary, len(tensors) // 3))
    network.load_state_dict(tensors, assign=True)
    told = {
        "imported from": path.name,
        "sha256": hashlib.sha256(raw).hexdigest(),
        "for the target": str(pair.target.config.name_or_path),
    }
    trained = TrainedDrafter(MedusaHeads.kind, network, pair.fingerprint["target"], told)
    save_drafter(trained, folder)
    return trained


def medusa_tensors(state: Mapping[str, Array], pair: Pair, where: str) -> dict[str, Tensor]:
    """Return the tensors of `MedusaHeads` from a released state dict; its file's name is for messages.

    Raises:
        InputError: other sizes than the target's.
        PolicyError: unknown or missing names, which are named, or numbers that are not finite.
    """
    matches = {key: _KEY.fullmatch(key) for key in state}
    if odd := [key for key, match in matches.items() if match is None]:
        raise PolicyError(f"{where}: unknown: {named(odd)}; Medusa's heads have one block and one output layer each")
    heads = 1 + max(int(match[1]) for match in matches.values() if match)
    if heads > MAX_DEPTH:
        raise PolicyError(f"{where}: has a head numbered {heads - 1}; expected at most {MAX_DEPTH} of them")
    shared = not any(key.endswith(".1.weight") for key in state)
    hidden, vocabulary = hidden_width(pair.target), pair.vocabulary
    shapes = {"0.linear.weight": (hidden, hidden), "0.linear.bias": (hidden,)}
    shapes |= {} if shared else {"1.weight": (vocabulary, hidden)}
    if missing := [f"{i}.{part}" for i in range(heads) for part in shapes if f"{i}.{part}" not in state]:
        raise PolicyError(f"{where}: missing: {named(missing)}; Medusa's heads are numbered from 0")
    for i in range(heads):
        for part, wanted in shapes.items():
            if (there := state[f"{i}.{part}"].shape) != wanted:
                raise InputError(
                    f"{where}: {i}.{part} has the shape {list(there)} where this target's heads have {list(wanted)}; give "
                    "the --target that they were trained for"
                )
            if not np.isfinite(state[f"{i}.{part}"]).all():
                raise PolicyError(f"{where}: {i}.{part} has numbers that are not finite; get the file again")
    output = pair.target.get_output_embeddings().weight.detach().to("cpu", torch.float32) if shared else None
    names = {"0.linear.weight": "blocks.{}.weight", "0.linear.bias": "blocks.{}.bias", "1.weight": "outputs.{}.weight"}
    tensors = {names[part].format(i): torch.from_numpy(state[f"{i}.{part}"]) for i in range(heads) for part in shapes}
    # A file of weights holds no tensor twice: each head gets a copy of what all of them share.
    return tensors | ({names["1.weight"].format(i): output.clone() for i in range(heads)} if output is not None else {})
