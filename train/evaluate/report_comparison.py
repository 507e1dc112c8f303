"""Compare a report with an earlier one: what changed by policy, and what else differs."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...decode.benchmark import Ratio
from ...policies.errors import InputError
from ...policies.files import read_json
from .records import REPORT_SCHEMA
from .statistics import Resamples, Values

PLAIN, BEST = "plain decoding", "best fixed"
FACTS = (
    "traces",
    "prompts",
    "temperature",
    "sampling",
    "verification",
    "depth",
    "topology",
    "clusters",
    "cluster unit",
)
MACHINE = ("device", "dtype", "threads")
PARTS = {"pair": ("target", "draft", "tokenizer"), "profile": (*MACHINE, "created", "versions")}

Data = dict[str, Any]


@dataclass(frozen=True)
class Change:
    """A line of either report: tokens/s `before` and `after`, None if a report has no such line.

    `speed` is their ratio, and `over_best` that of the ratios to the best fixed length, in which a pace shared by all rounds
    cancels. Both are over the common prompts, with intervals. Without common prompts `speed` is None.
    """

    name: str
    before: float | None
    after: float | None
    speed: Ratio | None
    over_best: Ratio | None


@dataclass(frozen=True)
class ReportComparison:
    """Changes from an earlier report to a later one.

    Attributes:
        prompts: number of common prompts; 0 if the reports are not paired.
        changes: by line, in the order of the later report.
        caveats: what the intervals leave out.
        differs: (fact, before, after) of everything else that differs.
    """

    prompts: int
    changes: tuple[Change, ...]
    caveats: tuple[str, ...]
    differs: tuple[tuple[str, str, str], ...]

    def section(self) -> Data:
        """Return the section of a report: title, text, columns and rows."""
        paired = f"Ratios are over {self.prompts} common prompts." if self.prompts else "There are no common prompts."
        facts = "; ".join(f"{what} ({before} before, {after} now)" for what, before, after in self.differs) or "nothing"
        text, rows, single = [paired, *self.caveats, f"Also different: {facts}."], [], []
        for x in self.changes:
            if x.before is None or x.after is None:
                single.append(f"{x.name} ({'before' if x.after is None else 'now'})")
            else:
                ratios = (None if ratio is None else dataclasses.asdict(ratio) for ratio in (x.speed, x.over_best))
                rows.append((x.name, *(ratio or "-" for ratio in ratios)))
        text += [f"Only in one report: {', '.join(single)}."] if single else []
        columns = ("policy", "tokens/s: now / before", "vs best fixed: now / before")
        return {"title": "Change from the earlier report", "text": " ".join(text), "columns": columns, "rows": rows}


def read_report(path: str | Path) -> Data:
    """Read a report folder, or its report.json; `InputError` if it is no report of this version of `evaluate`."""
    file = Path(path) / "report.json" if Path(path).is_dir() else Path(path)
    report = read_json(file, "--compare")
    if not isinstance(report, dict) or (report.get("kind"), report.get("schema")) != ("report", REPORT_SCHEMA):
        raise InputError(f"--compare: expected a report of `specstop evaluate` (schema {REPORT_SCHEMA}), got {file}")
    return report


def compare_reports(before: Data, after: Data, *, seed: int = 0) -> ReportComparison:
    """Compare a report with an earlier one.

    Each replicate of the bootstrap resamples the common prompts and takes a draw of the timings behind each profile. What the
    reports share cancels: the prompts, and the error of the profile if it is the same. With two profiles the errors of their
    mean paces are included.

    Args:
        before, after: report.json (`read_report`), or `Report.to_dict()`.
        seed: of the bootstrap.

    Raises:
        InputError: a report lacks an entry.
    """
    try:
        one, two = (report.get("details", {}).get("per_prompt") for report in (before, after))
        common = sorted(set(one["clusters"]) & set(two["clusters"])) if one and two else []
        paired = _paired_changes(one, two, common, seed) if len(common) > 1 else {}
        lines = [{line["name"]: line for line in report["lines"]} for report in (before, after)]
        changes = []
        for name in dict.fromkeys([*lines[1], *lines[0]]):
            of_line = [by_name.get(name) for by_name in lines]
            rates = [None if line is None else float(line["tokens_per_s"]) for line in of_line]
            speed, over_best = paired.get(name, (None, None))
            if not paired and all(of_line):
                old, new = (float(line["to_best_fixed"]["value"]) for line in of_line if line)
                over_best = Ratio(new / old)
            changes.append(Change(name, rates[0], rates[1], speed, over_best))
        differs = tuple(_differences(before, after, one, two))
        caveats = tuple(_caveats(one, two, changes, {what for what, *_ in differs})) if paired else ()
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"--compare: expected complete reports, but one is damaged ({error!r}); evaluate again"
        ) from None
    return ReportComparison(len(common) if paired else 0, tuple(changes), caveats, differs)


def _paired_changes(one: Data, two: Data, common: Sequence[str], seed: int) -> dict[str, tuple[Ratio, Ratio]]:
    """Return `speed` and `over_best` of each line that both reports have by prompt."""
    units = [dict(zip(figures["clusters"], figures["units"], strict=True)) for figures in (one, two)]
    # Groups are resampled if one of the reports resampled them.
    unit = next((unit for unit in units if any(unit[cluster] != cluster for cluster in common)), units[0])
    boot = Resamples([unit[cluster] for cluster in common], seed)
    rng = np.random.default_rng([seed, 2])  # independent of the costs of prompts
    drawn, other = rng.integers(2**32, size=(2, boot.replicates))
    is_same = one["profile"]["fingerprint"] == two["profile"]["fingerprint"]
    # Draws treat the paces of repetitions as independent, which they are not if the machine has slow phases.
    error = 0.0 if is_same else math.hypot(one["profile"]["pace_error"], two["profile"]["pace_error"])
    pace = np.concatenate([[1.0], np.exp(error * rng.standard_normal(boot.replicates))])
    # One profile has the same costs in both reports; those of two profiles are independent.
    old, new = _rates(one, common, boot, drawn), _rates(two, common, boot, drawn if is_same else other)
    return {
        name: (
            boot.interval(new[name] / pace / old[name]),
            boot.interval(new[name] / new[BEST] / (old[name] / old[BEST])),
        )
        for name in new
        if name in old
    }


def _rates(figures: Data, common: Sequence[str], boot: Resamples, drawn: Values) -> dict[str, Values]:
    """Return [1 + R] tokens/s of each line over the common clusters; resample i has draw `drawn[i]` of the profile."""

    def total(values: Sequence[float]) -> Values:
        sums: dict[str, float] = defaultdict(float)
        for cluster, value in zip(figures["clusters"], values, strict=True):
            sums[cluster] += value
        return boot.total([sums[cluster] for cluster in common])

    tokens, rates = total(figures["tokens"]), {}
    for name, values in figures["seconds"].items():
        seconds, factors = total(values), np.array(figures["profile"]["factors"].get(name, ()))
        if len(factors):
            seconds[1:] *= factors[drawn % len(factors)]
        rates[name] = tokens / seconds
    return rates


def _caveats(one: Data, two: Data, changes: Sequence[Change], differs: set[str]) -> list[str]:
    """Return what the intervals leave out, one sentence each."""
    untimed = [which for which, of in (("earlier", one), ("later", two)) if not of["profile"]["is_timed"]]
    caveats = [
        f"The {x} report's profile has no repeated timings of model calls: its error is not included." for x in untimed
    ]
    if one["profile"]["fingerprint"] == two["profile"]["fingerprint"]:
        return caveats
    plain, size = next((x.speed for x in changes if x.name == PLAIN), None), "small differences"
    if plain and plain.low and plain.high and not differs & {"pair: target", *(f"profile: {name}" for name in MACHINE)}:
        # Plain decoding of one target on one machine differs only by the pace of the machine.
        size = f"differences below {max(1, math.ceil(100 * max(1 - plain.low, plain.high - 1)))}%"
    return [
        *caveats,
        "The profiles are different measurements: intervals do not include changes of the machine between them. "
        f"For {size} evaluate both on one profile, or use `specstop bench`.",
    ]


def _differences(before: Data, after: Data, one: Data | None, two: Data | None) -> list[tuple[str, str, str]]:
    """Return (fact, before, after) of the facts that differ."""
    rows = [(name, *(report["facts"].get(name) for report in (before, after))) for name in FACTS]
    for part, names in PARTS.items():
        rows += [
            (f"{part}: {name}", *((x["facts"].get(part) or {}).get(name) for x in (before, after))) for name in names
        ]
    if one and two:
        rows.append(("profile: fingerprint", *(x["profile"]["fingerprint"][:12] for x in (one, two))))
    return [(what, *("-" if value is None else str(value) for value in (x, y))) for what, x, y in rows if x != y]
