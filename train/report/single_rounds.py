"""The report on live traces: what policies' single rounds are worth, where whole texts cannot be replayed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from ...decode.compare.intervals import Resamples
from ...policies.baselines.fixed import FixedLength
from ...policies.contract import StopPolicy
from ...policies.progress import Progress
from ..replay.rounds import RoundValues, evaluate_rounds
from ..replay.traces.arrays import TraceArrays
from .answer import answer, noise_findings
from .insight import acceptance_bands
from .pricing import Draws, Priced, Vary
from .records import Report
from .speeds import Comparison, Counts

Job = tuple[str, str, StopPolicy, str]

_SETTLED = 1e-12
_TURNS = 50


def round_report(
    arrays: TraceArrays, jobs: Sequence[Job], draws: Draws, facts: dict[str, Any], seed: int, progress: Progress
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
        seed: of the resamples of prompts.
        progress: told at every policy.
    """
    depth = min(arrays.depth, draws.profile.max_depth)
    todo: list[StopPolicy] = [*(FixedLength(k) for k in range(depth + 1)), *(job[2] for job in jobs)]
    values = []
    for done, policy in enumerate(todo):
        progress("rounds", done, len(todo))
        values.append(evaluate_rounds(arrays, policy, draws.profile))
    progress("rounds", len(todo), len(todo))
    fixed, asked = values[: depth + 1], values[depth + 1 :]
    bound = [_bound(fixed)] if arrays.tree.is_chain else []
    every = _Texts(arrays, [*values, *bound], draws, seed)
    kinds = {name: kind for name, kind, *_ in jobs}
    count = len(values)
    spent = {vary: some[:, :count] for vary, some in every.spent.items()}
    made = Comparison(every.boot, draws, every.tokens[:, :count], spent, kinds)
    if bound:
        made.ceiling = every.tokens[:, -1] / every.spent[Vary.ALL][:, -1]

    winner = max(fixed, key=lambda one: one.rate)
    lines = made.first_lines(_counts(fixed[0]), _counts(winner), winner.name)
    for (name, kind, _, note), of in zip(jobs, asked, strict=True):
        lines.append(made.line(name, kind, made.found.of[name], _counts(of), note))
    if made.ceiling is not None:
        note = "of single rounds; knows what every depth brings"
        lines.append(made.line("oracle bound", "bound", made.ceiling, None, note))
    reached = acceptance_bands(arrays, Resamples(arrays.prompt_ids, seed))
    return Report(
        tuple(lines),
        made.found.fixed,
        tuple(band.value for band in reached),
        {**facts, "rounds": len(winner.committed)},
        reached,
        answer(lines, winner.name, every.boot, made.to_rivals, by_profile=made.by_profile),
        noise_findings(draws.profile),
        tuple(dict.fromkeys(caveat for one in values for caveat in one.caveats)),
    )


class _Texts:
    """Rounds added up by the texts that they are of, in every resample.

    Attributes:
        boot: resamples of the prompts that have rounds.
        tokens: [1 + R, P].
        spent: [1 + R, P] seconds by what is drawn anew.
    """

    def __init__(self, arrays: TraceArrays, values: Sequence[RoundValues], draws: Draws, seed: int) -> None:
        # Every policy was asked at the same rounds in the same order, so that one of them tells the text of each.
        present, text = torch.unique(values[0].taken.sequence, return_inverse=True)
        self.boot = Resamples([arrays.prompt_ids[s] for s in present.tolist()], seed)
        tokens = torch.zeros(len(present), len(values), dtype=torch.float64)
        tokens.index_add_(0, text, torch.stack([one.committed for one in values], 1))
        self.tokens = self.boot.total(tokens)
        rounds = [dataclasses.replace(one.taken, sequence=text) for one in values]
        priced = Priced(self.boot, draws, rounds, torch.zeros(len(present), dtype=torch.int64))
        self.spent = {vary: priced.seconds(vary) for vary in Vary}


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
