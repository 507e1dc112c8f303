"""SmartSpec: one draft length for all streams of a batch, that of the largest goodput."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import ClassVar

import numpy as np

from ..arguments import validate_int, validate_number
from ..batch_rules import Batches, CostGrid
from ..contract import Array, DraftStep, RoundOutcome, State, StopPolicy
from ..profile import Profile


class SmartSpec(StopPolicy):
    """Draft for all streams of a batch the length of the largest goodput: expected tokens over predicted seconds.

    SmartSpec (arXiv 2406.14066): with a the acceptance rate of the batch, a moving average over its rounds, a stream that
    drafts k tokens is expected to commit 1 + a + ... + a^k. The length may be 0. The paper states neither window nor prior;
    ours are `decay` per round and `prior` tokens accepted at `start`. The average passes from text to text.

    The state is (key [S], tokens accepted and tokens with a known outcome [S, 2], length [S]).

    Args:
        draft, token: costs without a profile, in target calls: of a draft step, and of each further token.
        profile: a latency profile or its path; without one and with the default costs, `evaluate` and runs with a profile
            provide theirs.
        max_depth: the longest length.
    """

    reads_seconds: ClassVar[bool] = False
    joint: ClassVar[bool] = True
    carries: ClassVar[bool] = True
    first = 0

    def __init__(
        self,
        start: float = 0.7,
        prior: float = 10.0,
        decay: float = 0.95,
        draft: float = 0.1,
        token: float = 0.01,
        profile: str | Path | Profile = "",
        max_depth: int = 8,
    ) -> None:
        rates = {"start": start, "decay": decay}
        self.first_rate, self.decay = (validate_number("smartspec", k, v, 0.0, 1.0) for k, v in rates.items())
        self.prior = validate_number("smartspec", "prior", prior, 1e-3)
        self.max_depth = validate_int("smartspec", "max_depth", max_depth)
        self._grid = CostGrid.from_options("smartspec", profile, draft, token)
        self.name = f"smartspec:{start:g}"

    def with_costs(self, profile: Profile) -> StopPolicy:
        """Return this policy with the costs of a profile, unless it was given others."""
        other = copy.copy(self)
        other._grid = self._grid.with_profile(profile)
        return self if other._grid is self._grid else other

    def start(self, streams: int, keys: Array) -> State:
        """Return the state of streams without rounds."""
        seen = np.tile((self.prior * self.first_rate, self.prior), (streams, 1))
        return keys.copy(), seen, np.zeros(streams, dtype=np.int64)

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Choose the length at depth 0, and keep the branches above it."""
        key, seen, length = state
        if step.depth == 0:
            batches = Batches.of(step.batch, key)
            accepted, known = batches.sums(seen).T  # [G]
            tokens = np.cumsum((accepted / known)[:, None] ** np.arange(self.max_depth + 1), 1)  # [G, K + 1]
            best = self._grid.length_rates(batches.sizes, tokens).argmax(1)  # of equal rates the shortest length
            length = batches.spread(best, len(step.batch))
        return step.alive & (step.depth < length)[:, None], (key, seen, length)

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        """Return the state with the round's acceptance."""
        key, seen, length = state
        counts = outcome.active & ~outcome.cut & (outcome.verified > 0)
        known = np.minimum(outcome.accepted + 1, outcome.verified)  # those accepted and the first one rejected
        latest = np.stack([outcome.accepted, known], 1).astype(np.float64)
        return key, np.where(counts[:, None], self.decay * seen + latest, seen), length
