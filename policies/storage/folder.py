"""The policy folder: `policy.json`, `weights.safetensors`, `README.md`. Loading runs no code and unpickles nothing.

A folder may come from anywhere, so all of it is looked at before any of it is used (`safe_loading`): the names of its
files, that they are plain files of a sane size, their checksums, the header of the weights, every key of `policy.json`, which
has a checksum of its own: a folder that was damaged, or edited by hand, is refused rather than decoded with.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from ..batch_rules import BatchPolicy, BatchStop
from ..contract import Array
from ..errors import PolicyError
from ..features import feature
from ..files.atomic import write_atomic, write_json
from ..files.outputs import RUN_FILE, staged_folder
from ..files.text import markdown_cell
from ..heads.build import build_head
from ..learned.calibration import Calibrator
from ..learned.conditions import sampling_text
from ..learned.continuation import ContinuationPolicy, head_names
from ..learned.policy import Facts, LearnedPolicy
from ..learned.survival import SurvivalMaps
from ..learned.tree_calibration import PathCalibrator
from ..learned.trees import TreeGain
from ..rules.chains import BatchRule, Continuation, build_rule
from ..tree_rules import TreeRule
from .safe_loading import (
    MOST_DATA,
    MOST_TEXT,
    check_names,
    check_side_names,
    check_tensor_file,
    check_text,
    digest,
    parse_json,
    read_plain,
)

POLICY_SCHEMA = 2
POLICY_FILE, WEIGHTS_FILE, CARD_FILE = "policy.json", "weights.safetensors", "README.md"
TEXT_FILES = (CARD_FILE, RUN_FILE)
"""For people, and the configuration of the run that made the policy: loading looks that they are text, and no further."""

HUB_FILES = ("*.json", "*.safetensors", "*.ubj", "*.md")
"""All that is ever fetched from the hub."""

DEEPEST, MOST_FEATURES = 1024, 256
_KNOTS = ("calibration.accept", "calibration.next")
_SURVIVAL = "calibration.survival"
_HUB_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*")
_TYPES: dict[str, type | tuple[type, ...]] = {
    "schema": int,
    "kind": str,
    "name": str,
    "features": list,
    "max_depth": int,
    "head": str,
    "calibration": list,
    "rule": dict,
    "files": dict,
    "sha256": str,
    "temperature": (int, float, list),
    "verification": str,
    "label": str,
    "pair": dict,
    "rho": (int, float),
    "acceptance": list,
    "profile": dict,
    "provenance": dict,
    "metrics": dict,
    "shaping": dict,
    "prompts": dict,
}


def save_policy(policy: LearnedPolicy, path: str | Path, extra: Mapping[str, bytes] | None = None) -> Path:
    """Write a policy folder, whole or not at all.

    Args:
        policy: what to save.
        path: the folder; an older result of specstop is replaced.
        extra: further files `name.ubj`, such as a booster for retraining; loading checks them and reads nothing from them.

    Raises:
        InputError: the folder holds files that specstop did not write.
    """
    path = Path(path)
    check_side_names(extra or {})
    raw, files = _packed(policy, extra or {})
    with staged_folder(path) as folder:
        for name, data in files.items():
            write_atomic(folder / name, data)
        write_json(folder / POLICY_FILE, {**raw, "sha256": digest(raw)})
        write_atomic(folder / CARD_FILE, card(policy))
    return path


def content(policy: LearnedPolicy) -> str:
    """Return a digest of all that a policy consists of: that of `policy.json`, however often it is saved and read."""
    return digest(_packed(policy, {})[0])


def _packed(policy: LearnedPolicy, extra: Mapping[str, bytes]) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the contents of `policy.json`, and the other files."""
    tensors = {f"head.{name}": array for name, array in policy.head.tensors().items()}
    maps = (policy.accept, policy.next)
    tensors |= {name: c.knots for name, c in zip(_KNOTS, maps, strict=True)}
    if policy.survival is not None:
        tensors[_SURVIVAL] = policy.survival.tables
    whole = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    files = {WEIGHTS_FILE: safetensors.numpy.save(whole), **extra}
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
        **dataclasses.asdict(policy.facts),
    }
    return raw, files


save_pretrained = save_policy


def from_pretrained(name: str | Path, revision: str | None = None) -> LearnedPolicy:
    """Return the policy in a local folder, or on the Hugging Face hub as `owner/name`.

    Args:
        name: a folder that exists, or a repository.
        revision: of the repository; a commit hash pins what is loaded.

    Raises:
        PolicyError: neither exists, the hub cannot be reached, or the folder is not in order.
    """
    path = Path(os.path.expanduser(name))
    if path.is_dir():
        return load_policy_folder(path)
    if not isinstance(name, str) or not _HUB_NAME.fullmatch(name):
        raise PolicyError(f"--policy: the folder {name} does not exist, and it is no name of a hub repository")
    import tempfile

    from huggingface_hub import snapshot_download

    with tempfile.TemporaryDirectory() as fetched:
        try:
            # Into a folder of its own: the hub's cache consists of links, which loading refuses.
            snapshot_download(name, revision=revision, allow_patterns=list(HUB_FILES), local_dir=fetched)
        except Exception as error:  # the client raises errors of several libraries
            raise PolicyError(
                f"--policy: there is no folder {name}, and the hub repository of that name cannot be fetched "
                f"({type(error).__name__}); give a folder, or check name and connection"
            ) from None
        return load_policy_folder(fetched)


def load_policy_folder(path: str | Path) -> LearnedPolicy:
    """Read a policy folder, strictly.

    Raises:
        PolicyError: a file is missing, was changed, or is not what `policy.json` says.
    """
    path = Path(path)
    try:
        if not (path / POLICY_FILE).exists():
            raise PolicyError(f"expected the file {POLICY_FILE}, which does not exist")
        raw = parse_json(read_plain(path / POLICY_FILE, MOST_TEXT), POLICY_FILE)
        if raw.get("schema") != POLICY_SCHEMA:
            raise PolicyError(
                f"it has schema {raw.get('schema')!r}, but this specstop reads {POLICY_SCHEMA}; train it again"
            )
        _check_keys(raw)
        policy = _build(raw, safetensors.numpy.load(_checked_files(path, raw)[WEIGHTS_FILE]))
    except PolicyError as error:
        raise PolicyError(f"--policy: {path}: {error.command_line}") from None
    # Entries of the right types may still not fit each other; each part that is built of them says so with another error.
    except (LookupError, TypeError, ValueError, RuntimeError, OverflowError, OSError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:200]
        raise PolicyError(f"--policy: {path}: {POLICY_FILE} lacks or mangles {reason}") from None
    policy.source = path
    return policy


def _check_keys(raw: Mapping[str, Any]) -> None:
    """Refuse a missing or unknown key, a value of another type, and contents that are not those that were written."""
    if odd := sorted(set(raw) ^ set(_TYPES)):
        raise PolicyError(f"{POLICY_FILE} has keys missing or unknown: {', '.join(map(repr, odd))}")
    for name, kind in _TYPES.items():
        if name in raw and (not isinstance(raw[name], kind) or isinstance(raw[name], bool)):  # bool is an int
            raise PolicyError(f"{name}: {str(raw[name])[:80]!r} is not what is expected there")
    if raw["sha256"] != digest(raw):
        raise PolicyError(
            f"{POLICY_FILE} is not as it was written (its checksum differs); train or copy the policy again"
        )
    if raw["kind"] != "learned":
        raise PolicyError(f"kind: expected 'learned', not {raw['kind']!r}")


def _checked_files(path: Path, raw: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the files that `policy.json` names, once names, sizes, checksums and kinds are in order."""
    files = raw["files"]
    if WEIGHTS_FILE not in files or not (path / WEIGHTS_FILE).exists():
        raise PolicyError(f"it has no {WEIGHTS_FILE}")
    side = [name for name in files if name != WEIGHTS_FILE]
    check_names(path, (POLICY_FILE, WEIGHTS_FILE, *TEXT_FILES), side)
    contents = {name: read_plain(path / name, MOST_DATA) for name in files}
    for name, data in contents.items():
        if hashlib.sha256(data).hexdigest() != files[name]:
            raise PolicyError(
                f"{name} is not the file that {POLICY_FILE} was written with (its checksum differs); "
                "train or copy the policy again"
            )
        if name != WEIGHTS_FILE and data[:1] != b"{":  # UBJSON marks an object as JSON does
            raise PolicyError(f"{name} is not UBJSON")
    for name in TEXT_FILES:
        if (path / name).exists():
            check_text(read_plain(path / name, MOST_TEXT), name)
    check_tensor_file(contents[WEIGHTS_FILE])
    # The bytes themselves: files read again to be loaded might be others by then.
    return contents


def _build(raw: Mapping[str, Any], tensors: Mapping[str, Array]) -> LearnedPolicy:
    names = raw["features"]
    if len(names) > MOST_FEATURES or len(set(names)) != len(names):
        raise PolicyError(f"features: expected at most {MOST_FEATURES}, each once")
    features = tuple(feature(name).name for name in names)
    if set(_KNOTS) - set(tensors):
        raise PolicyError(f"weights: the tensors {', '.join(_KNOTS)} are missing")
    rule = build_rule(raw["rule"])
    head = build_head(
        raw["head"],
        head_names(features, rule),
        {n.removeprefix("head."): t for n, t in tensors.items() if n not in (*_KNOTS, _SURVIVAL)},
    )
    accept, next_ = (
        _calibrator(entry["kind"], float(entry["temperature"]), tensors[name])
        for name, entry in zip(_KNOTS, raw["calibration"], strict=True)
    )
    fields = {f.name for f in dataclasses.fields(Facts)}
    acceptance = tuple(float(a) for a in raw["acceptance"])
    temperatures = raw["temperature"]
    if isinstance(temperatures, list):
        temperatures = tuple(float(t) for t in temperatures)
        if not temperatures:
            raise PolicyError("temperature: expected a number, or a list of some")
    if not all(
        isinstance(names, list) and all(isinstance(name, str) for name in names) for names in raw["prompts"].values()
    ):
        raise PolicyError("prompts: expected lists of hashes")
    facts = Facts(**{**{name: raw[name] for name in fields}, "acceptance": acceptance, "temperature": temperatures})
    depth = raw["max_depth"]
    if not 1 <= depth <= DEEPEST:
        raise PolicyError(f"max_depth: expected 1 or more, at most {DEEPEST}, not {depth!r}")
    survival = SurvivalMaps(tensors[_SURVIVAL]) if _SURVIVAL in tensors else None
    if survival is not None and survival.depth != depth:
        raise PolicyError(f"calibration: expected survival tables for {depth} depths, got {survival.depth}")
    if isinstance(rule, Continuation):
        return ContinuationPolicy(raw["name"], features, head, rule, depth, facts)
    if isinstance(rule, TreeRule):
        if not (isinstance(accept, PathCalibrator) and isinstance(next_, PathCalibrator)):
            raise PolicyError("calibration: the rule gain needs calibrations of paths")
        return TreeGain(raw["name"], features, head, accept, next_, rule, depth, facts)
    kind: type[LearnedPolicy] = LearnedPolicy
    if isinstance(rule, BatchRule):
        kind = BatchPolicy if rule.send == "best" else BatchStop
    return kind(raw["name"], features, head, accept, next_, rule, depth, facts, survival)


def _calibrator(kind: str, temperature: float, knots: Array) -> Calibrator:
    return PathCalibrator(knots) if kind == PathCalibrator.name else Calibrator(kind, temperature, knots)


def card(policy: LearnedPolicy) -> str:
    """Return the folder's README: what the policy is, what it was trained for, how it did."""
    facts = policy.facts
    depths = policy.survival.changed if policy.survival is not None else []
    rows = [
        ("head", policy.head.kind),
        ("rule", policy.rule.kind),
        *([("batches that are not asked about", undecided)] if (undecided := policy.rule.undecided) else []),
        ("features", ", ".join(policy.features)),
        ("hidden states", ", ".join(f"{name} ({size} numbers)" for name, size in policy.sizes.items()) or "none"),
        ("calibration", f"accept {policy.accept.kind}, next {policy.next.kind}"),
        ("survival recalibrated at depths", ", ".join(map(str, depths)) or "none"),
        ("deepest draft", str(policy.max_depth)),
        ("trained for", f"{facts.verification}, {sampling_text(facts.temperature, facts.shaping)}"),
        ("rate assumed (rho)", f"{facts.rho:.1f} tokens/s"),
        *((f"pair: {role}", value) for role, value in facts.pair.items()),
        *((name, _cell(value)) for name, value in facts.metrics.items() if not isinstance(value, list)),
    ]
    table = "\n".join(f"| {markdown_cell(name)} | {markdown_cell(value)} |" for name, value in rows)
    return (
        "---\nlibrary_name: specstop\ntags: [speculative-decoding, stop-policy]\n---\n\n"
        f"# {markdown_cell(policy.name)}\n\nA specstop policy: decides when to stop drafting in speculative decoding. It "
        f"never changes the text, only its speed.\n\n| | |\n|---|---|\n{table}\n\n{_tables(facts.metrics)}"
        "Use: `specstop decode --policy <this folder>`, or `specstop evaluate` to see what it gains on other traces or "
        "hardware.\n"
    )


def _tables(metrics: Mapping[str, Any]) -> str:
    """Return the metrics that are lists of rows as a Markdown table each."""
    out = []
    for name, rows in metrics.items():
        if not (isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows)):
            continue
        names = list(rows[0])
        lines = [names, ["---"] * len(names), *([_cell(row.get(n)) for n in names] for row in rows)]
        table = "\n".join(f"| {' | '.join(map(markdown_cell, line))} |" for line in lines)
        out.append(f"## {name.replace('_', ' ').capitalize()}\n\n{table}\n\n")
    return "".join(out)


def _cell(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else "-" if value is None else str(value)
