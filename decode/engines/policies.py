"""What policies and drafters may read inside an engine, and which are refused there."""

from __future__ import annotations

from ...policies.contract import StopPolicy
from ...policies.errors import InputError, PolicyError
from ...policies.features import FEATURES, Kind
from ...policies.learned import LearnedPolicy
from ..drafters.known import reads_states

ANCHORS = ("anchor_token", "before_token", "temperature")
"""ANCHOR features that need no row of the target's."""


def known_in_engines(name: str, greedy: bool) -> bool:
    """Whether an engine's drafter knows a feature.

    Args:
        name: of the feature.
        greedy: at temperature 0 there is no noise, and a noisy margin is one of the bare logits.
    """
    found = FEATURES[name]
    if found.kind is Kind.ANCHOR:
        return name in ANCHORS
    return not found.needs.noisy or greedy


def missing_in_engines(policy: StopPolicy) -> list[str]:
    """Return by name what a policy reads that an engine's drafter does not know."""
    greedy = isinstance(policy, LearnedPolicy) and policy.metadata.temperature == 0.0
    return [name for name in policy.features if not known_in_engines(name, greedy)] + list(policy.hidden)


def check_engine_policy(policy: StopPolicy, engine: str) -> StopPolicy:
    """Return the policy.

    Raises:
        PolicyError: it reads what the engine does not hand over; the message names it.
    """
    missing = missing_in_engines(policy)
    if missing:
        raise PolicyError(
            f"{policy.name}: reads {', '.join(missing)}, which {engine} does not hand to a drafter (neither the target's "
            f"rows and hidden states nor its noise); train one with `specstop train --for {engine}`"
        )
    return policy


def check_engine_drafter(name: str, engine: str, reads: bool = False) -> str:
    """Return the name of a drafter.

    Args:
        name: as of `--drafter`.
        engine: for the message.
        reads: whether it is known to read the target's hidden states; of trained drafters that is known by the name.

    Raises:
        InputError: it reads hidden states of the target.
    """
    if reads or reads_states(name):
        raise InputError(
            f"drafter {name}: it reads the target's hidden states, which {engine} does not hand to a class; expected "
            "model, lookup, suffix, or two such as suffix+model"
        )
    return name
