"""Compare a report with an earlier one: what changed by policy, and what else differs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from ...decode.benchmark import Ratio
from ...policies.errors import InputError
from ...policies.files import read_json
from .comparison import BEST, PLAIN
from .records import REPORT_SCHEMA
from .statistics import Resamples, Values

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


def read_report(path: str | Path) -> Data:
    """Read a report folder, or its report.json; `InputError` if it is no report on one trace and one profile."""
    file = Path(path) / "report.json" if Path(path).is_dir() else Path(path)
    report = read_json(file, "--compare")
    if not isinstance(report, dict) or (report.get("kind"), report.get("schema")) != ("report", REPORT_SCHEMA):
        raise InputError(f"--compare: expected a report of `specstop evaluate` (schema {REPORT_SCHEMA}), got {file}")
    if report.get("places"):
        raise InputError(f"--compare: expected a report on one trace and one profile, got {file} on several")
    return report


def compare_reports(before: Data, after: Data, *, seed: int = 0) -> Data:
    """Return the section of a report on what changed since an earlier one, by policy, and on what else differs.

    Each replicate of the bootstrap resamples the common prompts and takes a draw of the timings behind each profile. What the
    reports share cancels: the prompts, and the error of the profile if it is the same. With two profiles the errors of their
    mean paces are included. Without common prompts there are no intervals.

    Args:
        before, after: report.json (`read_report`), or `Report.to_dict()`.
        seed: of the bootstrap.

    Returns:
        `title`, `text`, `columns` and `rows`: (name, ratio of tokens/s, ratio of the ratios to the best fixed length, in
        which a pace shared by all rounds cancels). A hyphen stands for an unknown ratio.

    Raises:
        InputError: a report lacks an entry.
    """
    try:
        one, two = (report.get("details", {}).get("per_prompt") for report in (before, after))
        common = sorted(set(one["clusters"]) & set(two["clusters"])) if one and two else []
        paired = _paired_changes(one, two, common, seed) if len(common) > 1 else {}
        old, new = ({line["name"]: line for line in report["lines"]} for report in (before, after))
        rows: list[tuple[Any, ...]] = []
        for name in (name for name in new if name in old):
            gains = [float(lines[name]["to_best_fixed"]["value"]) for lines in (new, old)]
            unpaired = (None, None if paired else Ratio(gains[0] / gains[1]))
            rows.append((name, *("-" if x is None else asdict(x) for x in paired.get(name, unpaired))))
        differences = _differences(before, after, one, two)
        caveats = _caveats(one, two, paired.get(PLAIN), {what for what, *_ in differences}) if paired else []
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"--compare: expected complete reports, but one is damaged ({error!r}); evaluate again"
        ) from None
    facts = "; ".join(f"{what} ({x} before, {y} now)" for what, x, y in differences) or "nothing"
    single = [f"{name} (now)" for name in new if name not in old] + [f"{n} (before)" for n in old if n not in new]
    text = [
        f"Ratios are over {len(common)} common prompts." if paired else "There are no common prompts.",
        *caveats,
        f"Also different: {facts}.",
        *([f"Only in one report: {', '.join(single)}."] if single else []),
    ]
    columns = ("policy", "tokens/s: now / before", "vs best fixed: now / before")
    return {"title": "Change from the earlier report", "text": " ".join(text), "columns": columns, "rows": rows}


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


def _caveats(one: Data, two: Data, plain: tuple[Ratio, Ratio] | None, differs: set[str]) -> list[str]:
    """Return what the intervals leave out, one sentence each."""
    untimed = [which for which, of in (("earlier", one), ("later", two)) if not of["profile"]["is_timed"]]
    caveats = [
        f"The {x} report's profile has no repeated timings of model calls: its error is not included." for x in untimed
    ]
    if one["profile"]["fingerprint"] == two["profile"]["fingerprint"]:
        return caveats
    size, pace = "small differences", plain[0] if plain else None
    if pace and pace.low and pace.high and not differs & {"pair: target", *(f"profile: {name}" for name in MACHINE)}:
        # Plain decoding of one target on one machine differs only by the pace of the machine.
        size = f"differences below {max(1, math.ceil(100 * max(1 - pace.low, pace.high - 1)))}%"
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
