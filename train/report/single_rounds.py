"""The report on live traces: what policies' single rounds are worth, where whole texts cannot be replayed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ...policies.baselines import FixedLength
from ...policies.contract import StopPolicy
from ...policies.costs import Profile
from ...policies.progress import Progress
from ..traces.data import TraceArrays
from ..traces.rounds import RoundValues, evaluate_rounds
from .answer import answer
from .insight import acceptance_bands
from .intervals import Resamples, Values
from .records import Line, Report, verdict

Job = tuple[str, str, StopPolicy, str]

_SETTLED = 1e-12
_TURNS = 50


def round_report(
    arrays: TraceArrays, jobs: Sequence[Job], profile: Profile, facts: dict[str, Any], seed: int, progress: Progress
) -> Report:
    """Evaluate policies on the rounds of a live trace.

    Rates are expected tokens over modelled seconds of the rounds that the recorded run came by. The bound is that of single
    rounds: the best depth of each round for someone who knows what every depth brings, at the rate that follows from it; of
    trees it would be wrong, since a policy may draft a part of a depth, so they have none.

    Args:
        arrays: with `extra=ROUND_COLUMNS`.
        jobs: (name, kind, policy, note).
        profile: what rounds cost.
        facts: of the report.
        seed: of the resamples of prompts.
        progress: told at every policy.
    """
    depth = min(arrays.depth, profile.max_depth)
    todo: list[StopPolicy] = [*(FixedLength(k) for k in range(depth + 1)), *(job[2] for job in jobs)]
    values = []
    for done, policy in enumerate(todo):
        progress("rounds", done, len(todo))
        values.append(evaluate_rounds(arrays, policy, profile))
    progress("rounds", len(todo), len(todo))
    fixed, asked = values[: depth + 1], values[depth + 1 :]
    boot = Resamples([arrays.prompt_ids[s] for s in round_owners(arrays).tolist()], seed)
    rates = [_rate(boot, one) for one in values]
    grid = np.stack(rates[: depth + 1], 1)
    plain, best = grid[:, 0], grid.max(1)
    ceiling = _bound(boot, fixed) if arrays.tree.is_chain else None

    def line(name: str, kind: str, rate: Values, of: RoundValues | None, note: str) -> Line:
        gap = np.zeros_like(rate)
        if ceiling is not None:
            with np.errstate(invalid="ignore", divide="ignore"):
                gap = np.where(ceiling > best, (rate - best) / (ceiling - best), 0.0)
        ratios = (boot.interval(rate / plain), boot.interval(rate / best), boot.interval(gap))
        if of is None:
            return Line(name, kind, float(rate[0]), *ratios, note=note)
        committed, drafted, verified = (float(v.mean()) for v in (of.committed, of.drafted, of.verified))
        told = verdict(ratios[1], boot.prompts) if kind in ("rule", "learned") else ""
        return Line(name, kind, float(rate[0]), *ratios, committed, drafted, verified, committed - 1.0, note, told)

    winner = fixed[int(grid[0].argmax())]
    lines = [line("plain decoding", "fixed", plain, fixed[0], "fixed:0")]
    lines.append(line("best fixed", "fixed", best, winner, f"{winner.name}, chosen on these prompts"))
    found = list(zip(jobs, asked, rates[depth + 1 :], strict=True))
    lines += [line(name, kind, rate, of, note) for (name, kind, _, note), of, rate in found]
    if ceiling is not None:
        lines.append(
            line("clairvoyant bound", "bound", ceiling, None, "of single rounds; knows what every depth brings")
        )
    reached = acceptance_bands(arrays, Resamples(arrays.prompt_ids, seed))
    caveats = tuple(dict.fromkeys(caveat for one in values for caveat in one.caveats))
    to_best = {name: rate / best for (name, *_), _, rate in found}
    return Report(
        tuple(lines),
        tuple(one.rate for one in fixed),
        tuple(band.value for band in reached),
        {**facts, "rounds": winner.rounds},
        reached,
        answer(lines, winner.name, boot, to_best),
        (),
        caveats,
    )


def round_owners(arrays: TraceArrays) -> torch.Tensor:
    """Return [rounds], the sequences that the rounds of `evaluate_rounds` are of, in its order: turn by turn."""
    full = arrays.extra["explored"] | (arrays.header.explore == 0.0)
    owners = []
    for turn in range(int(arrays.rows.max())):
        row = arrays.offset + torch.minimum(torch.tensor(turn), arrays.rows - 1)
        owners.append(torch.nonzero((turn < arrays.rows) & full[row] & ~arrays.cut[row])[:, 0])
    return torch.cat(owners)


def _rate(boot: Resamples, values: RoundValues) -> Values:
    rate: Values = boot.total(values.committed) / boot.total(values.seconds)
    return rate


def _bound(boot: Resamples, fixed: Sequence[RoundValues]) -> Values:
    """Return the rates of the best depth of each round: sum of tokens over sum of seconds at most rho, by Dinkelbach.

    The depths are those that are best for the whole sample, so that a resample's value is a little below its own bound.
    """
    tokens, seconds = (torch.stack([getattr(one, name) for one in fixed], 1) for name in ("committed", "seconds"))
    rho = max(one.rate for one in fixed)
    for _ in range(_TURNS):
        best = (tokens - rho * seconds).argmax(1, keepdim=True)
        chosen, spent = tokens.gather(1, best), seconds.gather(1, best)
        before, rho = rho, float(chosen.sum() / spent.sum())
        if rho - before <= _SETTLED * rho:
            break
    rate: Values = boot.total(chosen[:, 0]) / boot.total(spent[:, 0])
    return rate
