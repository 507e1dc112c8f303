"""The policy folder: `policy.json`, `weights.safetensors`, `README.md`. Loading runs no code and unpickles nothing.

A folder may come from anywhere. All of it is checked before any of it is used (`safe_loading`), and `policy.json` contains
checksums of itself and of the other files: a folder that was damaged or edited by hand is refused.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from .batch_rules import BatchPolicy, BatchStop
from .calibration import Calibrator, PathCalibrator, SurvivalMaps
from .contract import Array
from .errors import PolicyError
from .features import feature
from .files import RUN_FILE, staged_folder, write_atomic, write_json
from .heads import build_head
from .learned import ContinuationPolicy, LearnedPolicy, TrainingMetadata, TreeGain, build_rule, head_names
from .rules import BatchRule, Continuation
from .safe_loading import (
    MOST_DATA,
    MOST_TEXT,
    check_digest,
    check_folder,
    check_side_names,
    digest,
    parse_json,
    read_plain,
)
from .text import markdown_cell
from .training_metadata import sampling_text
from .tree_rules import TreeRule

POLICY_SCHEMA = 2
POLICY_FILE, WEIGHTS_FILE, CARD_FILE = "policy.json", "weights.safetensors", "README.md"
HUB_FILES = ("*.json", "*.safetensors", "*.ubj", "*.md")
"""All that is downloaded from the hub."""

DEEPEST, MOST_FEATURES, MOST_DIMENSIONS = 1024, 256, 8
_KNOTS = ("calibration.accept", "calibration.next")
_SURVIVAL = "calibration.survival"
_HUB_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*")


@dataclass(frozen=True)
class _Calibration:
    kind: str
    temperature: float


@dataclass(frozen=True)
class _Record:
    """Entries of `policy.json` that determine decisions. The others are the fields of `TrainingMetadata`."""

    kind: Literal["learned"]
    name: str
    features: list[str]
    max_depth: int
    head: str
    calibration: tuple[_Calibration, _Calibration]
    rule: dict[str, Any]
    files: dict[str, str]
    sha256: str


_KEYS = {"schema", *(field.name for kind in (_Record, TrainingMetadata) for field in dataclasses.fields(kind))}


def save_policy(policy: LearnedPolicy, path: str | Path, extra: Mapping[str, bytes] | None = None) -> Path:
    """Write a policy folder, whole or not at all.

    Args:
        policy: Policy to save.
        path: The folder. An older result of specstop is replaced.
        extra: Further files `name.ubj`, such as a booster for retraining. Loading checks them but does not read them.

    Raises:
        InputError: The folder contains files that specstop did not write.
    """
    check_side_names(extra or {})
    raw, files = _pack(policy, extra or {})
    with staged_folder(path) as folder:
        for name, data in files.items():
            write_atomic(folder / name, data)
        write_json(folder / POLICY_FILE, {**raw, "sha256": digest(raw)})
        write_atomic(folder / CARD_FILE, card(policy))
    return Path(path)


save_pretrained = save_policy


def content(policy: LearnedPolicy) -> str:
    """Return a digest of the policy, which saving and loading do not change."""
    return digest(_pack(policy, {})[0])


def _pack(policy: LearnedPolicy, extra: Mapping[str, bytes]) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the contents of `policy.json` and the other files."""
    maps = (policy.accept, policy.next)
    tensors = {f"head.{name}": array for name, array in policy.head.tensors().items()}
    tensors |= {name: calibrator.knots for name, calibrator in zip(_KNOTS, maps, strict=True)}
    if policy.survival is not None:
        tensors[_SURVIVAL] = policy.survival.tables
    weights = safetensors.numpy.save({name: np.ascontiguousarray(array) for name, array in tensors.items()})
    files = {WEIGHTS_FILE: weights, **extra}
    raw = {
        "schema": POLICY_SCHEMA,
        "kind": "learned",
        "name": policy.name,
        "features": list(policy.features),
        "max_depth": policy.max_depth,
        "head": policy.head.kind,
        "calibration": [{"kind": c.kind, "temperature": c.temperature} for c in maps],
        "rule": policy.rule.to_dict(),
        "files": {name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
        **dataclasses.asdict(policy.metadata),
    }
    return raw, files


def from_pretrained(name: str | Path, revision: str | None = None) -> LearnedPolicy:
    """Load a policy from a folder, or from the Hugging Face hub.

    Args:
        name: A folder, or a hub repository `owner/name`.
        revision: Of the repository. A commit hash pins what is loaded.

    Raises:
        PolicyError: Neither exists, the hub cannot be reached, or the folder is invalid.
    """
    path = Path(os.path.expanduser(name))
    if path.is_dir():
        return load_policy_folder(path)
    if not isinstance(name, str) or not _HUB_NAME.fullmatch(name):
        raise PolicyError(f"--policy: the folder {name} does not exist, and it is no name of a hub repository")
    from huggingface_hub import snapshot_download

    # Not the hub's cache, which consists of links: loading refuses these.
    with tempfile.TemporaryDirectory() as folder:
        try:
            snapshot_download(name, revision=revision, allow_patterns=list(HUB_FILES), local_dir=folder)
        except Exception as error:  # the client raises errors of several libraries
            raise PolicyError(
                f"--policy: there is no folder {name}, and the hub repository of that name cannot be fetched "
                f"({type(error).__name__}); give a folder, or check name and connection"
            ) from None
        return load_policy_folder(folder)


def load_policy_folder(path: str | Path) -> LearnedPolicy:
    """Load a policy folder.

    Raises:
        PolicyError: A file is missing, was changed, or does not agree with `policy.json`.
    """
    from pydantic import TypeAdapter, ValidationError  # takes 0.1 s, and rules without a folder do not need it

    path = Path(path)
    try:
        if not (path / POLICY_FILE).exists():
            raise PolicyError(f"expected the file {POLICY_FILE}, which does not exist")
        raw = parse_json(read_plain(path / POLICY_FILE, MOST_TEXT), POLICY_FILE)
        if type(raw.get("schema")) is not int or raw["schema"] != POLICY_SCHEMA:
            raise PolicyError(
                f"it has schema {raw.get('schema')!r}, but this specstop reads {POLICY_SCHEMA}; train it again"
            )
        if odd := sorted(set(raw) ^ _KEYS):
            raise PolicyError(f"{POLICY_FILE} has keys missing or unknown: {', '.join(map(repr, odd))}")
        check_digest(raw, POLICY_FILE)
        # From text, because strict validation of Python objects would not convert lists to tuples.
        text = json.dumps(raw)
        record = TypeAdapter(_Record).validate_json(text, strict=True)
        metadata = TypeAdapter(TrainingMetadata).validate_json(text, strict=True)
        weights = _checked_files(path, record.files)[WEIGHTS_FILE]
        policy = _build(record, metadata, safetensors.numpy.load(weights))
    except PolicyError as error:
        raise PolicyError(f"--policy: {path}: {error.command_line}") from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise PolicyError(
            f"--policy: {path}: {POLICY_FILE}: {place}: {first['msg']}, not {str(first['input'])[:80]!r}"
        ) from None
    # Entries of the right types may still not agree with each other; the parts that are built of them raise other errors.
    except (LookupError, TypeError, ValueError, RuntimeError, OverflowError, OSError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:200]
        raise PolicyError(f"--policy: {path}: {POLICY_FILE} or {WEIGHTS_FILE} is invalid: {reason}") from None
    policy.source = path
    return policy


def _checked_files(path: Path, files: Mapping[str, str]) -> dict[str, bytes]:
    """Return the files that `policy.json` names, after checking names, sizes and checksums of all files of the folder."""
    if WEIGHTS_FILE not in files or not (path / WEIGHTS_FILE).exists():
        raise PolicyError(f"it has no {WEIGHTS_FILE}")
    side = [name for name in files if name != WEIGHTS_FILE]
    check_folder(path, (POLICY_FILE, WEIGHTS_FILE, CARD_FILE, RUN_FILE), side, POLICY_FILE, (CARD_FILE, RUN_FILE))
    contents = {name: read_plain(path / name, MOST_DATA) for name in files}
    for name, data in contents.items():
        if hashlib.sha256(data).hexdigest() != files[name]:
            raise PolicyError(
                f"{name} is not the file that {POLICY_FILE} was written with (its checksum differs); train or copy the "
                "policy again"
            )
        if name != WEIGHTS_FILE and data[:1] != b"{":  # UBJSON marks an object as JSON does
            raise PolicyError(f"{name} is not UBJSON")
    return contents  # files that are read again could have been replaced


def _build(record: _Record, metadata: TrainingMetadata, tensors: Mapping[str, Array]) -> LearnedPolicy:
    if len(record.features) > MOST_FEATURES or len(set(record.features)) != len(record.features):
        raise PolicyError(f"features: expected at most {MOST_FEATURES}, each once")
    if not 1 <= record.max_depth <= DEEPEST:
        raise PolicyError(f"max_depth: expected 1 to {DEEPEST}, not {record.max_depth}")
    if metadata.temperature == ():
        raise PolicyError("temperature: expected a number, or a list of some")
    for name, tensor in tensors.items():
        if tensor.dtype not in (np.float32, np.int64, np.bool_) or tensor.ndim > MOST_DIMENSIONS:
            raise PolicyError(
                f"weights: {name} of type {tensor.dtype} has {tensor.ndim} dimensions, which no policy has"
            )
    if set(_KNOTS) - set(tensors):
        raise PolicyError(f"weights: the tensors {', '.join(_KNOTS)} are missing")
    features, rule, depth = (
        tuple(feature(name).name for name in record.features),
        build_rule(record.rule),
        record.max_depth,
    )
    own = {name.removeprefix("head."): t for name, t in tensors.items() if name not in (*_KNOTS, _SURVIVAL)}
    head = build_head(record.head, head_names(features, rule), own)
    accept, next_ = (
        PathCalibrator(tensors[name])
        if c.kind == PathCalibrator.name
        else Calibrator(c.kind, c.temperature, tensors[name])
        for name, c in zip(_KNOTS, record.calibration, strict=True)
    )
    survival = SurvivalMaps(tensors[_SURVIVAL]) if _SURVIVAL in tensors else None
    if survival is not None and survival.depth != depth:
        raise PolicyError(f"calibration: expected survival tables for {depth} depths, got {survival.depth}")
    if isinstance(rule, Continuation):
        return ContinuationPolicy(record.name, features, head, rule, depth, metadata)
    if isinstance(rule, TreeRule):
        if not (isinstance(accept, PathCalibrator) and isinstance(next_, PathCalibrator)):
            raise PolicyError("calibration: the rule gain needs calibrations of paths")
        return TreeGain(record.name, features, head, accept, next_, rule, depth, metadata)
    kind: type[LearnedPolicy] = LearnedPolicy
    if isinstance(rule, BatchRule):
        kind = BatchPolicy if rule.send == "best" else BatchStop
    return kind(record.name, features, head, accept, next_, rule, depth, metadata, survival)


def card(policy: LearnedPolicy) -> str:
    """Return the README of the folder: what the policy is, what it was trained for, and its metrics."""
    facts = policy.metadata
    depths = policy.survival.changed if policy.survival is not None else []
    rows = [
        ("head", policy.head.kind),
        ("rule", policy.rule.kind),
        *([("batches that are not asked about", undecided)] if (undecided := policy.rule.undecided) else []),
        ("features", ", ".join(policy.features)),
        ("hidden states", ", ".join(f"{name} ({size} numbers)" for name, size in policy.sizes.items()) or "none"),
        ("calibration", f"accept {policy.accept.kind}, next {policy.next.kind}"),
        ("survival recalibrated at depths", ", ".join(map(str, depths)) or "none"),
        ("deepest draft", policy.max_depth),
        ("trained for", f"{facts.verification}, {sampling_text(facts.temperature, facts.shaping)}"),
        ("assumed rate (rho)", f"{facts.rho:.1f} tokens/s"),
        *((f"pair: {role}", value) for role, value in facts.pair.items()),
        *((name, value) for name, value in facts.metrics.items() if not isinstance(value, list)),
    ]
    tables = ""
    for name, entries in facts.metrics.items():
        if isinstance(entries, list) and entries and all(isinstance(entry, dict) for entry in entries):
            header = list(entries[0])
            table = _table(header, ([entry.get(key) for key in header] for entry in entries))
            tables += f"## {name.replace('_', ' ').capitalize()}\n\n{table}\n"
    return (
        "---\nlibrary_name: specstop\ntags: [speculative-decoding, stop-policy]\n---\n\n"
        f"# {markdown_cell(policy.name)}\n\nA specstop policy: decides when to stop drafting in speculative decoding. It "
        f"never changes the text, only its speed.\n\n{_table(['', ''], rows)}\n{tables}"
        "Use: `specstop decode --policy <this folder>`, or `specstop evaluate` to see what it gains on other traces or "
        "hardware.\n"
    )


def _table(header: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    def cell(value: Any) -> str:
        return markdown_cell(f"{value:.4f}" if isinstance(value, float) else "-" if value is None else str(value))

    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(map(cell, line))} |\n" for line in lines)
