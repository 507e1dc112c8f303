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
from ..replay.arrays import TraceArrays
from ..replay.bounds import best_static_tree, drafted_alone, oracle_plan, planned_rounds
from ..replay.rounds import Rounds
from ..replay.run import replay
from ..replay.single_rounds import check_identified, evaluate_rounds, identified_limit
from .analysis import Entry, Replays, trace_outcomes
from .pricing import Priced, ProfileBootstrap, ResampleSource
from .records import POLICIES, Line
from .statistics import SAME, Clusters, Resamples, Values
from .verdict import verdict

CONVERGED, MOST_ITERATIONS = 1e-12, 50
EXACT_S = 1e-9
"""Seconds by which a replay may be below the bound: sums of the same numbers in another order."""

Counts = tuple[float, float, float, float]
"""Per round: tokens committed, drafted, verified, accepted."""


class Job(NamedTuple):
    """A policy to compare; `name`, `kind` and `note` as of `Line`."""

    name: str
    kind: str
    policy: StopPolicy
    note: str


@dataclass(frozen=True)
class Setting:
    """What policies are compared on.

    Attributes:
        arrays, costs: the trace, and the latency of its rounds.
        clusters: that intervals resample.
        primary, seed, progress: see `evaluate`.
    """

    arrays: TraceArrays
    costs: ProfileBootstrap
    clusters: Clusters
    primary: str = ""
    seed: int = 0
    progress: Progress = silent


@dataclass(frozen=True)
class Compared:
    """The lines of a report, and what its answer, findings and sections need besides.

    Attributes:
        lines, fixed, caveats: see `Report`.
        best_name: of the best fixed length.
        clusters, boot: of the sequences that were compared.
        replays: of whole texts; None of single rounds, of which there are `rounds`.
        below_bound: policies that need less time than the oracle on a text, which is impossible.
        to_achievable: speed of each policy over the achievable estimate.
    """

    lines: list[Line]
    fixed: tuple[float, ...]
    best_name: str
    clusters: Clusters
    boot: Resamples
    replays: Replays | None = None
    below_bound: Sequence[str] = ()
    to_achievable: Mapping[str, Ratio] = field(default_factory=dict)
    rounds: int = 0
    caveats: tuple[str, ...] = ()


class Comparison:
    """Speeds of the fixed lengths 0..K and of other entries.

    Args:
        boot, costs: resamples of the clusters, and of the latency.
        tokens: [S], or [S, P] if policies commit different numbers of tokens in the same rounds.
        priced: seconds of P replays: the fixed lengths, the entries, and the oracle bound if `has_bound`.
        kinds: kind of each entry (`Line.kind`) by name.
        primary: name of the entry that was chosen before the evaluation; "" if there is none.
        largest: share of all tokens in the largest cluster.

    Attributes:
        rates: [1 + R, P] tokens/s if everything is resampled, by column.
        fixed: [K + 1] tokens/s of each fixed length in the sample.
        plain, best: [1 + R] of length 0, and of the best length, which is chosen again in each resample.
        pace: [1 + R, P] seconds over those without the profile's uncertainty.
        bound: [1 + R] of the oracle; None without.
    """

    def __init__(
        self,
        boot: Resamples,
        costs: ProfileBootstrap,
        tokens: Values,
        priced: Priced,
        kinds: Mapping[str, str],
        *,
        has_bound: bool = False,
        primary: str = "",
        largest: float = 0.0,
    ) -> None:
        self._boot, self._kinds, self._primary, self._largest = boot, kinds, primary, largest
        self._tokens, self._seconds = tokens, priced.by_text()
        total = boot.total(tokens.reshape(len(tokens), -1))  # [1 + R, 1] or [1 + R, P]
        spent = {source: priced.seconds(source) for source in ResampleSource}
        self.pace: Values = spent[ResampleSource.ALL] / spent[ResampleSource.PROMPTS]
        self.rates: Values = total / spent[ResampleSource.ALL]
        lengths = range(self.rates.shape[1] - len(kinds) - has_bound)
        self._column = {name: at for at, name in enumerate(kinds, len(lengths))}
        self.fixed: tuple[float, ...] = tuple(self.rates[0, : len(lengths)].tolist())
        self.plain, self.best = self.rates[:, 0], self.rates[:, : len(lengths)].max(1)
        self.bound = self.rates[:, -1] if has_bound else None
        rivals = [*lengths, *(self._column[name] for name, kind in kinds.items() if kind == "static")]
        self._to_plain, self._to_best = self._ratios([0]), self._ratios(lengths)
        self._to_rival = self._ratios(rivals) if len(rivals) > len(lengths) else self._to_best
        self._parts: dict[str, dict[str, Ratio]] = {}
        if costs.profiles and boot.clusters > 1:
            prompts = self._ratios(rivals, is_priced=False)
            for name in (name for name, kind in kinds.items() if kind in POLICIES):
                self._parts[name] = {"all": self._to_rival[name], "prompts": prompts[name]}
                for source in (ResampleSource.PROFILE, ResampleSource.DECISIONS):
                    rates = total[:1] / spent[source]
                    ratios = rates[:, self._column[name]] / rates[:, rivals].max(1)
                    self._parts[name][source.value] = costs.interval(ratios)

    def rate(self, name: str) -> Values:
        """Return [1 + R] tokens/s of an entry."""
        out: Values = self.rates[:, self._column[name]]
        return out

    def _ratios(self, rivals: Sequence[int], *, is_priced: bool = True) -> dict[str, Ratio]:
        """Return the ratio of each entry to the fastest of the columns `rivals`.

        The intervals of all rules and learned policies hold at once, those of the primary policy and of other entries by
        themselves.
        """
        policies = [name for name, kind in self._kinds.items() if kind in POLICIES and name != self._primary]
        families = [policies, *([name] for name in self._kinds if name not in policies)]
        price = -np.log(self.pace) if is_priced else None
        ratios: dict[str, Ratio] = {}
        for names in filter(None, families):
            columns = [self._column[name] for name in names]
            others = [rival for rival in rivals if [rival] != columns]
            logs = self._boot.log_ratios(self._tokens, self._seconds, columns, others, price)
            ratios |= zip(names, self._boot.simultaneous([logs])[0], strict=True)
        return ratios

    def line(self, name: str, kind: str, rate: Values, counts: Counts | None = None, note: str = "") -> Line:
        """Return a line of the report, with its verdict.

        Args:
            name, kind, note: see `Line`.
            rate: [1 + R] tokens/s.
            counts: None if there are no rounds.
        """
        share = np.zeros_like(rate)
        if self.bound is not None:
            with np.errstate(invalid="ignore", divide="ignore"):
                # 0 if the best fixed length is the bound, up to rounding: there is no oracle gain.
                has_gain = self.bound > self.best * (1.0 + SAME)
                share = np.where(has_gain, (rate - self.best) / (self.bound - self.best), 0.0)
        to_plain = self._to_plain.get(name) or self._boot.interval(rate / self.plain)
        to_best = self._to_best.get(name) or self._boot.interval(rate / self.best)
        numbers = counts or (0.0, 0.0, 0.0, 0.0)
        line = Line(name, kind, float(rate[0]), to_plain, to_best, self._boot.interval(share), *numbers, note)
        if kind not in POLICIES:
            return line
        rival, parts = self._to_rival[name], self._parts.get(name, {})
        result = verdict(rival, self._boot.clusters, parts, self._largest)
        return dataclasses.replace(line, to_rival=rival, verdict=result, parts=parts)

    def lines(
        self, plain: Counts, best: Counts, best_name: str, counts: Sequence[Counts], notes: Sequence[str]
    ) -> list[Line]:
        """Return the lines of plain decoding, the best fixed length and all entries; `counts` and `notes` by entry."""
        out = [
            self.line("plain decoding", "fixed", self.plain, plain, "fixed:0"),
            self.line("best fixed", "fixed", self.best, best, f"{best_name}, chosen on these prompts"),
        ]
        for (name, kind), count, note in zip(self._kinds.items(), counts, notes, strict=True):
            out.append(self.line(name, kind, self.rate(name), count, note))
        return out


def compare_texts(setting: Setting, jobs: Sequence[Job], achievable: bool) -> Compared:
    """Return the lines of policies on whole texts, with the achievable estimate if requested."""
    arrays, costs, clusters, progress = setting.arrays, setting.costs, setting.clusters, setting.progress
    profile, entries, fixed = costs.profile, [], []
    depth = min(arrays.depth, profile.max_depth)
    total = depth + 1 + len(jobs)
    for k in range(depth + 1):
        progress("replay", k, total)
        fixed.append(replay(arrays, FixedLength(k), profile))
    for done, job in enumerate(jobs, depth + 1):
        progress("replay", done, total)
        entries.append(Entry(job.name, job.kind, job.note, replay(arrays, job.policy, profile)))
    progress("replay", total, total)
    if not arrays.tree.is_chain:
        static, _ = best_static_tree(arrays, profile)
        shape = f"--tree {static.shape.name}, of {len(static.nodes)} nodes" if static.nodes else "no nodes"
        note = f"{shape}; chosen on these prompts"
        entries.append(Entry("best static tree", "static", note, replay(*drafted_alone(arrays, static.nodes), profile)))
    tokens = arrays.text_tokens.double().numpy()
    boot, plan = Resamples(clusters.of, setting.seed), oracle_plan(arrays, profile)
    played = [*fixed, *(entry.played for entry in entries)]
    spent = torch.stack([*(one.seconds for one in played), plan.seconds], 1)
    rounds = [*played, planned_rounds(arrays, plan)]
    comparison = Comparison(
        boot, costs, tokens, Priced(boot, costs, rounds, arrays.prompt_tokens, spent), {e.name: e.kind for e in entries},
        has_bound=True, primary=setting.primary, largest=clusters.largest,
    )  # fmt: skip
    best = max(fixed, key=lambda one: one.rate)
    counts, notes = [_counts(entry.played) for entry in entries], [entry.note for entry in entries]
    lines = comparison.lines(_counts(fixed[0]), _counts(best), best.name, counts, notes)
    to_achievable = {}
    if achievable:
        from ..fit.achievable import achievable_estimate  # imports xgboost

        progress("achievable estimate", 0, 1)
        seconds = achievable_estimate(arrays, profile, seed=setting.seed).seconds
        # The estimate is not a replay: its price varies with the profile as that of the oracle's plan.
        rate = boot.total(tokens) / (boot.total(seconds) * comparison.pace[:, -1])
        note = "best cross-fitted continuation value on all scalars, decisions free"
        lines.append(comparison.line("achievable estimate", "achievable", rate, note=note))
        to_achievable = {job.name: boot.interval(comparison.rate(job.name) / rate) for job in jobs}
    assert comparison.bound is not None
    lines.append(comparison.line("oracle bound", "bound", comparison.bound, note="knows every accepted length"))
    below = [e.name for e in entries if bool((e.played.seconds < plan.seconds - EXACT_S).any())]
    replays = Replays(arrays, costs, entries, fixed, best, plan)
    return Compared(lines, comparison.fixed, best.name, clusters, boot, replays, below, to_achievable)


def _counts(played: Rounds) -> Counts:
    rounds = max(1, len(played))
    drafted, verified, accepted = (
        float(count.sum()) / rounds for count in (played.drafted, played.verified, played.accepted)
    )
    return played.block_efficiency, drafted, verified, accepted


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
    present, text = torch.unique(values[0].sequence, return_inverse=True)
    tokens = torch.zeros(len(present), len(columns), dtype=torch.float64)  # [S, P]
    tokens.index_add_(0, text, torch.stack([one.committed.double() for one in columns], 1))
    clusters = dataclasses.replace(setting.clusters, of=tuple(setting.clusters.of[at] for at in present.tolist()))
    boot = Resamples(clusters.of, setting.seed)
    rounds = [one.subset(present.tolist()) for one in columns]
    priced = Priced(boot, costs, rounds, torch.zeros(len(present), dtype=torch.int64))
    kinds, is_chain = {job.name: job.kind for job in jobs}, arrays.tree.is_chain
    comparison = Comparison(
        boot, costs, tokens.numpy(), priced, kinds, has_bound=is_chain, primary=setting.primary, largest=clusters.largest
    )  # fmt: skip
    winner = max(fixed, key=lambda one: one.rate)
    notes = [job.note for job in jobs]
    lines = comparison.lines(
        _round_counts(fixed[0]), _round_counts(winner), winner.name, list(map(_round_counts, others)), notes
    )
    if comparison.bound is not None:
        note = "of single rounds; knows the outcome of every depth"
        lines.append(comparison.line("oracle bound", "bound", comparison.bound, note=note))
    caveats = [*(caveat for one in values for caveat in one.caveats), *trace_outcomes(arrays).caveats]
    return Compared(
        lines, comparison.fixed, winner.name, clusters, boot, rounds=len(winner.committed),
        caveats=tuple(dict.fromkeys(caveats)),
    )  # fmt: skip


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
    for _ in range(MOST_ITERATIONS):
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
