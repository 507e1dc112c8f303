"""What `evaluate` answers: ratios with intervals, one line a policy, the answer, and what it rests on."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from ...decode.compare.intervals import FEWEST, Ratio

DEPLOY, NO_GAIN, REFUSE, TOO_FEW = "deploy", "no gain", "do not deploy", "too few prompts"
NO_VERDICT = "no verdict"
HF_DEFAULT, TUNED = "Hugging Face default", "confidence, tuned"
"""Rules that every report has for comparison."""


def verdict(ratio: Ratio, prompts: int, profile: Ratio | None = None) -> str:
    """Return what a ratio to what needs no policy means for deploying one.

    Args:
        ratio: with the interval over all that was drawn.
        prompts: in it.
        profile: the same where the profile's timings alone are drawn: what they could turn is not deployed.
    """
    if prompts < FEWEST:
        return TOO_FEW
    turns = profile is not None and profile.low is not None and not profile.is_above
    return REFUSE if ratio.is_below else DEPLOY if ratio.is_above and not turns else NO_GAIN


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
        verdict: of rules and learned policies, against the best fixed length, on trees the best static tree as well.
        parts: the same ratio with its interval over all that is drawn, over the prompts alone, over the profile's timings of
            model calls alone, and over those of decisions alone. Empty where the profile has kept no timings.
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
    verdict: str = ""
    parts: dict[str, Ratio] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """What to do.

    Attributes:
        deploy: whether a policy is clear of the best fixed length (and of the best static tree).
        verdict: `DEPLOY`, `REFUSE`, or `NO_VERDICT` from a single prompt.
        use: the policy, or the fixed length that none is clear of.
        candidate: what the answer speaks of; `use` where `deploy`.
        headline: one sentence.
        sure: how far to trust it.
        why: what it rests on, one sentence each.
        above: share of resamples in which the candidate is above the best fixed length.
    """

    deploy: bool
    use: str
    candidate: str
    headline: str
    sure: str
    why: tuple[str, ...]
    above: float
    verdict: str = REFUSE


@dataclass(frozen=True)
class Report:
    """The answer of `evaluate`.

    Attributes:
        lines: plain, best fixed, rules, learned policies, bound.
        fixed: tokens/s of every fixed length 0..K.
        acceptance: P(A >= k) over uncut anchors, k = 1..K.
        facts: prompts, tokens, temperature, verification, profile, pair.
        bands: of `acceptance`, with intervals.
        answer: what to do; None where no policy was compared.
        findings: what a reader must look into.
        caveats: of reports on single rounds.
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

    def line(self, name: str) -> Line:
        """Return the line called `name`."""
        return next(line for line in self.lines if line.name == name)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain JSON values."""
        return {"schema": 1, "kind": "report", **dataclasses.asdict(self)}
