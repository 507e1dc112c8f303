"""What decisions cost, features included: timed in the loop, or without models for a profile that lacks them."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ...policies.contract import StopPolicy
from ...policies.errors import SpecstopWarning
from ...policies.features.hidden_states import DRAFT_HIDDEN, TARGET_HIDDEN
from ...policies.features.history import HISTORY_FEATURES
from ...policies.host import PolicyHost
from ...policies.measurements import DECISIONS, Key, Measurements
from ...policies.profile import Profile
from ...policies.progress import Progress, silent
from ...policies.validation import validate_policy
from ..candidates import Candidates, draft_tree
from ..drafted import Drafted, Finished
from ..loop import Request, Speculator
from ..models.pair import Pair
from ..policy.reader import Base, Level, Logits, Reader
from ..records import Generation, Round
from ..settings import Settings, Stopwatch
from ..topology import Topology, chain
from .measuring import Case, Effort, Seconds, measure

EFFORT = Effort(repetitions=8)
"""Texts, or stretches of time, that decisions are timed in by default."""

ROUNDS = 10
"""Rounds without models in a stretch of time."""

CALLS = 3
"""Decisions in a round without models, where the policy goes as deep."""

HIDDEN = 1024
"""Width of hidden states whose width is unknown."""

SCRATCH = 1536
"""Rows of the matrix whose product clears the caches."""


def decision_case(
    pair: Pair, policy: StopPolicy, prompts: Sequence[Sequence[int]], settings: Settings, profile: Profile | None
) -> Case:
    """Return the case of a policy's decisions in the live loop.

    About one text, or where the policy decides nothing about one, about as many as the profile's largest batch.
    """
    streams = largest_batch(profile) if 1 in policy.unasked else 1
    speculator = Speculator(pair, policy, settings.for_policy(policy), profile, batch=streams)

    def case(number: int) -> Seconds:
        seconds: dict[Key, list[float]] = defaultdict(list)
        texts = speculator.run(
            [Request(prompts[(number * streams + at) % len(prompts)], number) for at in range(streams)]
        )
        if failure := next((text.failure for text in texts if text.failure is not None), None):
            raise failure.as_error("its decisions cannot be timed")
        # A text by itself is asked about in the round that ends it as in any other.
        for parts in whole_rounds(texts) if streams > 1 else [[r] for r in texts[0].rounds]:
            if calls := max(r.decisions for r in parts):
                # Each stream's record has its share.
                seconds[Key(DECISIONS, policy.cost_name, (calls,))].append(sum(r.policy_s for r in parts))
        return seconds

    return case


def whole_rounds(texts: Sequence[Generation]) -> list[list[Round]]:
    """Return the rounds of texts that began together, until one of them ends."""
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
    """Return the timings of decisions in the live loop by `cost_name`, features included, measured in turns.

    Args:
        pair: target and draft.
        policies: whose decisions are timed.
        prompts: token ids.
        settings: of the texts.
        profile: if given, the time that a policy takes to observe each round is a part of its price.
        effort: how long to measure.
        progress: see `Progress`.
    """
    cases = {policy.cost_name: decision_case(pair, policy, prompts, settings, profile) for policy in policies}
    return measure(cases, effort, progress=progress)


def largest_batch(profile: Profile | None) -> int:
    """Return the most streams that the profile has costs of."""
    return profile.batch.sizes[-1] if profile and profile.batch else 1


def is_asked(policy: StopPolicy, profile: Profile | None = None) -> bool:
    """Whether a policy decides anything in batches of up to the largest one of a profile."""
    # One whose first decision comes at its last depth, such as a fixed length, is never called.
    return policy.first < policy.max_depth and any(
        n not in policy.unasked for n in range(1, largest_batch(profile) + 1)
    )


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
    missing = {p.cost_name: p for p in policies if p.cost_name not in profile.decision_s and is_asked(p, profile)}
    for policy in missing.values():
        timed = measure_decision(policy, vocabulary, profile.temperature, device_of(profile), widths, profile, tree)
        profile = profile.with_measured_decisions(timed)
    return profile


def device_of(profile: Profile) -> torch.device:
    """Return the device that a profile was measured on: what a decision costs depends on where the logits lie.

    The CPU, with a warning, if this machine lacks it.
    """
    name = profile.facts.get("device", "cpu")
    for number in range(torch.cuda.device_count()):
        if torch.cuda.get_device_name(number) == name:
            return torch.device("cuda", number)
    if "cpu" not in name:
        message = f"the profile is of {name}, which is not here: what decisions cost is measured on the CPU"
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
    """Return the timings of all that a policy does in a round, without a model: features, decisions, selection, outcome.

    Logits and hidden states are random and as wide as the pair's (`widths` by name, as in the header of a trace). A large
    matrix product before each decision clears the processor's caches as a model call does.

    Args:
        policy: timed.
        vocabulary: tokens of the pair.
        temperature: of the sampling.
        device: where logits lie.
        widths: see above.
        profile: what rounds cost, which a policy may hear of; None = nothing.
        tree: that a typical round of it drafts; None = a chain.
    """

    alone = _RoundAlone(policy, vocabulary, temperature, device, widths, profile, tree)
    key = Key(DECISIONS, policy.cost_name, (alone.calls,))
    return measure({policy.cost_name: lambda number: {key: [alone.play() for _ in range(ROUNDS)]}}, EFFORT)


class _RoundAlone:
    """A round of one stream on random logits, `calls` decisions deep; arguments as of `measure_decision`."""

    def __init__(
        self,
        policy: StopPolicy,
        vocabulary: int,
        temperature: float,
        device: torch.device | str,
        widths: Mapping[str, int] | None,
        profile: Profile | None,
        tree: Topology | None = None,
    ) -> None:
        if tree is None or tree.deepest <= policy.first:  # nobody is asked in a tree that shallow
            tree = chain(policy.first + min(CALLS, max(policy.max_depth - policy.first, 1)))
        self._tree = tree
        self.calls = min(CALLS, tree.deepest - policy.first)
        self._policy, self._vocabulary, self._temperature = policy, vocabulary, temperature
        # What the policy says itself outweighs what is told, and that the guess.
        sizes = {**dict.fromkeys(policy.hidden, HIDDEN), **(widths or {}), **getattr(policy, "sizes", {})}
        self._generator = torch.Generator().manual_seed(0)
        self._scratch = torch.ones(SCRATCH, SCRATCH, device=device)
        self._rows = max(sum(map(bool, tree.children[level[0] : level[-1] + 1])) for level in tree.levels)
        self._hidden = {
            name: self._random(1 if name == TARGET_HIDDEN else self._rows, sizes[name]) for name in policy.hidden
        }
        self._reader = Reader(policy, widths=sizes)
        # As in the live loop, a round is priced for those alone who look at its seconds.
        looks = type(policy).observe is not StopPolicy.observe and policy.reads_seconds
        self._host = PolicyHost(policy, profile=profile if looks else None)
        self._host.start(np.arange(1))
        self._every = [np.ones((1, len(level)), dtype=bool) for level in tree.levels]
        # What the live loop leaves out for a policy that hears of nothing.
        self._hears = self._host.observes or any(name in HISTORY_FEATURES for name in policy.features)
        self._watch = Stopwatch(self._scratch.device)
        self._ask, self._open, self._select, self._finish = (
            self._watch.timed("policy", call)
            for call in (self._asked, self._opened, self._host.select, self._host.finished)
        )

    def _random(self, rows: int, width: int) -> Tensor:
        return torch.randn(rows, width, generator=self._generator, device="cpu").to(self._scratch.device)

    def play(self) -> float:
        """Return the seconds of the policy in a round."""
        first = self._policy.first
        self._logits = 3.0 * self._random(self._rows, self._vocabulary)
        self._found = [self._candidates()]
        made = self._round(first + self.calls)
        self._watch.restart()
        base, level = self._open(), None
        for depth in range(1, first):  # not timed: paths lead through it
            level = self._read(depth, base, level)
        for depth in range(first, first + self.calls):
            # Reads all 9 MB of it, as a model call does its weights, for little arithmetic.
            self._scratch @ self._scratch[:8].T
            level = self._ask(depth, base, level)
        if self._host.selects:
            self._select(draft_tree(self._found, made.found.sent))
        if self._hears:
            self._finish(made)
        return sum(self._watch.laps["policy"])

    def _candidates(self) -> Candidates:
        """Return the whole tree, each candidate among the likeliest of the row that it is drawn from."""
        tree, own = self._tree, Candidates.at([0], self._tree)
        best = self._logits[0].topk(min(self._vocabulary, max(map(len, tree.children)))).indices.tolist()
        for below in tree.children:
            for rank, row in enumerate(below):
                own.add(tree.parent[row], row, best[rank % len(best)])
        return own

    def _opened(self) -> Base:
        """Read what is known before the first token."""
        before = [(own.tokens[1], own.tokens[0]) for own in self._found]
        target = self._hidden.get(TARGET_HIDDEN)
        rows = self._logits[: len(before)]
        return self._reader.base(self._host.history, self._temperature, rows, before, target)

    def _asked(self, depth: int, base: Base, before: Level | None) -> Level | None:
        level = self._read(depth, base, before) if depth else None
        self._host.keep(self._reader.step(depth, base, level, self._tree, self._every[depth]))
        return level

    def _read(self, depth: int, base: Base, before: Level | None) -> Level:
        tree, tokens, rows = self._tree, [], 0
        for own in self._found:
            for parent in tree.levels[depth - 1]:
                below = tree.children[parent]
                tokens += [
                    (rows, own.tokens[row], own.tokens[parent], rank, len(below), depth)
                    for rank, row in enumerate(below)
                ]
                rows += bool(below)
        logits, states = self._logits[:rows], self._hidden.get(DRAFT_HIDDEN)
        drawn = Logits(logits, tokens, None, logits, None if states is None else states[:rows])
        turns = [(stream, own, tree.levels[depth]) for stream, own in enumerate(self._found)]
        return self._reader.level(turns, drawn, self._temperature, base, before)

    def _round(self, depth: int) -> Finished:
        """Return a round of the tree so far down, of which half the depths are accepted."""
        tree, ones = self._tree, np.ones(1, dtype=np.int64)
        found = Drafted(1, tree)
        found.drawn[:] = (tree.depths > 0) & (tree.depths <= depth)
        found.fed[:] = np.array([bool(below) for below in tree.children]) & (tree.depths < depth)
        found.count()
        accepted = ones * (depth // 2)
        return Finished(ones > 0, 100 * ones, ones, found, accepted, accepted + 1, ones < 0)
