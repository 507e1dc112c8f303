"""What if the draft were cheaper or more expensive: `sweep` says from which cost on each policy pays."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from ....collect.store.folder import Trace
from ....decode.benchmark import Ratio
from ....policies.batch_rules import BatchStop
from ....policies.contract import StopPolicy
from ....policies.display import Progress, shown
from ....policies.errors import InputError
from ....policies.fixed import FixedLength
from ....policies.host import with_costs
from ....policies.learned import LearnedPolicy
from ....policies.profile import Profile
from ....policies.registry import PolicySpec, as_policies
from ...fit.settle import is_priced, settle_for, solve_rate, unfitted_prompts
from ...replay.log import Played, play, scaled
from ...replay.traces.arrays import TraceArrays, trace_arrays, typical_context
from ...replay.traces.checking import require_disjoint_prompts
from ...statistics import FEWEST, Resamples, Values
from ..clusters import Clusters
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
    return float(draft / target)


def with_cost_ratio(profile: Profile, ratio: float, context: float) -> Profile:
    """Return the profile with every draft call scaled by one factor, so that `cost_ratio` is `ratio`; the rest is kept."""
    return scaled(profile, draft=ratio / cost_ratio(profile, context))


def sweep(
    traces: Trace,
    profile: Profile,
    policies: PolicySpec | Sequence[PolicySpec],
    *,
    train_traces: Trace | None = None,
    ratios: Sequence[float] = RATIOS,
    seed: int = 0,
    progress: Progress = shown,
    draws: Draws | None = None,
    clusters: Clusters | None = None,
    allow_overlap: bool = False,
    primary: str = "",
) -> Sweep:
    """Replay policies as the draft step grows more expensive beside the target's, and say from where each of them pays.

    At each point the draft's costs are scaled, the best fixed length is chosen again (in each replicate too), and derived
    rules are solved again if there are training traces. The intervals hold for all policies at all points at once.

    Args:
        traces: held-out prompts.
        profile: whose other costs are kept.
        policies: to compare.
        train_traces: where the derived rules' rates are solved for each point; without them the saved ones serve.
        ratios: cost of a draft step over that of a one-token target step.
        seed: of the bootstrap.
        progress: see `Progress`.
        draws: of `profile` with the policies' decisions, if they are available.
        clusters: to resample; None = the prompts.
        allow_overlap, primary: see `evaluate`.

    Raises:
        InputError: no policy, a ratio that is not above 0, or a profile without costs.
        TraceError: a policy does not fit the trace, or both traces share prompts.
    """
    policies = as_policies(policies)
    if not policies:
        raise InputError("--policy: expected at least one policy to sweep")
    if not ratios or any(not ratio > 0 for ratio in ratios):
        raise InputError(f"expected cost ratios above 0, not {list(ratios)}")
    ratios = sorted(set(map(float, ratios)))
    arrays = trace_arrays(traces)
    tuning = trace_arrays(train_traces) if train_traces is not None else None
    require_disjoint_prompts(arrays, tuning, policies, allow=allow_overlap)
    if draws is None:
        profile, _ = with_prices(profile, policies, traces.header)
    context = typical_context(tuning or arrays)
    clusters = clusters or Clusters(tuple(arrays.clusters))
    boot, draws = Resamples(clusters.of, seed), draws or Draws(profile, seed)
    names, depth = unique_names(policies), min(arrays.depth, profile.max_depth)
    fixed = [play(arrays, FixedLength(k), profile) for k in range(depth + 1)]
    replays = _Replays(arrays, fixed, [policy.limited(depth) for policy in policies], draws, boot, tuning)
    tokens = arrays.text_tokens.double().numpy()
    mine, lengths = range(len(fixed), len(fixed) + len(policies)), range(len(fixed))
    best, to_best, to_plain = [], [], []
    for at, ratio in enumerate(ratios):
        progress("sweep", at, len(ratios))
        seconds, price = replays.priced(partial(with_cost_ratio, ratio=ratio, context=context))
        rates = tokens.sum() / seconds.sum(0)[: len(fixed)]
        best.append((int(rates.argmax()), float(rates.max())))
        to_best.append(boot.log_ratios(tokens, seconds, mine, lengths, price))
        to_plain.append(boot.log_ratios(tokens, seconds, mine, [0], price))
    progress("sweep", len(ratios), len(ratios))
    apart = names.index(primary) if primary in names else None
    # All policies at all points are one family: where a policy pays is chosen among them.
    against_best, against_plain = (list(zip(*boot.simultaneous(of, apart), strict=True)) for of in (to_best, to_plain))
    lines = []
    for at, policy in enumerate(policies):
        kind = "learned" if isinstance(policy, LearnedPolicy) else "rule"
        runs = _runs(ratios, against_best[at]) if clusters.is_judged else ()
        lines.append(
            SweepLine(names[at], kind, against_best[at], against_plain[at], runs, _note(policy, tuning, clusters))
        )
    chosen, fastest = zip(*best, strict=True)
    return Sweep(
        tuple(ratios), cost_ratio(profile, context), chosen, fastest, tuple(lines), _facts(traces, arrays, draws, clusters)
    )  # fmt: skip


class _Replays:
    """Fixed lengths and policies under one profile after the other; replayed again only where one may stop elsewhere."""

    def __init__(
        self,
        arrays: TraceArrays,
        fixed: Sequence[Played],
        policies: Sequence[StopPolicy],
        draws: Draws,
        boot: Resamples,
        tuning: TraceArrays | None,
    ) -> None:
        self._arrays, self._policies, self._draws, self._boot, self._tuning = arrays, policies, draws, boot, tuning
        self._stays = [not self._moves(policy) for policy in policies]
        kept = [play(arrays, p, draws.profile) for p, stays in zip(policies, self._stays, strict=True) if stays]
        self._fixed, self._kept = len(fixed), self._prices_of([*fixed, *kept])

    def _moves(self, policy: StopPolicy) -> bool:
        solved = is_priced(policy) and self._tuning is not None
        by_costs = isinstance(policy, BatchStop) or with_costs(policy, self._draws.profile) is not policy
        return solved or by_costs or type(policy).observe is not StopPolicy.observe  # it observes seconds

    def _prices_of(self, played: Sequence[Played]) -> Priced:
        return Priced(self._boot, self._draws, [one.rounds for one in played], self._arrays.prompt_tokens)

    def priced(self, change: Change) -> tuple[Values, Values]:
        """Return [S, K + 1 + P] seconds under the changed profile, and [1 + R, K + 1 + P] log speeds due to its draws.

        A derived rule is solved first if there are training traces.
        """
        seconds, price = self._both(self._kept, change)
        columns = [(seconds[:, at], price[:, at]) for at in range(self._fixed)]
        stayed = iter(zip(seconds.T[self._fixed :], price.T[self._fixed :], strict=True))
        for policy, stays in zip(self._policies, self._stays, strict=True):
            columns.append(next(stayed) if stays else self._again(policy, change))
        both = [np.stack(part, 1) for part in zip(*columns, strict=True)]
        return both[0], both[1]

    @staticmethod
    def _both(priced: Priced, change: Change) -> tuple[Values, Values]:
        return priced.by_text(change), -np.log(priced.factors(change=change))

    def _again(self, policy: StopPolicy, change: Change) -> tuple[Values, Values]:
        profile = change(self._draws.profile)
        unfitted = None
        if self._tuning is not None and is_priced(policy):
            unfitted = unfitted_prompts(policy, self._tuning)
        if unfitted is not None and is_priced(policy):
            policy, _ = solve_rate(policy, unfitted, profile, policy.metadata.acceptance)
        else:
            policy, _ = settle_for(policy, None, profile)
        # Played under the changed profile; `Priced` has the draws as they were measured, and changes each of them likewise.
        played = play(self._arrays, policy, profile)
        seconds, price = self._both(self._prices_of([played]), change)
        return seconds[:, 0], price[:, 0]


def _note(policy: StopPolicy, tuning: TraceArrays | None, clusters: Clusters) -> str:
    notes = [f"{clusters.text}: too few for a verdict, which needs {FEWEST}"] if not clusters.is_judged else []
    if isinstance(policy, BatchStop):
        notes.append("decides by the costs of each point")
    elif is_priced(policy):
        saved = "rho as saved; give the training traces to solve it at each point"
        notes.append(saved if tuning is None else "rho solved at each point on the training traces")
    return "; ".join(notes)


def _runs(ratios: Sequence[float], found: Sequence[Ratio]) -> tuple[tuple[float, float], ...]:
    """Return (first, last) of every run of points whose interval lies above 1."""
    runs: list[tuple[float, float]] = []
    above = False
    for ratio, here in zip(ratios, found, strict=True):
        if here.is_above:
            runs.append((runs.pop()[0], ratio) if above else (ratio, ratio))
        above = here.is_above
    return tuple(runs)


def _facts(traces: Trace, arrays: TraceArrays, draws: Draws, clusters: Clusters) -> dict[str, Any]:
    return {
        "traces": str(traces.folder),
        "prompts": len(set(arrays.clusters)),
        **clusters.facts,
        "temperature": traces.header.temperature,
        "profile": dict(draws.profile.facts),
        "intervals": draws.text_over(clusters.unit),
    }
