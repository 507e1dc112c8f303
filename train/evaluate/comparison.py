"""Speeds of fixed lengths and policies, with intervals from the same resamples of clusters and of the profile's timings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ...decode.benchmark import Ratio
from ...policies.contract import StopPolicy
from ...policies.display import Progress, silent
from ..replay.traces.arrays import TraceArrays
from .analysis import Replays
from .pricing import Priced, ProfileBootstrap, ResampleSource
from .records import POLICIES, Line
from .statistics import SAME, Clusters, Resamples, Values
from .verdict import verdict

Counts = tuple[float, float, float, float]
"""Per round: tokens committed, drafted, verified, accepted."""


class Job(NamedTuple):
    """A policy to compare; `name`, `kind` and `note` as of `Line`."""

    name: str
    kind: str
    policy: StopPolicy
    note: str


@dataclass(frozen=True)
class Setting:
    """What policies are compared on.

    Attributes:
        arrays, costs: the trace, and the latency of its rounds.
        clusters: that intervals resample.
        primary, seed, progress: see `evaluate`.
    """

    arrays: TraceArrays
    costs: ProfileBootstrap
    clusters: Clusters
    primary: str = ""
    seed: int = 0
    progress: Progress = silent


@dataclass(frozen=True)
class Compared:
    """The lines of a report, and what its answer, findings and sections need besides.

    Attributes:
        lines, fixed, caveats: see `Report`.
        best_name: of the best fixed length.
        clusters, boot: of the sequences that were compared.
        replays: of whole texts; None of single rounds, of which there are `rounds`.
        below_bound: policies that need less time than the oracle on a text, which is impossible.
        to_achievable: speed of each policy over the achievable estimate.
    """

    lines: list[Line]
    fixed: tuple[float, ...]
    best_name: str
    clusters: Clusters
    boot: Resamples
    replays: Replays | None = None
    below_bound: Sequence[str] = ()
    to_achievable: Mapping[str, Ratio] = field(default_factory=dict)
    rounds: int = 0
    caveats: tuple[str, ...] = ()


class Comparison:
    """Speeds of the fixed lengths 0..K and of other entries.

    Args:
        boot, costs: resamples of the clusters, and of the latency.
        tokens: [S], or [S, P] if policies commit different numbers of tokens in the same rounds.
        priced: seconds of P replays: the fixed lengths, the entries, and the oracle bound if `has_bound`.
        kinds: kind of each entry (`Line.kind`) by name.
        primary: name of the entry that was chosen before the evaluation; "" if there is none.
        largest: share of all tokens in the largest cluster.

    Attributes:
        rates: [1 + R, P] tokens/s if everything is resampled, by column.
        fixed: [K + 1] tokens/s of each fixed length in the sample.
        plain, best: [1 + R] of length 0, and of the best length, which is chosen again in each resample.
        pace: [1 + R, P] seconds over those without the profile's uncertainty.
        bound: [1 + R] of the oracle; None without.
    """

    def __init__(
        self,
        boot: Resamples,
        costs: ProfileBootstrap,
        tokens: Values,
        priced: Priced,
        kinds: Mapping[str, str],
        *,
        has_bound: bool = False,
        primary: str = "",
        largest: float = 0.0,
    ) -> None:
        self._boot, self._kinds, self._primary, self._largest = boot, kinds, primary, largest
        self._tokens, self._seconds = tokens, priced.by_text()
        total = boot.total(tokens.reshape(len(tokens), -1))  # [1 + R, 1] or [1 + R, P]
        spent = {source: priced.seconds(source) for source in ResampleSource}
        self.pace: Values = spent[ResampleSource.ALL] / spent[ResampleSource.PROMPTS]
        self.rates: Values = total / spent[ResampleSource.ALL]
        lengths = range(self.rates.shape[1] - len(kinds) - has_bound)
        self._column = {name: at for at, name in enumerate(kinds, len(lengths))}
        self.fixed: tuple[float, ...] = tuple(self.rates[0, : len(lengths)].tolist())
        self.plain, self.best = self.rates[:, 0], self.rates[:, : len(lengths)].max(1)
        self.bound = self.rates[:, -1] if has_bound else None
        rivals = [*lengths, *(self._column[name] for name, kind in kinds.items() if kind == "static")]
        self._to_plain, self._to_best = self._ratios([0]), self._ratios(lengths)
        self._to_rival = self._ratios(rivals) if len(rivals) > len(lengths) else self._to_best
        self._parts: dict[str, dict[str, Ratio]] = {}
        if costs.profiles and boot.clusters > 1:
            prompts = self._ratios(rivals, is_priced=False)
            for name in (name for name, kind in kinds.items() if kind in POLICIES):
                self._parts[name] = {"all": self._to_rival[name], "prompts": prompts[name]}
                for source in (ResampleSource.PROFILE, ResampleSource.DECISIONS):
                    rates = total[:1] / spent[source]
                    ratios = rates[:, self._column[name]] / rates[:, rivals].max(1)
                    self._parts[name][source.value] = costs.interval(ratios)

    def rate(self, name: str) -> Values:
        """Return [1 + R] tokens/s of an entry."""
        out: Values = self.rates[:, self._column[name]]
        return out

    def _ratios(self, rivals: Sequence[int], *, is_priced: bool = True) -> dict[str, Ratio]:
        """Return the ratio of each entry to the fastest of the columns `rivals`.

        The intervals of all rules and learned policies hold at once, those of the primary policy and of other entries by
        themselves.
        """
        policies = [name for name, kind in self._kinds.items() if kind in POLICIES and name != self._primary]
        families = [policies, *([name] for name in self._kinds if name not in policies)]
        price = -np.log(self.pace) if is_priced else None
        ratios: dict[str, Ratio] = {}
        for names in filter(None, families):
            columns = [self._column[name] for name in names]
            others = [rival for rival in rivals if [rival] != columns]
            logs = self._boot.log_ratios(self._tokens, self._seconds, columns, others, price)
            ratios |= zip(names, self._boot.simultaneous([logs])[0], strict=True)
        return ratios

    def line(self, name: str, kind: str, rate: Values, counts: Counts | None = None, note: str = "") -> Line:
        """Return a line of the report, with its verdict.

        Args:
            name, kind, note: see `Line`.
            rate: [1 + R] tokens/s.
            counts: None if there are no rounds.
        """
        share = np.zeros_like(rate)
        if self.bound is not None:
            with np.errstate(invalid="ignore", divide="ignore"):
                # 0 if the best fixed length is the bound, up to rounding: there is no oracle gain.
                has_gain = self.bound > self.best * (1.0 + SAME)
                share = np.where(has_gain, (rate - self.best) / (self.bound - self.best), 0.0)
        to_plain = self._to_plain.get(name) or self._boot.interval(rate / self.plain)
        to_best = self._to_best.get(name) or self._boot.interval(rate / self.best)
        numbers = counts or (0.0, 0.0, 0.0, 0.0)
        line = Line(name, kind, float(rate[0]), to_plain, to_best, self._boot.interval(share), *numbers, note)
        if kind not in POLICIES:
            return line
        rival, parts = self._to_rival[name], self._parts.get(name, {})
        result = verdict(rival, self._boot.clusters, parts, self._largest)
        return dataclasses.replace(line, to_rival=rival, verdict=result, parts=parts)

    def lines(
        self, plain: Counts, best: Counts, best_name: str, counts: Sequence[Counts], notes: Sequence[str]
    ) -> list[Line]:
        """Return the lines of plain decoding, the best fixed length and all entries; `counts` and `notes` by entry."""
        out = [
            self.line("plain decoding", "fixed", self.plain, plain, "fixed:0"),
            self.line("best fixed", "fixed", self.best, best, f"{best_name}, chosen on these prompts"),
        ]
        for (name, kind), count, note in zip(self._kinds.items(), counts, notes, strict=True):
            out.append(self.line(name, kind, self.rate(name), count, note))
        return out
