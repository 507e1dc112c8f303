"""Replay of rounds drawn given the text beside live runs of the same prompts: what rounds do, and tokens a second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bars import Bars
from scipy import stats
from specstop.collect.prompts import Prompt, encode
from specstop.collect.run import collect
from specstop.collect.store import Trace
from specstop.decode import Settings
from specstop.decode.benchmark import run_alternating
from specstop.decode.loop import Request, Speculator
from specstop.decode.models.pair import Pair
from specstop.decode.profile import CalibrationRun, loop_decisions
from specstop.decode.verify.noise import stream_key
from specstop.policies import Confidence, FixedLength
from specstop.policies.contract import StopPolicy
from specstop.policies.profile import Profile
from specstop.train.fit.run import train
from specstop.train.replay.run import replay
from specstop.train.replay.traces.arrays import TraceArrays, trace_arrays

DEPTH, DRAWS, BATCH, WARM_UPS = 10, 4, 16, 4
HEADS = ("logistic", "tokens")

MOST_ERRORS = 3.0
"""Standard errors, clustered by prompt, that replay may be from live runs."""

MOST_MISSED = 0.05
"""Of tokens a second over those of plain decoding, that a prediction may be off."""


@dataclass(frozen=True)
class Sizes:
    """How much is run.

    Attributes:
        seeds: of the tables that are enumerated.
        train, prompts, timed: prompts that heads are trained on, that are compared, and that are timed.
        tokens: of each text.
        runs: live runs of each prompt.
        temperatures: of the sampling.
        repetitions: times that collection is timed.
    """

    seeds: int = 2
    train: int = 160
    prompts: int = 200
    timed: int = 100
    tokens: int = 128
    runs: int = 5
    temperatures: tuple[float, ...] = (0.7, 1.0)
    repetitions: int = 3


QUICK = Sizes(1, 32, 8, 2, 32, 1, (0.7,), 1)


@dataclass(frozen=True)
class Side:
    """A pair under one verification at one temperature, and its prompts.

    Attributes:
        train, test: prompts to train heads on, and to compare.
        room: folder for traces.
    """

    pair: Pair
    train: Sequence[Prompt]
    test: Sequence[Prompt]
    temperature: float
    mode: str
    sizes: Sizes
    room: Path

    def compare(self, bars: Bars) -> None:
        """Compare rounds, then speeds."""
        arrays = trace_arrays(self._traces(self.test, draws=DRAWS, seed=1))
        calibration = CalibrationRun(
            self.pair, self._ids(self.train), depth=DEPTH, temperature=self.temperature, verification=self.mode
        )
        for number in range(WARM_UPS):
            calibration.play(number)
        policies = self._policies(calibration.profile())
        for policy in policies:
            self._rounds(policy, arrays, calibration.profile(), bars)
        self._speeds(policies, arrays, calibration, bars)

    @cached_property
    def _settings(self) -> Settings:
        return Settings(self.temperature, self.sizes.tokens, DEPTH, verification=self.mode)

    def _ids(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        return encode(prompts, self.pair.tokenizer, self.pair.readable - self.sizes.tokens - DEPTH)

    def _traces(self, prompts: Sequence[Prompt], **more: Any) -> Trace:
        return collect(
            self.pair, prompts, self.room / f"{len(list(self.room.iterdir()))}", depth=DEPTH,
            temperature=self.temperature, max_new_tokens=self.sizes.tokens, verification=self.mode, **more,
        )  # fmt: skip

    def _policies(self, costs: Profile) -> list[StopPolicy]:
        """Return a fixed length, a rule, and heads that are trained under this verification."""
        seen = self._traces(self.train)
        return [FixedLength(3), Confidence(0.4, DEPTH), *(train(seen, costs, head=head).policy for head in HEADS)]

    def _rounds(self, policy: StopPolicy, arrays: TraceArrays, costs: Profile, bars: Bars) -> None:
        """Compare tokens a call, drafted and accepted a round with those of live runs, clustered by prompt."""
        number = {prompt.id: at for at, prompt in enumerate(self.test)}
        played = replay(arrays, policy, costs)
        each = torch.stack([played.rounds, played.committed, played.drafted, played.accepted], 1).double()
        offline = np.zeros((len(self.test), 4))  # a text of one token has no round
        np.add.at(offline, [number[name] for name in arrays.prompt_ids], each.numpy() / DRAWS)
        live = self._live_sums(policy, costs)
        z, chance = errors(offline, live)
        told = {"z": z.tolist(), "p": chance, "live": ratios(live).tolist(), "replay": ratios(offline).tolist()}
        bars.add(
            f"{self.mode} T={self.temperature:g} {policy.name}", told,
            bool(np.abs(z).max() <= MOST_ERRORS) and chance > 2 * stats.norm.sf(MOST_ERRORS),
            f"tokens a call, drafted, accepted a round: live {_three(ratios(live))}, replay {_three(ratios(offline))}; "
            f"z {_three(z)}, joint p {chance:.3f}",
        )  # fmt: skip

    def _live_sums(self, policy: StopPolicy, costs: Profile) -> Any:
        """Return [P, 4], the mean over runs of rounds, tokens committed by them, drafted and accepted."""
        runs, ids = self.sizes.runs, self._ids(self.test)
        speculator = Speculator(self.pair, policy, self._settings, costs, batch=BATCH)
        asked = [
            Request(tokens, stream_key(100 + run, prompt.id))
            for run in range(runs)
            for prompt, tokens in zip(self.test, ids, strict=True)
        ]
        sums = np.array(
            [
                [len(text.rounds), *(sum(getattr(r, n) for r in text.rounds) for n in ("committed", "drafted", "accepted"))]
                for text in speculator.run(asked)
            ],
            dtype=np.float64,
        )  # fmt: skip
        return sums.reshape(runs, len(ids), 4).mean(0)

    def _speeds(
        self, policies: Sequence[StopPolicy], arrays: TraceArrays, calibration: CalibrationRun, bars: Bars
    ) -> None:
        """Compare tokens a second, as ratios to plain decoding, with those of live texts in turns with a calibration."""
        known, before = self._ids(self.train), calibration.profile()
        decisions = loop_decisions(self.pair, policies, known, self._settings, before)
        runs = [
            Speculator(self.pair, policy, self._settings, before.with_measured_decisions(decisions))
            for policy in (FixedLength(0), *policies)
        ]
        timed = self.test[: self.sizes.timed]
        names = [prompt.id for prompt in timed]
        texts = run_alternating(runs, list(zip(names, self._ids(timed), strict=True)), calibration=calibration)
        arrays = arrays.subset([at for at, name in enumerate(arrays.prompt_ids) if name in names])
        live = [sum(len(text.tokens) for text in own) / sum(text.seconds for text in own) for own in texts]
        profile = calibration.profile().with_measured_decisions(decisions)
        told = [replay(arrays, run.policy, profile).rate for run in runs]
        for policy, rate, guess in zip(policies, live[1:], told[1:], strict=True):
            miss = (rate / live[0]) / (guess / told[0]) - 1.0
            bars.add(
                f"{self.mode} T={self.temperature:g} {policy.name}, speed", miss, abs(miss) <= MOST_MISSED,
                f"{rate / live[0]:.3f} of plain decoding, predicted {guess / told[0]:.3f}, {miss:+.1%}; within 5%",
            )  # fmt: skip


def ratios(sums: Any) -> Any:
    """Return [3]: tokens a call, drafted and accepted a round, ratios of sums."""
    total = sums.sum(0)
    return total[1:] / total[0]


def errors(one: Any, other: Any) -> tuple[Any, float]:
    """Return [3] differences of the ratios in standard errors, clustered by prompt, and the chance of all three together."""
    residual = [(side[:, 1:] - ratios(side) * side[:, :1]) / side[:, 0].mean() for side in (one, other)]
    spread = np.cov((residual[0] - residual[1]).T) / len(one)
    gap = ratios(one) - ratios(other)
    z = gap / np.sqrt(np.diag(spread).clip(1e-18))
    free = np.linalg.matrix_rank(spread, tol=1e-12, hermitian=True)
    if not free:  # nothing is drafted at all
        return z, 0.0 if gap.any() else 1.0
    inverse = np.linalg.pinv(spread, rcond=1e-9, hermitian=True)
    return z, float(stats.chi2.sf(gap @ inverse @ gap, free))


def _three(values: Any) -> str:
    return " / ".join(f"{value:.3f}" for value in values)
