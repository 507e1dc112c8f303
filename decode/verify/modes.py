"""The verification modes by name."""

from __future__ import annotations

from ...policies.contract import StopPolicy
from ...policies.errors import InputError, PolicyError, close_match
from ...policies.features import FEATURES, Kind
from ...policies.learned import LearnedPolicy
from ..topology import Topology
from .base import Verification
from .lossy import TargetInit, Typical
from .match import Match
from .point import Point
from .rejection import Block, Rejection, RejectionReplace

MODES: dict[str, type[Verification]] = {
    mode.name: mode for mode in (Match, Rejection, RejectionReplace, Block, Point, TargetInit, Typical)
}
"""Every mode by name."""

PLACE_FEATURES = ("depth", "branch_rank")
"""POST features that tell where a token stands, not which it is."""


def check_mode_name(name: str) -> None:
    """Refuse what is neither `auto` nor the name of a mode.

    Raises:
        InputError: there is none of that name.
    """
    if name != "auto" and name not in MODES:
        known, meant = ", ".join(MODES), close_match(str(name), MODES)
        raise InputError(f"--verification: expected auto or one of {known}, not {name!r}{meant}")


def find_mode(name: str, temperature: float) -> Verification:
    """Return the mode called `name`; at temperature 0 every one but `target_init` is greedy matching.

    Raises:
        InputError: there is none of that name.
    """
    check_mode_name(name)
    return Match() if temperature == 0.0 and name != TargetInit.name else MODES[name]()


def resolve_mode(name: str, policy: StopPolicy, topology: Topology, temperature: float) -> str:
    """Return the name of a mode; `auto` becomes the fastest lossless one for this policy and tree.

    A learned policy keeps the mode it was trained for. Others get block verification on a chain, and `match` on a tree and
    at temperature 0; `match` also where the policy reads what only that has (measured: `benchmarks/verification.py`).
    """
    if name != "auto":
        return name
    if isinstance(policy, LearnedPolicy):
        return policy.metadata.verification
    if temperature == 0.0 or not _reached(topology, policy).is_chain:
        return Match.name
    try:
        check_mode(Block(), policy, topology)
    except PolicyError:
        return Match.name
    return Block.name


def _reached(topology: Topology, policy: StopPolicy) -> Topology:
    """Return what of a topology a policy can draft; at least a level, so that plain decoding is verified as others are."""
    return topology.limited(max(policy.max_depth, 1))


def describe(name: str) -> str:
    """Return a mode's name with its label, for reports."""
    return f"{name} ({'lossless' if name == 'auto' or MODES[name].lossless else 'LOSSY'})"


def is_trimming(policy: StopPolicy) -> bool:
    """Whether a policy may leave drawn tokens out of the verification."""
    return policy.trims or type(policy).select is not StopPolicy.select


def check_mode(mode: Verification, policy: StopPolicy, topology: Topology) -> None:
    """Refuse what the mode cannot verify, or not without a bias.

    Raises:
        InputError: the tree is not of the mode's kind.
        PolicyError: the policy reads what the mode does not have, or would trim by what must not matter.
    """
    if mode.chains_only and not _reached(topology, policy).is_chain:
        raise InputError(f"--verification {mode.name}: expected a chain, not the tree {topology.name}; use rejection")
    names = [FEATURES[name] for name in policy.features]
    noisy = [f.name for f in names if f.name.startswith("noisy_")]
    if noisy and mode.name != Match.name:
        raise PolicyError(
            f"{policy.name}: reads {', '.join(noisy)}, which only match verification has; "
            "use it, or a policy without them"
        )
    drawn = [f.name for f in names if f.kind is Kind.POST and f.name not in PLACE_FEATURES]
    if mode.hides and is_trimming(policy) and drawn:
        raise PolicyError(
            f"{policy.name}: leaves drawn tokens out and reads {', '.join(drawn)} of them, which would bias the output "
            f"under {mode.name}; use match verification, or features that do not depend on the drawn token"
        )
