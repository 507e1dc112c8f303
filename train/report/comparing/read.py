"""A report of `evaluate` read back, with its figures by prompt and by draw of the profile's timings."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ....policies.errors import InputError
from ....policies.files import read_json
from ...evaluate.records import REPORT_SCHEMA

REPORT_FILE = "report.json"
_NUMBERS = ("value", "low", "high")
_DIGITS = 9
"""Of a factor: timings are kept in whole nanoseconds."""


@dataclass(frozen=True)
class Read:
    """A report as it was written.

    Attributes:
        path: the file.
        lines: by name, in order.
        facts: of the report.
        clusters: of each sequence, the hash of its prompt's text (`TraceArrays.clusters`); empty where the report has no
            figures by prompt.
        tokens: by sequence.
        seconds: by line, by sequence.
        fingerprint: of the profile; "" where it is not known.
        is_timed: whether intervals include the error of model calls (`ProfileBootstrap.is_timed`); None = not known.
        pace_error: of the machine's mean pace in the profile (`Noise.pace_error`).
        factors: by line, seconds of the whole sample under each draw of the profile's timings, relative to the measured
            ones; empty without draws.
        units: by cluster, what the report resamples: the prompt, or the group that it is of.
    """

    path: Path
    lines: dict[str, dict[str, Any]]
    facts: dict[str, Any]
    clusters: tuple[str, ...] = ()
    tokens: tuple[float, ...] = ()
    seconds: dict[str, tuple[float, ...]] = field(default_factory=dict)
    fingerprint: str = ""
    is_timed: bool | None = None
    pace_error: float = 0.0
    factors: dict[str, tuple[float, ...]] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=dict)

    def tokens_of(self) -> dict[str, float]:
        """Return tokens by cluster."""
        return _summed(self.clusters, self.tokens)

    def seconds_of(self, name: str) -> dict[str, float]:
        """Return seconds by cluster of a line."""
        return _summed(self.clusters, self.seconds[name])


def _summed(clusters: Sequence[str], values: Sequence[float]) -> dict[str, float]:
    out: dict[str, float] = defaultdict(float)
    for cluster, value in zip(clusters, values, strict=True):
        out[cluster] += value
    return dict(out)


def per_prompt_figures(
    clusters: Sequence[str],
    tokens: Sequence[float],
    seconds: Mapping[str, Sequence[float]],
    *,
    prompt_ids: Sequence[str],
    fingerprint: str,
    is_timed: bool,
    pace_error: float,
    factors: Mapping[str, Sequence[float]],
    units: Sequence[str],
) -> dict[str, Any]:
    """Return what a report holds as `details["per_prompt"]`, for `compare` to pair by.

    Args:
        clusters, prompt_ids: by sequence; pairs are made by cluster, ids are for people.
        tokens: of each text.
        seconds: by line of the report, the replayed seconds of each text.
        fingerprint, is_timed, pace_error, factors: of the profile, see `Read`.
        units: by sequence, what the report resamples: prompts, or groups of prompts.
    """
    return {
        "clusters": list(clusters),
        "units": list(units),
        "prompts": list(prompt_ids),
        "tokens": [float(x) for x in tokens],
        "seconds": {name: [float(x) for x in values] for name, values in seconds.items()},
        "profile": {
            "fingerprint": fingerprint,
            "is_timed": is_timed,
            "pace_error": float(pace_error),
            "factors": {name: [round(float(x), _DIGITS) for x in values] for name, values in factors.items()},
        },
    }


def read_report(path: str | Path) -> Read:
    """Read a report, a folder or its file.

    Raises:
        InputError: it is no report of `evaluate`, or mangled; the message names the file and the entry.
    """
    path = Path(path)
    file = path / REPORT_FILE if path.is_dir() else path
    raw = read_json(file, "compare")
    if not isinstance(raw, dict) or raw.get("kind") != "report":
        raise InputError(f"compare: expected a report of `specstop evaluate`, but {file} is none")
    if raw.get("schema") != REPORT_SCHEMA:
        raise InputError(
            f"compare: {file} has schema {raw.get('schema')!r}, but this specstop reads schema {REPORT_SCHEMA}; "
            "evaluate again"
        )
    try:
        lines = {str(line["name"]): _checked(line) for line in raw["lines"]}
        facts = raw["facts"]
        if not lines or not isinstance(facts, dict):
            raise ValueError("no lines or no facts")
        by_prompt = (raw.get("details") or {}).get("per_prompt")
        if not by_prompt:
            return Read(file, lines, facts, is_timed=_is_timed(lines))
        clusters, tokens, seconds = _by_prompt(by_prompt)
        units = dict(zip(clusters, map(str, by_prompt["units"]), strict=True))
        return Read(file, lines, facts, clusters, tokens, seconds, *_by_draw(by_prompt["profile"]), units)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"entry {error}" if isinstance(error, KeyError) else str(error)
        raise InputError(f"compare: {file} is mangled ({what}); evaluate again") from None


def _checked(line: Any) -> dict[str, Any]:
    """Return a line whose numbers are numbers; both ends of an interval may be null."""
    ratio, *ends = (line["to_best_fixed"][name] for name in _NUMBERS)
    for value in (line["tokens_per_s"], ratio, *(() if ends == [None, None] else ends)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f"{value!r} in the line {line['name']!r} is no number")
    out: dict[str, Any] = dict(line)
    return out


def _is_timed(lines: Mapping[str, Mapping[str, Any]]) -> bool | None:
    """Return whether the intervals of a report without figures by prompt include timings of model calls; None = unknown."""
    parts = [line["parts"]["profile"] for line in lines.values() if line.get("parts")]
    judged = any(line.get("verdict") for line in lines.values())
    return any(part["low"] != part["high"] for part in parts) if parts or judged else None


def _by_prompt(raw: Any) -> tuple[tuple[str, ...], tuple[float, ...], dict[str, tuple[float, ...]]]:
    clusters = tuple(str(cluster) for cluster in raw["clusters"])
    tokens = tuple(float(x) for x in raw["tokens"])
    seconds = {str(name): tuple(float(x) for x in values) for name, values in raw["seconds"].items()}
    if any(len(values) != len(clusters) for values in (tokens, *seconds.values())):
        raise ValueError("figures by prompt of other lengths than there are prompts")
    if any(not 0 < x < math.inf for values in (tokens, *seconds.values()) for x in values):
        raise ValueError("tokens or seconds by prompt that are not above 0")
    return clusters, tokens, seconds


def _by_draw(raw: Any) -> tuple[str, bool, float, dict[str, tuple[float, ...]]]:
    factors = {str(name): tuple(float(x) for x in values) for name, values in raw["factors"].items()}
    if len({len(values) for values in factors.values()}) > 1:
        raise ValueError("lines with other numbers of draws of the profile")
    if any(not 0 < x < math.inf for values in factors.values() for x in values):
        raise ValueError("seconds by draw of the profile that are not above 0")
    pace_error = float(raw["pace_error"])
    if not 0 <= pace_error < math.inf:
        raise ValueError("an error of the profile's pace that is below 0")
    return str(raw["fingerprint"]), bool(raw["is_timed"]), pace_error, factors
