"""What acceptance rests on beside the text, and whether a policy was trained, or a profile measured, for it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..contract import StopPolicy
from ..errors import SpecstopWarning
from ..profile import Profile
from ..storage.drafter_names import kinds_of
from .policy import LearnedPolicy

_TRUNCATING = ("top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
"""Options that leave tokens out by how likely they are, which greedy decoding never notices."""

_LONGEST = 200

UNKNOWN = "unknown"
"""Temperature of texts if the engine did not record it."""


@dataclass(frozen=True)
class Conditions:
    """Under which a policy is used, or a trace was recorded.

    Attributes:
        temperature: of the sampling; 0 = greedy. None = unknown, so that neither it nor `shaping` is compared.
        shaping: what else changes the distribution that is sampled from: options of `decode.Shaping` by name.
        verification: whose acceptance counts; "" = any.
        pair: hashes of target, draft and tokenizer; empty = any.
        tree: that rounds draft, as `decode.Topology.name` has it; "" = any.
    """

    temperature: float | None
    shaping: Mapping[str, Any] = field(default_factory=dict)
    verification: str = ""
    pair: Mapping[str, str] = field(default_factory=dict)
    tree: str = ""


def shaping_text(shaping: Mapping[str, Any], temperature: float = 1.0) -> str:
    """Return the options that change what is sampled at a temperature, in words: `top-p 0.9, min-p 0.05`, or `none`."""
    words = []
    for name, value in sorted(shaping.items()):
        if temperature > 0 or name not in _TRUNCATING:
            shown = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
            words.append(f"{name.replace('_', '-')} {shown}")
    return " ".join(", ".join(words).split())[:_LONGEST] or "none"  # a file may hold anything; messages are one line


def sampling_text(temperature: float | str | Sequence[float], shaping: Mapping[str, Any]) -> str:
    """Return `temperature 0.7, top-p 0.9`; of several temperatures all, and of `UNKNOWN` `temperature unknown`."""
    if isinstance(temperature, str):
        return f"temperature {temperature}"
    sampled_at = [temperature] if isinstance(temperature, float | int) else list(temperature)
    options = shaping_text(shaping, max(sampled_at))
    return f"temperature {', '.join(f'{t:g}' for t in sampled_at)}" + (f", {options}" if options != "none" else "")


def other_conditions(policy: StopPolicy, used: Conditions) -> list[tuple[str, Any, Any]]:
    """Return in what a policy was trained for something else: (what, what it was trained for, what it is used for)."""
    if not isinstance(policy, LearnedPolicy):
        return []
    facts = policy.facts
    differs: dict[str, tuple[Any, Any]] = {}
    if used.temperature is not None:
        mine, theirs = (shaping_text(options, used.temperature) for options in (facts.shaping, used.shaping))
        if not facts.covers(used.temperature):
            differs["temperature"] = facts.temperature, used.temperature
        if mine != theirs:
            differs["filter"] = mine, theirs
    if used.verification and facts.verification != used.verification:
        differs["verification"] = facts.verification, used.verification
    # One without a tokenizer, or a drafter that needs no draft, has fewer hashes.
    if apart := {name: hash for name, hash in facts.pair.items() if used.pair.get(name, hash) != hash}:
        differs["pair"] = apart, {name: used.pair[name] for name in apart}
    tree = facts.metrics.get("tree")  # of a policy that chooses nodes
    if used.tree and isinstance(tree, str) and tree != used.tree:
        differs["tree"] = tree, used.tree
    return [(what, *sides) for what, sides in differs.items()]


def tell_other_conditions(policy: StopPolicy, used: Conditions, where: str) -> None:
    """Warn of each thing that a learned policy was trained otherwise for: the text is not affected, only the speed.

    Args:
        policy: any.
        used: what for.
        where: "these traces" or "this run", for the message.
    """
    for what, mine, theirs in other_conditions(policy, used):
        remedy = f"; --tree {mine} drafts it" if what == "tree" else ""
        warnings.warn(
            f"{policy.name} was trained for another {what} ({mine}) than {where} ({theirs}){remedy}",
            SpecstopWarning,
            stacklevel=4,
        )


def tell_other_verification(profile: Profile, used: str, where: str) -> None:
    """Warn where a profile timed the rounds of chains under another verification.

    Args:
        profile: one that tells of none is silent.
        used: the mode.
        where: "the trace holds" or "this run plays", for the message.
    """
    if profile.verification and profile.verification != used:
        warnings.warn(
            f"the profile timed rounds under {profile.verification} verification, {where} those of {used}: what a "
            f"verification costs differs; measure it with --verification {used}",
            SpecstopWarning,
            stacklevel=4,
        )


def tell_other_drafter(profile: Profile, used: str, where: str) -> None:
    """Warn where a profile timed the rounds of another drafter.

    Args:
        profile: of a measurement; one of made-up costs, whose facts name no device, is silent.
        used: as of `--drafter`. Paths and options are left out: folders move, and costs hang on the kind.
        where: see `tell_other_verification`.
    """
    # Facts of a measurement name any drafter but the draft model.
    measured, kind = (kinds_of(name) for name in (str(profile.facts.get("drafter", "model")), used))
    if "device" in profile.facts and measured != kind:
        warnings.warn(
            f"the profile timed rounds of the drafter {measured}, {where} those of {kind}: what drafting costs differs; "
            f"measure it with --drafter {used}",
            SpecstopWarning,
            stacklevel=4,
        )
