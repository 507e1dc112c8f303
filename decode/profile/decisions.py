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
from ..loop import Request, Speculator
from ..models.pair import Pair
from ..policy.reader import Base, Level, Logits, Reader
from ..policy.runner import PolicyRunner
from ..settings import Settings, Stopwatch
from ..topology import chain
from .batches import whole_rounds
from .measuring import Case, Effort, Seconds, measure

EFFORT = Effort(repetitions=8)
"""Texts that decisions are timed on where nobody says otherwise, and stretches of time where there is no text."""

EACH = 25
"""Decisions of a stretch of time."""

HIDDEN = 1024
"""Width of hidden states that nobody has told."""

SCRATCH = 1536
"""Rows of the matrix whose product clears the caches."""


def streams_of(profile: Profile) -> tuple[int, ...]:
    """Return about how many streams at once decisions are to be timed: one, and the most that the profile has costs of."""
    return tuple(sorted({1, *(profile.batch.sizes[-1:] if profile.batch else ())}))


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


def batch_decision_case(
    pair: Pair,
    policy: StopPolicy,
    prompts: Sequence[Sequence[int]],
    settings: Settings,
    streams: int,
    profile: Profile | None = None,
) -> Case:
    """Return the case of a policy's decisions about texts that are decoded side by side, as many each time."""
    speculator = Speculator(pair, policy, settings, profile, batch=streams)

    def case(number: int) -> Seconds:
        seconds: dict[Key, list[float]] = defaultdict(list)
        some = [prompts[(number * streams + at) % len(prompts)] for at in range(streams)]
        texts = list(speculator.run([Request(prompt, number) for prompt in some]))
        for played in whole_rounds(texts):
            asked = [r.decisions for r in played]
            if any(asked):
                key = Key(DECISIONS, policy.cost_name, (max(asked), sum(asked)))
                seconds[key].append(sum(r.policy_s for r in played))  # each stream's record bears its share
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
    sizes = streams_of(profile) if profile else ()
    return measure(decision_cases(pair, policies, prompts, settings, profile, sizes), effort)


def decision_cases(
    pair: Pair,
    policies: Sequence[StopPolicy],
    prompts: Sequence[Sequence[int]],
    settings: Settings,
    profile: Profile | None = None,
    sizes: Sequence[int] = (),
) -> dict[str, Case]:
    """Return the cases of policies' decisions by name: about one text, and about as many as the largest of `sizes`."""
    most = max(sizes, default=1)
    cases = {policy.cost_name: decision_case(pair, policy, prompts, settings, profile) for policy in policies}
    if most > 1:
        cases |= {
            f"{policy.cost_name}, {most} texts": batch_decision_case(pair, policy, prompts, settings, most, profile)
            for policy in policies
        }
    return cases


@torch.inference_mode()
def measure_decision(
    policy: StopPolicy,
    vocabulary: int,
    temperature: float = 0.0,
    device: torch.device | str = "cpu",
    widths: Mapping[str, int] | None = None,
    streams: Sequence[int] = (1,),
) -> Measurements:
    """Return the timings of a round's first decision after a drawn token, features included.

    It needs no model: the logits are random, as wide as the pair's, hidden states too (`widths` by name, as the header of
    a trace has them), and a large matrix product before each decision clears the processor's caches as a model call does.

    Args:
        policy: timed.
        vocabulary: tokens of the pair.
        temperature: of the sampling.
        device: where logits lie.
        widths: see above.
        streams: that it is asked about at once; one of each is a case.
    """

    def case(count: int) -> Case:
        decision = _decision_alone(policy, vocabulary, temperature, device, widths, count)
        key = Key(DECISIONS, policy.cost_name, (1,) if count == 1 else (1, count))
        return lambda number: {key: [decision() for _ in range(EACH)]}

    return measure({f"{policy.cost_name}, {count} streams": case(count) for count in streams}, EFFORT)


def _decision_alone(
    policy: StopPolicy,
    vocabulary: int,
    temperature: float,
    device: torch.device | str,
    widths: Mapping[str, int] | None,
    streams: int,
) -> Callable[[], float]:
    """Return what takes one decision about so many streams, and the time of it."""
    generator = torch.Generator().manual_seed(0)
    scratch = torch.ones(SCRATCH, SCRATCH, device=device)
    # What the policy says itself outweighs what is told, and that the guess.
    sizes = {**dict.fromkeys(policy.hidden, HIDDEN), **(widths or {}), **getattr(policy, "sizes", {})}
    hidden = {
        name: torch.randn(streams, sizes[name], generator=generator, device="cpu").to(device) for name in policy.hidden
    }
    asked = max(1, policy.first)
    reader, tree = Reader(policy, widths=sizes, streams=streams), chain(asked + 1)
    runner = PolicyRunner(policy)
    runner.start(np.arange(streams))
    every = np.ones((streams, 1), dtype=bool)
    watch = Stopwatch(scratch.device)

    def read(depth: int, found: Sequence[Candidates], drawn: Logits, base: Base, above: Level | None) -> Level:
        return reader.level([(s, own, [depth]) for s, own in enumerate(found)], drawn, temperature, base, above)

    def ask(depth: int, base: Base, found: Sequence[Candidates], drawn: Logits, above: Level | None) -> None:
        runner.keep(reader.step(depth, base, read(depth, found, drawn, base, above), tree, every))

    timed = watch.timed("policy", ask)

    def decision() -> float:
        logits = (3.0 * torch.randn(streams, vocabulary, generator=generator, device="cpu")).to(device)
        found = [Candidates.at([0], tree) for _ in range(streams)]
        for own, likeliest in zip(found, logits.argmax(-1).tolist(), strict=True):
            for depth in range(asked):
                own.add(depth, depth + 1, likeliest)
        before = [(own.tokens[1], own.tokens[0]) for own in found]
        base = reader.base(History.start(streams), temperature, logits, before, hidden.get(TARGET_HIDDEN))
        # Not timed: the state, and below the levels above, that the decision is made from.
        if policy.first == 0:
            runner.keep(reader.step(0, base, None, tree, every))
        tokens = [(s, own.tokens[asked], own.tokens[asked - 1], 0, 1, asked) for s, own in enumerate(found)]
        drawn = Logits(logits, tokens, None, logits, hidden.get(DRAFT_HIDDEN))
        level = None
        for depth in range(1, asked):
            level = read(depth, found, drawn, base, level)
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
        timed = measure_decision(
            policy, vocabulary, profile.temperature, device_of(profile), widths, streams_of(profile)
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
