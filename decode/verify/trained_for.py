"""Whether a policy was trained, and a profile measured, for what a run does.

Apart from the modes, which replay knows without any model library.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...policies.conditions import Conditions, warn_other_conditions, warn_other_profile
from ...policies.contract import StopPolicy
from ...policies.learned import LearnedPolicy
from ...policies.profile import Profile
from ..models.pair import Pair
from ..settings import Settings
from .modes import resolve_mode
from .sampling import effective_sampling


def tell_if_untrained(policy: StopPolicy, settings: Settings, pair: Pair | None = None) -> None:
    """Warn where a learned policy was trained for another temperature, filter, verification, pair or tree than a run has.

    Args:
        policy: any.
        settings: of the run.
        pair: of the run, with its drafter; None = any.
    """
    temperature, shaping = effective_sampling(settings.shaping, settings.temperature)
    name = resolve_mode(settings.verification, policy, settings.topology, temperature)
    greedy = temperature == 0.0  # then all modes accept alike
    # Hashing looks through the models' weights: only for a policy that knows its pair.
    known = pair.fingerprint if pair is not None and isinstance(policy, LearnedPolicy) and policy.metadata.pair else {}
    used = Conditions(temperature, shaping, "" if greedy else name, known, settings.topology.name)
    warn_other_conditions(policy, used, "this run")


def tell_if_unmeasured(
    profile: Profile | None, policies: Sequence[StopPolicy], settings: Settings, drafter: str
) -> None:
    """Warn where a profile timed the rounds of another verification or drafter than a run has."""
    if profile is None:
        return
    tree, temperature = settings.topology, settings.temperature
    if tree.is_chain and temperature > 0:
        for name in dict.fromkeys(
            resolve_mode(settings.verification, policy, tree, temperature) for policy in policies
        ):
            warn_other_profile(profile, "this run plays", verification=name)
    warn_other_profile(profile, "this run plays", drafter=drafter)
