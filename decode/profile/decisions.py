"""The cost of decisions, including features: timed in the loop, or without models for a profile that lacks them."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import cast

import numpy as np
import torch
from torch import Tensor

from ...policies.contract import StopPolicy
from ...policies.display import Progress, silent
from ...policies.errors import PolicyError, SpecstopWarning
from ...policies.features import DRAFT_HIDDEN, TARGET_HIDDEN, Layout
from ...policies.host import PolicyHost, validate_policy
from ...policies.measurements import DECISIONS, Key, Measurements
from ...policies.profile import Profile
from ..feature_reader import FeatureReader
from ..hooks import Timer
from ..loop import Request, Speculator
from ..models.pair import Pair
from ..records import Generation, Round
from ..round_state import DraftScores, RoundState
from ..settings import Settings
from ..texts import Anchor, Text
from ..topology import Topology, chain, with_drafters
from ..verify.modes import check_mode, find_mode
from ..verify.sampling import SamplingParams
from .measuring import Case, Effort, Seconds, measure

EFFORT = Effort(repetitions=8)
"""Default number of texts, or of sets of `ROUNDS` rounds without models."""

ROUNDS, CALLS = 10, 3
"""Rounds without models in a repetition, and maximum number of decisions in each."""

HIDDEN = 1024
"""Width of hidden states if it is unknown."""

SCRATCH = 2304
"""Rows of a square matrix of 21 MB. Multiplying it clears the caches about as much as the calls of the shipped pair's models:
prices were then closest to those in the loop."""


def decision_case(
    pair: Pair, policy: StopPolicy, prompts: Sequence[Sequence[int]], settings: Settings, profile: Profile | None
) -> Case:
    """Return the case that times a policy's decisions in the live loop.

    It decodes one text, or the largest batch of the profile if the policy is not called for single texts.
    """
    streams = largest_batch(profile) if 1 in policy.unasked else 1
    speculator = Speculator(pair, policy, settings.for_policy(policy), profile, batch=streams)

    def case(number: int) -> Seconds:
        seconds: dict[Key, list[float]] = defaultdict(list)
        requests = [Request(prompts[(number * streams + at) % len(prompts)], number) for at in range(streams)]
        texts = speculator.run(requests)
        if failure := next((text.failure for text in texts if text.failure is not None), None):
            raise failure
        # The last round of a single text counts too: its decisions are complete.
        for parts in complete_rounds(texts) if streams > 1 else [[r] for r in texts[0].rounds]:
            if calls := max(r.decisions for r in parts):
                # The record of each stream has an equal share.
                seconds[Key(DECISIONS, policy.cost_name, (calls,))].append(sum(r.policy_s for r in parts))
        return seconds

    return case


def complete_rounds(texts: Sequence[Generation]) -> list[list[Round]]:
    """Return the rounds of texts that started together, up to the end of the first one."""
    rounds = [list(parts) for parts in zip(*(text.rounds for text in texts), strict=False)]  # to the shortest
    return [parts for parts in rounds if not any(r.cut for r in parts)]


def loop_decisions(
    pair: Pair,
    policies: Sequence[StopPolicy],
    prompts: Sequence[Sequence[int]],
    settings: Settings,
    profile: Profile | None = None,
    effort: Effort = EFFORT,
    progress: Progress = silent,
) -> Measurements:
    """Return the timings of decisions in the live loop by `cost_name`, including features, measured in alternation.

    Args:
        pair: target and draft.
        policies: policies to time.
        prompts: token ids of each prompt.
        settings: settings of the texts.
        profile: models the seconds that policies observe; the time for observing them is then part of the price.
        effort: how long to measure.
        progress: see `Progress`.
    """
    cases = {policy.cost_name: decision_case(pair, policy, prompts, settings, profile) for policy in policies}
    return measure(cases, effort, progress=progress)


def settings_of_profile(profile: Profile, policies: Sequence[StopPolicy], new_tokens: int = 96) -> Settings:
    """Return the settings of texts with the rounds that a profile timed.

    If a policy does not support the verification of the profile, it is `auto`.
    """
    verification = profile.verification or "auto"
    try:
        for policy in policies if profile.verification else ():
            check_mode(find_mode(verification, profile.temperature), policy, chain(profile.max_depth))
    except PolicyError:
        verification = "auto"
    sampling = SamplingParams.from_dict(profile.sampling)
    return Settings(
        profile.temperature,
        new_tokens,
        profile.max_depth,
        ignore_eos=True,
        verification=verification,
        sampling=sampling,
    )


def largest_batch(profile: Profile | None) -> int:
    """Return the largest batch size in a profile, 1 without one."""
    return profile.batch.sizes[-1] if profile and profile.batch else 1


def missing_decisions(profile: Profile, policies: Sequence[StopPolicy]) -> dict[str, StopPolicy]:
    """Return by `cost_name` the policies that are called in batches of the profile, but have no price in it."""

    def decides(policy: StopPolicy) -> bool:
        # A policy whose first decision is at its maximum depth, such as a fixed length, is never called.
        sizes = range(1, largest_batch(profile) + 1)
        return policy.first < policy.max_depth and any(size not in policy.unasked for size in sizes)

    return {p.cost_name: p for p in policies if p.cost_name not in profile.decision_s and decides(p)}


def add_decisions(
    profile: Profile,
    policies: Sequence[StopPolicy],
    vocabulary: int,
    widths: Mapping[str, int] | None = None,
    tree: Topology | None = None,
) -> Profile:
    """Return the profile with the missing prices of decisions measured on this machine.

    See `measure_decision` for the arguments.
    """
    for policy in policies:
        validate_policy(policy)
    for policy in missing_decisions(profile, policies).values():
        timed = measure_decision(
            policy, vocabulary, profile.temperature, profile_device(profile), widths, profile, tree
        )
        profile = profile.with_measured_decisions(timed)
    return profile


def profile_device(profile: Profile) -> torch.device:
    """Return the device that a profile was measured on; the cost of a decision depends on the device of the logits.

    If this machine does not have it, a warning is issued and the CPU is returned.
    """
    name = str(profile.facts.get("device", "cpu"))
    for number in range(torch.cuda.device_count()):
        if torch.cuda.get_device_name(number) == name:
            return torch.device("cuda", number)
    if "cpu" not in name:
        message = (
            f"the profile was measured on {name}, which this machine does not have: decisions are timed on the CPU"
        )
        warnings.warn(message, SpecstopWarning, stacklevel=2)
    return torch.device("cpu")


@torch.inference_mode()
def measure_decision(
    policy: StopPolicy,
    vocabulary: int,
    temperature: float = 0.0,
    device: torch.device | str = "cpu",
    widths: Mapping[str, int] | None = None,
    profile: Profile | None = None,
    tree: Topology | None = None,
) -> Measurements:
    """Time the work of a policy in a round without models: features, decisions, selection and observation.

    Logits and hidden states are random. A large matrix product before each decision, and before the outcome is observed,
    clears the processor's caches, as a model call does.

    Args:
        policy: policy to time.
        vocabulary: V, number of tokens.
        temperature: sampling temperature.
        device: device of the logits.
        widths: width of each hidden state by name, as in the header of a trace; default: `HIDDEN`.
        profile: models the seconds of the rounds that the policy observes.
        tree: topology of a typical round; None = a chain.
    """
    round = _RoundWithoutModels(policy, vocabulary, temperature, device, widths, profile, tree)
    key = Key(DECISIONS, policy.cost_name, (round.calls,))
    return measure({policy.cost_name: lambda number: {key: [round.play() for _ in range(ROUNDS)]}}, EFFORT)


class _RoundWithoutModels:
    """A round of one stream on random logits with `calls` decisions. See `measure_decision` for the arguments."""

    def __init__(
        self,
        policy: StopPolicy,
        vocabulary: int,
        temperature: float,
        device: torch.device | str,
        widths: Mapping[str, int] | None,
        profile: Profile | None,
        tree: Topology | None,
    ) -> None:
        if tree is None or tree.deepest <= policy.first:  # a tree without decisions
            tree = chain(policy.first + min(CALLS, max(policy.max_depth - policy.first, 1)))
        if policy.routes and tree.drafters == 1:
            tree = with_drafters(tree, len(policy.parts) or 1)
        self._tree, self._first, self._vocabulary = tree, policy.first, vocabulary
        self.calls = min(CALLS, tree.deepest - policy.first)
        sizes = {**dict.fromkeys(policy.hidden, HIDDEN), **(widths or {}), **getattr(policy, "sizes", {})}
        self._generator = torch.Generator().manual_seed(0)
        self._scratch = torch.ones(SCRATCH, SCRATCH, device=device)
        self._fed = [
            [row for row in level if tree.children[row]] for level in tree.levels
        ]  # rows with children, by depth
        self._rows = max(map(len, self._fed))
        rows = {DRAFT_HIDDEN: self._rows, TARGET_HIDDEN: 1}
        self._hidden = {name: self._random(rows[name], sizes[name]) for name in policy.hidden}
        self._reader = FeatureReader(policy, tree, temperature, sizes)
        # As in the live loop, a round is priced, and its outcome passed, only for policies that read them.
        reads_seconds = type(policy).observe is not StopPolicy.observe and policy.reads_seconds
        costs = profile if reads_seconds else None
        self._host = PolicyHost(policy, profile=costs, drafters=tree.drafters)
        self._host.start(np.arange(1))
        self._observes = self._host.observes or bool(Layout(policy.features).history)
        self._timer = Timer(self._scratch.device)

    def _random(self, rows: int, width: int) -> Tensor:
        return torch.randn(rows, width, generator=self._generator, device="cpu").to(self._scratch.device)

    def play(self) -> float:
        """Return the seconds of the policy in a round."""
        host, reader, timer, last = self._host, self._reader, self._timer, self._first + self.calls
        self._logits = 3.0 * self._random(self._rows, self._vocabulary)
        round = self._round(last)
        timer.restart()
        reader.begin(round)
        for depth in range(last):
            if depth:
                reader.drawn(depth, [self._scores(depth)])
            if depth < self._first:
                reader.read_path()
                continue
            self._clear_caches()
            alive = np.ones((1, len(self._tree.levels[depth]) if depth else self._tree.drafters), dtype=bool)
            mark = timer.mark()
            host.keep(reader.step(depth, alive, host.history))
            timer.add("policy", mark)
        if host.selects:
            tree = round.draft_tree()
            mark = timer.mark()
            host.select(tree)
            timer.add("policy", mark)
        if self._observes:
            self._clear_caches()  # the target was called
            mark = timer.mark()
            host.end_round(round)
            timer.add("policy", mark)
        return sum(timer.laps["policy"])

    def _clear_caches(self) -> None:
        """Read the matrix with little arithmetic, like a model call that reads its weights."""
        self._scratch @ self._scratch[:8].T

    def _scores(self, depth: int) -> DraftScores:
        """Return the scores from which the tokens of a depth are drawn."""
        fed = self._fed[depth - 1]
        logits, states = self._logits[: len(fed)], self._hidden.get(DRAFT_HIDDEN)
        states = None if states is None else states[: len(fed)]
        counts = [len(self._tree.children[row]) for row in fed]
        return DraftScores([(0, fed)], counts, logits, scores=logits, states=states)

    def _round(self, depth: int) -> RoundState:
        """Return a round that drafted the tree down to `depth`, with half of the depths accepted."""
        tree, one = self._tree, np.ones(1, dtype=np.int64)
        round = RoundState(tree, one > 0, 100 * one, one if tree.drafters == 1 else one.repeat(tree.drafters)[None])
        # Each candidate is among the likeliest tokens of the row that it is drawn from.
        tokens = self._logits[0].topk(min(self._vocabulary, max(map(len, tree.children)))).indices.tolist()
        round.tokens[0, 0] = 0
        for children in tree.children:
            for rank, row in enumerate(children):
                round.tokens[0, row] = tokens[rank % len(tokens)]
        round.anchors = [Anchor(self._logits, 0, self._hidden.get(TARGET_HIDDEN))]
        # Only the last two tokens of a text are read.
        round.texts = [cast(Text, SimpleNamespace(tokens=[0, int(round.tokens[0, 1])]))]
        round.drawn[:] = (tree.depths > 0) & (tree.depths <= depth)
        round.fed[:] = np.array([bool(children) for children in tree.children]) & (tree.depths < depth)
        round.count()
        round.accepted = one * (depth // 2)
        round.committed, round.ended = round.accepted + 1, one < 0
        return round
