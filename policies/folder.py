"""The policy folder: `policy.json`, `weights.safetensors`, `README.md`. Loading runs no code and unpickles nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from .calibration import Calibrator
from .errors import InputError, PolicyError
from .features import feature
from .files import read_json, sha256, staged_folder, write_atomic, write_json
from .heads import build_head
from .learned import Facts, LearnedPolicy
from .rules import build_rule

POLICY_SCHEMA = 1
POLICY_FILE, WEIGHTS_FILE, CARD_FILE = "policy.json", "weights.safetensors", "README.md"
_KNOTS = ("calibration.accept", "calibration.next")


def save_policy(policy: LearnedPolicy, path: str | Path, extra: Mapping[str, bytes] | None = None) -> Path:
    """Write a policy folder, whole or not at all.

    Args:
        policy: what to save.
        path: the folder; an existing one is replaced.
        extra: further files by name, such as a booster's UBJSON for retraining; loading ignores them.
    """
    path = Path(path)
    tensors: dict[str, Tensor] = {f"head.{name}": t.contiguous() for name, t in policy.head.tensors().items()}
    maps = (policy.accept, policy.following)
    tensors.update({name: c.knots.contiguous() for name, c in zip(_KNOTS, maps, strict=True)})
    with staged_folder(path) as folder:
        safetensors.torch.save_file(tensors, folder / WEIGHTS_FILE)
        for name, raw in (extra or {}).items():
            write_atomic(folder / name, raw)
        write_json(
            folder / POLICY_FILE,
            {
                "schema": POLICY_SCHEMA,
                "kind": "learned",
                "name": policy.name,
                "features": list(policy.features),
                "max_depth": policy.max_depth,
                "head": policy.head.kind,
                "calibration": [{"kind": c.kind, "temperature": c.temperature} for c in maps],
                "rule": policy.rule.to_dict(),
                "weights_sha256": sha256(folder / WEIGHTS_FILE),
                **dataclasses.asdict(policy.facts),
            },
        )
        write_atomic(folder / CARD_FILE, card(policy))
    return path


def load_policy_folder(path: str | Path) -> LearnedPolicy:
    """Read a policy folder, strictly.

    Raises:
        PolicyError: a file is missing, was changed, or is not what `policy.json` says.
    """
    path = Path(path)
    try:
        raw = read_json(path / POLICY_FILE, "--policy")
    except InputError as error:
        raise PolicyError(str(error)) from None
    if not isinstance(raw, dict) or raw.get("schema") != POLICY_SCHEMA:
        version = raw.get("schema") if isinstance(raw, dict) else None
        raise PolicyError(f"--policy: {path} has schema {version!r}, but this specstop reads {POLICY_SCHEMA}")
    weights = path / WEIGHTS_FILE
    if not weights.is_file():
        raise PolicyError(f"--policy: {path} has no {WEIGHTS_FILE}")
    if sha256(weights) != raw.get("weights_sha256"):
        raise PolicyError(
            f"--policy: {weights} is not the file that {POLICY_FILE} was written with (its checksum differs); "
            "train or copy the policy again"
        )
    try:
        return _build(raw, safetensors.torch.load_file(weights))
    except (KeyError, TypeError, ValueError, IndexError, RuntimeError, SafetensorError) as error:
        if isinstance(error, PolicyError):
            raise PolicyError(f"--policy: {path}: {error}") from None
        raise PolicyError(f"--policy: {path / POLICY_FILE} lacks or mangles {error}") from None


def _build(raw: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> LearnedPolicy:
    features = tuple(feature(name).name for name in raw["features"])
    if set(_KNOTS) - set(tensors):
        raise PolicyError(f"weights: the tensors {', '.join(_KNOTS)} are missing")
    head = build_head(
        raw["head"], features, {n.removeprefix("head."): t for n, t in tensors.items() if n not in _KNOTS}
    )
    accept, following = (
        Calibrator(entry["kind"], float(entry["temperature"]), tensors[name])
        for name, entry in zip(_KNOTS, raw["calibration"], strict=True)
    )
    names = {f.name for f in dataclasses.fields(Facts)}
    facts = Facts(**{name: raw[name] for name in names if name != "acceptance"}, acceptance=tuple(raw["acceptance"]))
    for name, kind in (
        ("temperature", (int, float)),
        ("rho", (int, float)),
        ("verification", str),
        ("label", str),
        ("pair", dict),
        ("profile", dict),
        ("provenance", dict),
        ("metrics", dict),
    ):
        if not isinstance(raw[name], kind):
            raise PolicyError(f"{name}: {raw[name]!r} is not what is expected there")
    depth = raw["max_depth"]
    if not isinstance(depth, int) or depth < 1:
        raise PolicyError(f"max_depth: expected 1 or more, not {depth!r}")
    rule = build_rule(raw["rule"])
    return LearnedPolicy(str(raw["name"]), features, head, accept, following, rule, depth, facts)


def card(policy: LearnedPolicy) -> str:
    """Return the folder's README: what the policy is, what it was trained for, how it did."""
    facts = policy.facts
    rows = [
        ("head", policy.head.kind),
        ("rule", policy.rule.kind),
        ("features", ", ".join(policy.features)),
        ("calibration", f"accept {policy.accept.kind}, next {policy.following.kind}"),
        ("deepest draft", str(policy.max_depth)),
        ("trained for", f"{facts.verification}, temperature {facts.temperature:g}"),
        ("rate assumed (rho)", f"{facts.rho:.1f} tokens/s"),
        *((f"pair: {role}", value) for role, value in facts.pair.items()),
        *((name, f"{value:.4f}" if isinstance(value, float) else str(value)) for name, value in facts.metrics.items()),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    return (
        "---\nlibrary_name: specstop\ntags: [speculative-decoding, stop-policy]\n---\n\n"
        f"# {policy.name}\n\nA specstop policy: decides when to stop drafting in speculative decoding. It never "
        f"changes the text, only its speed.\n\n| | |\n|---|---|\n{table}\n\n"
        "Use: `specstop decode --policy <this folder>`, or `specstop evaluate` to see what it gains on other traces "
        "or hardware.\n"
    )
