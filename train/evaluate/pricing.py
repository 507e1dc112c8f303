"""Seconds of replayed rounds in every resample: of the prompts, of the timings behind the profile, or of both.

A profile is an average of timings, and another hour on the same machine gives a different one. Each resample of the prompts
is therefore priced with a profile that is estimated from a bootstrap sample of the timings. Policies stop where they stopped
in the replay: their thresholds are what is deployed, and only the prices of their rounds change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum

import numpy as np
import torch
from torch import Tensor

from ...decode.benchmark import Ratio
from ...policies.profile import Profile
from ..replay.counted import count_rounds, joined
from ..replay.log import Rounds
from .statistics import LEVEL, REPLICATES, Resamples, Values

DRAWS = 200
"""Bootstrap samples of the profile's timings; each serves several resamples of the prompts."""

Change = Callable[[Profile], Profile]


class ResampleSource(Enum):
    """What is resampled: everything, or one part while the others keep their measured values."""

    ALL = "all"
    PROMPTS = "prompts"
    PROFILE = "profile"
    DECISIONS = "decisions"


class ProfileBootstrap:
    """A profile, and profiles from bootstrap samples of its timings.

    Args:
        profile: as measured.
        seed: of the samples.
        count: of them.

    Attributes:
        profiles: one per sample; empty if the profile kept no timings.
    """

    def __init__(self, profile: Profile, seed: int = 0, count: int = DRAWS) -> None:
        self.profile = profile
        # The random numbers are independent of those of the prompts' resamples. Each sample has its own generator: the model
        # calls of sample i are the same in all reports of a profile, however often the decisions of policies were timed.
        generators = (np.random.default_rng([seed, 1, number]) for number in range(count))
        self.profiles = tuple(map(profile.resampled, generators)) if profile.measurements else ()

    @property
    def is_timed(self) -> bool:
        """Whether samples differ in the costs of model calls: not if at most one repetition of their timings was kept."""
        first = self.profiles[:1]
        return any((one.low, one.high) != (first[0].low, first[0].high) for one in self.profiles)

    def describe(self, unit: str = "prompts") -> str:
        """Return the sources of error that intervals include; `unit` is what they resample, "prompts" or "groups"."""
        over, missing = f"{unit} and the profile's timings", ""
        if not self.is_timed:
            over = f"{unit} and timings of decisions" if self.profiles else unit
            missing = "; the profile kept no repeated timings of model calls, so that their error is not included"
        return f"{LEVEL:.0%} bootstrap over {over}, {REPLICATES} replicates{missing}"

    def interval(self, values: Values) -> Ratio:
        """Return the measured value and its percentile interval, of a statistic [1 + D] under every sample."""
        if not self.profiles:
            return Ratio(float(values[0]))
        low, high = np.quantile(values[1:], [(1.0 - LEVEL) / 2, (1.0 + LEVEL) / 2])
        return Ratio(float(values[0]), float(low), float(high))


class Priced:
    """Seconds of P replays in every resample.

    Args:
        boot: resamples of the prompts of S sequences.
        costs: the profile and its bootstrap samples.
        replays: the rounds of each replay.
        prompt_tokens: [S] of the prompts that were read; zeros if only rounds are priced.
        spent: [S, P] seconds under the measured profile, if they are already known.
    """

    def __init__(
        self,
        boot: Resamples,
        costs: ProfileBootstrap,
        replays: Sequence[Rounds],
        prompt_tokens: Tensor,
        spent: Tensor | None = None,
    ) -> None:
        self._boot, self._costs, self._replays = boot, costs, list(replays)
        self._prompt_tokens, self._spent = prompt_tokens, spent
        if not costs.profiles:
            return
        counted = [count_rounds(rounds, len(prompt_tokens)) for rounds in self._replays]
        self._groups = []
        # Rounds of chains and of trees are priced by different formulas; all replays of one sort are priced in one call.
        for is_tree in (False, True):
            columns = [at for at, one in enumerate(counted) if (one.kinds.fed is not None) is is_tree]
            if columns:
                rounds = boot.total(np.concatenate([counted[at].counts for at in columns], 2))
                self._groups.append((columns, *joined([counted[at].kinds for at in columns]), rounds))
        self._decisions = boot.total(np.stack([one.decisions for one in counted], 1))  # [1 + R, P]
        tokens = prompt_tokens.double().numpy()
        self._prompts = boot.total(np.stack([tokens > 0, tokens], 1))  # [1 + R, 2]

    def by_text(self, change: Change | None = None) -> Values:
        """Return [S, P] seconds of each text under the measured profile, or under `change` of it."""
        if self._spent is None or change is not None:
            profile = change(self._costs.profile) if change else self._costs.profile
            spent = torch.stack([rounds.of_texts(profile, self._prompt_tokens) for rounds in self._replays], 1)
        else:
            spent = self._spent
        out: Values = spent.double().numpy()
        return out

    def factors(self, source: ResampleSource = ResampleSource.ALL, change: Change | None = None) -> Values:
        """Return seconds under samples of the profile, relative to those under the measured profile.

        Args:
            source: what is resampled.
            change: of the profile and of each sample, such as another price of drafting.

        Returns:
            [1 + R, P], a sample for each resample; [1 + D, P] if only the profile is resampled. Row 0 is 1.
        """
        profiles = self._costs.profiles
        is_profile_only = source in (ResampleSource.PROFILE, ResampleSource.DECISIONS)
        rows = 1 + (len(profiles) if is_profile_only else self._boot.replicates)
        out = np.ones((rows, len(self._replays)))
        if not profiles or source is ResampleSource.PROMPTS:
            return out
        # Counted rounds give only the ratio of two profiles: what they miss (`Kinds.seconds`) mostly cancels in it.
        measured = change(self._costs.profile) if change else self._costs.profile
        calls, decided = self._call_seconds(measured, slice(None)), self._decision_seconds(measured, slice(None))
        for at, profile in enumerate(map(change, profiles) if change else profiles, 1):
            # Sample `at` prices the resamples at, at + D, ...; row 0 keeps the measured profile.
            use = slice(1) if is_profile_only else slice(at, None, len(profiles))
            row = slice(at, at + 1) if is_profile_only else use
            by_calls = calls[use] if source is ResampleSource.DECISIONS else self._call_seconds(profile, use)
            by_decisions = decided[use] if source is ResampleSource.PROFILE else self._decision_seconds(profile, use)
            out[row] = (by_calls + by_decisions) / (calls[use] + decided[use])
        return out

    def seconds(self, source: ResampleSource = ResampleSource.ALL, change: Change | None = None) -> Values:
        """Return [1 + R, P] seconds in the sample and in every resample; arguments and shapes as of `factors`."""
        spent = self._boot.total(self.by_text(change))
        is_profile_only = source in (ResampleSource.PROFILE, ResampleSource.DECISIONS)
        return (spent[:1] if is_profile_only else spent) * self.factors(source, change)

    def _call_seconds(self, profile: Profile, rows: slice) -> Values:
        """Return [rows, P] seconds of everything but decisions."""
        constant, per_token = profile.prefill_s
        prompts = constant * self._prompts[rows, :1] + per_token * self._prompts[rows, 1:]
        total = np.repeat(prompts, len(self._replays), 1)
        for columns, kinds, begins, rounds in self._groups:
            # `reduceat` would be wrong for an empty part; every replay has at least the two kinds of long backlogs.
            total[:, columns] += np.add.reduceat(kinds.seconds(profile, rounds[rows]), begins, 1)
        return total

    def _decision_seconds(self, profile: Profile, rows: slice) -> Values:
        """Return [rows, P] seconds of decisions."""
        prices = np.array([profile.decision(rounds.cost_name) for rounds in self._replays])
        total: Values = prices * self._decisions[rows]
        return total
