"""Warnings if a policy was trained, or a profile measured, under other conditions than those of a run."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from transformers import GenerationConfig

from ...policies.contract import StopPolicy
from ...policies.errors import SpecstopWarning
from ...policies.learned import Conditions, LearnedPolicy, warn_other_conditions
from ...policies.profile import Profile
from ..drafters.spec import parse_spec
from ..models.pair import Pair
from ..settings import Settings
from .modes import resolve_mode
from .processors import processor_name
from .sampling import NEUTRAL, STATELESS, model_defaults


def warn_if_untrained(
    policy: StopPolicy, settings: Settings, pair: Pair | None = None, config: GenerationConfig | None = None
) -> None:
    """Warn if a learned policy was trained for another temperature, filter, verification, pair or tree.

    Args:
        policy: any policy.
        settings: of the run.
        pair: of the run, with its drafter; None = not compared.
        config: of a `generate` call, which passes most of its sampling options as logits processors.
    """
    temperature, options = settings.temperature, settings.sampling.to_dict()
    if config is not None:
        temperature = (config.temperature or 1.0) if config.do_sample else 0.0
        others = [processor_name(one) for one in settings.sampling.processors if not isinstance(one, STATELESS)]
        options = {name: value for name, value in model_defaults(config).items() if name in NEUTRAL}
        options |= {"processors": others} if others else {}
    mode = resolve_mode(settings.verification, policy, settings.topology, temperature) if temperature else ""
    # The fingerprint hashes the weights: computed only for a policy that records one.
    compare_pair = isinstance(policy, LearnedPolicy) and bool(policy.metadata.pair)
    fingerprint = pair.fingerprint if pair is not None and compare_pair else {}
    warn_other_conditions(
        policy, Conditions(temperature, options, mode, fingerprint, settings.topology.name), "this run"
    )


def warn_if_unmeasured(
    profile: Profile | None, policies: Sequence[StopPolicy], settings: Settings, drafter: str
) -> None:
    """Warn if a profile was measured with another verification mode or drafter."""
    if profile is None:
        return
    tree, temperature = settings.topology, settings.temperature
    if tree.is_chain and temperature > 0:
        modes = (resolve_mode(settings.verification, policy, tree, temperature) for policy in policies)
        for name in dict.fromkeys(modes):
            warn_other_profile(profile, "this run plays", verification=name)
    warn_other_profile(profile, "this run plays", drafter=drafter)


def warn_other_profile(profile: Profile, where: str, verification: str = "", drafter: str = "") -> None:
    """Warn if a profile timed rounds of another verification or kind of drafter; "" = any, or not recorded.

    `where` is "the trace holds" or "this run plays".
    """
    timed = _kinds(str(profile.facts.get("drafter", "model"))) if "device" in profile.facts else ""
    for name, measured, used, value in (
        ("verification", profile.verification, verification, verification),
        ("drafter", timed, _kinds(drafter), drafter),
    ):
        if measured and used and measured != used:
            message = (
                f"the profile timed rounds of the {name} {measured}, {where} those of {used}: their costs differ; measure "
                f"it with --{name} {value}"
            )
            warnings.warn(message, SpecstopWarning, stacklevel=4)


def _kinds(drafter: str) -> str:
    """Return the spec of a drafter without values and options, such as `suffix+hydra`."""
    return "+".join(part.name for part in parse_spec(drafter))
