"""Compare policies on single rounds of a live trace, of which whole texts cannot be replayed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from ...policies.fixed import FixedLength
from ..replay.rounds import RoundValues, check_identified, evaluate_rounds, identified_limit
from .analysis import trace_outcomes
from .comparison import Compared, Comparison, Counts, Job, Setting
from .pricing import Priced
from .statistics import Resamples

_CONVERGED, _MOST_ITERATIONS = 1e-12, 50


def compare_rounds(setting: Setting, jobs: Sequence[Job]) -> Compared:
    """Return the lines of policies on the rounds of a live trace.

    Rates are expected tokens over modelled seconds of the rounds that the recorded run visits. The bound is that of single
    rounds: the best depth of each round if the outcome of every depth is known, at the rate that follows from it. Trees have
    no bound: a policy may draft a part of a depth, and could be above it.

    Args:
        setting: the arrays are read with `extra=ROUND_COLUMNS`.
        jobs: policies to compare with the fixed lengths.

    Raises:
        TraceError: as of `evaluate_rounds`.
    """
    arrays, costs, progress = setting.arrays, setting.costs, setting.progress
    for policy in (FixedLength(1), *(job.policy for job in jobs)):
        check_identified(arrays, policy)
    depth = min(arrays.depth, costs.profile.max_depth, identified_limit(arrays))
    policies = [*(FixedLength(k) for k in range(depth + 1)), *(job.policy for job in jobs)]
    values = []
    for done, policy in enumerate(policies):
        progress("rounds", done, len(policies))
        values.append(evaluate_rounds(arrays, policy, costs.profile, depth))
    progress("rounds", len(policies), len(policies))
    fixed, others = values[: depth + 1], values[depth + 1 :]
    columns = [*values, *([_round_bound(fixed)] if arrays.tree.is_chain else [])]
    # All policies are valued at the same rounds in the same order, so that one of them has the text of each.
    present, text = torch.unique(values[0].taken.sequence, return_inverse=True)
    tokens = torch.zeros(len(present), len(columns), dtype=torch.float64)  # [S, P]
    tokens.index_add_(0, text, torch.stack([one.committed.double() for one in columns], 1))
    clusters = dataclasses.replace(setting.clusters, of=tuple(setting.clusters.of[at] for at in present.tolist()))
    boot = Resamples(clusters.of, setting.seed)
    rounds = [dataclasses.replace(one.taken, sequence=text) for one in columns]
    priced = Priced(boot, costs, rounds, torch.zeros(len(present), dtype=torch.int64))
    kinds, is_chain = {job.name: job.kind for job in jobs}, arrays.tree.is_chain
    comparison = Comparison(
        boot,
        costs,
        tokens.numpy(),
        priced,
        kinds,
        has_bound=is_chain,
        primary=setting.primary,
        largest=clusters.largest,
    )
    winner = max(fixed, key=lambda one: one.rate)
    notes = [job.note for job in jobs]
    lines = comparison.lines(_counts(fixed[0]), _counts(winner), winner.name, list(map(_counts, others)), notes)
    if comparison.bound is not None:
        note = "of single rounds; knows the outcome of every depth"
        lines.append(comparison.line("oracle bound", "bound", comparison.bound, note=note))
    caveats = [*(caveat for one in values for caveat in one.caveats), *trace_outcomes(arrays).caveats]
    return Compared(
        lines, comparison.fixed, winner.name, clusters, boot, rounds=len(winner.committed),
        caveats=tuple(dict.fromkeys(caveats)),
    )  # fmt: skip


def _counts(values: RoundValues) -> Counts:
    counts = (values.committed, values.taken.drafted, values.taken.verified)
    committed, drafted, verified = (float(count.double().mean()) for count in counts)
    return committed, drafted, verified, committed - 1.0


def _round_bound(fixed: Sequence[RoundValues]) -> RoundValues:
    """Return the best depth of each round: the largest sum of tokens over sum of seconds, by Dinkelbach iteration.

    The depths are those that are best for the whole sample, so that the value of a resample is a little below its bound.
    """
    tokens, seconds = (torch.stack([getattr(one, name) for one in fixed], 1) for name in ("committed", "seconds"))
    # From a rate that is reached, rho never falls: the depths of each iteration are at least as good as those before.
    rho = max(one.rate for one in fixed)
    for _ in range(_MOST_ITERATIONS):
        best = (tokens - rho * seconds).argmax(1, keepdim=True)
        chosen, spent = tokens.gather(1, best)[:, 0], seconds.gather(1, best)[:, 0]
        before, rho = rho, float(chosen.sum() / spent.sum())
        if rho - before <= _CONVERGED * rho:
            break
    at_best: dict[str, Any] = {
        name: torch.stack([getattr(one.taken, name) for one in fixed], 1).gather(1, best)[:, 0]
        for name in ("drafted", "verified", "accepted", "steps")
    }
    return RoundValues("bound", chosen, spent, (), dataclasses.replace(fixed[0].taken, **at_best))
