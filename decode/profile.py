"""The latency profile, measured through the round loop itself, driven by scripted lengths.

Timings of forwards in isolation miss a good part of what a round costs, so the loop runs as it is, on prompts that no
prediction is made for, with a script in the place of the policy: every length 0..K equally often, in shuffled order, and
plain decoding beside it.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..policies.baselines import FixedLength
from ..policies.checking import check_policy
from ..policies.contract import DraftStep, RoundOutcome, State, StopPolicy, checked_start
from ..policies.costs import Profile
from ..policies.errors import InputError
from ..policies.history import HistoryOne
from ..policies.latency.estimate import CONTEXTS, DECISIONS, FIRST, LATER, OUTSIDE, PLAIN, PREFILL, VERIFY
from ..policies.latency.measurements import Key, Measurements, collected
from ..policies.progress import Progress, silent
from ..policies.vectors import DRAFT_HIDDEN, TARGET_HIDDEN
from .candidates import Candidates
from .decide import Decider, Logits
from .loop import Speculator
from .pair import Pair
from .records import Generation
from .settings import Settings, Stopwatch
from .topology import chain
from .tree_gauge import TreeGauge

REPETITIONS, EACH = 8, 25
"""Of a decision that is timed without a model: stretches of time, and decisions in each."""

TWICE = 2
TEXTS, CARRIED = 4, 8
"""Texts that decisions are priced on; more for policies that go on learning from one to the next."""

HIDDEN = 1024
"""Width of hidden states that nobody has told."""
SCRATCH = 1536


class Scripted(StopPolicy):
    """Drafts lengths from a shuffled deck of 0..K, each twice in a row, whatever the text is; K = 0 is plain decoding.

    A size that comes again is a little cheaper, and with real policies about every other one does. It works in plain
    numbers: what a script does between model calls cools the caches that these are timed on.
    """

    first = 0

    def __init__(self, depth: int) -> None:
        self.max_depth = depth
        self.name = f"scripted:{depth}"

    def start(self, streams: int, key: Tensor) -> State:
        """Return by stream its key and the number of its round."""
        return [(one, 0) for one in key.tolist()]

    def _length(self, key: int, number: int) -> int:
        deck, place = divmod(number // TWICE, self.max_depth + 1)
        return _shuffled(self.max_depth + 1, key, deck)[place]

    def keep_one(self, depth: int, features: Sequence[float], state: State) -> tuple[bool, State]:
        """Go on up to the length on the deck."""
        return depth < self._length(*state[0]), state

    def keep(self, step: DraftStep, state: State) -> tuple[Tensor, State]:
        """Keep up to the length on the deck."""
        length = torch.tensor([[self._length(*stream)] for stream in state], device=step.alive.device)
        return step.alive & (step.depth < length), state

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        """Turn to the next card."""
        active = outcome.active.tolist()
        return [(key, number + on) for (key, number), on in zip(state, active, strict=True)]


@lru_cache(maxsize=256)
def _shuffled(cards: int, key: int, deck: int) -> list[int]:
    return random.Random(f"{key} {deck}").sample(range(cards), cards)


def measure_profile(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    *,
    depth: int = 10,
    temperature: float = 0.0,
    policies: Sequence[StopPolicy] = (),
    new_tokens: int = 96,
    repeats: int = 4,
    facts: dict[str, Any] | None = None,
    progress: Progress = silent,
    tree: str | None = None,
) -> Profile:
    """Measure what draft steps, verifications and everything around them cost.

    Args:
        pair: on its device.
        prompts: token ids; not the ones that predictions are made for. They are laid end to end to reach a short and
            a long context.
        depth: K, the longest chain timed.
        temperature: of the sampling.
        policies: whose decisions are timed, features included.
        new_tokens: decoded from each context.
        repeats: texts at each context, after one that warms up.
        facts: kept in the profile.
        progress: see `Progress`.
        tree: a topology whose rounds are timed too.

    Returns:
        Averages over rounds; `facts["spread"]` is the relative interquartile range of the verification times.
    """
    gauge = Gauge(pair, prompts, depth=depth, temperature=temperature, new_tokens=new_tokens, tree=tree)
    total = repeats + 1 + len(policies)
    for repeat in range(repeats + 1):
        gauge.play(repeat)
        progress("profile", repeat + 1, total)
    decisions = Measurements()
    for number, policy in enumerate(policies, 1):
        decisions = decisions.with_series(loop_decisions(pair, [policy], prompts, gauge.settings))
        progress("profile", repeats + 1 + number, total)
    return gauge.profile(facts).with_measured_decisions(decisions)


class Gauge:
    """A profile in the making: texts that can be played when it suits, such as between those of a live comparison.

    A shared machine changes its pace within minutes, and not equally for all sizes; what is compared with a prediction
    is best timed in the same minutes as the profile behind it.

    Args:
        pair, prompts, depth, temperature, new_tokens, tree: as of `measure_profile`.
    """

    def __init__(
        self,
        pair: Pair,
        prompts: Sequence[Sequence[int]],
        *,
        depth: int,
        temperature: float,
        new_tokens: int = 96,
        tree: str | None = None,
    ) -> None:
        self.settings = Settings(temperature, new_tokens, depth, ignore_eos=True)
        self._prompts = prompts
        self._contexts = _contexts(pair, prompts, new_tokens)
        self._script = Speculator(pair, Scripted(depth), self.settings)
        # After a drafting round a plain one runs on cold caches, so plain decoding is timed as it is met: on its own.
        self._plain = Speculator(pair, FixedLength(0), self.settings)
        self._tree = TreeGauge(pair, tree, temperature=temperature, new_tokens=new_tokens) if tree else None
        self._timed: list[dict[Key, list[float]]] = []
        self._seen: tuple[list[int], list[int]] = [], []

    def play(self, number: int) -> None:
        """Decode one text at each context, scripted and plain; number 0 only warms up."""
        timed: dict[Key, list[float]] = defaultdict(list)
        contexts = [_stretch(self._prompts, length, number) for length in self._contexts]
        for side, tokens in enumerate(contexts):
            generation, alone = self._script.generate(tokens, key=number), self._plain.generate(tokens, key=number)
            _add_rounds(timed, CONTEXTS[side], generation, alone)
            if number:
                self._seen[side].extend(r.context for r in generation.rounds if not r.cut)
        if self._tree is not None:
            for key, seconds in self._tree.play(number, contexts).items():
                timed[key].extend(seconds)
        if number:
            self._timed.append(timed)

    def profile(self, facts: Mapping[str, Any] | None = None) -> Profile:
        """Return the profile of the texts played so far, at least one after the warm-up; `facts` are kept in it."""
        low, high = (statistics.fmean(side) if side else 0.0 for side in self._seen)
        depth, temperature = self.settings.max_depth, self.settings.temperature
        made = Profile.measured(collected(self._timed), (low, high), depth, temperature)
        spread = made.noise.spread if made.noise else 0.0
        known = {**(facts or {}), "spread": spread, "rounds": sum(map(len, self._seen))}
        return dataclasses.replace(made, facts=known)


def _add_rounds(timed: dict[Key, list[float]], side: str, generation: Generation, alone: Generation) -> None:
    """Add the timings of a scripted text and of a plain one at one context; cut rounds are none."""
    timed[Key(PREFILL, side, (generation.prompt_tokens,))].append(generation.prefill_s)
    for r in generation.rounds:
        if r.cut:
            continue
        timed[Key(VERIFY, side, (r.verified,))].append(r.verify_s)
        timed[Key(OUTSIDE, side, (r.drafted,))].append(r.outside_s)
        if r.drafted:
            timed[Key(FIRST, side, (r.backlog,))].append(r.first_draft_s)
        if r.drafted > 1:
            timed[Key(LATER, side, (r.drafted,))].append(r.draft_s)
    timed[Key(PLAIN, side)].extend(r.verify_s for r in alone.rounds if not r.cut)


def _contexts(pair: Pair, prompts: Sequence[Sequence[int]], new_tokens: int) -> tuple[int, int]:
    """Return the lengths of the short and the long prompt."""
    if not prompts or not all(prompts):
        raise InputError("profile: expected at least one prompt, and none empty")
    short = int(statistics.median(map(len, prompts)))
    long = min(4 * short, pair.readable - new_tokens)
    if long <= short:
        raise InputError(f"profile: the prompts leave no room for {new_tokens} new tokens; give shorter ones")
    return short, long


def _stretch(prompts: Sequence[Sequence[int]], length: int, start: int) -> list[int]:
    """Return `length` tokens of the prompts laid end to end, beginning with prompt `start`."""
    tokens: list[int] = []
    while len(tokens) < length:
        tokens.extend(prompts[start % len(prompts)])
        start += 1
    return tokens[:length]


def loop_decisions(
    pair: Pair, policies: Sequence[StopPolicy], prompts: Sequence[Sequence[int]], settings: Settings,
    profile: Profile | None = None,
) -> Measurements:  # fmt: skip
    """Return the timings of decisions by `cost_name`, features included, as a few texts of the live loop have them.

    With a profile what a policy hears of each round, the seconds among it, is a part of the price.
    """
    timed = Measurements()
    for policy in policies:
        speculator = Speculator(pair, policy, settings, profile)
        texts = []
        for number, prompt in enumerate(prompts[: CARRIED if policy.carries else TEXTS]):
            seconds: dict[Key, list[float]] = defaultdict(list)
            for r in speculator.generate(prompt, number).rounds:
                if r.decisions:
                    seconds[Key(DECISIONS, policy.cost_name, (r.decisions,))].append(r.policy_s)
            texts.append(seconds)
        timed = timed.with_series(collected(texts))
    return timed


@torch.inference_mode()
def measure_decision(
    policy: StopPolicy,
    vocabulary: int,
    temperature: float = 0.0,
    device: torch.device | str = "cpu",
    widths: Mapping[str, int] | None = None,
) -> Measurements:
    """Return the timings of a round's first decision after a drawn token, features included, for one stream.

    It needs no model: the logits are random, as wide as the pair's, hidden states too (`widths` by vector, as the header of
    a trace has them), and a large matrix product before each decision clears the processor's caches as a model call does.
    """
    generator = torch.Generator().manual_seed(0)
    scratch = torch.ones(SCRATCH, SCRATCH, device=device)
    sizes = {**dict.fromkeys(policy.vectors, HIDDEN), **(widths or {}), **getattr(policy, "sizes", {})}
    hidden = {
        name: torch.randn(1, sizes[name], generator=generator, device="cpu").to(device) for name in policy.vectors
    }
    asked = max(1, policy.first)
    decide, tree = Decider(policy, widths=sizes), chain(asked + 1)
    state = checked_start(policy, 1, torch.zeros(1, dtype=torch.int64, device="cpu"))
    watch = Stopwatch(scratch.device)
    seconds = []
    for _ in range(REPETITIONS * EACH):
        logits = (3.0 * torch.randn(1, vocabulary, generator=generator, device="cpu")).to(device)
        found = Candidates.at([0], tree)
        for depth in range(asked):
            found.add(depth, depth + 1, int(logits.argmax(-1)))
        base = decide.base(
            logits, found.tokens[1], found.tokens[0], HistoryOne(), temperature, hidden.get(TARGET_HIDDEN)
        )
        if policy.first == 0:
            _, state = decide(0, base, None, state, found, [0])
        drawn = Logits(logits, None, logits, [0], hidden.get(DRAFT_HIDDEN))
        level = None
        for depth in range(1, asked):
            level = decide.level(found, [depth], drawn, temperature, level)
        scratch @ scratch[:8].T
        before = watch.laps["policy"]
        watch.start()
        level = decide.level(found, [asked], drawn, temperature, level)
        _, state = decide(asked, base, level, state, found, [asked])
        watch.lap("policy")
        seconds.append(watch.laps["policy"] - before)
    key = Key(DECISIONS, policy.cost_name, (1,))
    return collected([{key: seconds[at : at + EACH]} for at in range(0, len(seconds), EACH)])


def add_decisions(
    profile: Profile, policies: Sequence[StopPolicy], vocabulary: int, widths: Mapping[str, int] | None = None
) -> Profile:
    """Return the profile with the decisions of `policies` measured here, where it does not have them yet."""
    for policy in policies:
        check_policy(policy)
    missing = {p.cost_name: p for p in policies if p.cost_name not in profile.decision_s and p.first < p.max_depth}
    for policy in missing.values():
        timed = measure_decision(policy, vocabulary, profile.temperature, widths=widths)
        profile = profile.with_measured_decisions(timed)
    return profile
