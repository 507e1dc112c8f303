"""Every section of a report behind its table of speeds, computed from the rounds that were replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...policies.display import Progress
from ...policies.profile import Profile
from ..replay.bounds.oracle import Ideal
from ..replay.bounds.regret import Regret, judge, planned_rounds
from ..replay.log import Played
from ..replay.traces.arrays import TraceArrays
from ..statistics import Resamples
from .insight import Entry, StopCost, by_group, by_prompt, lengths, sensitivity, stop_cost, time_share
from .losses import decoder, largest_losses
from .pricing import Draws, Priced, Vary
from .reliability import has_survival, reliability


@dataclass(frozen=True)
class Material:
    """What the sections are computed from.

    Attributes:
        arrays, draws: the trace, and its latency with draws of it.
        entries: the policies.
        fixed: every fixed length 0..K; `best` the fastest.
        ideal: the oracle's plan.
        candidate: name of the entry that sections on one policy are about.
    """

    arrays: TraceArrays
    draws: Draws
    entries: Sequence[Entry]
    fixed: Sequence[Played]
    best: Played
    ideal: Ideal
    candidate: str

    @property
    def profile(self) -> Profile:
        """The latency as measured."""
        return self.draws.profile

    @property
    def subject(self) -> Entry:
        """The entry that sections on one policy are about."""
        return next(e for e in self.entries if e.name == self.candidate)

    @property
    def everyone(self) -> list[Entry]:
        """The best fixed length, then the entries."""
        return [Entry("best fixed", "fixed", "", self.best), *self.entries]

    def judged(self, played: Played) -> Regret:
        """Return what each round of a replay lost."""
        return judge(self.arrays, played.rounds, self.ideal, self.profile)


def stop_costs(material: Material) -> tuple[StopCost, ...]:
    """Return the cost of wrong stops of the best fixed length and every entry."""
    tokens = int(material.arrays.text_tokens.sum())
    return tuple(stop_cost(e.name, material.judged(e.played), tokens) for e in material.everyone)


def details(material: Material, boot: Resamples, seed: int, progress: Progress) -> dict[str, Any]:
    """Return the sections by name: records of `insight`, `reliability` and `losses`.

    Args:
        material: replays of this trace.
        boot: resamples of its prompts.
        seed: of random samples where there is too much to show.
        progress: told at every section.
    """
    arrays, profile, subject = material.arrays, material.profile, material.subject
    depth = arrays.depth
    learned = [(e, e.played.policy) for e in material.entries if has_survival(e.played.policy)]
    steps: dict[str, Callable[[], Any]] = {
        "stops": lambda: stop_costs(material),
        "time": lambda: tuple(time_share(e.name, arrays, e.played, profile) for e in material.everyone),
        "lengths": lambda: tuple(
            lengths(e.name, e.played, material.judged(e.played), depth) for e in (subject, material.everyone[0])
        ),
        "reliability": lambda: tuple(
            reliability(policy, arrays, e.played.rounds, e.played.result, seed) for e, policy in learned
        ),
        "groups": lambda: by_group(arrays, material.entries, material.fixed, material.best, material.draws, seed),
        "prompts": lambda: by_prompt(arrays, subject.played, material.fixed[0], material.best, seed),
        "sensitivity": lambda: sensitivity(arrays, material.entries, material.fixed, material.draws, boot),
        "losses": lambda: largest_losses(
            arrays, subject.played, material.best, material.judged(subject.played), decoder(arrays.header)
        ),
    }
    out: dict[str, Any] = {"subject": subject.name, "per_prompt": _per_prompt(material, boot)}
    for done, (name, compute) in enumerate(steps.items()):
        progress("report", done, len(steps))
        out[name] = compute()
    progress("report", len(steps), len(steps))
    return out


def _per_prompt(material: Material, boot: Resamples) -> dict[str, Any]:
    """Return what `report_comparison` reads: figures by prompt, and what each draw of the profile's timings changes."""
    arrays, profile = material.arrays, material.profile
    replays = {"plain decoding": material.fixed[0], **{e.name: e.played for e in material.everyone}}
    seconds = {name: played.result.seconds for name, played in replays.items()}
    seconds["oracle bound"] = material.ideal.seconds
    rounds = [*(played.rounds for played in replays.values()), planned_rounds(arrays, material.ideal)]
    # Draws with the default seed, whatever that of the report: two reports on one profile have the same ones.
    draws = Draws(profile)
    priced = Priced(boot, draws, rounds, arrays.prompt_tokens, torch.stack(list(seconds.values()), 1))
    # Seconds are sums of model calls and decisions, so that what a draw changes of each adds up.
    calls, decided = (priced.factors(vary)[1:] for vary in (Vary.PROFILE, Vary.DECISIONS))
    return {
        "clusters": arrays.clusters,
        "units": boot.labels,
        "prompts": arrays.prompt_ids,
        "tokens": arrays.text_tokens.double().tolist(),
        "seconds": {name: values.double().tolist() for name, values in seconds.items()},
        "profile": {
            "fingerprint": profile.fingerprint,
            "is_timed": draws.is_timed,
            "pace_error": profile.noise.pace_error if profile.noise else 0.0,
            # Timings are in whole nanoseconds: nine digits are exact.
            "factors": dict(zip(seconds, (calls + decided - 1.0).round(9).T.tolist(), strict=True)),
        },
    }
