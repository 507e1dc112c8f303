"""What the decisions of a policy cost where there are no models: rounds of it on random logits, with cold caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ...policies.contract import StopPolicy
from ...policies.features import DRAFT_HIDDEN, TARGET_HIDDEN
from ...policies.history import HISTORY_FEATURES
from ...policies.host import PolicyHost
from ...policies.latency.estimate import DECISIONS
from ...policies.latency.measurements import Key, Measurements
from ...policies.latency.profile import Profile
from ..candidates import Candidates, draft_tree
from ..drafted import Drafted, Finished
from ..policy.reader import Base, Level, Logits, Reader
from ..settings import Stopwatch
from ..topology import Topology, chain
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
    tree: Topology | None = None,
) -> Measurements:
    """Return the timings of the decisions of a round, features included, of its choice of nodes, and of what it hears of it.

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
        tree: that a typical round of it drafts; None = a chain.
    """

    def case(count: int) -> Case:
        alone = RoundAlone(policy, vocabulary, temperature, device, widths, count, profile, tree)
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
        policy, vocabulary, temperature, device, widths, profile, tree: see `measure_decision`.
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
        tree: Topology | None = None,
    ) -> None:
        if tree is None or tree.deepest <= policy.first:  # nobody is asked in a tree that shallow
            tree = chain(policy.first + min(OFTEN, max(policy.max_depth - policy.first, 1)))
        self._tree = tree
        self.asked = sorted({1, min(OFTEN, tree.deepest - policy.first)})
        self._policy, self._vocabulary, self._temperature = policy, vocabulary, temperature
        # What the policy says itself outweighs what is told, and that the guess.
        sizes = {**dict.fromkeys(policy.hidden, HIDDEN), **(widths or {}), **getattr(policy, "sizes", {})}
        self._generator = torch.Generator().manual_seed(0)
        self._scratch = torch.ones(SCRATCH, SCRATCH, device=device)
        self._rows = streams * max(sum(map(bool, tree.children[level[0] : level[-1] + 1])) for level in tree.levels)
        self._hidden = {
            name: self._drawn(streams if name == TARGET_HIDDEN else self._rows, sizes[name]) for name in policy.hidden
        }
        self._reader = Reader(policy, widths=sizes, streams=streams)
        # As in the live loop, a round is priced for those alone who look at its seconds.
        looks = type(policy).observe is not StopPolicy.observe and policy.reads_seconds
        self._host = PolicyHost(policy, profile=profile if looks else None, batch=streams)
        self._host.start(np.arange(streams))
        self._every = [np.ones((streams, len(level)), dtype=bool) for level in tree.levels]
        # What the live loop leaves out for a policy that hears of nothing.
        self._hears = self._host.observes or any(name in HISTORY_FEATURES for name in policy.features)
        self._watch = Stopwatch(self._scratch.device)
        self._ask, self._open, self._select, self._finish = (
            self._watch.timed("policy", call)
            for call in (self._asked, self._opened, self._host.select, self._host.finished)
        )

    def _drawn(self, rows: int, width: int) -> Tensor:
        return torch.randn(rows, width, generator=self._generator, device="cpu").to(self._scratch.device)

    def play(self, asked: int) -> float:
        """Return the seconds of a round in which the policy is asked so often."""
        first, streams = self._policy.first, len(self._every[0])
        self._logits = 3.0 * self._drawn(self._rows, self._vocabulary)
        self._found = [self._candidates(stream) for stream in range(streams)]
        made = self._round(first + asked)
        self._watch.restart()
        base, level = self._open(), None
        for depth in range(1, first):  # not timed: paths lead through it
            level = self._read(depth, base, level)
        for depth in range(first, first + asked):
            # Reads all 9 MB of it, as a model call does its weights, for little arithmetic.
            self._scratch @ self._scratch[:8].T
            level = self._ask(depth, base, level)
        if self._host.selects:
            self._select(draft_tree(self._found, made.found.sent))
        if self._hears:
            self._finish(made)
        return sum(self._watch.laps["policy"])

    def _candidates(self, stream: int) -> Candidates:
        """Return the whole tree, each candidate among the likeliest of the row that it is drawn from."""
        tree, own = self._tree, Candidates.at([0], self._tree)
        best = self._logits[stream].topk(min(self._vocabulary, max(map(len, tree.children)))).indices.tolist()
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
        tree, streams = self._tree, len(self._every[0])
        found, ones = Drafted(streams, tree), np.ones(streams, dtype=np.int64)
        found.drawn[:] = (tree.depths > 0) & (tree.depths <= depth)
        found.fed[:] = np.array([bool(below) for below in tree.children]) & (tree.depths < depth)
        found.count()
        accepted = ones * (depth // 2)
        return Finished(ones > 0, 100 * ones, ones, found, accepted, accepted + 1, ones < 0)
