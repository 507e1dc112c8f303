"""The drift monitor compares the accepted lengths of live rounds with a learned policy's predictions.

A learned policy predicts S_j, the probability that j tokens are accepted, for each token that it is called for. If it is
calibrated, a round of k tokens has S_1 + ... + S_k accepted tokens on average, with variance sum (2j - 1) S_j - (sum S_j)^2.
The sums over the last rounds give a band for the mean. A policy that was trained on other texts, another pair or another
temperature leaves it.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections import deque
from collections.abc import Sequence

import numpy as np

from ..policies.batch_rules import CostGrid
from ..policies.contract import DraftStep, RoundOutcome, State, StopPolicy
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
"""Share of the prediction added to half the band: the error of fitted calibrations on new prompts of the same kind."""


class DriftMonitor:
    """Observes a host (`policies.host.PolicyHost`): warns once when the mean accepted length leaves the band.

    Args:
        policy: can be monitored (`make_monitor`).
        mode: `warn`, or `fallback` to replace the policy by the best fixed length as well.
        fallback: length if the policy has no profile.
        streams: number of streams that are verified together.
    """

    def __init__(self, policy: LearnedPolicy, mode: str, fallback: int = 4, streams: int = 1) -> None:
        self._policy, self._mode, self._fallback, self._streams = policy, mode, fallback, streams
        self.reset()

    def reset(self) -> None:
        """Forget earlier rounds."""
        # Of the last rounds: mean and variance of the predicted accepted length, accepted and verified tokens.
        self._rounds: deque[tuple[float, float, int, int]] = deque(maxlen=WINDOW)
        self._survival: list[list[float]] = []  # of the current round, by stream
        self._has_warned = False

    def on_decision(self, step: DraftStep, state: State) -> None:
        """Record the predicted survival of the tokens that a decision was about."""
        if self._has_warned or not step.depth:  # before the first token nothing is predicted
            return
        if step.depth == 1:
            self._survival = [[] for _ in step.alive]
        survival = self._policy.latest(state)[:, 0].tolist()
        for stream in np.flatnonzero(step.alive[:, 0]).tolist():
            self._survival[stream].append(survival[stream])

    def on_outcome(self, outcome: RoundOutcome) -> StopPolicy | None:
        """Record a round; return the policy that replaces the monitored one, if any."""
        if self._has_warned:
            return None
        is_counted = (outcome.active & ~outcome.cut).tolist()
        for stream, survival in enumerate(self._survival):
            predicted = survival[: int(outcome.verified[stream])]
            if predicted and is_counted[stream]:
                self.add(predicted, int(outcome.accepted[stream]))
        self._survival = []
        live, low, high = self.band() or (0.0, 0.0, 0.0)
        if low <= live <= high:
            return None
        message = (
            f"policy {self._policy.name}: {live:.2f} drafted tokens a round were accepted over the last rounds, but its "
            f"calibration predicts {max(low, 0.0):.2f} to {high:.2f}; it may have been trained on other texts, another pair "
            "or another temperature (the text is not affected, only the speed)"
        )
        replacement = None
        if self._mode == "fallback":
            replacement = FixedLength(self.best_length())
            message += f"; drafting {replacement.max_depth} tokens a round from now on"
        self._has_warned = True  # until `reset`
        warnings.warn(message, SpecstopWarning, stacklevel=3)
        return replacement

    def add(self, survival: Sequence[float], accepted: int) -> None:
        """Add a round with predictions S_1, S_2, ... of the verified tokens, and its accepted length."""
        mean = sum(survival)
        square = sum((2 * j - 1) * s for j, s in enumerate(survival, 1))  # E[N^2] of the accepted length N
        count = len(survival)
        self._rounds.append((mean, max(square - mean * mean, 0.0), min(accepted, count), count))

    def band(self) -> tuple[float, float, float] | None:
        """Return mean accepted length and its predicted bounds; None before there are `MIN_ROUNDS`."""
        count = len(self._rounds)
        if count < MIN_ROUNDS:
            return None
        means, variances, accepted, _ = zip(*self._rounds, strict=True)
        mean = math.fsum(means) / count
        half = DEVIATIONS * math.sqrt(math.fsum(variances)) / count + SLACK * mean
        return sum(accepted) / count, mean - half, mean + half

    def best_length(self) -> int:
        """Return the draft length with the most tokens per second, by the policy's profile and the recorded acceptance."""
        if not self._policy.metadata.profile:
            return self._fallback
        try:
            profile = Profile.from_dict(self._policy.metadata.profile, "the policy's profile")
        except InputError:
            return self._fallback
        accepted = sum(length for _, _, length, _ in self._rounds)
        rejected = sum(length < verified for _, _, length, verified in self._rounds)
        acceptance = accepted / max(accepted + rejected, 1)  # of a token after accepted ones
        # E[min(A, k) + 1] = 1 + a + ... + a^k.
        tokens = np.cumsum(acceptance ** np.arange(min(self._policy.max_depth, profile.max_depth) + 1))
        costs = dataclasses.replace(profile, batch=None) if self._streams == 1 else profile
        rates = CostGrid(costs, context=profile.low.context).length_rates(np.array([self._streams]), tokens)
        return int(rates.argmax())


def make_monitor(
    policy: StopPolicy, mode: str, chain: bool, fallback: int = 4, streams: int = 1
) -> DriftMonitor | None:
    """Return the monitor of a policy; None if it is off or the policy predicts nothing that could be compared.

    Args:
        policy: any policy.
        mode: one of `MODES`.
        chain: whether rounds draft chains.
        fallback, streams: see `DriftMonitor`.
    """
    if mode == "off" or not chain or not isinstance(policy, LearnedPolicy) or isinstance(policy, TreeGain):
        return None
    # A policy that is first called at depth 2 does not predict S_1.
    if policy.first > 1:
        return None
    return DriftMonitor(policy, mode, fallback, streams)
