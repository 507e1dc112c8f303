"""What if the draft were cheaper or more expensive: `sweep` says from which cost on each policy pays."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from ....collect.store.folder import Trace
from ....decode.compare.intervals import Ratio, Resamples, Values
from ....policies.baselines.fixed import FixedLength
from ....policies.checking import with_costs
from ....policies.contract import StopPolicy
from ....policies.errors import InputError
from ....policies.joint.survival import BatchStop
from ....policies.latency.profile import Profile
from ....policies.learned.policy import LearnedPolicy
from ....policies.progress import Progress, shown
from ...fit.tuning.rates import is_priced, solve_rate
from ...fit.tuning.settled import settle_for
from ...replay.log import Played, play, scaled
from ...replay.traces.arrays import TraceArrays, trace_arrays, typical_context
from ...replay.traces.checking import check_apart
from ..decision_costs import with_prices
from ..pricing import Change, Draws, Priced
from .records import Sweep, SweepLine, unique_names

RATIOS = tuple(float(f"{r:.3g}") for r in np.geomspace(0.01, 0.5, 9))
"""Cost of a draft step over that of a one-token target step: from an n-gram table to a draft of half the target's price."""


def cost_ratio(profile: Profile, context: float) -> float:
    """Return the seconds of a draft step over those of a target step of one token, at a context length.

    Raises:
        InputError: one of them is not above 0.
    """
    draft, target = profile.between(context, lambda table: (table.later_s, table.verify_s[0]))
    if draft <= 0 or target <= 0:
        raise InputError(
            f"--profile: expected draft and target steps that take time, not {draft:g} s and {target:g} s; "
            "a sweep over their ratio needs both"
        )
    return draft / target


def with_cost_ratio(profile: Profile, ratio: float, context: float) -> Profile:
    """Return the profile with every draft call scaled by one factor, so that `cost_ratio` is `ratio`; the rest is kept."""
    return scaled(profile, draft=ratio / cost_ratio(profile, context))


def sweep(
    traces: Trace,
    profile: Profile,
    policies: Sequence[StopPolicy],
    *,
    train_traces: Trace | None = None,
    ratios: Sequence[float] = RATIOS,
    seed: int = 0,
    progress: Progress = shown,
    draws: Draws | None = None,
) -> Sweep:
    """Replay policies as the draft step grows more expensive beside the target's, and say from where each of them pays.

    At each point the draft's costs are scaled, the best fixed length is chosen again (in each replicate too), and derived
    rules are solved again where there are training traces.

    Args:
        traces: held-out prompts.
        profile: whose other costs are kept.
        policies: to compare.
        train_traces: where the derived rules' rates are solved for each point; without them the saved ones serve.
        ratios: cost of a draft step over that of a one-token target step.
        seed: of the bootstrap.
        progress: see `Progress`.
        draws: of `profile` with the policies' decisions, where they have been made.

    Raises:
        InputError: no policy, a ratio that is not above 0, or a profile without costs.
        TraceError: a policy does not fit the trace, or both traces share prompts.
    """
    if not policies:
        raise InputError("--policy: expected at least one policy to sweep")
    if not ratios or any(not ratio > 0 for ratio in ratios):
        raise InputError(f"expected cost ratios above 0, not {list(ratios)}")
    ratios = sorted(set(map(float, ratios)))
    arrays = trace_arrays(traces)
    tuning = trace_arrays(train_traces) if train_traces is not None else None
    if tuning is not None:
        check_apart("--train-traces", tuning, "the evaluated traces", arrays)
    if draws is None:
        profile, _ = with_prices(profile, policies, traces.header)
    context = typical_context(tuning or arrays)
    made, draws = Resamples(arrays.prompt_ids, seed), draws or Draws(profile, seed)
    names, depth = unique_names(policies), min(arrays.depth, profile.max_depth)
    fixed = [play(arrays, FixedLength(k), profile) for k in range(depth + 1)]
    replays = _Replays(arrays, fixed, [policy.limited(depth) for policy in policies], draws, made, tuning)
    tokens = made.total(arrays.text_tokens)
    found, best = [], []
    for at, ratio in enumerate(ratios):
        progress("sweep", at, len(ratios))
        spent = replays.seconds(partial(with_cost_ratio, ratio=ratio, context=context))
        rates = tokens[:, None] / spent
        grid, mine = rates[:, : len(fixed)], rates[:, len(fixed) :]
        best.append((int(grid[0].argmax()), float(grid[0].max())))
        found.append([(made.interval(r / grid.max(1)), made.interval(r / grid[:, 0])) for r in mine.T])
    progress("sweep", len(ratios), len(ratios))
    lines = []
    for at, policy in enumerate(policies):
        to_best, to_plain = zip(*(row[at] for row in found), strict=True)
        kind = "learned" if isinstance(policy, LearnedPolicy) else "rule"
        lines.append(SweepLine(names[at], kind, to_best, to_plain, _runs(ratios, to_best), _note(policy, tuning)))
    lengths, fastest = zip(*best, strict=True)
    return Sweep(
        tuple(ratios), cost_ratio(profile, context), lengths, fastest, tuple(lines), _facts(traces, arrays, draws)
    )


class _Replays:
    """Fixed lengths and policies under one profile after the other; replayed again only where one may stop elsewhere."""

    def __init__(
        self,
        arrays: TraceArrays,
        fixed: Sequence[Played],
        policies: Sequence[StopPolicy],
        draws: Draws,
        made: Resamples,
        tuning: TraceArrays | None,
    ) -> None:
        self._arrays, self._policies, self._draws, self._made, self._tuning = arrays, policies, draws, made, tuning
        self._stays = [not self._moves(policy) for policy in policies]
        kept = [play(arrays, p, draws.profile) for p, stays in zip(policies, self._stays, strict=True) if stays]
        self._fixed, self._kept = len(fixed), self._priced([*fixed, *kept])

    def _moves(self, policy: StopPolicy) -> bool:
        solved = is_priced(policy) and self._tuning is not None
        by_costs = isinstance(policy, BatchStop) or with_costs(policy, self._draws.profile) is not policy
        return solved or by_costs or type(policy).observe is not StopPolicy.observe  # it hears seconds

    def _priced(self, played: Sequence[Played]) -> Priced:
        return Priced(self._made, self._draws, [one.rounds for one in played], self._arrays.prompt_tokens)

    def seconds(self, change: Change) -> Values:
        """Return [1 + R, K + 1 + P] under the changed profile; a derived rule is solved first where there are traces to."""
        kept = self._kept.seconds(change=change)
        columns, stayed = list(kept[:, : self._fixed].T), iter(kept[:, self._fixed :].T)
        for policy, stays in zip(self._policies, self._stays, strict=True):
            columns.append(next(stayed) if stays else self._again(policy, change))
        return np.stack(columns, 1)

    def _again(self, policy: StopPolicy, change: Change) -> Values:
        profile = change(self._draws.profile)
        if self._tuning is not None and is_priced(policy):
            policy, _ = solve_rate(policy, self._tuning, profile, policy.facts.acceptance)
        else:
            policy, _ = settle_for(policy, None, profile)
        # Played under the changed profile; `_priced` has the draws as they were measured, and changes each of them likewise.
        played = play(self._arrays, policy, profile)
        spent: Values = self._priced([played]).seconds(change=change)[:, 0]
        return spent


def _note(policy: StopPolicy, tuning: TraceArrays | None) -> str:
    if isinstance(policy, BatchStop):
        return "decides by the costs of each point"
    if not is_priced(policy):
        return ""
    if tuning is None:
        return "rho as saved; give the training traces to solve it at each point"
    return "rho solved at each point on the training traces"


def _runs(ratios: Sequence[float], found: Sequence[Ratio]) -> tuple[tuple[float, float], ...]:
    """Return (first, last) of every run of points whose interval lies above 1."""
    runs: list[tuple[float, float]] = []
    above = False
    for ratio, here in zip(ratios, found, strict=True):
        if here.is_above:
            runs.append((runs.pop()[0], ratio) if above else (ratio, ratio))
        above = here.is_above
    return tuple(runs)


def _facts(traces: Trace, arrays: TraceArrays, draws: Draws) -> dict[str, Any]:
    return {
        "traces": str(traces.folder),
        "prompts": len(set(arrays.prompt_ids)),
        "temperature": traces.header.temperature,
        "profile": dict(draws.profile.facts),
        "intervals": draws.text,
    }
