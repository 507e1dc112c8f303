"""The report on live traces: what policies' single rounds are worth, where whole texts cannot be replayed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...policies.contract import StopPolicy
from ...policies.display import Progress, silent
from ...policies.fixed import FixedLength
from ..replay.rounds import RoundValues, check_identified, evaluate_rounds, identified_limit
from ..replay.traces.arrays import TraceArrays
from ..statistics import Resamples, Values
from .answer import answer, contradicted, doubts, noise_findings, remedy
from .clusters import choose_clusters, dominant_cluster
from .insight import acceptance_bands, trace_outcomes
from .pricing import Draws, Priced
from .records import Report
from .speeds import POLICIES, Comparison, Counts

Job = tuple[str, str, StopPolicy, str]

_SETTLED = 1e-12
_TURNS = 50


def round_report(
    arrays: TraceArrays,
    jobs: Sequence[Job],
    draws: Draws,
    facts: dict[str, Any],
    *,
    cluster: str = "auto",
    primary: str = "",
    seed: int = 0,
    progress: Progress = silent,
) -> Report:
    """Evaluate policies on the rounds of a live trace.

    Rates are expected tokens over modelled seconds of the rounds that the recorded run visits. The bound is that of single
    rounds: the best depth of each round for someone who knows what every depth brings, at the rate that follows from it; of
    trees it would be wrong, since a policy may draft a part of a depth, so they have none.

    Args:
        arrays: with `extra=ROUND_COLUMNS`.
        jobs: (name, kind, policy, note).
        draws: what rounds cost.
        facts: of the report.
        cluster, primary: see `evaluate`.
        seed: of the bootstrap.
        progress: called at every policy.

    Raises:
        TraceError: as of `evaluate_rounds`.
    """
    for policy in (FixedLength(1), *(job[2] for job in jobs)):
        check_identified(arrays, policy)
    depth = min(arrays.depth, draws.profile.max_depth, identified_limit(arrays))
    todo: list[StopPolicy] = [*(FixedLength(k) for k in range(depth + 1)), *(job[2] for job in jobs)]
    values = []
    for done, policy in enumerate(todo):
        progress("rounds", done, len(todo))
        values.append(evaluate_rounds(arrays, policy, draws.profile, depth))
    progress("rounds", len(todo), len(todo))
    fixed, others = values[: depth + 1], values[depth + 1 :]
    bound = [_bound(fixed)] if arrays.tree.is_chain else []
    texts = _Texts([*values, *bound])
    kinds = {name: kind for name, kind, *_ in jobs}
    policies = [len(fixed) + at for at, kind in enumerate(kinds.values()) if kind in POLICIES]
    prompts, groups = ([of[s] for s in texts.present] for of in (arrays.clusters, arrays.groups))
    clusters = choose_clusters(
        prompts, groups, texts.tokens, texts.seconds, policies, range(len(fixed)), cluster
    )  # fmt: skip
    boot = Resamples(clusters.of, seed)
    priced = Priced(boot, draws, texts.rounds, torch.zeros(len(texts.present), dtype=torch.int64))
    speeds = Comparison(boot, draws, texts.tokens, priced, kinds, len(fixed), primary, clusters.largest)
    if bound:
        speeds.ceiling = speeds.rates[:, -1]

    winner = max(fixed, key=lambda one: one.rate)
    lines = speeds.first_lines(_counts(fixed[0]), _counts(winner), winner.name)
    for (name, kind, _, note), of in zip(jobs, others, strict=True):
        lines.append(speeds.line(name, kind, speeds.speeds.of[name], _counts(of), note))
    if speeds.ceiling is not None:
        note = "of single rounds; knows what every depth brings"
        lines.append(speeds.line("oracle bound", "bound", speeds.ceiling, None, note))
    outcomes, reached = trace_outcomes(arrays), acceptance_bands(arrays, Resamples(arrays.clusters, seed))
    reasons = doubts(lines, (), draws.profile)
    lines = contradicted(lines, reasons)
    return Report(
        tuple(lines),
        speeds.speeds.fixed,
        tuple(band.value for band in reached),
        {**facts, **clusters.facts, "intervals": draws.text_over(clusters.unit), "rounds": len(winner.committed)},
        reached,
        answer(lines, winner.name, clusters, (), reasons, primary, remedy(arrays.header, draws.profile)),
        (*noise_findings(draws.profile), *dominant_cluster(arrays.subset(texts.present), clusters)),
        tuple(dict.fromkeys([*(caveat for one in values for caveat in one.caveats), *outcomes.caveats])),
    )


class _Texts:
    """Rounds by the texts that they are of.

    Attributes:
        present: the S texts that have rounds.
        tokens, seconds: [S, P].
        rounds: of each of P policies, the sequence numbered among the texts that are present.
    """

    def __init__(self, values: Sequence[RoundValues]) -> None:
        # Every policy is valued at the same rounds in the same order, so that one of them has the text of each.
        present, text = torch.unique(values[0].taken.sequence, return_inverse=True)
        self.present: list[int] = present.tolist()
        self.rounds = [dataclasses.replace(one.taken, sequence=text) for one in values]
        self.tokens, self.seconds = (self._by_text(values, name, text) for name in ("committed", "seconds"))

    def _by_text(self, values: Sequence[RoundValues], name: str, text: Tensor) -> Values:
        sums = torch.zeros(len(self.present), len(values), dtype=torch.float64)
        out: Values = sums.index_add_(0, text, torch.stack([getattr(one, name).double() for one in values], 1)).numpy()
        return out


def _counts(values: RoundValues) -> Counts:
    counts = (values.committed, values.taken.drafted, values.taken.verified)
    committed, drafted, verified = (float(count.double().mean()) for count in counts)
    return committed, drafted, verified, committed - 1.0


def _bound(fixed: Sequence[RoundValues]) -> RoundValues:
    """Return the best depth of each round: sum of tokens over sum of seconds at most rho, by Dinkelbach.

    The depths are those that are best for the whole sample, so that a resample's value is a little below its own bound.
    """
    tokens, seconds = (torch.stack([getattr(one, name) for one in fixed], 1) for name in ("committed", "seconds"))
    # From a rate that is reached, rho never falls: each turn's depths are at least as good at it as those before.
    rho = max(one.rate for one in fixed)
    for _ in range(_TURNS):
        best = (tokens - rho * seconds).argmax(1, keepdim=True)
        chosen, spent = tokens.gather(1, best)[:, 0], seconds.gather(1, best)[:, 0]
        before, rho = rho, float(chosen.sum() / spent.sum())
        if rho - before <= _SETTLED * rho:
            break

    at_best: dict[str, Any] = {
        name: torch.stack([getattr(one.taken, name) for one in fixed], 1).gather(1, best)[:, 0]
        for name in ("drafted", "verified", "accepted", "steps")
    }
    return RoundValues("bound", chosen, spent, (), dataclasses.replace(fixed[0].taken, **at_best))
