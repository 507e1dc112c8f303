"""What if the draft were cheaper or dearer: `sweep` says from which cost on each policy pays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from ...collect.store import Trace
from ...decode.profile import add_decisions
from ...policies.baselines import FixedLength
from ...policies.contract import StopPolicy
from ...policies.costs import Profile
from ...policies.errors import InputError, TraceError
from ...policies.learned import LearnedPolicy
from ...policies.progress import Progress, silent
from ..fit.tune import solve_rate
from ..traces.data import TraceArrays, trace_arrays, typical_context
from ..traces.metered import play, scaled
from ..traces.replay import replay
from .intervals import LEVEL, REPLICATES, Resamples, Values
from .records import Ratio
from .whatif_records import Sweep, SweepLine, unique_names

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
    progress: Progress = silent,
) -> Sweep:
    """Replay policies as the draft step grows dearer beside the target's, and say from where each of them pays.

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
    if tuning is not None and (shared := set(tuning.prompt_ids) & set(arrays.prompt_ids)):
        raise TraceError(f"--train-traces: {len(shared)} prompts are in the evaluated traces too; split them by prompt")
    profile = add_decisions(profile, policies, traces.header.vocabulary, traces.header.vectors)
    context = typical_context(tuning or arrays)
    made = Resamples(arrays.prompt_ids, seed)
    names, depth = unique_names(policies), min(arrays.depth, profile.max_depth)
    fixed = [play(arrays, FixedLength(k), profile) for k in range(depth + 1)]
    played = [_Priced(arrays, policy.limited(depth), profile, tuning) for policy in policies]
    found, best = [], []
    for at, ratio in enumerate(ratios):
        progress("sweep", at, len(ratios))
        costs = with_cost_ratio(profile, ratio, context)
        point = Point(made, arrays.text_tokens, [one.seconds(arrays, costs) for one in fixed])
        best.append((point.best_length, point.best_rate))
        found.append([point.ratios(one.seconds(costs)) for one in played])
    progress("sweep", len(ratios), len(ratios))
    lines = []
    for at, policy in enumerate(policies):
        to_best, to_plain = zip(*(row[at] for row in found), strict=True)
        kind = "learned" if isinstance(policy, LearnedPolicy) else "rule"
        lines.append(SweepLine(names[at], kind, to_best, to_plain, _runs(ratios, to_best), _note(policy, tuning)))
    lengths, rates = zip(*best, strict=True)
    return Sweep(
        tuple(ratios), cost_ratio(profile, context), lengths, rates, tuple(lines), _facts(traces, arrays, profile)
    )


class Point:
    """The fixed lengths of a trace under a profile, and what others are beside them.

    Args:
        made: resamples of its prompts.
        tokens: [S] of the texts.
        fixed: by length, [S] seconds.
    """

    def __init__(self, made: Resamples, tokens: Tensor, fixed: Sequence[Tensor]) -> None:
        self._made, self._tokens = made, made.total(tokens)
        grid = np.stack([self._rate(seconds) for seconds in fixed], 1)
        self._best, self._plain = grid.max(1), grid[:, 0]
        self.best_length, self.best_rate = int(grid[0].argmax()), float(self._best[0])

    def _rate(self, seconds: Tensor) -> Values:
        rate: Values = self._tokens / self._made.total(seconds)
        return rate

    def ratios(self, seconds: Tensor) -> tuple[Ratio, Ratio]:
        """Return the ratios to the best fixed length and to plain decoding."""
        rate = self._rate(seconds)
        return self._made.interval(rate / self._best), self._made.interval(rate / self._plain)


class _Priced:
    """What a policy takes under one profile after the other; replayed again only where it may go another way."""

    def __init__(self, arrays: TraceArrays, policy: StopPolicy, profile: Profile, tuning: TraceArrays | None) -> None:
        self._arrays, self._policy, self._tuning = arrays, policy, tuning
        solves = _is_derived(policy) and tuning is not None
        hears_seconds = type(policy).observe is not StopPolicy.observe
        self._once = None if solves or hears_seconds else play(arrays, policy, profile)

    def seconds(self, profile: Profile) -> Tensor:
        """Return [S] seconds; a derived rule is solved first where there are training traces."""
        if self._once is not None:
            return self._once.seconds(self._arrays, profile)
        policy = self._policy
        if self._tuning is not None and isinstance(policy, LearnedPolicy) and _is_derived(policy):
            policy, _ = solve_rate(policy, self._tuning, profile, policy.facts.acceptance)
        return replay(self._arrays, policy, profile).seconds


def _is_derived(policy: StopPolicy) -> bool:
    return isinstance(policy, LearnedPolicy) and policy.rule.kind == "derived"


def _note(policy: StopPolicy, tuning: TraceArrays | None) -> str:
    if not _is_derived(policy):
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


INTERVALS = f"{LEVEL:.0%} bootstrap over prompts, {REPLICATES} replicates"


def _facts(traces: Trace, arrays: TraceArrays, profile: Profile) -> dict[str, Any]:
    return {
        "traces": str(traces.folder),
        "prompts": len(set(arrays.prompt_ids)),
        "temperature": traces.header.temperature,
        "profile": dict(profile.facts),
        "intervals": INTERVALS,
    }
