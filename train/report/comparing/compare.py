"""`compare`: two reports of `evaluate` side by side: what changed by policy, how sure that is, and what else differs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....decode.compare.intervals import Ratio, Resamples
from .read import Read, read_report

PAIRED, UNPAIRED = "paired", "unpaired"
_TOLD = ("traces", "prompts", "tokens", "temperature", "shaping", "verification", "depth", "topology")
"""Facts that are compared as they are; pair and profile are compared inside."""

_OF_PROFILE = ("device", "dtype", "threads", "created", "versions")


@dataclass(frozen=True)
class Difference:
    """A line that one or both reports have.

    Attributes:
        name: of the line; `kind` as in the report.
        rate_a, rate_b: tokens per second; None where a report has no such line.
        to_best_a, to_best_b: ratio to the best fixed length of each report.
        gain: B over A: of the rates where that is known by prompt (paired), else of the ratios to the best fixed length.
        overlap: whether the intervals of `to_best_a` and `to_best_b` do; None where one of them has none.
    """

    name: str
    kind: str
    rate_a: float | None
    rate_b: float | None
    to_best_a: Ratio | None
    to_best_b: Ratio | None
    gain: Ratio | None
    overlap: bool | None


@dataclass(frozen=True)
class Comparison:
    """The answer of `compare`.

    Attributes:
        a, b: the files.
        method: "paired" over common prompts, or "unpaired"; `why` in words.
        prompts: common ones; 0 where unpaired.
        differs: what else differs between the reports: (what, in A, in B).
        lines: of either report, in the order of A.
    """

    a: str
    b: str
    method: str
    why: str
    prompts: int
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
    have, with a bootstrap over those: what prompts have in common cancels. Else the ratios to the best fixed length are
    compared as independent ones (the method of variance recovery, Zou and Donner 2008, on logarithms): wider than need be.

    Args:
        a, b: report folders, or their report.json.
        seed: of the bootstrap.

    Raises:
        InputError: one of them is no report, or is mangled; the message names the file.
    """
    one, two = read_report(a), read_report(b)
    common = sorted(set(one.seconds_of()) & set(two.seconds_of()))
    paired, why = _method(one, two, common)
    lines = []
    for name in dict.fromkeys([*one.lines, *two.lines]):
        lines.append(_difference(name, one, two, common if paired else [], seed))
    return Comparison(
        str(one.path), str(two.path), PAIRED if paired else UNPAIRED, why, len(common) if paired else 0,
        _differs(one.facts, two.facts), tuple(lines),
    )  # fmt: skip


def _method(one: Read, two: Read, common: Sequence[str]) -> tuple[bool, str]:
    lacking = [str(r.path) for r in (one, two) if not r.prompts]
    if lacking:
        return False, f"{' and '.join(lacking)} hold{'s' * (len(lacking) == 1)} no figures by prompt"
    if len(common) < 2:
        return False, f"the reports have {len(common)} prompts in common; a paired comparison needs 2 or more"
    if any(one.tokens_of()[p] != two.tokens_of()[p] for p in common):
        return True, f"over {len(common)} common prompts, whose texts differ in length between the reports"
    return True, f"over {len(common)} common prompts"


def _difference(name: str, one: Read, two: Read, common: Sequence[str], seed: int) -> Difference:
    """Return a line of the comparison."""
    mine, other = one.lines.get(name), two.lines.get(name)
    kind = (mine or other or {}).get("kind", "")
    if mine is None or other is None:
        rate_a, rate_b = (None if line is None else float(line["tokens_per_s"]) for line in (mine, other))
        ratio_a, ratio_b = (None if line is None else _ratio(line) for line in (mine, other))
        return Difference(name, kind, rate_a, rate_b, ratio_a, ratio_b, None, None)
    to_a, to_b = _ratio(mine), _ratio(other)
    gain = _paired(name, one, two, common, seed) if common else _unpaired(to_a, to_b)
    rates = float(mine["tokens_per_s"]), float(other["tokens_per_s"])
    return Difference(name, kind, *rates, to_a, to_b, gain, _overlap(to_a, to_b))


def _overlap(a: Ratio, b: Ratio) -> bool | None:
    """Return whether two intervals do; None where one of them is none."""
    if a.low is None or a.high is None or b.low is None or b.high is None:
        return None
    return a.low <= b.high and b.low <= a.high


def _ratio(line: Mapping[str, Any]) -> Ratio:
    raw = line["to_best_fixed"]
    low, high = (None if end is None else float(end) for end in (raw["low"], raw["high"]))
    return Ratio(float(raw["value"]), low, high)


def _paired(name: str, one: Read, two: Read, common: Sequence[str], seed: int) -> Ratio | None:
    """Return B's rate over A's on the common prompts; None for a line without seconds by prompt, such as a bound."""
    if name not in one.seconds or name not in two.seconds:
        return None
    made = Resamples(common, seed)
    rates = []
    for report in (one, two):
        tokens, seconds = report.tokens_of(), report.seconds_of(name)
        rates.append(made.total([tokens[p] for p in common]) / made.total([seconds[p] for p in common]))
    return made.interval(rates[1] / rates[0])


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


def _differs(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[tuple[str, str, str], ...]:
    """Return (what, in A, in B) of the facts that are not the same."""
    a, b = ({"shaping": {}, **facts} for facts in (a, b))  # older reports were of plain sampling
    rows: list[tuple[str, Any, Any]] = [(name, a.get(name), b.get(name)) for name in _TOLD]
    for part, names in (("pair", ("target", "draft", "tokenizer")), ("profile", _OF_PROFILE)):
        one, two = (dict(facts.get(part) or {}) for facts in (a, b))
        rows += [(f"{part}: {name}", one.get(name), two.get(name)) for name in names]
    return tuple((what, _text(x), _text(y)) for what, x, y in rows if x != y)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {v}" for k, v in value.items())
    return "-" if value is None else str(value)
