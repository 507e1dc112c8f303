"""What decisions cost, features included: in the loop, as a part of rounds, or alone where there are no models."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from ...policies.checking import check_policy
from ...policies.contract import StopPolicy
from ...policies.errors import SpecstopWarning
from ...policies.features.hidden_states import DRAFT_HIDDEN, TARGET_HIDDEN
from ...policies.features.history import History
from ...policies.latency.estimate import DECISIONS
from ...policies.latency.measurements import Key, Measurements
from ...policies.latency.profile import Profile
from ..candidates import Candidates
from ..loop import Speculator
from ..models.pair import Pair
from ..policy.reader import Base, Level, Logits, Reader
from ..policy.runner import PolicyRunner
from ..settings import Settings, Stopwatch
from ..topology import chain
from .measuring import Case, Effort, Seconds, measure

EFFORT = Effort(repetitions=8)
"""Texts that decisions are timed on where nobody says otherwise, and stretches of time where there is no text."""

EACH = 25
"""Decisions of a stretch of time."""

HIDDEN = 1024
"""Width of hidden states that nobody has told."""

SCRATCH = 1536
"""Rows of the matrix whose product clears the caches."""


def decision_case(
    pair: Pair,
    policy: StopPolicy,
    prompts: Sequence[Sequence[int]],
    settings: Settings,
    profile: Profile | None = None,
) -> Case:
    """Return the case of a policy's decisions in the live loop, a text each time."""
    speculator = Speculator(pair, policy, settings, profile)

    def case(number: int) -> Seconds:
        seconds: dict[Key, list[float]] = defaultdict(list)
        for r in speculator.generate(prompts[number % len(prompts)], number).rounds:
            if r.decisions:
                seconds[Key(DECISIONS, policy.cost_name, (r.decisions,))].append(r.policy_s)
        return seconds

    return case


def loop_decisions(
    pair: Pair,
    policies: Sequence[StopPolicy],
    prompts: Sequence[Sequence[int]],
    settings: Settings,
    profile: Profile | None = None,
    effort: Effort = EFFORT,
) -> Measurements:
    """Return the timings of decisions by `cost_name`, features included, as texts of the live loop have them, in turns.

    With a profile what a policy hears of each round, the seconds among it, is a part of the price.
    """
    return measure({p.cost_name: decision_case(pair, p, prompts, settings, profile) for p in policies}, effort)


@torch.inference_mode()
def measure_decision(
    policy: StopPolicy,
    vocabulary: int,
    temperature: float = 0.0,
    device: torch.device | str = "cpu",
    widths: Mapping[str, int] | None = None,
) -> Measurements:
    """Return the timings of a round's first decision after a drawn token, features included, for one stream.

    It needs no model: the logits are random, as wide as the pair's, hidden states too (`widths` by name, as the header of
    a trace has them), and a large matrix product before each decision clears the processor's caches as a model call does.
    """
    decision = _decision_alone(policy, vocabulary, temperature, device, widths)
    key = Key(DECISIONS, policy.cost_name, (1,))
    return measure({policy.cost_name: lambda number: {key: [decision() for _ in range(EACH)]}}, EFFORT)


def _decision_alone(
    policy: StopPolicy,
    vocabulary: int,
    temperature: float,
    device: torch.device | str,
    widths: Mapping[str, int] | None,
) -> Callable[[], float]:
    """Return what takes one decision, and the time of it."""
    generator = torch.Generator().manual_seed(0)
    scratch = torch.ones(SCRATCH, SCRATCH, device=device)
    # What the policy says itself outweighs what is told, and that the guess.
    sizes = {**dict.fromkeys(policy.hidden, HIDDEN), **(widths or {}), **getattr(policy, "sizes", {})}
    hidden = {name: torch.randn(1, sizes[name], generator=generator, device="cpu").to(device) for name in policy.hidden}
    asked = max(1, policy.first)
    reader, tree, runner = Reader(policy, widths=sizes), chain(asked + 1), PolicyRunner(policy)
    runner.start(np.zeros(1, dtype=np.int64))
    one = np.ones((1, 1), dtype=bool)
    watch = Stopwatch(scratch.device)

    def ask(depth: int, base: Base, found: Candidates, drawn: Logits, above: Level | None) -> None:
        level = reader.level([(0, found, [depth])], drawn, temperature, base, above)
        runner.keep(reader.step(depth, base, level, tree, one))

    timed = watch.timed("policy", ask)

    def decision() -> float:
        logits = (3.0 * torch.randn(1, vocabulary, generator=generator, device="cpu")).to(device)
        found = Candidates.at([0], tree)
        for depth in range(asked):
            found.add(depth, depth + 1, int(logits.argmax(-1)))
        before = [(found.tokens[1], found.tokens[0])]
        base = reader.base(History.start(1), temperature, logits, before, hidden.get(TARGET_HIDDEN))
        # Not timed: the state, and below the levels above, that the decision is made from.
        if policy.first == 0:
            runner.keep(reader.step(0, base, None, tree, one))
        token = (0, found.tokens[asked], found.tokens[asked - 1], 0, 1, asked)
        drawn = Logits(logits, [token], None, logits, hidden.get(DRAFT_HIDDEN))
        level = None
        for depth in range(1, asked):
            level = reader.level([(0, found, [depth])], drawn, temperature, base, level)
        # Reads all 9 MB of it, as a model call does its weights, for little arithmetic.
        scratch @ scratch[:8].T
        watch.restart()
        timed(asked, base, found, drawn, level)
        return sum(watch.laps["policy"])

    return decision


def add_decisions(
    profile: Profile, policies: Sequence[StopPolicy], vocabulary: int, widths: Mapping[str, int] | None = None
) -> Profile:
    """Return the profile with the decisions of `policies` measured here, where it does not have them yet."""
    for policy in policies:
        check_policy(policy)
    # One whose first decision comes at its last depth, such as a fixed length, is never asked.
    missing = {p.cost_name: p for p in policies if p.cost_name not in profile.decision_s and p.first < p.max_depth}
    for policy in missing.values():
        timed = measure_decision(policy, vocabulary, profile.temperature, device_of(profile), widths)
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
