"""The drift monitor: is what the target accepts what the policy's calibration predicts?

A learned policy says for each token it was asked about how likely the round is to get that far, S_j. If it is calibrated,
a round that drafted k tokens has S_1 + ... + S_k of them accepted on average, whatever the policy decided along the way,
with a variance of sum (2j - 1) S_j - (sum S_j)^2. Summed over the last rounds that gives a band for the mean; a policy
that was trained on other texts, another pair or another temperature leaves it.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections import deque
from dataclasses import dataclass

import numpy as np

from ..policies.batches import CostGrid
from ..policies.contract import Array, DraftStep, RoundOutcome, State, StopPolicy
from ..policies.errors import InputError, SpecstopWarning
from ..policies.fixed import FixedLength
from ..policies.learned import LearnedPolicy, TreeGain
from ..policies.profile import Profile

MODES = ("off", "warn", "fallback")
WINDOW, MIN_ROUNDS = 200, 60
DEVIATIONS = 4.5
"""Half width of the band in standard deviations. Windows overlap and are tested after every round: with 4.5 a calibrated
policy is reported in about one of a thousand texts of 10,000 rounds."""

SLACK = 0.1
"""Share of the prediction added to half the band: fitted calibrations are that far off on new prompts of the same sort."""


@dataclass(frozen=True)
class Band:
    """Mean accepted tokens a round: as they were, and between which two values the calibration puts them."""

    live: float
    low: float
    high: float
    rounds: int

    @property
    def left(self) -> bool:
        """Whether the live mean lies outside."""
        return not self.low <= self.live <= self.high


class AcceptanceWatch:
    """Compares the last rounds with what was predicted for them."""

    def __init__(self, min_rounds: int = MIN_ROUNDS) -> None:
        self._min_rounds = min_rounds
        self._rounds: deque[tuple[float, float, int, int]] = deque(maxlen=WINDOW)  # mean, variance, accepted, known
        self._survival: list[list[float]] = []  # of the round, by stream

    def decided(self, depth: int, survival: Array, asked: Array) -> None:
        """Take in S_j [S] after a decision at depth j >= 1 of chains; `asked` [S] bool, the streams that it was about."""
        if depth == 1:
            self._survival = [[] for _ in asked]
        for own, value, was_asked in zip(self._survival, survival.tolist(), asked.tolist(), strict=True):
            if was_asked:
                own.append(value)

    def finished(self, accepted: Array, verified: Array, counts: Array) -> None:
        """Take in how the rounds ended; tokens that the policy was not asked about are left out.

        Args:
            accepted, verified: [S] int64, min(A, k) and k.
            counts: [S] bool, streams with a round that was not cut.
        """
        for stream, all_survival in enumerate(self._survival):
            survival = all_survival[: int(verified[stream])]
            if survival and counts[stream]:
                mean = sum(survival)
                # Of the accepted tokens N: E[N] = sum of S_j, E[N^2] = sum of (2j - 1) S_j.
                square = sum((2 * j - 1) * s for j, s in enumerate(survival, 1))
                known = len(survival)
                self._rounds.append((mean, max(square - mean * mean, 0.0), min(int(accepted[stream]), known), known))
        self._survival = []

    def band(self) -> Band | None:
        """Return live mean and band over the window; None before there are enough rounds."""
        count = len(self._rounds)
        if count < self._min_rounds:
            return None
        mean = math.fsum(r[0] for r in self._rounds) / count
        spread = math.sqrt(math.fsum(r[1] for r in self._rounds)) / count
        half = DEVIATIONS * spread + SLACK * mean
        return Band(sum(r[2] for r in self._rounds) / count, mean - half, mean + half, count)

    def conditional(self) -> float:
        """Return the share of tokens accepted among those whose predecessors were."""
        accepted = sum(r[2] for r in self._rounds)
        refused = sum(r[2] < r[3] for r in self._rounds)
        return accepted / (accepted + refused) if accepted + refused else 0.0


class DriftMonitor:
    """Monitor of a host (`policies.host.Monitor`): warns once when live acceptance leaves the band.

    Args:
        policy: can be monitored (`make_monitor`).
        mode: `warn`, or `fallback` to replace the policy by the best fixed length as well.
        fallback: length if the policy has no profile.
        streams: that are verified together.
    """

    def __init__(self, policy: LearnedPolicy, mode: str, fallback: int, streams: int) -> None:
        self._policy, self._mode, self._fallback, self._streams = policy, mode, fallback, streams
        self.reset()

    def reset(self) -> None:
        """Forget earlier rounds."""
        self._watch: AcceptanceWatch | None = AcceptanceWatch()

    def on_decision(self, step: DraftStep, state: State) -> None:
        """Record the predicted survival of the tokens that a decision was about."""
        if self._watch is not None and step.depth:  # before the first token nothing is predicted
            self._watch.decided(step.depth, self._policy.latest(state)[:, 0], step.alive[:, 0])

    def on_outcome(self, outcome: RoundOutcome) -> StopPolicy | None:
        """Record a round; return the policy that replaces the monitored one, if any."""
        if self._watch is None:
            return None
        self._watch.finished(outcome.accepted, outcome.verified, outcome.active & ~outcome.cut)
        band = self._watch.band()
        if band is None or not band.left:
            return None
        message = (
            f"policy {self._policy.name}: {band.live:.2f} drafted tokens a round were accepted over the last {band.rounds} "
            f"rounds, where its calibration predicts {max(band.low, 0.0):.2f} to {band.high:.2f}; it may have been trained "
            "on other texts, another pair or another temperature (the text is not affected, only the speed)"
        )
        replacement = None
        if self._mode == "fallback":
            length = best_fixed(self._policy, self._watch.conditional(), self._fallback, self._streams)
            replacement = FixedLength(length)
            message += f"; drafting {length} tokens a round from here on"
        self._watch = None  # one warning until `reset`
        warnings.warn(message, SpecstopWarning, stacklevel=3)
        return replacement


def check_drift(mode: str) -> None:
    """Raise `InputError` if `mode` is not a mode of the monitor."""
    if mode not in MODES:
        raise InputError(f"--drift: expected one of {', '.join(MODES)}, not {mode!r}")


def make_monitor(
    policy: StopPolicy, mode: str, chain: bool, fallback: int = 4, streams: int = 1
) -> DriftMonitor | None:
    """Return the monitor of a policy; None if it is off or the policy predicts nothing that could be compared.

    Args:
        policy: any policy.
        mode: one of `MODES`.
        chain: whether rounds draft chains.
        fallback, streams: see `DriftMonitor`.

    Raises:
        InputError: an unknown mode.
    """
    check_drift(mode)
    if mode == "off" or not chain or not isinstance(policy, LearnedPolicy) or isinstance(policy, TreeGain):
        return None  # the state of `TreeGain` is that of a tree
    # A policy that is called from depth 2 on does not know S_1, and a continuation value is not a survival.
    if policy.first > 1 or policy.rule.kind == "continuation":
        return None
    return DriftMonitor(policy, mode, fallback, streams)


def best_fixed(policy: StopPolicy, acceptance: float, otherwise: int, streams: int = 1) -> int:
    """Return the length that commits the most tokens a second at this conditional acceptance, by the policy's own profile.

    Args:
        policy: its `facts.profile` has the costs.
        acceptance: chance of each token, given those before it.
        otherwise: the answer where no profile was saved.
        streams: that are verified together.
    """
    if not isinstance(policy, LearnedPolicy) or not policy.metadata.profile:
        return otherwise
    try:
        profile = Profile.from_dict(policy.metadata.profile, "the policy's profile")
    except InputError:
        return otherwise
    deepest = min(policy.max_depth, profile.max_depth)
    # E[min(A, k) + 1] = 1 + a + ... + a^k where every token is accepted with chance a.
    tokens = np.cumsum(acceptance ** np.arange(deepest + 1))
    costs = dataclasses.replace(profile, batch=None) if streams == 1 else profile
    return int(CostGrid(costs, profile.low.context).length_rates(np.array([streams]), tokens).argmax())
