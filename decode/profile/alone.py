"""What the decisions of a policy cost where there are no models: rounds of it on random logits, with cold caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import cast

import numpy as np
import torch
from torch import Tensor

from ...policies.contract import StopPolicy
from ...policies.features import DRAFT_HIDDEN, HISTORY_FEATURES, TARGET_HIDDEN
from ...policies.host import PolicyHost
from ...policies.latency.estimate import DECISIONS
from ...policies.latency.measurements import Key, Measurements
from ...policies.latency.profile import Profile
from ..feature_reader import FeatureReader
from ..hooks import Timer
from ..round_state import DraftScores, RoundState, Rows
from ..texts import Anchor, Text
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
        self._reader = FeatureReader(policy, tree, temperature, sizes, streams)
        # As in the live loop, a round is priced for those alone who look at its seconds.
        looks = type(policy).observe is not StopPolicy.observe and policy.reads_seconds
        self._host = PolicyHost(policy, profile=profile if looks else None, batch=streams)
        self._host.start(np.arange(streams))
        self._every = [np.ones((streams, len(level)), dtype=bool) for level in tree.levels]
        # What the live loop leaves out for a policy that hears of nothing.
        self._hears = self._host.observes or any(name in HISTORY_FEATURES for name in policy.features)
        self._timer = Timer(self._scratch.device)

    def _drawn(self, rows: int, width: int) -> Tensor:
        return torch.randn(rows, width, generator=self._generator, device="cpu").to(self._scratch.device)

    def play(self, asked: int) -> float:
        """Return the seconds of a round in which the policy is asked so often."""
        first, timer = self._policy.first, self._timer
        self._logits = 3.0 * self._drawn(self._rows, self._vocabulary)
        round = self._round(first + asked)
        timer.restart()
        self._reader.begin(round)
        for depth in range(1, first):  # not timed: paths lead through it
            self._reader.drawn(depth, self._scores(round, depth))
            if self._reader.has_unread_path:
                self._reader.read()
        for depth in range(first, first + asked):
            # Reads all 9 MB of it, as a model call does its weights, for little arithmetic.
            self._scratch @ self._scratch[:8].T
            if depth:
                self._reader.drawn(depth, self._scores(round, depth))
            mark = timer.mark()
            self._host.keep(self._reader.step(depth, self._every[depth], self._host.history))
            timer.add("policy", mark)
        if self._host.selects:
            tree = round.draft_tree()
            mark = timer.mark()
            self._host.select(tree)
            timer.add("policy", mark)
        if self._hears:
            mark = timer.mark()
            self._host.finished(round)
            timer.add("policy", mark)
        return sum(timer.laps["policy"])

    def _scores(self, round: RoundState, depth: int) -> DraftScores:
        """Return what the tokens of a depth were drawn from."""
        tree = self._tree
        fed = [row for row in tree.levels[depth - 1] if tree.children[row]]
        rows: Rows = [(stream, fed) for stream in range(len(round.active))]
        counts = [len(tree.children[row]) for _, own in rows for row in own]
        logits, states = self._logits[: len(counts)], self._hidden.get(DRAFT_HIDDEN)
        states = None if states is None else states[: len(counts)]
        return DraftScores(rows, counts, logits, scores=logits, states=states)

    def _round(self, depth: int) -> RoundState:
        """Return a round of the tree so far down, of which half the depths are accepted; tokens are those of the whole tree.

        Each candidate is among the likeliest of the row that it is drawn from.
        """
        tree, ones = self._tree, np.ones(len(self._every[0]), dtype=np.int64)
        round = RoundState(tree, ones > 0, 100 * ones, ones)
        best = self._logits[: len(ones)].topk(min(self._vocabulary, max(map(len, tree.children)))).indices.tolist()
        for stream, likeliest in enumerate(best):
            round.tokens[stream, 0] = 0
            for below in tree.children:
                for rank, row in enumerate(below):
                    round.tokens[stream, row] = likeliest[rank % len(likeliest)]
        hidden = self._hidden.get(TARGET_HIDDEN)
        round.anchors = [
            Anchor(self._logits, stream, None if hidden is None else hidden[stream : stream + 1])
            for stream in range(len(ones))
        ]
        # Of a text only the last two tokens are read.
        round.texts = [cast(Text, SimpleNamespace(tokens=[0, tokens[1]])) for tokens in round.tokens.tolist()]
        round.drawn[:] = (tree.depths > 0) & (tree.depths <= depth)
        round.fed[:] = np.array([bool(below) for below in tree.children]) & (tree.depths < depth)
        round.count()
        round.accepted = ones * (depth // 2)
        round.committed, round.ended = round.accepted + 1, ones < 0
        return round
