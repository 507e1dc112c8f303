"""What the decisions of a policy cost where there are no models: rounds of it on random logits, with cold caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ...policies.contract import StopPolicy
from ...policies.features.hidden_states import DRAFT_HIDDEN, TARGET_HIDDEN
from ...policies.features.history import HISTORY_FEATURES
from ...policies.latency.estimate import DECISIONS
from ...policies.latency.measurements import Key, Measurements
from ...policies.latency.profile import Profile
from ..candidates import Candidates
from ..drafted import Drafted, Finished
from ..policy.reader import Base, Level, Logits, Reader
from ..policy.runner import PolicyRunner
from ..settings import Stopwatch
from ..topology import chain
from .measuring import Case, Effort, measure

EFFORT = Effort(repetitions=8)
"""Stretches of time in which rounds are timed."""

EACH = 10
"""Rounds of a kind in a stretch of time."""

OFTEN = 3
"""Decisions of the longer of the two kinds of round: what they differ by is the price of each."""

HIDDEN = 1024
"""Width of hidden states that nobody has told."""

SCRATCH = 1536
"""Rows of the matrix whose product clears the caches."""


@torch.inference_mode()
def measure_decision(
    policy: StopPolicy,
    vocabulary: int,
    temperature: float = 0.0,
    device: torch.device | str = "cpu",
    widths: Mapping[str, int] | None = None,
    streams: Sequence[int] = (1,),
    profile: Profile | None = None,
) -> Measurements:
    """Return the timings of the decisions of a round, features included, and of what the policy hears of it.

    It needs no model: the logits are random, as wide as the pair's, hidden states too (`widths` by name, as the header of
    a trace has them), and a large matrix product before each decision clears the processor's caches as a model call does.

    Args:
        policy: timed.
        vocabulary: tokens of the pair.
        temperature: of the sampling.
        device: where logits lie.
        widths: see above.
        streams: that it is asked about at once; one of each is a case.
        profile: what rounds cost, which a policy may hear of; None = nothing.
    """

    def case(count: int) -> Case:
        alone = RoundAlone(policy, vocabulary, temperature, device, widths, count, profile)
        return lambda number: {
            Key(DECISIONS, policy.cost_name, (asked,) if count == 1 else (asked, asked * count)): [
                alone.play(asked) for _ in range(EACH)
            ]
            for asked in alone.asked
        }

    return measure({f"{policy.cost_name}, {count} streams": case(count) for count in streams}, EFFORT)


class RoundAlone:
    """Rounds of a policy without models: its decisions about so many streams, one after the other, are timed.

    Args:
        policy, vocabulary, temperature, device, widths, profile: see `measure_decision`.
        streams: S.

    Attributes:
        asked: how often it is asked in a round: once, and `OFTEN` times where it goes as deep.
    """

    def __init__(
        self,
        policy: StopPolicy,
        vocabulary: int,
        temperature: float,
        device: torch.device | str,
        widths: Mapping[str, int] | None,
        streams: int,
        profile: Profile | None,
    ) -> None:
        self.asked = sorted({1, min(OFTEN, max(policy.max_depth - policy.first, 1))})
        self._policy, self._vocabulary, self._temperature = policy, vocabulary, temperature
        # What the policy says itself outweighs what is told, and that the guess.
        sizes = {**dict.fromkeys(policy.hidden, HIDDEN), **(widths or {}), **getattr(policy, "sizes", {})}
        self._generator = torch.Generator().manual_seed(0)
        self._scratch = torch.ones(SCRATCH, SCRATCH, device=device)
        self._hidden = {name: self._drawn(streams, sizes[name]) for name in policy.hidden}
        self._tree = chain(policy.first + self.asked[-1])
        self._reader = Reader(policy, widths=sizes, streams=streams)
        # As in the live loop, a round is priced for those alone who look at its seconds.
        looks = type(policy).observe is not StopPolicy.observe and policy.reads_seconds
        self._runner = PolicyRunner(policy, profile if looks else None, together=streams > 1)
        self._runner.start(np.arange(streams))
        self._every = np.ones((streams, 1), dtype=bool)
        # What the live loop leaves out for a policy that hears of nothing.
        self._hears = self._runner.observes or any(name in HISTORY_FEATURES for name in policy.features)
        self._watch = Stopwatch(self._scratch.device)
        self._ask, self._open, self._finish = (
            self._watch.timed("policy", call) for call in (self._asked, self._opened, self._runner.finished)
        )

    def _drawn(self, rows: int, width: int) -> Tensor:
        return torch.randn(rows, width, generator=self._generator, device="cpu").to(self._scratch.device)

    def play(self, asked: int) -> float:
        """Return the seconds of a round in which the policy is asked so often."""
        first, streams = self._policy.first, len(self._every)
        self._logits = 3.0 * self._drawn(streams, self._vocabulary)
        self._found = [Candidates.at([0], self._tree) for _ in range(streams)]
        for own, likeliest in zip(self._found, self._logits.argmax(-1).tolist(), strict=True):
            for depth in range(self._tree.deepest):
                own.add(depth, depth + 1, likeliest)
        self._watch.restart()
        base, level = self._open(), None
        for depth in range(1, first):  # not timed: paths lead through it
            level = self._read(depth, base, level)
        for depth in range(first, first + asked):
            # Reads all 9 MB of it, as a model call does its weights, for little arithmetic.
            self._scratch @ self._scratch[:8].T
            level = self._ask(depth, base, level)
        if self._hears:
            self._finish(self._round(first + asked))
        return sum(self._watch.laps["policy"])

    def _opened(self) -> Base:
        """Read what is known before the first token."""
        before = [(own.tokens[1], own.tokens[0]) for own in self._found]
        target = self._hidden.get(TARGET_HIDDEN)
        return self._reader.base(self._runner.history, self._temperature, self._logits, before, target)

    def _asked(self, depth: int, base: Base, before: Level | None) -> Level | None:
        level = self._read(depth, base, before) if depth else None
        self._runner.keep(self._reader.step(depth, base, level, self._tree, self._every))
        return level

    def _read(self, depth: int, base: Base, before: Level | None) -> Level:
        tokens = [(s, own.tokens[depth], own.tokens[depth - 1], 0, 1, depth) for s, own in enumerate(self._found)]
        drawn = Logits(self._logits, tokens, None, self._logits, self._hidden.get(DRAFT_HIDDEN))
        turns = [(s, own, [depth]) for s, own in enumerate(self._found)]
        return self._reader.level(turns, drawn, self._temperature, base, before)

    def _round(self, drafted: int) -> Finished:
        """Return a round of so many tokens, of which half are accepted."""
        streams = len(self._every)
        found, ones = Drafted(streams, self._tree), np.ones(streams, dtype=np.int64)
        found.drawn[:, 1 : drafted + 1] = found.fed[:, :drafted] = True
        found.count()
        accepted = ones * (drafted // 2)
        return Finished(self._every[:, 0], 100 * ones, ones, found, accepted, accepted + 1, ~self._every[:, 0])
