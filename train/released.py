"""Released weights of others: DynaSD's decision models and SpecDec++'s head as policy folders, Medusa's heads as drafters.

Only tensors are read from a file, and they must have the names and shapes of one of these layouts. A `.pt` file is a pickle.
It is read by torch's weights-only loader, which builds tensors and plain containers and refuses everything else before it is
called: no code of the file runs.

| layout | keys | shapes |
|---|---|---|
| `dynasd-soft` | `layers.0`, `.2`, `.4`: `weight`, `bias` | 768-512-256-1 (llama-68m), 2048-1024-512-1 (TinyLlama) |
| `dynasd-hard` | `layers.0`, `.2`: `weight`, `bias` | 11-44-1 |
| `specdec` | `model.I.linear.weight`, `.bias` for I < D, `model.D.weight`, `.bias` | H-H, 2-H |
| Medusa, head I (with or without `medusa_head.` before it) | `I.0.linear.weight`, `.bias`, its block | [H, H], [H] |
| | `I.1.weight`, its output layer; absent if all heads share the target's | [V, H] |

Sources: github.com/JackZeng0208/DynaSD, `inference/decision_models.py` (`DecisionModelV1`, `DecisionModelV1_Tinyllama`,
`DecisionModelVTopk`), `decision_model/weights/*.pt`; github.com/Kaffaljidhmah2/SpecDec_pp, `specdec_pp/wrap_model.py`;
github.com/FasterDecoding/Medusa, `medusa/model/medusa_model.py` and `medusa_model_legacy.py` (`MedusaModel`).
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import pickle
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from ..decode.drafters.folder import TrainedDrafter, save_drafter
from ..decode.drafters.networks import MAX_DEPTH as MAX_HEADS, MedusaHeads, Shape
from ..decode.models.pair import Pair
from ..decode.models.view import hidden_width
from ..policies.arguments import check_limits
from ..policies.contract import Array
from ..policies.errors import InputError, PolicyError
from ..policies.files import MAX_DATA_BYTES, prepare_output_dir
from ..policies.heads import build_head
from ..policies.heads.layers import HARD_FEATURES
from ..policies.learned import Calibrator, LearnedPolicy, TrainingMetadata
from ..policies.rules import Threshold
from ..policies.storage import MAX_DEPTH, save_policy

STOP_THRESHOLD, MAX_DRAFT = 0.7, 20
"""h and the longest round of SpecDec++'s released example; h is within 0.7% of the best on each of its three sets."""

ANY_THRESHOLD = 0.4
"""Of the any-fork rule in DynaSD's scripts."""

DYNASD_DEPTH = 5
"""Depth of the published main script."""

FILES = ("model.safetensors", "pytorch_model.bin")
MEDUSA_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
"""Files that are looked for in a folder, in this order."""

PREFIX = "medusa_head."

_SPECDEC = re.compile(r"model\.(\d{1,3})\.(linear\.)?(weight|bias)")
_FIRST_LOGIT = np.zeros(1, dtype=np.float32)  # the papers say nothing about depth 0: a probability of 1/2


def import_weights(
    weights: str | Path,
    out: str | Path,
    *,
    threshold: float | None = None,
    depth: int | None = None,
    rejection_weight: float = 1.0,
    overwrite: bool = False,
) -> LearnedPolicy:
    """Convert a released head to a policy folder, under the rule it was published with.

    Args:
        weights: the `.pt`, `.bin` or `.safetensors` file, or a folder with `model.safetensors` or `pytorch_model.bin`; its
            layout is recognized by the names of the tensors.
        out: the policy folder to write.
        threshold: of the rule. DynaSD continues while the score of any fork is above it (0.4); SpecDec++ while the
            probability that no token is rejected is at least it (0.3, which is h = 0.7).
        depth: of the deepest draft (DynaSD 5, SpecDec++ 20).
        rejection_weight: of SpecDec++'s training, the bias of which is removed (6 for the released head); 1 leaves the
            outputs as published.
        overwrite: replace the contents of `out`.

    Raises:
        InputError: the file does not exist, a folder that is not empty, or as `prepare_output_dir`.
        PolicyError: the file holds anything but the tensors of a known layout.
    """
    check_limits(rejection_weight=rejection_weight, threshold=threshold)
    if depth is not None and not 1 <= depth <= MAX_DEPTH:
        raise InputError(f"--depth: expected 1 to {MAX_DEPTH}, not {depth}")
    path = find_weights(weights, FILES)
    folder = prepare_output_dir(out, overwrite=overwrite, inputs=[weights, path])
    raw = path.read_bytes()
    state = read_state(raw, path, MAX_DATA_BYTES)
    roots = {key.partition(".")[0] for key in state}
    if roots == {"layers"}:
        first = state.get("layers.0.weight", _FIRST_LOGIT)
        layout = "dynasd-hard" if first.shape[-1] == len(HARD_FEATURES) else "dynasd-soft"
        tensors, rule, deepest = dynasd_tensors(state), Threshold("any", ANY_THRESHOLD), DYNASD_DEPTH
    elif roots == {"model"}:
        layout, tensors, deepest = "specdec", specdec_tensors(state), MAX_DRAFT
        tensors["leave.bias"] = remove_weight_bias(tensors["leave.bias"], rejection_weight)
        rule = Threshold("survival", round(1.0 - STOP_THRESHOLD, 6))
    else:
        raise PolicyError(
            f"{path.name}: the layout is not known, for {_listed(list(state))}; expected a head of DynaSD or SpecDec++, or "
            "Medusa's heads with --target"
        )
    if rejection_weight != 1.0 and layout != "specdec":
        raise InputError(f"--rejection-weight: {path.name} is of the layout {layout}, which was trained without one")
    metadata = TrainingMetadata(
        temperature=1.0,
        verification="rejection",
        label="rejection",
        provenance={
            **_provenance(path, raw),
            "layout": layout,
            "rejection weight taken out": rejection_weight,
        },
    )
    features = HARD_FEATURES if layout == "dynasd-hard" else ()
    rule = rule if threshold is None else Threshold(rule.kind, threshold)
    head, exact = build_head(layout, features, tensors), Calibrator()
    policy = LearnedPolicy(layout, features, head, exact, exact, rule, depth or deepest, metadata)
    save_policy(policy, folder)
    return policy


def _provenance(path: Path, raw: bytes) -> dict[str, Any]:
    return {"imported from": path.name, "sha256": hashlib.sha256(raw).hexdigest()}


def dynasd_tensors(state: Mapping[str, Array]) -> dict[str, Array]:
    """Return the tensors of `policies.heads.layers.SoftHead` from a released state dict.

    Raises:
        PolicyError: unknown or missing names, which are listed.
    """
    count = len({key.rpartition(".")[0] for key in state})
    names = {f"{part}.{i}": f"layers.{2 * i}.{part}" for i in range(count) for part in ("weight", "bias")}
    _check_names(names.values(), state, "DynaSD's models are linear layers at layers.0, .2, ... with ReLU between them")
    return {**{name: state[key] for name, key in names.items()}, "first": _FIRST_LOGIT}


def specdec_tensors(state: Mapping[str, Array]) -> dict[str, Array]:
    """Return the tensors of `policies.heads.residual.SpecDecHead` from a released state dict.

    The published head has one block in D places: a state dict then has D equal ones, or, as safetensors writes it, one.

    Raises:
        PolicyError: unknown or missing names, which are listed, or blocks of different shapes.
    """
    matches = [match for key in state if (match := _SPECDEC.fullmatch(key))]
    # The only layer that is no block follows the D blocks: its number is D.
    last = max((int(match[1]) for match in matches if match[2] is None), default=0)
    present = sorted({int(match[1]) for match in matches if match[2] is not None})
    blocks = present if len(present) == 1 and last > 1 else list(range(last))
    names = [f"model.{i}.linear.{part}" for i in blocks for part in ("weight", "bias")]
    _check_names(
        [*names, f"model.{last}.weight", f"model.{last}.bias"], state,
        "SpecDec++'s head is blocks at model.0, .1, ... and a linear layer after them",
    )  # fmt: skip
    leave = state[f"model.{last}.weight"]
    size = leave.shape[-1] if leave.ndim else 0
    empty = {"weight": np.zeros((0, size, size), dtype=np.float32), "bias": np.zeros((0, size), dtype=np.float32)}
    try:
        stacked = {part: np.stack([state[f"model.{i}.linear.{part}"] for i in blocks]) for part in empty if blocks}
    except ValueError:
        shapes = ", ".join(str(list(state[name].shape)) for name in names)
        raise PolicyError(f"weights: blocks of different shapes: {shapes}") from None
    is_shared = last > 0 and all(np.array_equal(values, values[[0] * len(blocks)]) for values in stacked.values())
    kept = 1 if is_shared else None
    return {
        **{f"block.{part}": values[:kept] for part, values in {**empty, **stacked}.items()},
        # The block in each of the D places.
        "order": np.array([0] * last if is_shared else range(last), dtype=np.int64),
        "leave.weight": leave,
        "leave.bias": state[f"model.{last}.bias"],
        "first": _FIRST_LOGIT,
    }


def remove_weight_bias(leave_bias: Array, weight: float) -> Array:
    """Return the last bias [2] float32 without the effect of the rejection weight w.

    Cross-entropy with weight w on rejections is least at p' = a / (a + w (1 - a)), a the true probability. So in log-odds
    ln(a / (1 - a)) = ln(p' / (1 - p')) + ln w.
    """
    return leave_bias + np.array([0.0, math.log(weight)], dtype=np.float32)


def import_medusa(weights: str | Path, pair: Pair, out: str | Path, *, overwrite: bool = False) -> TrainedDrafter:
    """Convert Medusa's released heads to a folder for `--drafter medusa:FOLDER`.

    Args:
        weights: `medusa_lm_head.pt` or `.safetensors`, a folder with one of them, or a checkpoint that holds such heads.
        pair: with the target they were trained for, loaded with `engine="plain"`; a draft is not needed.
        out: the folder to write.
        overwrite: replace the contents of `out`.

    Raises:
        InputError: the file does not exist, the heads have other sizes than the target, a folder that is not empty.
        PolicyError: the file holds anything but the tensors of such heads.
    """
    path = find_weights(weights, MEDUSA_FILES)
    folder = prepare_output_dir(out, overwrite=overwrite, inputs=[weights, path])
    raw, hidden, vocabulary = path.read_bytes(), hidden_width(pair.target), pair.vocabulary
    state = read_state(raw, path, 4 * hidden * max(vocabulary, hidden))
    state = {key.removeprefix(PREFIX): value for key, value in state.items() if key.startswith(PREFIX)} or state
    tensors = medusa_tensors(state, pair)
    with torch.device("meta"):
        network = MedusaHeads(Shape(hidden, vocabulary, len(tensors) // 3))
    network.load_state_dict(tensors, assign=True)
    provenance = {**_provenance(path, raw), "for the target": str(pair.target.config.name_or_path)}
    trained = TrainedDrafter(MedusaHeads.kind, network, pair.fingerprint["target"], provenance)
    save_drafter(trained, folder)
    return trained


def medusa_tensors(state: Mapping[str, Array], pair: Pair) -> dict[str, Tensor]:
    """Return the tensors of `MedusaHeads` from a released state dict.

    Raises:
        InputError: other sizes than the target's.
        PolicyError: unknown or missing names, which are listed, or numbers that are not finite.
    """
    hidden, vocabulary = hidden_width(pair.target), pair.vocabulary
    is_shared = not any(key.endswith(".1.weight") for key in state)
    parts = {"0.linear.weight": ("blocks.{}.weight", (hidden, hidden)), "0.linear.bias": ("blocks.{}.bias", (hidden,))}
    parts |= {} if is_shared else {"1.weight": ("outputs.{}.weight", (vocabulary, hidden))}
    heads = min(MAX_HEADS, len({key.partition(".")[0] for key in state}))
    names = {(i, part): f"{i}.{part}" for i in range(heads) for part in parts}
    _check_names(names.values(), state, "Medusa's heads have one block and one output layer each, numbered from 0")
    tensors = {}
    for (i, part), key in names.items():
        name, shape = parts[part]
        if state[key].shape != shape:
            raise InputError(
                f"weights: {key} has the shape {list(state[key].shape)} where this target's heads have {list(shape)}; use "
                "the --target that they were trained for"
            )
        if not np.isfinite(state[key]).all():
            raise PolicyError(f"weights: {key} has numbers that are not finite; get the file again")
        tensors[name.format(i)] = torch.from_numpy(state[key])
    if is_shared:
        output = pair.target.get_output_embeddings().weight.detach().to("cpu", torch.float32)
        # A file of weights holds no tensor twice, so each head gets a copy.
        tensors |= {f"outputs.{i}.weight": output.clone() for i in range(heads)}
    return tensors


# Tensors from an untrusted file


def find_weights(weights: str | Path, files: Sequence[str]) -> Path:
    """Return the file of weights: the path itself, or one of `files` in the folder; raise `InputError` if there is none."""
    path = Path(os.path.expanduser(weights))
    if path.is_dir():
        path = next((path / name for name in files if (path / name).is_file()), path)
    if path.is_dir():
        raise InputError(f"expected {' or '.join(files)} in the folder {path}, which has neither")
    if not path.is_file():
        raise InputError(f"expected a file of weights, but {path} does not exist")
    return path


def read_state(raw: bytes, path: Path, max_bytes: int) -> dict[str, Array]:
    """Return the state dict as float32 arrays; of a pickle only tensors are built.

    Args:
        raw: the file.
        path: its name, for messages; `.safetensors` determines its format.
        max_bytes: of the largest tensor.

    Raises:
        PolicyError: it is damaged, or holds anything but a state dict of tensors of numbers.
    """
    try:
        if path.suffix == ".safetensors":
            state: Any = safetensors.torch.load(raw)
        else:
            with warnings.catch_warnings():  # problems of the file are reported below
                warnings.simplefilter("ignore")
                state = torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise PolicyError(
            f"{path.name} holds more than tensors, and nothing of it was run; expected a state dict: "
            "torch.save(model.state_dict(), ...)"
        ) from None
    except Exception as error:  # torch raises errors of many classes for a damaged file
        reason = " ".join(str(error).split())[:120]
        raise PolicyError(f"{path.name} cannot be read as weights ({type(error).__name__}: {reason})") from None
    if not isinstance(state, Mapping) or not state or not all(isinstance(key, str) for key in state):
        raise PolicyError(f"{path.name} holds a {type(state).__name__}; expected a state dict, tensors by name")
    for key, value in state.items():
        is_plain = isinstance(value, Tensor) and value.layout == torch.strided and value.device.type == "cpu"
        # Counted as float32: an expanded view in a small file may stand for any number of elements.
        if not (is_plain and value.dtype.is_floating_point and value.numel() * 4 <= max_bytes):
            raise PolicyError(
                f"{path.name}: {key[:80]!r} is no plain tensor of real numbers, of at most {max_bytes} bytes"
            )
    return {key: value.detach().float().contiguous().numpy() for key, value in state.items()}


def _check_names(expected: Iterable[str], state: Mapping[str, Array], layout: str) -> None:
    names = set(expected)
    if unknown := sorted(set(state) - names):
        raise PolicyError(f"weights: unknown: {_listed(unknown)}; {layout}")
    if missing := sorted(names - set(state)):
        raise PolicyError(f"weights: missing: {_listed(missing)}; {layout}")


def _listed(names: Sequence[str]) -> str:
    """Return names of tensors for a message, the first few of them."""
    return ", ".join(repr(name[:60]) for name in names[:6]) + (", ..." if len(names) > 6 else "")
