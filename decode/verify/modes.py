"""The verification modes by name, and checks of a policy and a tree against them."""

from __future__ import annotations

from ...policies.contract import StopPolicy
from ...policies.errors import InputError, PolicyError, close_match
from ...policies.features import FEATURES, Kind
from ...policies.learned import LearnedPolicy
from ..topology import Topology
from .base import Verification
from .match import Match, Point
from .rejection import Block, Rejection, RejectionReplace
from .typical import Typical

MODES: dict[str, type[Verification]] = {
    mode.name: mode for mode in (Match, Rejection, RejectionReplace, Block, Point, Typical)
}
"""All modes by name."""

POSITION_FEATURES = ("depth", "branch_rank")
"""POST features that do not depend on the drawn token."""


def check_mode_name(name: str) -> None:
    """Check that a name is `auto` or the name of a mode.

    Raises:
        InputError: it is not.
    """
    if name != "auto" and name not in MODES:
        hint = close_match(str(name), MODES)
        raise InputError(f"--verification: expected auto or one of {', '.join(MODES)}, not {name!r}{hint}")


def find_mode(name: str, temperature: float) -> Verification:
    """Return the mode called `name`; `match` at temperature 0, as all modes are then greedy matching.

    Raises:
        InputError: there is no such mode.
    """
    check_mode_name(name)
    return Match() if temperature == 0.0 else MODES[name]()


def resolve_mode(name: str, policy: StopPolicy, topology: Topology, temperature: float) -> str:
    """Return the name of a mode; `auto` becomes the fastest lossless one for this policy and tree.

    That is the mode a learned policy was trained for. For other policies it is `block` on a chain, and `match` on a tree, at
    temperature 0 and if `block` does not support the policy (measured by `benchmarks/verification.py`).
    """
    if name != "auto":
        return name
    if isinstance(policy, LearnedPolicy):
        return policy.metadata.verification
    if temperature == 0.0 or not _drafted(topology, policy).is_chain:
        return Match.name
    try:
        check_mode(Block(), policy, topology)
    except PolicyError:
        return Match.name
    return Block.name


def _drafted(topology: Topology, policy: StopPolicy) -> Topology:
    """Return the part of a topology that a policy can draft; one level for plain decoding."""
    return topology.limited(max(policy.max_depth, 1))


def describe(name: str) -> str:
    """Return the name of a mode and whether it is lossless, for reports."""
    return f"{name} ({'lossless' if name == 'auto' or MODES[name].lossless else 'LOSSY'})"


def is_trimming(policy: StopPolicy) -> bool:
    """Whether a policy may exclude drawn tokens from verification."""
    return policy.trims or type(policy).select is not StopPolicy.select


def check_mode(mode: Verification, policy: StopPolicy, topology: Topology) -> None:
    """Check that a mode supports a policy and a tree.

    Raises:
        InputError: the mode verifies chains only.
        PolicyError: the policy reads features that the mode does not have, or would bias the output.
    """
    if mode.chains_only and not _drafted(topology, policy).is_chain:
        raise InputError(f"--verification {mode.name}: expected a chain, not the tree {topology.name}; use rejection")
    noisy = [name for name in policy.features if name.startswith("noisy_")]
    if noisy and mode.name != Match.name:
        raise PolicyError(f"{policy.name}: reads {', '.join(noisy)}, which requires match verification")
    drawn = [n for n in policy.features if FEATURES[n].kind is Kind.POST and n not in POSITION_FEATURES]
    if mode.hides and is_trimming(policy) and drawn:
        raise PolicyError(
            f"{policy.name}: excludes drawn tokens and reads {', '.join(drawn)}, which would bias the output under "
            f"{mode.name}; use match verification, or features that do not depend on the drawn token"
        )
