"""Compare fixed lengths and policies, on whole texts or on single rounds of a live trace.

All intervals are from the same resamples of the clusters and of the profile's timings. Whole texts of a live trace cannot be
replayed, because the text depends on the policy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from ...decode.benchmark import Ratio
from ...policies.contract import StopPolicy
from ...policies.display import Progress, silent
from ...policies.fixed import FixedLength
from ..fit.rules import fixed_grid
from ..replay.arrays import TraceArrays
from ..replay.bounds import best_static_tree, oracle_plan, planned_rounds
from ..replay.rounds import Rounds
from ..replay.run import replay
from ..replay.single_rounds import check_identified, evaluate_rounds, identified_limit
from .analysis import Replays, trace_outcomes
from .pricing import PricedReplays, ProfileBootstrap, ResampleSource
from .records import POLICIES, Line
from .statistics import Clusters, LogRatios, Resamples, Values, oracle_share
from .verdict import verdict

PLAIN, BEST, BOUND = "plain decoding", "best fixed", "oracle bound"
CONVERGED, MAX_ITERATIONS = 1e-12, 50
EXACT_S = 1e-9
"""Seconds by which a replay may be below the bound: sums of the same numbers in another order."""

Counts = tuple[float, float, float, float]
"""Per round: tokens committed, drafted, verified, accepted."""


class Job(NamedTuple):
    """A policy to compare; `name`, `kind` and `note` as of `Line`."""

    name: str
    kind: str
    note: str
    policy: StopPolicy


@dataclass(frozen=True)
class Setting:
    """What policies are compared on.

    Attributes:
        arrays, costs: the trace, and the latency of its rounds.
        clusters: that intervals resample.
        primary, seed, progress: see `evaluate`.
        among: clusters of all places, which are drawn together (`Resamples`); empty if there is one place.
    """

    arrays: TraceArrays
    costs: ProfileBootstrap
    clusters: Clusters
    primary: str = ""
    seed: int = 0
    progress: Progress = silent
    among: tuple[str, ...] = ()

    def resamples(self, clusters: Clusters) -> Resamples:
        """Return resamples of these clusters."""
        return Resamples(clusters.of, self.seed, among=self.among)


@dataclass(frozen=True)
class ComparisonResult:
    """The lines of a report, and what its answer, findings and sections need besides.

    Attributes:
        lines, fixed, caveats: see `Report`.
        clusters, boot: of the sequences that were compared.
        logs: of the rules and learned policies against their rivals.
        replays: of whole texts; None of single rounds, of which there are `rounds`.
        below_bound: policies that need less time than the oracle on a text, which is impossible.
        to_achievable: speed of each policy over the achievable estimate.
        of_fixed: rounds of the lengths 0..K of chains of one drafter; empty for others.
    """

    lines: list[Line]
    fixed: tuple[float, ...]
    clusters: Clusters
    boot: Resamples
    logs: LogRatios | None
    replays: Replays | None = None
    below_bound: Sequence[str] = ()
    to_achievable: Mapping[str, Ratio] = field(default_factory=dict)
    rounds: int = 0
    caveats: tuple[str, ...] = ()
    of_fixed: Sequence[Rounds] = ()


class Comparison:
    """Speeds of the fixed lengths 0..K and of other policies.

    Args:
        boot: resamples of the clusters.
        setting: latency, primary policy and sizes of clusters.
        tokens: [S], or [S, P] if policies commit different numbers of tokens in the same rounds.
        priced: seconds of P replays: the fixed lengths, the policies, and the oracle bound if `has_bound`.
        jobs: the policies.
        counts: of each fixed length, then of each policy.
        fixed: the fixed lengths, with each drafter.
        has_bound: see `priced`.

    Attributes:
        by_length: [K + 1] tokens/s of each fixed length in the sample, with the drafter for which it is fastest.
        best_at: the best of `fixed`.
        bound: [1 + R] tokens/s of the oracle; NaN without.
        pace: [1 + R, P] seconds over those without the profile's uncertainty.
        logs: of the rules and learned policies against their rivals; None without any.
    """

    def __init__(
        self,
        boot: Resamples,
        setting: Setting,
        tokens: Values,
        priced: PricedReplays,
        jobs: Sequence[Job],
        counts: Sequence[Counts],
        fixed: Sequence[StopPolicy],
        *,
        has_bound: bool,
    ) -> None:
        self._boot, self._setting, self._jobs, self._counts, self._fixed = boot, setting, jobs, counts, fixed
        self._tokens, self._seconds = tokens, priced.by_text()
        total = boot.total(tokens.reshape(len(tokens), -1))  # [1 + R, 1] or [1 + R, P]
        spent = {source: priced.seconds(source) for source in ResampleSource}
        self.pace: Values = spent[ResampleSource.ALL] / spent[ResampleSource.PROMPTS]
        rates = total / spent[ResampleSource.ALL]  # [1 + R, P]
        lengths = range(len(fixed))
        self._column = {job.name: at for at, job in enumerate(jobs, len(lengths))}
        self._rates = {name: rates[:, at] for name, at in self._column.items()}
        of_fixed = rates[0, : len(lengths)]
        depths = np.array([policy.max_depth for policy in fixed])
        self.by_length = tuple(float(of_fixed[depths == k].max()) for k in range(int(depths.max()) + 1))
        self.best_at = int(of_fixed.argmax())
        # The best length, and its drafter, are chosen again in each resample.
        self._plain, self._best = rates[:, 0], rates[:, : len(lengths)].max(1)
        self.bound: Values = rates[:, -1] if has_bound else np.full(len(rates), np.nan)
        rivals = [*lengths, *(self._column[job.name] for job in jobs if job.kind == "static")]
        self._to_plain, self._to_best = self._ratios([0]), self._ratios(lengths)
        self._to_rival = self._ratios(rivals) if len(rivals) > len(lengths) else self._to_best
        policies = [job.name for job in jobs if job.kind in POLICIES]
        self.logs = self._log_ratios(policies, rivals) if policies else None
        self._parts: dict[str, dict[str, Ratio]] = {}
        if setting.costs.profiles and boot.clusters > 1:
            prompts, by_profile = self._ratios(rivals, is_priced=False), total[:1] / spent[ResampleSource.PROFILE]
            for name in policies:
                ratios = by_profile[:, self._column[name]] / by_profile[:, rivals].max(1)
                self._parts[name] = {
                    "all": self._to_rival[name],
                    "prompts": prompts[name],
                    "profile": setting.costs.interval(ratios),
                }

    def _log_ratios(self, names: Sequence[str], rivals: Sequence[int], *, is_priced: bool = True) -> LogRatios:
        """Return the log ratios of policies to the fastest of the columns `rivals`."""
        columns, price = [self._column[name] for name in names], -np.log(self.pace) if is_priced else None
        others = [rival for rival in rivals if [rival] != columns]
        return self._boot.log_ratios(self._tokens, self._seconds, columns, others, price)

    def _ratios(self, rivals: Sequence[int], *, is_priced: bool = True) -> dict[str, Ratio]:
        """Return the ratio of each policy to the fastest of the columns `rivals`.

        The intervals of all rules and learned policies hold at once, those of the primary policy and of other kinds by
        themselves.
        """
        primary = self._setting.primary
        together = [job.name for job in self._jobs if job.kind in POLICIES and job.name != primary]
        ratios: dict[str, Ratio] = {}
        for names in filter(None, [together, *([job.name] for job in self._jobs if job.name not in together)]):
            logs = self._log_ratios(names, rivals, is_priced=is_priced)
            ratios |= zip(names, self._boot.simultaneous([logs])[0], strict=True)
        return ratios

    def line(self, name: str, kind: str, note: str, rate: Values, counts: Counts = (0.0, 0.0, 0.0, 0.0)) -> Line:
        """Return a line of the report, with its verdict; `rate` is [1 + R] tokens/s."""
        interval = self._boot.interval
        share = oracle_share(rate, self._best, self.bound)
        to_plain = self._to_plain.get(name) or interval(rate / self._plain)
        to_best = self._to_best.get(name) or interval(rate / self._best)
        line = Line(name, kind, float(rate[0]), to_plain, to_best, interval(share), *counts, note)
        if kind not in POLICIES:
            return line
        rival, parts = self._to_rival[name], self._parts.get(name, {})
        result = verdict(rival, self._boot.clusters, parts, self._setting.clusters.largest)
        return dataclasses.replace(line, to_rival=rival, verdict=result, parts=parts)

    def lines(self) -> list[Line]:
        """Return the lines of plain decoding, the best fixed length and all policies."""
        counts, best_note = self._counts, f"{self._fixed[self.best_at].name}, chosen on these prompts"
        of_policies = zip(self._jobs, counts[len(self._fixed) :], strict=True)
        return [
            self.line(PLAIN, "fixed", "fixed:0", self._plain, counts[0]),
            self.line(BEST, "fixed", best_note, self._best, counts[self.best_at]),
            *(self.line(x.name, x.kind, x.note, self._rates[x.name], of_policy) for x, of_policy in of_policies),
        ]

    def over(self, rate: Values) -> dict[str, Ratio]:
        """Return the speed of every rule and learned policy over `rate` [1 + R]."""
        policies = [job.name for job in self._jobs if job.kind in POLICIES]
        return {name: self._boot.interval(self._rates[name] / rate) for name in policies}


def compare_texts(setting: Setting, jobs: Sequence[Job], achievable: bool = False) -> ComparisonResult:
    """Return the lines of policies on whole texts, with the achievable estimate if requested."""
    arrays, costs, progress = setting.arrays, setting.costs, setting.progress
    profile = costs.profile
    progress("replay", 0, 1 + len(jobs))
    fixed = fixed_grid(arrays, profile)
    lengths, played = [one.policy for one in fixed], list(fixed)
    for done, job in enumerate(jobs, 1):
        progress("replay", done, 1 + len(jobs))
        played.append(replay(arrays, job.policy, profile))
    progress("replay", 1 + len(jobs), 1 + len(jobs))
    if not arrays.tree.is_chain and arrays.tree.drafters == 1:
        static, static_rounds = best_static_tree(arrays, profile)
        shape = f"--tree {static.shape.name}, of {len(static.nodes)} nodes" if static.nodes else "no nodes"
        played.append(static_rounds)
        jobs = [*jobs, Job("best static tree", "static", f"{shape}; chosen on these prompts", static)]
    by_name = dict(zip([job.name for job in jobs], played[len(fixed) :], strict=True))
    tokens, boot = arrays.text_tokens.double().numpy(), setting.resamples(setting.clusters)
    plan = oracle_plan(arrays, profile)
    spent = torch.stack([*(one.seconds for one in played), plan.seconds], 1)
    rounds = [*played, planned_rounds(arrays, plan)]
    priced = PricedReplays(boot, costs, rounds, spent)
    counts = [_counts(one) for one in played]
    comparison = Comparison(boot, setting, tokens, priced, jobs, counts, lengths, has_bound=True)
    lines, to_achievable, estimate = comparison.lines(), {}, None
    if arrays.tree.drafters > 1:
        lines = [_with_shares(line, arrays, by_name.get(line.name)) for line in lines]
        rate = boot.total(tokens) / (boot.total(_best_by_text(fixed)) * comparison.pace[:, comparison.best_at])
        note = "the fastest drafter of each text in hindsight, at its best fixed length"
        lines.append(comparison.line("best drafter by text", "hindsight", note, rate))
    if achievable:
        from ..fit.achievable import achievable_estimate, achievable_route  # imports xgboost

        progress("achievable estimate", 0, 1)
        compute = achievable_route if arrays.tree.drafters > 1 else achievable_estimate
        estimate = compute(arrays, profile, seed=setting.seed).seconds
        # The estimate is not a replay: its price varies with the profile as that of the oracle's plan.
        rate = boot.total(tokens) / (boot.total(estimate.numpy()) * comparison.pace[:, -1])
        note = "best cross-fitted values on all scalars, decisions free"
        lines.append(comparison.line("achievable estimate", "achievable", note, rate))
        to_achievable = comparison.over(rate)
    lines.append(comparison.line(BOUND, "bound", "knows every accepted length", comparison.bound))
    below = [x for x, one in by_name.items() if bool((one.seconds < plan.seconds - EXACT_S).any())]
    replays = Replays(arrays, costs, by_name, fixed, fixed[comparison.best_at], plan, estimate)
    return ComparisonResult(
        lines, comparison.by_length, setting.clusters, boot, comparison.logs, replays, below, to_achievable,
        of_fixed=fixed if arrays.tree.is_chain and arrays.tree.drafters == 1 else (),
    )  # fmt: skip


def _with_shares(line: Line, arrays: TraceArrays, played: Rounds | None) -> Line:
    """Return the line of a policy that routes with the share of rounds in which each drafter drafted."""
    if played is None or not played.policy.routes:
        return line
    shares = played.drafting.double().mean(0).tolist()
    return dataclasses.replace(line, drafters=dict(zip(arrays.drafters, shares, strict=True)))


def _best_by_text(fixed: Sequence[Rounds]) -> Values:
    """Return [S] seconds with the fastest drafter of each text, each at the fixed length that is best for all texts."""
    best: dict[str, Rounds] = {}
    for played in fixed[1:]:
        drafter = played.policy.drafter
        best[drafter] = max(best.get(drafter, played), played, key=lambda one: one.rate)
    out: Values = torch.stack([played.seconds for played in best.values()], 1).min(1).values.numpy()
    return out


def _counts(played: Rounds) -> Counts:
    rounds = max(1, len(played))
    drafted, verified, accepted = (
        float(count.sum()) / rounds for count in (played.drafted, played.verified, played.accepted)
    )
    return played.block_efficiency, drafted, verified, accepted


def compare_rounds(setting: Setting, jobs: Sequence[Job]) -> ComparisonResult:
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
    lengths = [FixedLength(k) for k in range(depth + 1)]
    policies, values = [*lengths, *(job.policy for job in jobs)], []
    for done, policy in enumerate(policies):
        progress("rounds", done, len(policies))
        values.append(evaluate_rounds(arrays, policy, costs.profile, depth))
    progress("rounds", len(policies), len(policies))
    columns = [*values, *([_round_bound(values[: depth + 1])] if arrays.tree.is_chain else [])]
    # All policies are valued at the same rounds in the same order, so that one of them has the text of each.
    present, text = torch.unique(values[0].sequence, return_inverse=True)
    tokens = torch.zeros(len(present), len(columns), dtype=torch.float64)  # [S, P]
    tokens.index_add_(0, text, torch.stack([one.committed.double() for one in columns], 1))
    clusters = dataclasses.replace(setting.clusters, of=tuple(setting.clusters.of[at] for at in present.tolist()))
    boot = setting.resamples(clusters)
    rounds = [one.subset(present.tolist()) for one in columns]
    priced = PricedReplays(boot, costs, rounds)
    counts, is_chain = list(map(_round_counts, values)), arrays.tree.is_chain
    comparison = Comparison(boot, setting, tokens.numpy(), priced, jobs, counts, lengths, has_bound=is_chain)
    lines = comparison.lines()
    if is_chain:
        note = "of single rounds; knows the outcome of every depth"
        lines.append(comparison.line(BOUND, "bound", note, comparison.bound))
    caveats = [*(caveat for one in values for caveat in one.caveats), *trace_outcomes(arrays).caveats]
    return ComparisonResult(
        lines, comparison.by_length, clusters, boot, comparison.logs, rounds=len(values[0].committed),
        caveats=tuple(dict.fromkeys(caveats)), of_fixed=rounds[: depth + 1] if is_chain else (),
    )  # fmt: skip


def compare_places(places: Sequence[ComparisonResult]) -> list[ComparisonResult]:
    """Return comparisons of the same policies with intervals and verdicts that are simultaneous over all of them."""
    logs = [one.logs for one in places if one.logs is not None]
    out = []
    for compared, ratios in zip(places, places[0].boot.simultaneous(logs), strict=True):
        lines, remaining = [], iter(ratios)
        for line in compared.lines:
            if line.kind in POLICIES:
                ratio, parts = next(remaining), dict(line.parts)
                parts |= {"all": ratio} if parts else {}
                result = verdict(ratio, compared.boot.clusters, parts, compared.clusters.largest)
                to_best = ratio if line.to_rival == line.to_best_fixed else line.to_best_fixed
                line = dataclasses.replace(line, to_best_fixed=to_best, to_rival=ratio, verdict=result, parts=parts)
            lines.append(line)
        out.append(dataclasses.replace(compared, lines=lines))
    return out


def _round_counts(values: Rounds) -> Counts:
    counts = (values.committed, values.drafted, values.verified)
    committed, drafted, verified = (float(count.double().mean()) for count in counts)
    return committed, drafted, verified, committed - 1.0


def _round_bound(fixed: Sequence[Rounds]) -> Rounds:
    """Return the best depth of each round: the largest sum of tokens over sum of seconds, by Dinkelbach iteration.

    The depths are those that are best for the whole sample, so that the value of a resample is a little below its bound.
    """
    tokens = torch.stack([one.committed for one in fixed], 1)
    seconds = torch.stack([one.price(one.profile) for one in fixed], 1)
    # From a rate that is reached, rho never falls: the depths of each iteration are at least as good as those before.
    rho = max(one.rate for one in fixed)
    for _ in range(MAX_ITERATIONS):
        best = (tokens - rho * seconds).argmax(1, keepdim=True)
        chosen, spent = tokens.gather(1, best)[:, 0], seconds.gather(1, best)[:, 0]
        before, rho = rho, float(chosen.sum() / spent.sum())
        if rho - before <= CONVERGED * rho:
            break
    at_best: dict[str, Any] = {
        name: torch.stack([getattr(one, name) for one in fixed], 1).gather(1, best)[:, 0]
        for name in ("drafted", "verified", "accepted", "steps")
    }
    return dataclasses.replace(fixed[0], committed=chosen, **at_best)
