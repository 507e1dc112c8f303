"""The report: lines with ratios and intervals, the answer, and their JSON form."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

from ...decode.benchmark import Ratio
from ...policies.errors import PolicyFailure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REPORT_SCHEMA = 2
DEPLOY, INCONCLUSIVE, REFUSE = "deploy", "inconclusive", "do not deploy"
TOO_FEW, NOISY = "too few prompts", "profile too noisy"

HF_DEFAULT, TUNED = "Hugging Face default", "confidence, tuned"
"""Rules that every report has for comparison."""

POLICIES = ("rule", "learned")
"""Kinds of lines that get a verdict."""


@dataclass(frozen=True)
class Line:
    """One policy of a report.

    Attributes:
        name: of the policy; `kind` is fixed, static (a tree that never changes), rule, learned, achievable or bound.
        tokens_per_s: modelled.
        to_plain, to_best_fixed, oracle_share: ratios with intervals; share of the oracle gain is against the oracle bound.
        block_efficiency: committed tokens per target call.
        drafted, verified, accepted: per round.
        note: what a reader must know.
        to_rival: of rules and learned policies: ratio to the best fixed length, on trees to the best static tree if that is
            faster, with an interval that holds for all of them at once.
        verdict: of the same, by `to_rival`.
        parts: `to_rival` by source of error: "all", the "prompts" alone, the "profile" (timings of model calls) alone, and
            timings of "decisions" alone. Empty if the profile kept no timings.
    """

    name: str
    kind: str
    tokens_per_s: float
    to_plain: Ratio
    to_best_fixed: Ratio
    oracle_share: Ratio
    block_efficiency: float = 0.0
    drafted: float = 0.0
    verified: float = 0.0
    accepted: float = 0.0
    note: str = ""
    to_rival: Ratio | None = None
    verdict: str = ""
    parts: dict[str, Ratio] = field(default_factory=dict)

    @property
    def speedup(self) -> Ratio:
        """The ratio that decides: to the fastest alternative that needs no policy."""
        return self.to_rival or self.to_best_fixed


@dataclass(frozen=True)
class Answer:
    """What to do.

    Attributes:
        verdict: `DEPLOY`, `INCONCLUSIVE`, `REFUSE`, `TOO_FEW` or `NOISY`.
        use: the policy to deploy, else the best fixed length (or static tree).
        candidate: the policy that the verdict is about.
        headline: the verdict in one or two sentences.
        interval: what the interval covers, in one sentence.
        why: where the candidate gains and loses, one sentence each.
        needed: number of clusters at which an interval of the same spread would exclude 1; None if it does or cannot.
    """

    verdict: str
    use: str
    candidate: str
    headline: str
    interval: str
    why: tuple[str, ...] = ()
    needed: int | None = None

    @property
    def deploy(self) -> bool:
        """Whether to deploy the candidate."""
        return self.verdict == DEPLOY


@dataclass(frozen=True)
class Report:
    """The result of `evaluate`; `report[name]` is the line of a policy.

    Attributes:
        lines: plain decoding, best fixed length, rules, learned policies, bound.
        fixed: tokens/s of every fixed length 0..K.
        facts: prompts, tokens, temperature, verification, profile, pair.
        bands: P(A >= k) over uncut anchors with its interval, k = 1, 2, ... as far as it was observed.
        answer: what to do; None if no policy was compared.
        findings: warnings about the report.
        caveats: assumptions of reports on single rounds.
        details: JSON values by section, see `analysis.details`.
        failed: policies that were left out because they failed.
    """

    lines: tuple[Line, ...]
    fixed: tuple[float, ...]
    facts: dict[str, Any] = field(default_factory=dict)
    bands: tuple[Ratio, ...] = ()
    answer: Answer | None = None
    findings: tuple[str, ...] = ()
    caveats: tuple[str, ...] = ()
    details: dict[str, Any] = field(default_factory=dict)
    failed: tuple[PolicyFailure, ...] = ()

    @property
    def acceptance(self) -> tuple[float, ...]:
        """The values of `bands`."""
        return tuple(band.value for band in self.bands)

    def __getitem__(self, name: str) -> Line:
        for line in self.lines:
            if line.name == name:
                return line
        raise KeyError(f"{name!r} is not in the report; it has {', '.join(line.name for line in self.lines)}")

    @property
    def table(self) -> list[dict[str, Any]]:
        """One row per line: speeds, the ratio to the best fixed length with its interval, and the verdict."""
        return [
            {
                "policy": line.name,
                "kind": line.kind,
                "tokens_per_s": line.tokens_per_s,
                "vs_best_fixed": line.to_best_fixed.value,
                "low": line.to_best_fixed.low,
                "high": line.to_best_fixed.high,
                "vs_plain": line.to_plain.value,
                "oracle_share": line.oracle_share.value,
                "tokens_per_call": line.block_efficiency,
                "verdict": line.verdict,
                "note": line.note,
            }
            for line in self.lines
        ]

    def to_pandas(self) -> Any:
        """Return the table as a pandas data frame."""
        import pandas as pd

        return pd.DataFrame(self.table)

    def plot(self) -> Figure:
        """Return a figure of the speed of every policy against the best fixed length."""
        from .plots import gains

        return gains(self.to_dict()["lines"]).figure

    def _rows(self) -> list[tuple[str, str, str, str]]:
        head = ("policy", "tokens/s", "vs best fixed [95%]", "verdict")
        rows = [(line.name, f"{line.tokens_per_s:.1f}", line.to_best_fixed.text(), line.verdict) for line in self.lines]
        return [head, *rows]

    def __repr__(self) -> str:
        """Return a table of at most 80 columns and the headline."""
        width = min(32, max(len(line.name) for line in self.lines))
        rows = [
            f"{name[:width]:<{width}}  {rate:>8}  {ratio:<20}  {verdict}" for name, rate, ratio, verdict in self._rows()
        ]
        return "\n".join([row.rstrip() for row in rows] + ([self.answer.headline] if self.answer else []))

    def _repr_html_(self) -> str:
        head, *rows = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in self._rows()]
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        headline = f"<p>{escape(self.answer.headline)}</p>" if self.answer else ""
        return f"{headline}<table><thead><tr>{head.replace('td>', 'th>')}</tr></thead><tbody>{body}</tbody></table>"

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain JSON values."""
        raw = dataclasses.asdict(self) | {"acceptance": self.acceptance}
        if self.answer is not None:
            raw["answer"]["deploy"] = self.answer.deploy
        raw["failed"] = [failure.to_dict() for failure in self.failed]
        return {"schema": REPORT_SCHEMA, "kind": "report", **raw}
