"""What replayed rounds take in every resample: of the prompts, of the timings behind the profile, or of both.

A profile is an average of timings, and another hour on the same machine gives another one. So each resample of the prompts
is priced by a profile of its own, estimated anew from a bootstrap draw of the timings. Policies stop where they stopped:
their thresholds are what is deployed, and only the prices of their rounds change.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from enum import Enum

import numpy as np
import torch
from torch import Tensor

from ...decode.benchmark import Ratio
from ...policies.profile import Profile
from ..replay.counted import count_rounds, joined
from ..replay.log import Rounds
from ..statistics import LEVEL, REPLICATES, Resamples, Values

DRAWS = 200
"""Of the profile's timings; each serves several resamples of the prompts."""

Change = Callable[[Profile], Profile]


def _unchanged(profile: Profile) -> Profile:
    return profile


class Vary(Enum):
    """What is drawn anew: all, or one part while the others stay as they were found."""

    ALL = "all"
    PROMPTS = "prompts"
    PROFILE = "profile"
    DECISIONS = "decisions"


class Draws:
    """A profile, and bootstrap draws of its timings; none where it has kept no timings.

    Args:
        profile: as measured.
        seed: of the draws.
        count: of them.
    """

    def __init__(self, profile: Profile, seed: int = 0, count: int = DRAWS) -> None:
        self.profile = profile
        # Another sequence of random numbers than that of the prompts' resamples: the two must not go together. Each draw has
        # a generator of its own: draw i of model calls is the same in all reports of a profile, however often the decisions
        # of their policies were timed.
        rngs = (np.random.default_rng([seed, 1, number]) for number in range(count))
        self.drawn = tuple(map(profile.resampled, rngs)) if profile.measurements else ()

    @property
    def is_timed(self) -> bool:
        """Whether draws differ in the costs of model calls: not if one repetition or none of their timings was kept."""
        return any((one.low, one.high) != (self.drawn[0].low, self.drawn[0].high) for one in self.drawn)

    @property
    def text(self) -> str:
        """Sources of error that intervals over prompts include."""
        return self.text_over("prompts")

    def text_over(self, unit: str) -> str:
        """Return the sources of error that intervals include, with what they resample: "prompts" or "groups"."""
        over, lacks = f"{unit} and the profile's timings", ""
        if not self.is_timed:
            over = f"{unit} and timings of decisions" if self.drawn else unit
            lacks = "; the profile kept no repeated timings of model calls, so that their error is not included"
        return f"{LEVEL:.0%} bootstrap over {over}, {REPLICATES} replicates{lacks}"

    def interval(self, values: Values) -> Ratio:
        """Return the value as found and its interval, of a statistic [1 + D] under every draw."""
        if not self.drawn:
            return Ratio(float(values[0]))
        low, high = np.quantile(values[1:], [(1.0 - LEVEL) / 2, (1.0 + LEVEL) / 2])
        return Ratio(float(values[0]), float(low), float(high))


class Priced:
    """Seconds of P replays in every resample.

    Args:
        boot: resamples of the prompts of S sequences.
        draws: of the profile.
        replays: the rounds of each.
        prompt_tokens: [S] of the prompts that were read; zeros of rounds alone.
        spent: [S, P] seconds under the profile as measured, where they are known already.
    """

    def __init__(
        self,
        boot: Resamples,
        draws: Draws,
        replays: Sequence[Rounds],
        prompt_tokens: Tensor,
        spent: Tensor | None = None,
    ) -> None:
        self._boot, self._draws, self._replays = boot, draws, list(replays)
        self._tokens, self._known = prompt_tokens, spent
        self._at: Values | slice = slice(None)
        self._counted = [count_rounds(rounds, len(prompt_tokens)) for rounds in replays] if draws.drawn else []
        self._count()

    def among(self, boot: Resamples, at: Tensor) -> Priced:
        """Return the same replays of the sequences `at` alone, whose prompts `boot` resamples."""
        other = copy.copy(self)
        other._boot, other._at = boot, at.numpy()  # numpy takes a tensor of one number for that number
        other._count()
        return other

    def _count(self) -> None:
        """Add up rounds, decisions and prompts in every resample."""
        if not self._counted:
            return
        self._groups = []
        # Rounds of chains and of trees are priced by other formulas; all of one sort are priced in one call.
        for of_trees in (False, True):
            places = [at for at, one in enumerate(self._counted) if (one.kinds.fed is not None) is of_trees]
            if places:
                some = [self._counted[at] for at in places]
                rounds = self._total(np.concatenate([one.counts for one in some], 2))
                self._groups.append((places, *joined([one.kinds for one in some]), rounds))
        self._decisions = self._total(np.stack([one.decisions for one in self._counted], 1))
        tokens = self._tokens.double().numpy()
        self._read = self._total(np.stack([tokens > 0, tokens], 1))

    def _total(self, values: Values) -> Values:
        part = values[self._at]
        total: Values = self._boot.total(part.reshape(len(part), -1)).reshape(-1, *values.shape[1:])
        return total

    def by_text(self, change: Change | None = None) -> Values:
        """Return [S, P] seconds of each text under the measured profile, or under `change` of it."""
        if self._known is None or change is not None:
            profile = (change or _unchanged)(self._draws.profile)
            known = torch.stack([rounds.of_texts(profile, self._tokens) for rounds in self._replays], 1)
        else:
            known = self._known
        out: Values = known.double().numpy()[self._at]
        return out

    def factors(self, vary: Vary = Vary.ALL, change: Change | None = None) -> Values:
        """Return seconds under draws of the profile, relative to those under the measured profile.

        Args:
            vary: what is drawn.
            change: of the profile and of each draw of it, such as another price of drafting.

        Returns:
            [1 + R, P], a draw for each resample; [1 + D, P] if the profile alone is drawn. Row 0 is 1.
        """
        drawn = self._draws.drawn
        alone = vary in (Vary.PROFILE, Vary.DECISIONS)
        out = np.ones(((1 + len(drawn)) if alone else 1 + self._boot.replicates, len(self._replays)))
        if not drawn or vary is Vary.PROMPTS:
            return out
        changed = change or _unchanged
        # Counted rounds give only the ratio of two profiles: what they miss (`Kinds.seconds`) mostly cancels in it.
        measured = changed(self._draws.profile)
        calls, decided = self._calls(measured, slice(None)), self._decided(measured, slice(None))
        for at, profile in enumerate(map(changed, drawn), 1):
            # Draw `at` prices the resamples at, at + D, ...; row 0, the sample, keeps the profile as measured.
            rows = slice(1) if alone else slice(at, len(out), len(drawn))
            by_calls = calls[rows] if vary is Vary.DECISIONS else self._calls(profile, rows)
            by_decisions = decided[rows] if vary is Vary.PROFILE else self._decided(profile, rows)
            out[slice(at, at + 1) if alone else rows] = (by_calls + by_decisions) / (calls[rows] + decided[rows])
        return out

    def seconds(self, vary: Vary = Vary.ALL, change: Change | None = None) -> Values:
        """Return [1 + R, P] seconds in the sample and in every resample; [1 + D, P] if the profile alone is drawn.

        Args:
            vary: what is drawn.
            change: see `factors`.
        """
        spent = self._boot.total(self.by_text(change))
        return (spent[:1] if vary in (Vary.PROFILE, Vary.DECISIONS) else spent) * self.factors(vary, change)

    def _calls(self, profile: Profile, rows: slice) -> Values:
        """Return [rows, P] seconds of everything but decisions."""
        constant, per_token = profile.prefill_s
        read = constant * self._read[rows, :1] + per_token * self._read[rows, 1:]
        total = np.repeat(read, len(self._replays), 1)
        for places, kinds, begins, rounds in self._groups:
            # Of an empty part `reduceat` gives an entry, not 0; no part is empty, since each has the two kinds of backlogs.
            total[:, places] += np.add.reduceat(kinds.seconds(profile, rounds[rows]), begins, 1)
        return total

    def _decided(self, profile: Profile, rows: slice) -> Values:
        """Return [rows, P] seconds of decisions."""
        prices = np.array([profile.decision(rounds.cost_name) for rounds in self._replays])
        total: Values = prices * self._decisions[rows]
        return total
