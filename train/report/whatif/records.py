"""What `sweep` and `transfer` answer, as records, as Markdown, and as files."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ....decode.benchmark import Ratio
from ....policies.contract import StopPolicy
from ....policies.display import markdown, markdown_cell
from ....policies.errors import InputError
from ....policies.files import write_atomic, write_json
from ....policies.learned import LearnedPolicy
from ...evaluate.records import DEPLOY, INCONCLUSIVE, REFUSE


@dataclass(frozen=True)
class SweepLine:
    """One policy over all cost ratios.

    Attributes:
        name: shown; `kind` is learned or rule.
        to_best_fixed, to_plain: one ratio with interval for each point.
        pays: (first, last) cost ratio of every run of points at which `to_best_fixed` is clear above 1.
        note: what a reader must know.
    """

    name: str
    kind: str
    to_best_fixed: tuple[Ratio, ...]
    to_plain: tuple[Ratio, ...]
    pays: tuple[tuple[float, float], ...]
    note: str = ""

    @property
    def pays_from(self) -> float | None:
        """The least cost ratio at which the policy pays; None = at none."""
        return self.pays[0][0] if self.pays else None

    @property
    def verdict(self) -> str:
        """Where the policy pays, in words."""
        if not self.pays:
            return "at no point above the best fixed length beyond its interval"
        return "pays " + " and ".join(f"from {a:.3g} to {b:.3g}" if a < b else f"at {a:.3g}" for a, b in self.pays)


@dataclass(frozen=True)
class Sweep:
    """Policies under draft steps from cheap to expensive.

    Attributes:
        ratios: cost of a draft step over that of a one-token target step, rising.
        here: the profile's own ratio.
        best_fixed: length chosen at each point, and `best_fixed_tokens_per_s` its rate.
        lines: one a policy.
        facts: prompts, temperature, profile, intervals.
    """

    ratios: tuple[float, ...]
    here: float
    best_fixed: tuple[int, ...]
    best_fixed_tokens_per_s: tuple[float, ...]
    lines: tuple[SweepLine, ...]
    facts: dict[str, Any] = field(default_factory=dict)

    def line(self, name: str) -> SweepLine:
        """Return the line called `name`."""
        return next(line for line in self.lines if line.name == name)

    def to_dict(self) -> dict[str, Any]:
        """Return the sweep as plain JSON values."""
        raw = dataclasses.asdict(self)
        for line, values in zip(self.lines, raw["lines"], strict=True):
            values |= {"pays_from": line.pays_from, "verdict": line.verdict}
        return {"schema": 1, "kind": "sweep", **raw}

    def to_markdown(self) -> str:
        """Return the sweep as Markdown."""
        head = ["cost ratio", "best fixed", *(line.name for line in self.lines)]
        rows = [
            [f"{ratio:.3g}", str(length), *(line.to_best_fixed[at].text() for line in self.lines)]
            for at, (ratio, length) in enumerate(zip(self.ratios, self.best_fixed, strict=True))
        ]
        advice = "".join(
            f"- {markdown(line.name)}: {line.verdict}{f' ({line.note})' if line.note else ''}\n" for line in self.lines
        )
        return (
            "# Where each policy pays\n\nRatio to the best fixed length (chosen again in each row) as a draft step grows "
            f"more expensive; everything else as in the profile, whose own ratio is {self.here:.3g}.\n\n"
            f"{markdown_table(head, rows)}\n\n{advice}\n{_prompts(self.facts)}\n"
        )


@dataclass(frozen=True)
class Cell:
    """A policy on a trace.

    Attributes:
        to_best_fixed: against the best fixed length of this trace.
        verdict: see `records.verdict`.
        own: trained for this temperature, verification and pair.
    """

    to_best_fixed: Ratio
    verdict: str
    own: bool


@dataclass(frozen=True)
class Transfer:
    """Policies by what they were trained on (rows), on what they are used on (columns).

    Attributes:
        rows: names of the policies, and `trained_on` in words.
        columns: names of the traces or groups, `prompts` in each and `best_fixed` length there.
        cells: [rows][columns].
        facts: profile, intervals.
    """

    rows: tuple[str, ...]
    trained_on: tuple[str, ...]
    columns: tuple[str, ...]
    prompts: tuple[int, ...]
    best_fixed: tuple[int, ...]
    cells: tuple[tuple[Cell, ...], ...]
    facts: dict[str, Any] = field(default_factory=dict)

    def cell(self, row: str, column: str) -> Cell:
        """Return what the policy `row` does on `column`."""
        return self.cells[self.rows.index(row)][self.columns.index(column)]

    @property
    def refused(self) -> tuple[tuple[str, str], ...]:
        """(row, column) of every cell that must not be deployed."""
        return tuple((r, c) for r in self.rows for c in self.columns if self.cell(r, c).verdict == REFUSE)

    def to_dict(self) -> dict[str, Any]:
        """Return the table as plain JSON values."""
        return {"schema": 1, "kind": "transfer", **dataclasses.asdict(self)}

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return the head and the rows as texts."""
        head = ["policy", "trained on", *self.columns]
        rows = [
            [name, source, *(f"{c.to_best_fixed.text()} {c.verdict}{', own' if c.own else ''}" for c in cells)]
            for name, source, cells in zip(self.rows, self.trained_on, self.cells, strict=True)
        ]
        return head, rows

    def to_markdown(self) -> str:
        """Return the table as Markdown."""
        head, rows = self.table()
        below = [
            "",
            "best fixed there",
            *(f"{k} ({n} prompts)" for k, n in zip(self.best_fixed, self.prompts, strict=True)),
        ]
        return (
            "# Trained on one, used on another\n\nRatio to the best fixed length of each column. "
            f"{REFUSE}: the interval lies below 1; {INCONCLUSIVE}: it contains 1; {DEPLOY}: it lies above 1.\n\n"
            f"{markdown_table(head, [*rows, below])}\n\n{self.facts.get('intervals', '')}\n"
        )


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; see `markdown_cell`."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(map(markdown_cell, cells)) + " |"

    return "\n".join([line(head), "|" + "---|" * len(head), *map(line, rows)])


def write_whatif(value: Sweep | Transfer, folder: Path) -> None:
    """Write `sweep.json` and `sweep.md`, or `transfer.json` and `transfer.md`, into a folder."""
    name = "sweep" if isinstance(value, Sweep) else "transfer"
    write_json(folder / f"{name}.json", value.to_dict())
    write_atomic(folder / f"{name}.md", value.to_markdown())


def _prompts(facts: dict[str, Any]) -> str:
    return f"{facts['prompts']} prompts, temperature {facts['temperature']:g}, {facts['intervals']}."


def unique_names(policies: Sequence[StopPolicy], names: Sequence[str] | None = None) -> tuple[str, ...]:
    """Return a name for each policy: what it was called by; where several share one, with what they were trained for.

    Raises:
        InputError: that does not tell them apart either.
    """
    names = [p.shown_name for p in policies] if names is None else list(names)
    full = [
        f"{name} (T = {temperature_text(policy)})"
        if names.count(name) > 1 and isinstance(policy, LearnedPolicy)
        else name
        for name, policy in zip(names, policies, strict=True)
    ]
    check_apart_names(full)
    return tuple(full)


def check_apart_names(names: Sequence[str]) -> None:
    """Refuse policies that could not be told apart in a report."""
    if again := next((name for name in names if names.count(name) > 1), None):
        raise InputError(f"--policy: two policies are called {again!r}; give each once, or rename one")


def temperature_text(policy: LearnedPolicy) -> str:
    """Return the temperature, or the range of temperatures, that a policy was trained for."""
    known = policy.metadata.temperature
    return " to ".join(f"{t:g}" for t in sorted({min(known), max(known)})) if isinstance(known, tuple) else f"{known:g}"
