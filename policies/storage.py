"""The policy folder: `policy.json`, `weights.safetensors`, `README.md`. Loading runs no code and unpickles nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import inspect
import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from .batch_rules import for_batches
from .contract import Array, StopPolicy
from .display import markdown_cell, markdown_table
from .errors import PolicyError
from .features import feature
from .files import (
    CARD_FILE,
    WEIGHTS_FILE,
    digest,
    read_signed_json,
    read_weights,
    staged_folder,
    write_atomic,
    write_json,
)
from .fixed import FixedLength
from .heads import build_head
from .learned import (
    Calibrator,
    LearnedPolicy,
    PathCalibrator,
    SurvivalMaps,
    TrainingMetadata,
    TreeGain,
    build_rule,
)
from .profile import Profile
from .routing import RoutingPolicy, ThresholdRoute, ValueRoute, input_features
from .rules import BatchRule
from .tree_rules import TreeRule

POLICY_SCHEMA = 2
POLICY_FILE = "policy.json"
MAX_DEPTH, MAX_FEATURES, MAX_DIMENSIONS = 1024, 256, 8
_KNOTS = ("calibration.accept", "calibration.next")
_SURVIVAL = "calibration.survival"
_HUB_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*")


@dataclass(frozen=True)
class _Calibration:
    kind: str
    temperature: float


@dataclass(frozen=True)
class _Record:
    """Entries of `policy.json` that determine decisions. The others are `files` and the fields of `TrainingMetadata`."""

    kind: Literal["learned"]
    name: str
    features: list[str]
    max_depth: int
    head: str
    calibration: tuple[_Calibration, _Calibration]
    rule: dict[str, Any]


@dataclass(frozen=True)
class _RouteRecord:
    """The same of a policy that routes.

    Attributes:
        features: that the route reads.
        heads: kinds of the heads of a `ValueRoute`; `reference` is its reference.
        level: of a `ThresholdRoute`; None of a `ValueRoute`.
        stops: of each drafter, a fixed length, or a learned policy as `policy.json` has it.
    """

    kind: Literal["route"]
    name: str
    features: list[str]
    heads: list[str]
    reference: int
    level: float | None
    stops: list[int | dict[str, Any]]


_RECORDS: dict[str, type[_Record | _RouteRecord]] = {"learned": _Record, "route": _RouteRecord}
_METADATA = [field.name for field in dataclasses.fields(TrainingMetadata)]

Saved = LearnedPolicy | RoutingPolicy
"""What a policy folder holds."""


def save_policy(policy: Saved, path: str | Path) -> Path:
    """Write a policy folder, whole or not at all.

    Args:
        policy: the policy.
        path: the folder. An older result of specstop is replaced.

    Raises:
        InputError: the folder contains files that specstop did not write.
        PolicyError: a policy that routes is no built-in, or has a stop policy that is neither learned nor a fixed length.
    """
    raw, weights = _pack(policy)
    with staged_folder(path) as folder:
        write_atomic(folder / WEIGHTS_FILE, weights)
        write_json(folder / POLICY_FILE, {**raw, "sha256": digest(raw)})
        write_atomic(folder / CARD_FILE, _card(policy))
    return Path(path)


def content_digest(policy: Saved) -> str:
    """Return a digest of the policy, which saving and loading do not change."""
    return digest(_pack(policy)[0])


def policy_digest(policy: StopPolicy) -> str:
    """Return a digest of what a policy does, the code of its class included. It is the same in every process."""
    return hashlib.sha256(json.dumps(_describe_value(policy)).encode()).hexdigest()[:16]


def _describe_value(value: Any, outer: tuple[int, ...] = ()) -> Any:
    """Return a value as JSON. Objects of other classes, and those that contain themselves, are described by their class.

    Args:
        value: a policy, or a part of it.
        outer: ids of the objects that contain it.
    """
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, LearnedPolicy | ValueRoute):
        with contextlib.suppress(PolicyError):  # a route may have other stop policies than those that can be saved
            return content_digest(value)
    if isinstance(value, np.ndarray | np.generic):
        return _describe_value(value.tolist(), outer)
    kind, inner = type(value), (*outer, id(value))
    code = kind.__qualname__
    if id(value) in outer:
        return code
    if isinstance(value, list | tuple):
        return [_describe_value(item, inner) for item in value]
    if isinstance(value, Profile | Mapping):
        items = value.to_dict() if isinstance(value, Profile) else value
        pairs = ([str(_describe_value(key)), _describe_value(item, inner)] for key, item in items.items())
        return sorted(pairs, key=lambda pair: pair[0])
    is_policy = isinstance(value, StopPolicy)
    if is_policy:
        with contextlib.suppress(OSError, TypeError):  # the source is not known
            code = inspect.getsource(kind)
    elif not dataclasses.is_dataclass(value):
        return code  # others may print as an address
    # Costs may have tables that grow beside their fields; private dictionaries are caches. `label` and `source` do not change
    # what a policy does.
    names = {*getattr(kind, "__dataclass_fields__", ()), *(getattr(value, "__dict__", ()) if is_policy else ())}
    parts = {name: getattr(value, name, None) for name in names}
    caches = {name for name, part in parts.items() if name[0] == "_" and isinstance(part, dict)}
    return [code, _describe_value({name: parts[name] for name in parts.keys() - caches - {"label", "source"}}, inner)]


def _pack(policy: Saved) -> tuple[dict[str, Any], bytes]:
    """Return the contents of `policy.json` and of the file of weights."""
    raw, tensors = _entries(policy)
    weights = safetensors.numpy.save({name: np.ascontiguousarray(array) for name, array in tensors.items()})
    digests = {WEIGHTS_FILE: hashlib.sha256(weights).hexdigest()}
    return {"schema": POLICY_SCHEMA, **raw, "files": digests}, weights


def _entries(policy: Saved) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return the entries of `policy.json` of a policy, and its tensors."""
    record: _Record | _RouteRecord
    if isinstance(policy, LearnedPolicy):
        maps = (policy.accept, policy.next)
        tensors = {f"head.{name}": array for name, array in policy.head.tensors().items()}
        tensors |= {name: calibrator.knots for name, calibrator in zip(_KNOTS, maps, strict=True)}
        if policy.survival is not None:
            tensors[_SURVIVAL] = policy.survival.tables
        record = _Record(
            "learned", policy.name, list(policy.features), policy.max_depth, policy.head.kind,
            (_Calibration(maps[0].kind, maps[0].temperature), _Calibration(maps[1].kind, maps[1].temperature)),
            policy.rule.to_dict(),
        )  # fmt: skip
    else:
        record, tensors = _route_record(policy)
    return {**dataclasses.asdict(record), **dataclasses.asdict(policy.metadata)}, tensors


def _route_record(policy: RoutingPolicy) -> tuple[_RouteRecord, dict[str, Array]]:
    if not isinstance(policy, ThresholdRoute | ValueRoute):
        raise PolicyError(f"{policy.name}: expected a route of specstop, which can be saved")
    tensors: dict[str, Array] = {}
    stops: list[int | dict[str, Any]] = []
    for index, stop in enumerate(policy.stops):
        if isinstance(stop, LearnedPolicy):
            raw, own = _entries(stop)
            stops.append(raw)
            tensors |= {f"stop.{index}.{name}": array for name, array in own.items()}
        elif isinstance(stop, FixedLength):
            stops.append(stop.max_depth)
        else:
            raise PolicyError(f"{policy.name}: expected a learned policy or a fixed length to save, got {stop.name}")
    if isinstance(policy, ThresholdRoute):
        return _RouteRecord("route", policy.name, [policy.feature], [], 0, float(policy.level), stops), tensors
    for index, head in enumerate(policy.heads):
        tensors |= {f"head.{index}.{name}": array for name, array in head.tensors().items()}
    kinds = [head.kind for head in policy.heads]
    names = list(policy.route_features)
    return _RouteRecord("route", policy.name, names, kinds, policy.reference, None, stops), tensors


def from_pretrained(name: str | Path, revision: str | None = None) -> Saved:
    """Load a policy from a folder, or from the Hugging Face hub.

    Args:
        name: a folder, or a hub repository `owner/name`.
        revision: of the repository. A commit hash pins the content.

    Raises:
        PolicyError: neither exists, the hub cannot be reached, or the folder is invalid.
    """
    path = os.path.expanduser(name)
    if os.path.isdir(path):  # unlike `Path.is_dir`, does not raise an error for long names
        return load_policy_folder(path)
    if not isinstance(name, str) or not _HUB_NAME.fullmatch(name):
        raise PolicyError(f"--policy: the folder {name} does not exist, and it is no name of a hub repository")
    from huggingface_hub import snapshot_download

    # Not the hub's cache, which consists of links: loading refuses these.
    with tempfile.TemporaryDirectory() as folder:
        try:
            patterns = ["*.json", "*.safetensors", "*.md"]
            snapshot_download(name, revision=revision, allow_patterns=patterns, local_dir=folder)
        except Exception as error:  # the client raises errors of several libraries
            raise PolicyError(
                f"--policy: there is no folder {name}, and the hub repository of that name cannot be fetched "
                f"({type(error).__name__}); use a folder, or check name and connection"
            ) from None
        policy = load_policy_folder(folder)
        policy.source = None  # the folder is deleted
        return policy


def load_policy_folder(path: str | Path) -> Saved:
    """Load a policy folder.

    Raises:
        PolicyError: a file is missing, was changed, or does not agree with `policy.json`.
    """
    from pydantic import TypeAdapter, ValidationError  # takes 0.1 s, and rules without a folder do not need it

    path = Path(path)
    try:
        raw = read_signed_json(path / POLICY_FILE, POLICY_SCHEMA, _keys)
        digests = TypeAdapter(dict[str, str]).validate_python(raw.pop("files"), strict=True)
        policy = _read(raw, safetensors.numpy.load(read_weights(path, POLICY_FILE, digests)))
    except PolicyError as error:
        raise PolicyError(f"--policy: {path}: {error.command_line}") from None
    except ValidationError as error:
        first = error.errors()[0]
        place, value = ".".join(map(str, first["loc"])), str(first["input"])[:80]
        raise PolicyError(f"--policy: {path}: {POLICY_FILE}: {place}: {first['msg']}, not {value!r}") from None
    # Entries of the right types may not agree with each other, which the parts of the policy report with other errors.
    except (LookupError, TypeError, ValueError, RuntimeError, OverflowError, OSError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:200]
        raise PolicyError(f"--policy: {path}: {POLICY_FILE} or {WEIGHTS_FILE} is invalid: {reason}") from None
    policy.source = path
    return policy


def _keys(raw: Mapping[str, Any]) -> set[str]:
    """Return the expected entries of `policy.json`, or of a stop policy in it, without the schema and the signature."""
    record = _RECORDS.get(str(raw.get("kind")), _Record)
    return {*(field.name for field in dataclasses.fields(record)), *_METADATA, "files"}


def _read(raw: Mapping[str, Any], tensors: Mapping[str, Array]) -> Saved:
    """Return the policy of the entries of `policy.json`."""
    from pydantic import TypeAdapter

    for key, tensor in tensors.items():
        if tensor.dtype not in (np.float32, np.int64, np.bool_) or tensor.ndim > MAX_DIMENSIONS:
            raise PolicyError(f"weights: {key} has an unexpected type {tensor.dtype} or {tensor.ndim} dimensions")
    # From text, because strict validation of Python objects would not convert lists to tuples.
    text = json.dumps(raw)
    metadata = TypeAdapter(TrainingMetadata).validate_json(text, strict=True)
    if metadata.temperature == ():
        raise PolicyError("temperature: expected a number or a list of numbers, not an empty list")
    if raw["kind"] != "route":
        return _build(TypeAdapter(_Record).validate_json(text, strict=True), metadata, tensors)
    return _build_route(TypeAdapter(_RouteRecord).validate_json(text, strict=True), metadata, tensors)


def _part(tensors: Mapping[str, Array], prefix: str) -> dict[str, Array]:
    """Return the tensors with names that begin with a prefix, without it."""
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}


def _build_route(
    record: _RouteRecord, metadata: TrainingMetadata, tensors: Mapping[str, Array]
) -> ThresholdRoute | ValueRoute:
    stops: list[StopPolicy] = []
    for index, entry in enumerate(record.stops):
        if isinstance(entry, dict) and entry.get("kind") != "learned":
            raise PolicyError("stops: expected learned policies and fixed lengths")
        stop = FixedLength(entry) if isinstance(entry, int) else _read(entry, _part(tensors, f"stop.{index}."))
        _check_depth(stop.max_depth, 0)
        stops.append(stop)
    features = _features(record.features)
    policy: ThresholdRoute | ValueRoute
    if record.level is not None:
        policy = ThresholdRoute(features[0], record.level, stops)
        policy.name, policy.metadata = record.name, metadata
        return policy
    _, names = input_features(features, len(stops))
    heads = [build_head(kind, names, _part(tensors, f"head.{at}.")) for at, kind in enumerate(record.heads)]
    return ValueRoute(record.name, features, heads, record.reference, stops, metadata)


def _features(names: Sequence[str]) -> tuple[str, ...]:
    features = tuple(feature(each).name for each in names)
    if len(features) > MAX_FEATURES or len(set(features)) < len(features):
        raise PolicyError(f"features: expected at most {MAX_FEATURES}, each once")
    return features


def _check_depth(depth: int, low: int = 1) -> None:
    if not low <= depth <= MAX_DEPTH:
        raise PolicyError(f"max_depth: expected {low} to {MAX_DEPTH}, not {depth}")


def _build(record: _Record, metadata: TrainingMetadata, tensors: Mapping[str, Array]) -> LearnedPolicy:
    name, depth, rule = record.name, record.max_depth, build_rule(record.rule)
    features = _features(record.features)
    _check_depth(depth)
    of_head = {key.removeprefix("head."): t for key, t in tensors.items() if key not in (*_KNOTS, _SURVIVAL)}
    head = build_head(record.head, features, of_head)
    accept, next_ = (
        PathCalibrator(tensors[key])
        if c.kind == PathCalibrator.name
        else Calibrator(c.kind, c.temperature, tensors[key])
        for key, c in zip(_KNOTS, record.calibration, strict=True)
    )
    survival = SurvivalMaps(tensors[_SURVIVAL]) if _SURVIVAL in tensors else None
    if survival is not None and survival.depth != depth:
        raise PolicyError(f"calibration: expected survival tables for {depth} depths, got {survival.depth}")
    kind = TreeGain if isinstance(rule, TreeRule) else LearnedPolicy
    policy = kind(name, features, head, accept, next_, rule, depth, metadata, survival)
    return for_batches(policy, rule=rule) if isinstance(rule, BatchRule) else policy


def _card(policy: Saved) -> str:
    """Return the README of the folder."""
    tables = ""
    for name, entries in policy.metadata.metrics.items():
        if isinstance(entries, list) and entries and all(isinstance(entry, dict) for entry in entries):
            table = markdown_table(list(entries[0]), ([entry.get(key) for key in entries[0]] for entry in entries))
            tables += f"## {name.replace('_', ' ').capitalize()}\n\n{table}\n"
    return (
        "---\nlibrary_name: specstop\ntags: [speculative-decoding, stop-policy]\n---\n\n"
        f"# {markdown_cell(policy.name)}\n\nA specstop policy for speculative decoding. It never changes the "
        f"text, only its speed.\n\n{markdown_table(['', ''], policy.describe().items())}\n{tables}"
        "Use: `specstop decode --policy <this folder>`, or `specstop evaluate` to see what it gains on other traces or "
        "hardware.\n"
    )
