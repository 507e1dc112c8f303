"""What decisions cost, features included: timed in the loop, as a part of rounds, or alone (`alone`) for a profile."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

from ...policies.contract import StopPolicy
from ...policies.display import Progress, silent
from ...policies.errors import SpecstopWarning
from ...policies.host import validate_policy
from ...policies.latency.estimate import DECISIONS
from ...policies.latency.measurements import Key, Measurements
from ...policies.latency.profile import Profile
from ..loop import Request, Speculator
from ..models.pair import Pair
from ..settings import Settings
from ..topology import Topology
from .alone import measure_decision
from .batches import whole_rounds
from .measuring import Case, Effort, Seconds, measure

EFFORT = Effort(repetitions=8)
"""Texts that decisions are timed on where nobody says otherwise."""


def streams_of(profile: Profile) -> tuple[int, ...]:
    """Return about how many streams at once decisions are to be timed: one, and the most that the profile has costs of."""
    return tuple(sorted({1, *(profile.batch.sizes[-1:] if profile.batch else ())}))


def decision_case(
    pair: Pair,
    policy: StopPolicy,
    prompts: Sequence[Sequence[int]],
    settings: Settings,
    streams: int,
    profile: Profile | None,
) -> Case:
    """Return the case of a policy's decisions in the live loop, about as many texts side by side each time."""
    speculator = Speculator(pair, policy, settings.for_policy(policy), profile, batch=streams)

    def case(number: int) -> Seconds:
        seconds: dict[Key, list[float]] = defaultdict(list)
        some = [prompts[(number * streams + at) % len(prompts)] for at in range(streams)]
        texts = speculator.run([Request(prompt, number) for prompt in some])
        if failure := next((text.failure for text in texts if text.failure is not None), None):
            raise failure
        # A text by itself is asked about in the round that ends it as in any other.
        for parts in whole_rounds(texts) if streams > 1 else [[r] for r in texts[0].rounds]:
            asked = [r.decisions for r in parts]
            if any(asked):
                counts = (asked[0],) if streams == 1 else (max(asked), sum(asked))
                # Each stream's record bears its share.
                seconds[Key(DECISIONS, policy.cost_name, counts)].append(sum(r.policy_s for r in parts))
        return seconds

    return case


def loop_decisions(
    pair: Pair,
    policies: Sequence[StopPolicy],
    prompts: Sequence[Sequence[int]],
    settings: Settings,
    profile: Profile | None = None,
    effort: Effort = EFFORT,
    progress: Progress = silent,
) -> Measurements:
    """Return the timings of decisions in the live loop by `cost_name`, features included, measured in alternation.

    Args:
        pair: Target and draft.
        policies: Policies whose decisions are timed.
        prompts: Token ids.
        settings: Settings of the texts.
        profile: If given, the time that a policy takes to observe each round is a part of its price.
        effort: How long to measure.
        progress: See `Progress`.
    """
    sizes = streams_of(profile) if profile else ()
    return measure(decision_cases(pair, policies, prompts, settings, profile, sizes), effort, progress=progress)


def decision_cases(
    pair: Pair,
    policies: Sequence[StopPolicy],
    prompts: Sequence[Sequence[int]],
    settings: Settings,
    profile: Profile | None = None,
    sizes: Sequence[int] = (),
) -> dict[str, Case]:
    """Return the cases of policies' decisions by name: about one text, and about as many as the largest of `sizes`."""
    return {
        policy.cost_name + f", {texts} texts" * (texts > 1): decision_case(
            pair, policy, prompts, settings, texts, profile
        )
        for texts in sorted({1, max(sizes, default=1)})
        for policy in policies
    }


def is_asked(policy: StopPolicy, sizes: Sequence[int]) -> bool:
    """Whether a policy decides anything in batches of up to the largest of `sizes`."""
    asked = (size not in policy.unasked for size in range(1, max(sizes, default=1) + 1))
    # One whose first decision comes at its last depth, such as a fixed length, is never asked.
    return policy.first < policy.max_depth and any(asked)


def add_decisions(
    profile: Profile,
    policies: Sequence[StopPolicy],
    vocabulary: int,
    widths: Mapping[str, int] | None = None,
    tree: Topology | None = None,
) -> Profile:
    """Return the profile with the decisions of `policies` measured here, where it does not have them yet.

    Arguments as of `measure_decision`.
    """
    for policy in policies:
        validate_policy(policy)
    sizes = streams_of(profile)
    missing = {p.cost_name: p for p in policies if p.cost_name not in profile.decision_s and is_asked(p, sizes)}
    for policy in missing.values():
        timed = measure_decision(
            policy, vocabulary, profile.temperature, device_of(profile), widths, sizes, profile, tree
        )
        profile = profile.with_measured_decisions(timed)
    return profile


def device_of(profile: Profile) -> torch.device:
    """Return the device that a profile was measured on: what a decision costs depends on where the logits lie.

    The CPU, with a warning, in the place of one that this machine has not.
    """
    name = profile.facts.get("device", "cpu")
    for number in range(torch.cuda.device_count()):
        if torch.cuda.get_device_name(number) == name:
            return torch.device("cuda", number)
    if "cpu" not in name:
        message = f"the profile is of {name}, which is not here: what decisions cost is measured on the CPU"
        warnings.warn(message, SpecstopWarning, stacklevel=2)
    return torch.device("cpu")
