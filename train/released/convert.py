"""Heads that others have released, brought into a policy folder: DynaSD's decision models and SpecDec++'s acceptance head.

Nothing but tensors is read of a file (`state_dicts`), and they must have the names and shapes of one of these layouts.

| layout | keys | shapes |
|---|---|---|
| `dynasd-soft` | `layers.0`, `.2`, `.4`: `weight`, `bias` | 768-512-256-1 (llama-68m), 2048-1024-512-1 (TinyLlama) |
| `dynasd-hard` | `layers.0`, `.2`: `weight`, `bias` | 11-44-1 |
| `specdec` | `model.I.linear.weight`, `.bias` for I < D, `model.D.weight`, `.bias` | H-H, 2-H |

Sources: github.com/JackZeng0208/DynaSD, `inference/decision_models.py` (`DecisionModelV1`, `DecisionModelV1_Tinyllama`,
`DecisionModelVTopk`), `decision_model/weights/*.pt`; github.com/Kaffaljidhmah2/SpecDec_pp, `specdec_pp/wrap_model.py`.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...policies.arguments import check_limits
from ...policies.contract import Array
from ...policies.errors import InputError, PolicyError
from ...policies.files import prepare_output_dir
from ...policies.heads import build_head
from ...policies.heads.layers import HARD_FEATURES
from ...policies.learned import Calibrator, LearnedPolicy, TrainingMetadata
from ...policies.rules import Rule, Threshold
from ...policies.storage import MAX_DEPTH, save_policy
from .state_dicts import find_weights, named, read_state

STOP_THRESHOLD, MAX_DRAFT = 0.7, 20
"""h and the longest round of SpecDec++'s released example; h is within 0.7% of the best on each of its three sets."""

ANY_THRESHOLD = 0.4
"""Of the any-fork rule in DynaSD's scripts."""

LAYOUTS = ("dynasd-soft", "dynasd-hard", "specdec")
DYNASD_DEPTH = 5
"""Depth of the published main script."""

_LAYER = re.compile(r"layers\.(\d{1,3})\.(weight|bias)")
_BLOCK = re.compile(r"model\.(\d{1,3})\.(linear\.)?(weight|bias)")


@dataclass(frozen=True)
class Imported:
    """What was brought in: the policy, its folder, and its layout."""

    policy: LearnedPolicy
    path: Path
    layout: str


def import_weights(
    weights: str | Path,
    out: str | Path,
    *,
    layout: str = "auto",
    threshold: float | None = None,
    depth: int | None = None,
    rejection_weight: float = 1.0,
    name: str | None = None,
    overwrite: bool = False,
) -> Imported:
    """Bring a released head into a policy folder, under the rule it was published with.

    Args:
        weights: the `.pt`, `.bin` or `.safetensors` file, or a folder with `model.safetensors` or `pytorch_model.bin`.
        out: the policy folder to write.
        layout: of the file; "auto" finds it by the names of the tensors.
        threshold: of the rule. DynaSD: drafting goes on while any fork's score is above it (0.4); SpecDec++: while the chance
            that no token is rejected is at least it (0.3, which is h = 0.7).
        depth: of the deepest draft (DynaSD 5, SpecDec++ 20).
        rejection_weight: that SpecDec++'s head was trained with and whose bias is taken out (6 for the released one); 1
            leaves the outputs as published.
        name: of the policy; by default the layout's.
        overwrite: replace what is in `out`.

    Raises:
        InputError: the file does not exist, an unknown layout, a folder that is not empty, or as `prepare_output_dir`.
        PolicyError: the file holds anything but the tensors of a known layout.
    """
    if layout != "auto" and layout not in LAYOUTS:
        raise InputError(f"--layout: expected auto, {', '.join(LAYOUTS)}, not {layout!r}")
    check_limits(rejection_weight=rejection_weight, threshold=threshold)
    if depth is not None and not 1 <= depth <= MAX_DEPTH:
        raise InputError(f"--depth: expected 1 to {MAX_DEPTH}, not {depth}")
    path = find_weights(Path(os.path.expanduser(weights)))
    folder = prepare_output_dir(out, overwrite=overwrite, inputs=[weights, path])
    raw = path.read_bytes()
    state = read_state(raw, path)
    found = find_layout(state, path.name) if layout == "auto" else layout
    if rejection_weight != 1.0 and found != "specdec":
        raise InputError(f"--rejection-weight: {path.name} is of the layout {found}, which was trained without one")
    tensors = {"specdec": specdec_tensors}.get(found, dynasd_tensors)(state)
    if found == "specdec":
        tensors["leave.bias"] = unbiased(tensors["leave.bias"], rejection_weight)
    features = HARD_FEATURES if found == "dynasd-hard" else ()
    rule, deepest = _published(found, threshold)
    facts = TrainingMetadata(
        temperature=1.0,
        verification="rejection",
        label="rejection",
        provenance={
            "imported from": path.name,
            "sha256": hashlib.sha256(raw).hexdigest(),
            "layout": found,
            "rejection weight taken out": rejection_weight,
        },
    )
    head = build_head(found, features, tensors)
    policy = LearnedPolicy(name or found, features, head, Calibrator(), Calibrator(), rule, depth or deepest, facts)
    return Imported(policy, save_policy(policy, folder), found)


def _published(layout: str, threshold: float | None) -> tuple[Rule, int]:
    """Return the rule that a layout was published with, and its deepest draft."""
    if layout == "specdec":
        return Threshold("survival", round(1.0 - STOP_THRESHOLD, 6) if threshold is None else threshold), MAX_DRAFT
    return Threshold("any", ANY_THRESHOLD if threshold is None else threshold), DYNASD_DEPTH


def find_layout(state: Mapping[str, Array], where: str) -> str:
    """Return the layout that has these names; a `PolicyError` names those that none has."""
    if all(_LAYER.fullmatch(key) for key in state):
        first = state.get("layers.0.weight")
        hard = first is not None and first.ndim == 2 and first.shape[1] == len(HARD_FEATURES)
        return "dynasd-hard" if hard else "dynasd-soft"
    if all(_BLOCK.fullmatch(key) for key in state):
        return "specdec"
    odd = [key for key in state if not (_LAYER.fullmatch(key) or _BLOCK.fullmatch(key))] or list(state)
    raise PolicyError(
        f"{where}: the layout is not known, for {named(odd)}; expected {', '.join(LAYOUTS)}, or Medusa's heads with --target"
    )


def dynasd_tensors(state: Mapping[str, Array]) -> dict[str, Array]:
    """Return the tensors of `policies.heads.layers.SoftHead` from a released state dict.

    Raises:
        PolicyError: unknown or missing names, which are named, or a layer that is none.
    """
    places = sorted({int(match[1]) for key in state if (match := _LAYER.fullmatch(key))})
    wanted = {f"layers.{2 * i}.{part}" for i in range(max(len(places), 1)) for part in ("weight", "bias")}
    _same(wanted, state, "DynaSD's models are linear layers at layers.0, .2, ... with ReLU between them")
    tensors = {
        f"{part}.{i}": state[f"layers.{2 * i}.{part}"] for i in range(len(places)) for part in ("weight", "bias")
    }
    # Of depth 0 the paper says nothing: a logit of 0, which is a chance of 1/2.
    return {**tensors, "first": np.zeros(1, dtype=np.float32)}


def specdec_tensors(state: Mapping[str, Array]) -> dict[str, Array]:
    """Return the tensors of `policies.heads.residual.SpecDecHead` from a released state dict.

    The published head has one block in D places: a state dict then has D equal ones, or, as safetensors writes it, one.

    Raises:
        PolicyError: unknown or missing names, which are named, or blocks of different shapes.
    """
    matches = [match for key in state if (match := _BLOCK.fullmatch(key))]
    # The one layer that is no block stands after the D blocks: its number is D.
    last = max((int(m[1]) for m in matches if m[2] is None), default=0)
    there = sorted({int(m[1]) for m in matches if m[2] is not None})
    blocks = there if len(there) == 1 and last > 1 else list(range(last))
    wanted = {f"model.{i}.linear.{part}" for i in blocks for part in ("weight", "bias")}
    _same(
        wanted | {f"model.{last}.{part}" for part in ("weight", "bias")},
        state,
        "SpecDec++'s head is blocks at model.0, .1, ... and a linear layer after them",
    )
    weights = [state[f"model.{i}.linear.weight"] for i in blocks]
    biases = [state[f"model.{i}.linear.bias"] for i in blocks]
    if len({w.shape for w in weights}) > 1 or len({b.shape for b in biases}) > 1:
        raise PolicyError(f"weights: blocks of different shapes: {', '.join(str(list(w.shape)) for w in weights)}")
    shared = all(np.array_equal(weights[0], w) for w in weights) and all(np.array_equal(biases[0], b) for b in biases)
    if shared and last:
        weights, biases = weights[:1], biases[:1]
    leave = state[f"model.{last}.weight"]
    size = leave.shape[-1] if leave.ndim else 0
    return {
        "block.weight": np.stack(weights) if weights else np.zeros((0, size, size), dtype=np.float32),
        "block.bias": np.stack(biases) if biases else np.zeros((0, size), dtype=np.float32),
        # Which block stands in each of the D places.
        "order": np.array([0] * last if shared else list(range(last)), dtype=np.int64),
        "leave.weight": leave,
        "leave.bias": state[f"model.{last}.bias"],
        "first": np.zeros(1, dtype=np.float32),
    }


def _same(wanted: set[str], state: Mapping[str, Array], what: str) -> None:
    if unknown := sorted(set(state) - wanted):
        raise PolicyError(f"weights: unknown: {named(unknown)}; {what}")
    if missing := sorted(wanted - set(state)):
        raise PolicyError(f"weights: missing: {named(missing)}; {what}")


def unbiased(leave_bias: Array, weight: float) -> Array:
    """Return the last bias [2] float32 without the effect of the rejection weight w.

    Cross-entropy with weight w on rejections is least at p' = a / (a + w (1 - a)), a the true chance. So in log-odds
    ln(a / (1 - a)) = ln(p' / (1 - p')) + ln w.
    """
    return leave_bias + np.array([0.0, math.log(weight)], dtype=np.float32)
