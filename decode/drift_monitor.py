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


class AcceptanceWatch:
    """Sums predicted and accepted lengths over the last `WINDOW` rounds."""

    def __init__(self) -> None:
        self._rounds: deque[tuple[float, float, int, int]] = deque(maxlen=WINDOW)  # mean, variance, accepted, tokens

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

    def conditional(self) -> float:
        """Return the share of accepted tokens among those whose predecessors were accepted."""
        accepted = sum(record[2] for record in self._rounds)
        rejected = sum(record[2] < record[3] for record in self._rounds)
        return accepted / max(accepted + rejected, 1)


class DriftMonitor:
    """Observes a host (`policies.host.PolicyHost`): warns once when the mean accepted length leaves the band.

    Args:
        policy: can be monitored (`make_monitor`).
        mode: `warn`, or `fallback` to replace the policy by the best fixed length as well.
        fallback: length if the policy has no profile.
        streams: number of streams that are verified together.
    """

    def __init__(self, policy: LearnedPolicy, mode: str, fallback: int, streams: int) -> None:
        self._policy, self._mode, self._fallback, self._streams = policy, mode, fallback, streams
        self.reset()

    def reset(self) -> None:
        """Forget earlier rounds."""
        self._watch: AcceptanceWatch | None = AcceptanceWatch()
        self._survival: list[list[float]] = []  # of the round, by stream

    def on_decision(self, step: DraftStep, state: State) -> None:
        """Record the predicted survival of the tokens that a decision was about."""
        if self._watch is None or not step.depth:  # before the first token nothing is predicted
            return
        if step.depth == 1:
            self._survival = [[] for _ in step.alive]
        survival = self._policy.latest(state)[:, 0].tolist()
        for stream in np.flatnonzero(step.alive[:, 0]).tolist():
            self._survival[stream].append(survival[stream])

    def on_outcome(self, outcome: RoundOutcome) -> StopPolicy | None:
        """Record a round; return the policy that replaces the monitored one, if any."""
        if self._watch is None:
            return None
        is_counted = (outcome.active & ~outcome.cut).tolist()
        for stream, survival in enumerate(self._survival):
            predicted = survival[: int(outcome.verified[stream])]
            if predicted and is_counted[stream]:
                self._watch.add(predicted, int(outcome.accepted[stream]))
        self._survival = []
        live, low, high = self._watch.band() or (0.0, 0.0, 0.0)
        if low <= live <= high:
            return None
        message = (
            f"policy {self._policy.name}: {live:.2f} drafted tokens a round were accepted over the last rounds, but its "
            f"calibration predicts {max(low, 0.0):.2f} to {high:.2f}; it may have been trained on other texts, another pair "
            "or another temperature (the text is not affected, only the speed)"
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
        return None
    # A policy that is first called at depth 2 does not predict S_1, and a continuation value is not a survival.
    if policy.first > 1 or policy.rule.kind == "continuation":
        return None
    return DriftMonitor(policy, mode, fallback, streams)


def best_fixed(policy: StopPolicy, acceptance: float, otherwise: int, streams: int = 1) -> int:
    """Return the draft length with the most tokens per second at this acceptance, by the policy's saved profile.

    Args:
        policy: its `metadata.profile` has the costs.
        acceptance: probability of each token, given those before it.
        otherwise: the result if no profile was saved.
        streams: number of streams that are verified together.
    """
    if not isinstance(policy, LearnedPolicy) or not policy.metadata.profile:
        return otherwise
    try:
        profile = Profile.from_dict(policy.metadata.profile, "the policy's profile")
    except InputError:
        return otherwise
    # E[min(A, k) + 1] = 1 + a + ... + a^k.
    tokens = np.cumsum(acceptance ** np.arange(min(policy.max_depth, profile.max_depth) + 1))
    costs = dataclasses.replace(profile, batch=None) if streams == 1 else profile
    return int(CostGrid(costs, context=profile.low.context).length_rates(np.array([streams]), tokens).argmax())
