"""Records of a report: lines with ratios and intervals, and the answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...decode.benchmark import Ratio
from ...policies.errors import PolicyFailure
from ..statistics import FEWEST

REPORT_SCHEMA = 2
DEPLOY, INCONCLUSIVE, REFUSE = "deploy", "inconclusive", "do not deploy"
TOO_FEW, NOISY, AGAIN = "too few prompts", "profile too noisy", "measure again"
"""What a verdict may be; `AGAIN` is that of a report which contradicts itself."""

HF_DEFAULT, TUNED = "Hugging Face default", "confidence, tuned"
"""Rules that every report has for comparison."""


ROUNDING = 1e-9
"""Relative difference of two speeds that rounding explains."""

MOST_OF_TOKENS = 1 / 3
"""Share of all tokens in one cluster from which on the others count too little for a verdict (`benchmarks/intervals.py`)."""


def verdict(ratio: Ratio, clusters: int, parts: Mapping[str, Ratio] | None = None, largest: float = 0.0) -> str:
    """Return whether to deploy a policy.

    Args:
        ratio: of its speed to the best of what needs no policy, with the simultaneous interval.
        clusters: independent prompts or groups behind the interval.
        parts: the same ratio by source of error, see `Line.parts`; empty if the profile kept no timings.
        largest: share of all tokens in the largest cluster.
    """
    prompts, profile = (parts or {}).get("prompts"), (parts or {}).get("profile")
    if clusters < FEWEST or largest > MOST_OF_TOKENS:
        return TOO_FEW
    if ratio.is_below:
        return REFUSE
    if ratio.is_above:
        # Timings of model calls that could turn the result are too noisy, however many prompts there are.
        return NOISY if profile is not None and profile.low is not None and not profile.is_above else DEPLOY
    return NOISY if prompts is not None and prompts.is_above else INCONCLUSIVE


@dataclass(frozen=True)
class Line:
    """One policy of a report.

    Attributes:
        name: shown; `kind` is fixed, static (a tree that never changes), rule, learned, achievable or bound.
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


@dataclass(frozen=True)
class Answer:
    """What to do.

    Attributes:
        verdict: `DEPLOY`, `INCONCLUSIVE`, `REFUSE`, `TOO_FEW`, `NOISY` or `AGAIN`.
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
    """The answer of `evaluate`.

    Attributes:
        lines: plain, best fixed, rules, learned policies, bound.
        fixed: tokens/s of every fixed length 0..K.
        acceptance: P(A >= k) over uncut anchors, k = 1, 2, ... as far as it was observed (`collect.acceptance`).
        facts: prompts, tokens, temperature, verification, profile, pair.
        bands: of `acceptance`, with intervals.
        answer: what to do; None where no policy was compared.
        findings: what a reader must look into.
        caveats: of reports on single rounds.
        failed: policies that were left out because they failed.
        details: plain JSON values by section, see `details.details`; empty where they were not asked for.
    """

    lines: tuple[Line, ...]
    fixed: tuple[float, ...]
    acceptance: tuple[float, ...]
    facts: dict[str, Any] = field(default_factory=dict)
    bands: tuple[Ratio, ...] = ()
    answer: Answer | None = None
    findings: tuple[str, ...] = ()
    caveats: tuple[str, ...] = ()
    details: dict[str, Any] = field(default_factory=dict)
    failed: tuple[PolicyFailure, ...] = ()

    def line(self, name: str) -> Line:
        """Return the line called `name`."""
        return next(line for line in self.lines if line.name == name)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain JSON values."""
        raw = dataclasses.asdict(self)
        if self.answer is not None:
            raw["answer"]["deploy"] = self.answer.deploy
        raw["failed"] = [failure.to_dict() for failure in self.failed]
        return {"schema": REPORT_SCHEMA, "kind": "report", **raw}
