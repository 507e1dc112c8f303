"""`compare`: two reports of `evaluate` side by side: what changed by policy, how sure that is, and what else differs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ....decode.benchmark import Ratio
from ...evaluate.statistics import Resamples, Values
from .read import Read, read_report

PAIRED, UNPAIRED = "paired", "unpaired"
SAME, DIFFERENT, UNKNOWN = "same", "different", "unknown"
PLAIN, BEST = "plain decoding", "best fixed"
_FACTS = (
    "traces", "prompts", "tokens", "temperature", "shaping", "verification", "depth", "topology", "intervals",
    "clusters", "cluster unit",
)  # fmt: skip
"""Facts that are compared as they are; pair and profile are compared inside."""

_MACHINE = ("device", "dtype", "threads")
_OF_PROFILE = (*_MACHINE, "created", "versions")


@dataclass(frozen=True)
class Difference:
    """A line that one or both reports have.

    Attributes:
        name: of the line; `kind` as in the report.
        rate_a, rate_b: tokens per second; None where a report has no such line.
        to_best_a, to_best_b: ratio to the best fixed length of each report.
        gain: B over A of tokens per second; None where that is not known by prompt (unpaired).
        gain_over_best: B over A of the ratios to the best fixed length, in which a pace that all rounds share cancels.
        overlap: whether the intervals of `to_best_a` and `to_best_b` do; None where one of them has none.
    """

    name: str
    kind: str
    rate_a: float | None
    rate_b: float | None
    to_best_a: Ratio | None
    to_best_b: Ratio | None
    gain: Ratio | None
    gain_over_best: Ratio | None
    overlap: bool | None


@dataclass(frozen=True)
class Comparison:
    """The answer of `compare`.

    Attributes:
        a, b: the files.
        method: "paired" over common prompts, or "unpaired"; `why` in words.
        prompts: common ones; 0 where unpaired.
        profiles: of A and B: "same", "different", or "unknown".
        caveats: what the intervals leave out, a sentence each.
        differs: what else differs between the reports: (what, in A, in B).
        lines: of either report, in the order of A.
    """

    a: str
    b: str
    method: str
    why: str
    prompts: int
    profiles: str
    caveats: tuple[str, ...]
    differs: tuple[tuple[str, str, str], ...]
    lines: tuple[Difference, ...]

    def line(self, name: str) -> Difference:
        """Return the line called `name`."""
        return next(line for line in self.lines if line.name == name)

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as plain JSON values."""
        return {"schema": 1, "kind": "comparison", **dataclasses.asdict(self)}


def compare(a: str | Path, b: str | Path, *, seed: int = 0) -> Comparison:
    """Set two reports beside each other.

    Where both hold tokens and seconds by prompt, each line's rate in B over that in A is taken over the prompts that both
    have. Each replicate of the bootstrap resamples those prompts and takes a draw of the timings behind each profile: what
    prompts have in common cancels, and so does the error of a profile that both reports share. Of two profiles the error of
    their mean pace is included too. Else the ratios to the best fixed length are compared as independent ones (the method of
    variance recovery, Zou and Donner 2008, on logarithms): wider than need be. The intervals of a report include its
    profile's timings already.

    Args:
        a, b: report folders, or their report.json.
        seed: of the bootstrap.

    Raises:
        InputError: one of them is no report, or is mangled; the message names the file.
    """
    one, two = read_report(a), read_report(b)
    common = sorted(set(one.clusters) & set(two.clusters))
    is_paired, why = _method(one, two, common)
    rates = _PairedRates(one, two, common, seed) if is_paired else None
    lines = tuple(_difference(name, one, two, rates) for name in dict.fromkeys([*one.lines, *two.lines]))
    profiles, differs = _profiles(one, two), _differs(one, two)
    caveats = [*_untimed(one, two, profiles), *(_drift(lines, differs) if is_paired and profiles == DIFFERENT else ())]
    return Comparison(
        str(one.path), str(two.path), PAIRED if is_paired else UNPAIRED, why, len(common) if is_paired else 0,
        profiles, tuple(caveats), differs, lines,
    )  # fmt: skip


def _method(one: Read, two: Read, common: Sequence[str]) -> tuple[bool, str]:
    lacking = [str(r.path) for r in (one, two) if not r.clusters]
    if lacking:
        return False, f"{' and '.join(lacking)} hold{'s' * (len(lacking) == 1)} no figures by prompt"
    if len(common) < 2:
        return False, f"the reports have {len(common)} prompts in common; a paired comparison needs 2 or more"
    if any(one.tokens_of()[p] != two.tokens_of()[p] for p in common):
        return True, f"over {len(common)} common prompts, whose texts differ in length between the reports"
    return True, f"over {len(common)} common prompts"


class _PairedRates:
    """Tokens/s of two reports in the same resamples of their common prompts, and of their profiles' timings.

    Args:
        one, two: the reports.
        common: clusters that both have.
        seed: of the resamples.
    """

    def __init__(self, one: Read, two: Read, common: Sequence[str], seed: int) -> None:
        self._reports, self._common = (one, two), common
        self._boot = Resamples(_units(one, two, common), seed)
        self._tokens = [self._total(report.tokens_of()) for report in self._reports]
        # Another sequence of random numbers than that of the prompts.
        rng, replicates = np.random.default_rng([seed, 2]), len(self._tokens[0]) - 1
        is_same = one.fingerprint == two.fingerprint
        drawn, other = rng.integers(2**32, size=(2, replicates))
        # Draws of one profile go together: the same index in both reports. Those of two profiles are independent.
        self._drawn = [drawn, drawn if is_same else other]
        # Draws of repetitions treat their paces as independent, which they are not if the machine has slow phases.
        error = 0.0 if is_same else math.hypot(one.pace_error, two.pace_error)
        self._pace = np.concatenate([[1.0], np.exp(error * rng.standard_normal(replicates))])

    def gain(self, name: str) -> Ratio | None:
        """Return B's rate over A's; None for a line without seconds by prompt, such as an estimate."""
        rates = [self._rate(side, name) for side in (0, 1)]
        return self._ratio([rates[0], self._over(rates[1], self._pace)])

    def gain_over_best(self, name: str) -> Ratio | None:
        """Return B's ratio to its best fixed length over A's; None where one of the lines has no seconds by prompt."""
        return self._ratio([self._over(self._rate(side, name), self._rate(side, BEST)) for side in (0, 1)])

    def _ratio(self, sides: Sequence[Values | None]) -> Ratio | None:
        ratio = self._over(sides[1], sides[0])
        return None if ratio is None else self._boot.interval(ratio)

    @staticmethod
    def _over(values: Values | None, others: Values | None) -> Values | None:
        return None if values is None or others is None else values / others

    def _rate(self, side: int, name: str) -> Values | None:
        """Return [1 + R] tokens/s of one report in the sample and in every resample."""
        report = self._reports[side]
        if name not in report.seconds:
            return None
        seconds, factors = self._total(report.seconds_of(name)), np.array(report.factors.get(name, ()))
        if len(factors):
            seconds[1:] *= factors[self._drawn[side] % len(factors)]
        rate: Values = self._tokens[side] / seconds
        return rate

    def _total(self, by_cluster: Mapping[str, float]) -> Values:
        return self._boot.total([by_cluster[cluster] for cluster in self._common])


def _units(one: Read, two: Read, common: Sequence[str]) -> list[str]:
    """Return what is resampled for each common prompt: its group if a report resampled groups, else the prompt."""
    grouped = next((report for report in (one, two) if any(report.units[c] != c for c in common)), one)
    return [grouped.units[cluster] for cluster in common]


def _difference(name: str, one: Read, two: Read, rates: _PairedRates | None) -> Difference:
    """Return a line of the comparison."""
    mine, other = one.lines.get(name), two.lines.get(name)
    kind = (mine or other or {}).get("kind", "")
    if mine is None or other is None:
        rate_a, rate_b = (None if line is None else float(line["tokens_per_s"]) for line in (mine, other))
        ratio_a, ratio_b = (None if line is None else _ratio(line) for line in (mine, other))
        return Difference(name, kind, rate_a, rate_b, ratio_a, ratio_b, None, None, None)
    to_a, to_b = _ratio(mine), _ratio(other)
    gain = None if rates is None else rates.gain(name)
    over = _unpaired(to_a, to_b) if rates is None else rates.gain_over_best(name)
    speeds = float(mine["tokens_per_s"]), float(other["tokens_per_s"])
    return Difference(name, kind, *speeds, to_a, to_b, gain, over, _overlap(to_a, to_b))


def _profiles(one: Read, two: Read) -> str:
    """Return whether two reports were priced with copies of one measurement."""
    if not one.fingerprint or not two.fingerprint:
        return UNKNOWN
    return SAME if one.fingerprint == two.fingerprint else DIFFERENT


def _untimed(one: Read, two: Read, profiles: str) -> list[str]:
    """Return a sentence where a profile kept no timings: no difference is certain beyond it."""
    names = [name for name, report in (("A", one), ("B", two)) if report.is_timed is False]
    if not names:
        return []
    which = "profile of A and B" if profiles == SAME else f"profile{'s' * (len(names) > 1)} of {' and '.join(names)}"
    return [
        f"The {which} kept no repeated timings of model calls: B / A leaves out that error, and no difference is certain."
    ]


def _drift(lines: Sequence[Difference], differs: Sequence[tuple[str, str, str]]) -> list[str]:
    """Return the caveat about changes of the machine between two profiles, which neither contains."""
    plain = next((line.gain for line in lines if line.name == PLAIN), None)
    other = {"pair: target", *(f"profile: {name}" for name in _MACHINE)} & {what for what, *_ in differs}
    changed, least = "", "small differences"
    if plain is not None and plain.low is not None and plain.high is not None and not other:
        # Plain decoding of the same target differs by the pace of the machine alone.
        changed = f" (plain decoding: {plain.text()})"
        least = f"differences below {max(1, math.ceil(100 * max(1 - plain.low, plain.high - 1)))}%"
    return [
        f"A and B have different profiles: B / A includes timing errors and changes of pace within each measurement, not "
        f"changes of the machine between the two{changed}. For {least} evaluate both on one profile or use `specstop bench`."
    ]


def _overlap(a: Ratio, b: Ratio) -> bool | None:
    """Return whether two intervals do; None where one of them is none."""
    if a.low is None or a.high is None or b.low is None or b.high is None:
        return None
    return a.low <= b.high and b.low <= a.high


def _ratio(line: Mapping[str, Any]) -> Ratio:
    raw = line["to_best_fixed"]
    low, high = (None if end is None else float(end) for end in (raw["low"], raw["high"]))
    return Ratio(float(raw["value"]), low, high)


def _unpaired(a: Ratio, b: Ratio) -> Ratio | None:
    """Return b / a of two independent ratios (Zou and Donner 2008): squared distances to the bounds add up."""
    values = [end for end in (a.value, a.low, a.high, b.value, b.low, b.high) if end is not None]
    if len(values) < 6 or min(values) <= 0:
        return None
    a0, a1, a2, b0, b1, b2 = map(math.log, values)
    # l = d - sqrt((b - b_low)^2 + (a_high - a)^2). A bootstrap interval need not hold its own value, hence the 0.
    low = b0 - a0 - math.hypot(max(b0 - b1, 0.0), max(a2 - a0, 0.0))
    high = b0 - a0 + math.hypot(max(b2 - b0, 0.0), max(a0 - a1, 0.0))
    return Ratio(math.exp(b0 - a0), math.exp(low), math.exp(high))


def _differs(one: Read, two: Read) -> tuple[tuple[str, str, str], ...]:
    """Return (what, in A, in B) of the facts that are not the same."""
    a, b = one.facts, two.facts
    rows: list[tuple[str, Any, Any]] = [(name, a.get(name), b.get(name)) for name in _FACTS]
    for part, names in (("pair", ("target", "draft", "tokenizer")), ("profile", _OF_PROFILE)):
        mine, other = (dict(facts.get(part) or {}) for facts in (a, b))
        rows += [(f"{part}: {name}", mine.get(name), other.get(name)) for name in names]
    if one.fingerprint and two.fingerprint:
        rows.append(("profile: fingerprint", one.fingerprint[:12], two.fingerprint[:12]))
    return tuple((what, _text(x), _text(y)) for what, x, y in rows if x != y)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {v}" for k, v in value.items())
    return "-" if value is None else str(value)
