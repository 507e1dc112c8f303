"""The report: lines with ratios and intervals, the answer, and their JSON form."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

from ...decode.benchmark import Ratio
from ...policies.display import Table
from ...policies.errors import PolicyFailure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REPORT_SCHEMA = 2
DEPLOY, INCONCLUSIVE, REFUSE = "deploy", "inconclusive", "do not deploy"
TOO_FEW, NOISY = "too few prompts", "profile too noisy"

HF_DEFAULT, TUNED = "Hugging Face default", "confidence, tuned"
"""Rules that every report on one place has for comparison."""

POLICIES = ("rule", "learned")
"""Kinds of lines that get a verdict."""


@dataclass(frozen=True)
class Line:
    """One policy of a report.

    Attributes:
        name: of the policy; `kind` is fixed, static (a tree that never changes), rule, learned, hindsight (the best drafter
            of each text), achievable or bound.
        tokens_per_s: modelled.
        to_plain, to_best_fixed, oracle_share: ratios with intervals; share of the oracle gain is against the oracle bound.
        block_efficiency: committed tokens per target call.
        drafted, verified, accepted: per round.
        note: what a reader must know.
        to_rival: of rules and learned policies: ratio to the best fixed length, on trees to the best static tree if that is
            faster, with an interval that holds for all of them at once.
        verdict: of the same, by `to_rival`.
        parts: `to_rival` by source of error: "all", the "prompts" alone, and the timings of the "profile" alone. Empty if
            the profile kept no timings.
        drafters: of a policy that routes, share of rounds in which each drafter drafted.
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
    drafters: dict[str, float] = field(default_factory=dict)

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
    """

    verdict: str
    use: str
    candidate: str
    headline: str
    interval: str
    why: tuple[str, ...] = ()

    @property
    def deploy(self) -> bool:
        """Whether to deploy the candidate."""
        return self.verdict == DEPLOY


@dataclass(frozen=True)
class Report:
    """The result of `evaluate`; `report[name]` is the line of a policy.

    Attributes:
        lines: plain decoding, best fixed length, rules, learned policies, bound. Empty if there are several places.
        fixed: tokens/s of every fixed length 0..K, with the drafter for which it is fastest.
        facts: prompts, tokens, temperature, verification, profile, pair.
        bands: P(A >= k) over uncut anchors with its interval, k = 1, 2, ... as far as it was observed.
        answer: what to do; None if no policy was compared, or in several places.
        findings: warnings about the report.
        caveats: assumptions of reports on single rounds.
        details: JSON values by section, see `analysis.details`.
        failed: policies that were left out because they failed.
        places: of several traces or profiles, the report on each of them by name. The intervals and verdicts of their lines
            hold for all policies in all places at once.
    """

    lines: tuple[Line, ...] = ()
    fixed: tuple[float, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    bands: tuple[Ratio, ...] = ()
    answer: Answer | None = None
    findings: tuple[str, ...] = ()
    caveats: tuple[str, ...] = ()
    details: dict[str, Any] = field(default_factory=dict)
    failed: tuple[PolicyFailure, ...] = ()
    places: dict[str, Report] = field(default_factory=dict)

    @property
    def acceptance(self) -> tuple[float, ...]:
        """The values of `bands`."""
        return tuple(band.value for band in self.bands)

    @property
    def summary(self) -> tuple[str, ...]:
        """The answer, or of several places where to deploy each policy; one sentence each."""
        if not self.places:
            return () if self.answer is None else (self.answer.headline, self.answer.interval, *self.answer.why)
        by_policy: dict[str, dict[str, list[str]]] = {}
        for place, report in self.places.items():
            for line in (line for line in report.lines if line.kind in POLICIES):
                by_policy.setdefault(line.name, {}).setdefault(line.verdict, []).append(place)
        parts = {n: [f"{x} on {', '.join(where)}" for x, where in results.items()] for n, results in by_policy.items()}
        return tuple(f"{name}: {'; '.join(texts)}." for name, texts in parts.items())

    def __getitem__(self, name: str) -> Line:
        for line in self.lines:
            if line.name == name:
                return line
        names = ", ".join(line.name for line in self.lines)
        where = f"`report.places` has {', '.join(self.places)}" if self.places else f"it has {names}"
        raise KeyError(f"{name!r} is not in the report; {where}")

    @property
    def table(self) -> Table:
        """One row per line: speeds, the ratio to the best fixed length with its interval, and the verdict."""
        by_place = {name: {"place": name} for name in self.places} or {"": {}}
        reports = [*self.places.values()] or [self]
        drafters = dict.fromkeys(name for report in reports for line in report.lines for name in line.drafters)
        return Table(
            {
                **place,
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
                **({f"rounds of {drafter}": line.drafters.get(drafter) for drafter in drafters}),
                "note": line.note,
            }
            for name, place in by_place.items()
            for line in self.places.get(name, self).lines
        )

    def to_pandas(self) -> Any:
        """Return the table as a `pandas.DataFrame`."""
        return self.table.to_pandas()

    def plot(self) -> Figure:
        """Return a figure of the speed of every policy against the best fixed length, in every place."""
        from .plots import gains

        if not self.places:
            return gains(self.to_dict()["lines"]).figure
        lines = [(name, line) for name, report in self.places.items() for line in report.to_dict()["lines"]]
        return gains([line | {"name": f"{line['name']}, {name}"} for name, line in lines if line["verdict"]]).figure

    def _short_table(self) -> Table:
        """Return columns that fit 80 characters."""
        return Table(
            {
                **({"place": row["place"]} if self.places else {}),
                "policy": row["policy"][:28],
                "tokens/s": f"{row['tokens_per_s']:.1f}",
                "vs best fixed [95%]": Ratio(row["vs_best_fixed"], row["low"], row["high"]).text(),
                "verdict": row["verdict"],
            }
            for row in self.table
        )

    def __repr__(self) -> str:
        """Return a table and the answer."""
        return "\n".join([repr(self._short_table()), *(self.summary if self.places else self.summary[:1])])

    def _repr_html_(self) -> str:
        answer = "".join(f"<p>{escape(text)}</p>" for text in (self.summary if self.places else self.summary[:1]))
        return answer + self._short_table()._repr_html_()

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain JSON values."""
        raw = dataclasses.asdict(dataclasses.replace(self, places={})) | {"acceptance": self.acceptance}
        if self.answer is not None:
            raw["answer"]["deploy"] = self.answer.deploy
        raw["failed"] = [failure.to_dict() for failure in self.failed]
        raw["places"] = {name: report.to_dict() for name, report in self.places.items()}
        return {"schema": REPORT_SCHEMA, "kind": "report", **raw, "summary": self.summary}
