"""What a policy was trained for, and warnings where it is used under other conditions."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .contract import StopPolicy
from .errors import SpecstopWarning

# Options that remove unlikely tokens, which has no effect on greedy decoding.
_FILTERS = ("top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
_MAX_CHARACTERS = 200


@dataclass(frozen=True)
class TrainingMetadata:
    """What a policy was trained for and how it performed; does not change decisions.

    Attributes:
        temperature, verification, label, shaping: of the traces; several temperatures if the head reads the temperature.
        pair: hashes of target, draft and tokenizer.
        rho, acceptance: tokens per second, and a_1..a_K, that rules assume.
        profile: the latency profile as JSON, or empty.
        provenance: command, versions, seed, traces.
        metrics: on prompts that influenced nothing in the policy.
        prompts: hashes of the training prompts: "fit" of the head, "select" of calibration, thresholds and rho, "report".
    """

    temperature: float | tuple[float, ...] = 0.0
    verification: str = "match"
    label: str = "match"
    pair: dict[str, str] = field(default_factory=dict)
    rho: float = 0.0
    acceptance: tuple[float, ...] = ()
    profile: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    shaping: dict[str, Any] = field(default_factory=dict)
    prompts: dict[str, list[str]] = field(default_factory=dict)

    def covers(self, temperature: float) -> bool:
        """Whether a temperature lies within those of the traces."""
        known = self.temperature if isinstance(self.temperature, tuple) else (self.temperature,)
        return min(known) <= temperature <= max(known)


@dataclass(frozen=True)
class Conditions:
    """Conditions under which a policy is used or a trace was recorded.

    Attributes:
        temperature: 0 = greedy; None = unknown: neither it nor `shaping` is compared.
        shaping: other options that change the distribution that is sampled from, by name.
        verification: mode; "" = any.
        pair: hashes of target, draft and tokenizer; empty = any.
        tree: name of the topology of rounds; "" = any.
    """

    temperature: float | None
    shaping: Mapping[str, Any] = field(default_factory=dict)
    verification: str = ""
    pair: Mapping[str, str] = field(default_factory=dict)
    tree: str = ""


def shaping_text(shaping: Mapping[str, Any], temperature: float = 1.0) -> str:
    """Return the options that have an effect at a temperature as text: `top-p 0.9, min-p 0.05`, or `none`."""
    words = []
    for name, value in sorted(shaping.items()):
        if temperature > 0 or name not in _FILTERS:
            text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
            words.append(f"{name.replace('_', '-')} {text}")
    return " ".join(", ".join(words).split())[:_MAX_CHARACTERS] or "none"  # values in files may have any length


def sampling_text(temperature: float | str | Sequence[float], shaping: Mapping[str, Any]) -> str:
    """Return `temperature 0.7, top-p 0.9`; with all temperatures if there are several."""
    if isinstance(temperature, str):
        return f"temperature {temperature}"
    temperatures = [temperature] if isinstance(temperature, float | int) else list(temperature)
    options = shaping_text(shaping, max(temperatures))
    return f"temperature {', '.join(f'{t:g}' for t in temperatures)}" + (f", {options}" if options != "none" else "")


def other_conditions(policy: StopPolicy, used: Conditions) -> list[tuple[str, Any, Any]]:
    """Return the conditions that differ from those of training: (name, of training, of use)."""
    trained = getattr(policy, "metadata", None)
    if not isinstance(trained, TrainingMetadata):
        return []
    different = list[tuple[str, Any, Any]]()
    if used.temperature is not None:
        filters = [shaping_text(options, used.temperature) for options in (trained.shaping, used.shaping)]
        if not trained.covers(used.temperature):
            different.append(("temperature", trained.temperature, used.temperature))
        if filters[0] != filters[1]:
            different.append(("filter", filters[0], filters[1]))
    if used.verification and trained.verification != used.verification:
        different.append(("verification", trained.verification, used.verification))
    # A pair without a tokenizer, or a drafter that needs no draft, has fewer hashes.
    if hashes := {name: hash for name, hash in trained.pair.items() if used.pair.get(name, hash) != hash}:
        different.append(("pair", hashes, {name: used.pair[name] for name in hashes}))
    tree = trained.metrics.get("tree")  # of a tree policy
    if used.tree and isinstance(tree, str) and tree != used.tree:
        different.append(("tree", tree, used.tree))
    return different


def warn_other_conditions(policy: StopPolicy, used: Conditions, where: str) -> None:
    """Warn of each condition that differs from those of training; `where` is "these traces" or "this run"."""
    for name, trained, current in other_conditions(policy, used):
        remedy = f"; --tree {trained} drafts it" if name == "tree" else ""
        message = f"{policy.name} was trained for another {name} ({trained}) than {where} ({current}){remedy}"
        warnings.warn(message, SpecstopWarning, stacklevel=4)
