"""Speeds with intervals, from the same resamples of the clusters and of the profile's timings, as lines of a report."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from ...decode.benchmark import Ratio
from ..replay.bounds.oracle import Ideal
from ..replay.bounds.regret import planned_rounds
from ..replay.log import Played
from ..replay.run import Replayed
from ..replay.traces.arrays import TraceArrays
from ..statistics import Resamples, Values
from .insight import Entry
from .pricing import Draws, Priced, Vary
from .records import ROUNDING, Line, verdict

if TYPE_CHECKING:
    from ..fit.achievable import Achievable

POLICIES = ("rule", "learned")
"""Kinds of lines that get a verdict."""

Counts = tuple[float, float, float, float]
"""Of a round: tokens committed, drafted, verified, accepted."""


class Speeds:
    """Tokens/s in every resample of one source of error.

    Args:
        rates: [1 + R, P], the fixed lengths 0..K, then the entries.
        kinds: of the entries, by name.

    Attributes:
        plain, best: [1 + R] of length 0, and of the best length, which is chosen again in each resample.
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
        """Return the speed of an entry over the fastest fixed length or static tree, [1 + R]."""
        ratio: Values = self.of[name] / np.max([self.best, *(self.of[n] for n in self._static if n != name)], axis=0)
        return ratio


class Comparison:
    """Fixed lengths and policies next to each other.

    Args:
        boot, draws: resamples of the clusters, and of the latency.
        tokens: [S], or [S, P'] if policies commit different numbers of tokens in the same rounds.
        priced: seconds of P' replays: the fixed lengths 0..K, the entries, and further ones such as the bound.
        kinds: of the entries, by name.
        fixed: number of fixed lengths, K + 1.
        primary: name of the entry that was chosen before the evaluation; "" = none.
        largest: share of all tokens in the largest cluster.

    Attributes:
        speeds: tokens/s if all sources of error are drawn.
        rates: [1 + R, P'] the same, by column.
        to_rival: by entry, see `Line.to_rival`.
        parts: of rules and learned policies, see `Line.parts`; empty if the profile kept no timings.
        ceiling: [1 + R] of the oracle; None without.
    """

    def __init__(
        self,
        boot: Resamples,
        draws: Draws,
        tokens: Values,
        priced: Priced,
        kinds: Mapping[str, str],
        fixed: int,
        primary: str = "",
        largest: float = 0.0,
    ) -> None:
        self._largest = largest
        self._boot, self._draws, self._kinds, self._fixed_count, self._primary = boot, draws, kinds, fixed, primary
        self._tokens, self._seconds = tokens, priced.by_text()
        total = boot.total(tokens.reshape(len(tokens), -1))  # [1 + R, 1] or [1 + R, P']
        spent = {vary: priced.seconds(vary) for vary in Vary}
        self._pace = spent[Vary.ALL] / spent[Vary.PROMPTS]
        self.rates: Values = total / spent[Vary.ALL]
        columns = fixed + len(kinds)
        self.speeds = Speeds(self.rates[:, :columns], kinds)
        self._static = [fixed + at for at, kind in enumerate(kinds.values()) if kind == "static"]
        lengths = range(fixed)
        self._to_plain, self._to_best = self._ratios([0]), self._ratios(lengths)
        self.to_rival = self._ratios([*lengths, *self._static]) if self._static else self._to_best
        self.parts: dict[str, dict[str, Ratio]] = {}
        if draws.drawn and boot.clusters > 1:
            prompts = self._ratios([*lengths, *self._static], is_priced=False)
            alone = {v: Speeds((total[:1] / spent[v])[:, :columns], kinds) for v in (Vary.PROFILE, Vary.DECISIONS)}
            for name in (name for name, kind in kinds.items() if kind in POLICIES):
                drawn = {vary.value: draws.interval(speeds.to_rival(name)) for vary, speeds in alone.items()}
                self.parts[name] = {"all": self.to_rival[name], "prompts": prompts[name], **drawn}
        self.ceiling: Values | None = None

    def _ratios(self, rivals: Sequence[int], *, is_priced: bool = True) -> dict[str, Ratio]:
        """Return the ratio of each entry to the fastest of some columns.

        The intervals of all rules and learned policies hold at once, that of the primary policy and those of other entries
        by themselves.
        """
        policies = [name for name, kind in self._kinds.items() if kind in POLICIES and name != self._primary]
        families = [policies, *([name] for name in self._kinds if name not in policies)]
        at = {name: self._fixed_count + number for number, name in enumerate(self._kinds)}
        price = -np.log(self._pace) if is_priced else None
        ratios: dict[str, Ratio] = {}
        for names in filter(None, families):
            others = [rival for rival in rivals if [rival] != [at[name] for name in names]]
            logs = self._boot.log_ratios(self._tokens, self._seconds, [at[name] for name in names], others, price)
            ratios |= zip(names, self._boot.simultaneous([logs])[0], strict=True)
        return ratios

    def line(self, name: str, kind: str, rate: Values, counts: Counts | None, note: str) -> Line:
        """Return a line of the report, with its verdict.

        Args:
            name, kind, note: see `Line`.
            rate: [1 + R] tokens/s.
            counts: of a round; None if there are no rounds.
        """
        best, gap = self.speeds.best, np.zeros_like(rate)
        if self.ceiling is not None:
            with np.errstate(invalid="ignore", divide="ignore"):
                # 0 if the best fixed length is the bound, up to rounding: the gain of the oracle is 0.
                gap = np.where(self.ceiling > best * (1.0 + ROUNDING), (rate - best) / (self.ceiling - best), 0.0)
        to_plain = self._to_plain.get(name) or self._boot.interval(rate / self.speeds.plain)
        to_best = self._to_best.get(name) or self._boot.interval(rate / best)
        numbers = counts or (0.0, 0.0, 0.0, 0.0)
        line = Line(name, kind, float(rate[0]), to_plain, to_best, self._boot.interval(gap), *numbers, note)
        if kind not in POLICIES:
            return line
        rival, parts = self.to_rival[name], self.parts.get(name, {})
        result = verdict(rival, self._boot.clusters, parts, self._largest)
        return dataclasses.replace(line, to_rival=rival, verdict=result, parts=parts)

    def first_lines(self, plain: Counts, best: Counts, best_name: str) -> list[Line]:
        """Return the lines of plain decoding and of the best fixed length."""
        note = f"{best_name}, chosen on these prompts"
        return [
            self.line("plain decoding", "fixed", self.speeds.plain, plain, "fixed:0"),
            self.line("best fixed", "fixed", self.speeds.best, best, note),
        ]


class SpeedTable(Comparison):
    """The lines of a report on dense traces.

    Args:
        arrays: the trace.
        boot, draws: resamples of its clusters, and of its latency.
        fixed: every fixed length 0..K.
        entries: policies.
        plan: the oracle's.
        achievable: an estimate, or None.
        primary, largest: see `Comparison`.

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
        primary: str = "",
        largest: float = 0.0,
    ) -> None:
        replays, ideal = [*fixed, *(e.played for e in entries)], planned_rounds(arrays, plan)
        spent_s = torch.stack([*(one.result.seconds for one in replays), plan.seconds], 1)
        rounds = [*(one.rounds for one in replays), ideal]
        priced = Priced(boot, draws, rounds, arrays.prompt_tokens, spent_s)
        tokens = arrays.text_tokens.double().numpy()
        kinds = {e.name: e.kind for e in entries}
        super().__init__(boot, draws, tokens, priced, kinds, len(fixed), primary, largest)
        self._fixed, self._entries = fixed, entries
        self.ceiling = bound = self.rates[:, -1]
        self._bound: Values = bound
        self._achievable: Values | None = None
        if achievable is not None:
            # An estimate is no replay: it costs more or less as the oracle's plan does.
            self._achievable = boot.total(tokens) / (boot.total(achievable.seconds) * self._pace[:, -1])
        static = [self.speeds.of[name] for name, kind in kinds.items() if kind == "static"]
        self.to_static = {name: rate / one for one in static for name, rate in self.speeds.of.items()}
        self.to_achievable = {}
        if self._achievable is not None:
            self.to_achievable = {name: rate / self._achievable for name, rate in self.speeds.of.items()}

    def lines(self, best: Played) -> list[Line]:
        """Return all lines; `best` is the best fixed length."""
        out = self.first_lines(_counts(self._fixed[0].result), _counts(best.result), best.result.name)
        for e in self._entries:
            out.append(self.line(e.name, e.kind, self.speeds.of[e.name], _counts(e.played.result), e.note))
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
