"""Speeds with intervals, all from the same resamples of the prompts and of the profile's timings, as lines of a report."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from ...decode.compare.intervals import Ratio, Resamples, Values
from ..replay.bounds.oracle import Ideal
from ..replay.bounds.regret import planned_rounds
from ..replay.log import Played
from ..replay.run import Replayed
from ..replay.traces.arrays import TraceArrays
from .insight import Entry
from .pricing import Draws, Priced, Vary
from .records import Line, verdict

if TYPE_CHECKING:
    from ..fit.continuation.values import Achievable

ASKED = ("rule", "learned")
"""Kinds of lines that get a verdict."""

Counts = tuple[float, float, float, float]
"""Of a round: tokens committed, drafted, verified, accepted."""


class Speeds:
    """Tokens/s in every resample of one sort.

    Args:
        rates: [1 + R, P], the fixed lengths 0..K, then the entries.
        kinds: of the entries, by name.

    Attributes:
        plain, best: [1 + R] of length 0, and of the best length, which is picked again in each resample.
        fixed: [K + 1] of each length in the sample.
        of: by entry.
    """

    def __init__(self, rates: Values, kinds: Mapping[str, str]) -> None:
        fixed = rates.shape[1] - len(kinds)
        self.plain, self.best = rates[:, 0], rates[:, :fixed].max(1)
        self.fixed: tuple[float, ...] = tuple(rates[0, :fixed].tolist())
        self.of = {name: rates[:, fixed + at] for at, name in enumerate(kinds)}
        self._static = [name for name, kind in kinds.items() if kind == "static"]

    def to_rival(self, name: str) -> Values:
        """Return an entry's speed against the best of what reads nothing: fixed lengths, static trees."""
        ratio: Values = self.of[name] / np.max([self.best, *(self.of[n] for n in self._static if n != name)], axis=0)
        return ratio


class Comparison:
    """Fixed lengths and policies beside each other.

    Args:
        boot, draws: resamples of the prompts, and of the latency.
        tokens: [1 + R] or [1 + R, P] in every resample.
        spent: [1 + R, P] seconds by what was drawn anew.
        kinds: of the entries, by name.

    Attributes:
        found: the speeds where all is drawn.
        to_rivals: by entry, [1 + R] its speed against the best of what needs no policy.
        by_profile: the same with its interval where the profile's timings of model calls alone are drawn; empty where it
            kept none.
        ceiling: [1 + R] of the oracle; None without.
    """

    def __init__(
        self, boot: Resamples, draws: Draws, tokens: Values, spent: Mapping[Vary, Values], kinds: Mapping[str, str]
    ) -> None:
        self._boot, self._draws = boot, draws
        tokens = tokens.reshape(len(tokens), -1)
        self._speeds = {
            # Where the profile alone is drawn, rows are its draws and tokens are those of the sample.
            vary: Speeds((tokens if vary in (Vary.ALL, Vary.PROMPTS) else tokens[:1]) / some, kinds)
            for vary, some in spent.items()
        }
        self.found = self._speeds[Vary.ALL]
        self.to_rivals = {name: self.found.to_rival(name) for name in kinds}
        self.by_profile = {name: self._alone(Vary.PROFILE, name) for name in kinds} if draws.drawn else {}
        self.ceiling: Values | None = None

    def _alone(self, vary: Vary, name: str) -> Ratio:
        """Return an entry's ratio to its rivals with the interval over what is drawn."""
        values = self._speeds[vary].to_rival(name)
        return (self._boot if vary in (Vary.ALL, Vary.PROMPTS) else self._draws).interval(values)

    def line(self, name: str, kind: str, rate: Values, counts: Counts | None, note: str) -> Line:
        """Return a line of the report, with its verdict and what the interval behind it is made of."""
        best, gap = self.found.best, np.zeros_like(rate)
        if self.ceiling is not None:
            with np.errstate(invalid="ignore", divide="ignore"):
                # 0 where the best fixed length is the bound: there is no gain to have a share of.
                gap = np.where(self.ceiling > best, (rate - best) / (self.ceiling - best), 0.0)
        of_plain, of_best, closed = (
            self._boot.interval(values) for values in (rate / self.found.plain, rate / best, gap)
        )
        committed, drafted, verified, accepted = counts or (0.0, 0.0, 0.0, 0.0)
        made = Line(name, kind, float(rate[0]), of_plain, of_best, closed, committed, drafted, verified, accepted, note)
        if kind not in ASKED:
            return made
        told = verdict(self._boot.interval(self.to_rivals[name]), self._boot.prompts, self.by_profile.get(name))
        kept = self._draws.drawn and self._boot.prompts > 1
        parts = {vary.value: self._alone(vary, name) for vary in Vary} if kept else {}
        return dataclasses.replace(made, verdict=told, parts=parts)

    def first_lines(self, plain: Counts, best: Counts, best_name: str) -> list[Line]:
        """Return the lines of plain decoding and of the best fixed length."""
        note = f"{best_name}, chosen on these prompts"
        return [
            self.line("plain decoding", "fixed", self.found.plain, plain, "fixed:0"),
            self.line("best fixed", "fixed", self.found.best, best, note),
        ]


class SpeedTable(Comparison):
    """The lines of a report on dense traces.

    Args:
        arrays, boot, draws: the trace, resamples of its prompts, and of its latency.
        fixed: every fixed length 0..K.
        entries: policies.
        plan: the oracle's.
        achievable: an estimate, or None.

    Attributes:
        to_static, to_achievable: [1 + R] against the best static tree and the achievable estimate; empty without.
    """

    def __init__(
        self,
        arrays: TraceArrays,
        boot: Resamples,
        draws: Draws,
        fixed: Sequence[Played],
        entries: Sequence[Entry],
        plan: Ideal,
        achievable: Achievable | None,
    ) -> None:
        replays, ideal = [*fixed, *(e.played for e in entries)], planned_rounds(arrays, plan)
        spent_s = torch.stack([*(one.result.seconds for one in replays), plan.seconds], 1)
        rounds = [*(one.rounds for one in replays), ideal]
        priced = Priced(boot, draws, rounds, arrays.prompt_tokens, spent_s)
        tokens, spent = boot.total(arrays.text_tokens), {vary: priced.seconds(vary) for vary in Vary}
        kinds = {e.name: e.kind for e in entries}
        super().__init__(boot, draws, tokens, {vary: some[:, :-1] for vary, some in spent.items()}, kinds)
        self._fixed, self._entries = fixed, entries
        # An estimate is no replay: it costs more or less as the oracle's plan does.
        pace = spent[Vary.ALL][:, -1] / spent[Vary.PROMPTS][:, -1]
        self.ceiling = bound = tokens / spent[Vary.ALL][:, -1]
        self._bound: Values = bound
        self._achievable: Values | None = (
            None if achievable is None else tokens / (boot.total(achievable.seconds) * pace)
        )
        static = [self.found.of[name] for name, kind in kinds.items() if kind == "static"]
        self.to_static = {name: rate / one for one in static for name, rate in self.found.of.items()}
        self.to_achievable = {}
        if self._achievable is not None:
            self.to_achievable = {name: rate / self._achievable for name, rate in self.found.of.items()}

    def lines(self, best: Played) -> list[Line]:
        """Return all lines; `best` is the best fixed length."""
        out = self.first_lines(_counts(self._fixed[0].result), _counts(best.result), best.result.name)
        for e in self._entries:
            out.append(self.line(e.name, e.kind, self.found.of[e.name], _counts(e.played.result), e.note))
        if self._achievable is not None:
            note = "best cross-fitted continuation value on all scalars, decisions for nothing"
            out.append(self.line("achievable estimate", "achievable", self._achievable, None, note))
        out.append(self.line("oracle bound", "bound", self._bound, None, "knows every accepted length"))
        return out


def _counts(played: Replayed) -> Counts:
    rounds = max(1, int(played.rounds.sum()))
    drafted, verified, accepted = (
        float(count.sum()) / rounds for count in (played.drafted, played.verified, played.accepted)
    )
    return played.block_efficiency, drafted, verified, accepted
