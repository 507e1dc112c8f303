"""What `evaluate` answers: ratios with intervals, one line a policy, the report."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Ratio:
    """A ratio of sums and its bootstrap interval over prompts."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Line:
    """One policy of a report.

    Attributes:
        name: shown; `kind` is fixed, rule, learned or bound.
        tokens_per_s: modelled.
        to_plain, to_best_fixed, gap_closed: ratios with intervals; gap closed is against the clairvoyant bound.
        block_efficiency: committed tokens per target call.
        drafted, verified, accepted: per round.
        note: what a reader must know.
    """

    name: str
    kind: str
    tokens_per_s: float
    to_plain: Ratio
    to_best_fixed: Ratio
    gap_closed: Ratio
    block_efficiency: float = 0.0
    drafted: float = 0.0
    verified: float = 0.0
    accepted: float = 0.0
    note: str = ""


@dataclass(frozen=True)
class Report:
    """The answer of `evaluate`.

    Attributes:
        lines: plain, best fixed, rules, learned policies, bound.
        fixed: tokens/s of every fixed length 0..K.
        acceptance: P(A >= k) over uncut anchors, k = 1..K.
        facts: prompts, tokens, temperature, verification, profile, pair.
    """

    lines: tuple[Line, ...]
    fixed: tuple[float, ...]
    acceptance: tuple[float, ...]
    facts: dict[str, Any] = field(default_factory=dict)

    def line(self, name: str) -> Line:
        """Return the line called `name`."""
        return next(line for line in self.lines if line.name == name)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain JSON values."""
        return {"schema": 1, "kind": "report", **dataclasses.asdict(self)}
