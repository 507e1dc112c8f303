"""A report of `evaluate` read back, and its figures by prompt."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ....policies.errors import InputError
from ....policies.files.atomic import read_json

REPORT_FILE = "report.json"
_NUMBERS = ("value", "low", "high")


@dataclass(frozen=True)
class Read:
    """A report as it was written.

    Attributes:
        path: the file.
        lines: by name, in order.
        facts: of the report.
        prompts: ids by sequence; empty where the report has no figures by prompt.
        tokens: by sequence.
        seconds: by line, by sequence.
    """

    path: Path
    lines: dict[str, dict[str, Any]]
    facts: dict[str, Any]
    prompts: tuple[str, ...] = ()
    tokens: tuple[float, ...] = ()
    seconds: dict[str, tuple[float, ...]] = field(default_factory=dict)

    def tokens_of(self) -> dict[str, float]:
        """Return tokens by prompt."""
        return _summed(self.prompts, self.tokens)

    def seconds_of(self, name: str | None = None) -> dict[str, float]:
        """Return seconds by prompt of a line; by default of any, to know the prompts."""
        return _summed(self.prompts, self.tokens if name is None else self.seconds[name])


def _summed(prompts: Sequence[str], values: Sequence[float]) -> dict[str, float]:
    out: dict[str, float] = defaultdict(float)
    for prompt, value in zip(prompts, values, strict=True):
        out[prompt] += value
    return dict(out)


def per_prompt_figures(
    prompt_ids: Sequence[str], tokens: Sequence[float], seconds: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
    """Return what a report holds of each prompt as `details["per_prompt"]`, for `compare` to pair by.

    Args:
        prompt_ids: by sequence.
        tokens: of each text.
        seconds: by line of the report, the replayed seconds of each text.
    """
    return {
        "prompts": list(prompt_ids),
        "tokens": [float(x) for x in tokens],
        "seconds": {name: [float(x) for x in values] for name, values in seconds.items()},
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
    if raw.get("schema") != 1:
        raise InputError(
            f"compare: {file} has schema {raw.get('schema')!r}, but this specstop reads schema 1; evaluate again"
        )
    try:
        lines = {str(line["name"]): _checked(line) for line in raw["lines"]}
        facts = raw["facts"]
        if not lines or not isinstance(facts, dict):
            raise ValueError("no lines or no facts")
        return Read(file, lines, facts, *_by_prompt((raw.get("details") or {}).get("per_prompt")))
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


def _by_prompt(raw: Any) -> tuple[tuple[str, ...], tuple[float, ...], dict[str, tuple[float, ...]]]:
    if not raw:
        return (), (), {}
    prompts = tuple(str(p) for p in raw["prompts"])
    tokens = tuple(float(x) for x in raw["tokens"])
    seconds = {str(name): tuple(float(x) for x in values) for name, values in raw["seconds"].items()}
    if any(len(values) != len(prompts) for values in (tokens, *seconds.values())):
        raise ValueError("figures by prompt of other lengths than there are prompts")
    if any(not x > 0 for values in (tokens, *seconds.values()) for x in values):
        raise ValueError("tokens or seconds by prompt that are not above 0")
    return prompts, tokens, seconds
