"""Replay policies as the cost of a draft step changes, and say from which cost each of them pays."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from ...policies.batch_rules import BatchStop
from ...policies.contract import StopPolicy
from ...policies.display import Progress, silent
from ...policies.errors import InputError
from ...policies.fixed import FixedLength
from ...policies.host import with_costs
from ...policies.profile import Profile
from ..fit.settle import is_priced, settle_for, solve_rate, unfitted_prompts
from ..replay.arrays import TraceArrays, typical_context
from ..replay.rounds import scaled
from ..replay.run import replay
from .pricing import Priced, ProfileBootstrap
from .statistics import FEWEST, Clusters, Resamples

RATIOS = tuple(float(f"{r:.3g}") for r in np.geomspace(0.01, 0.5, 9))
"""Cost of a draft step relative to a one-token target step: from an n-gram table to half the target's cost."""


def sweep(
    arrays: TraceArrays,
    policies: Sequence[StopPolicy],
    costs: ProfileBootstrap,
    clusters: Clusters,
    *,
    tuning: TraceArrays | None = None,
    ratios: Sequence[float] = RATIOS,
    primary: str = "",
    seed: int = 0,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Replay policies at each cost of a draft step relative to the target's.

    At each point the best fixed length is chosen again (in each replicate, too), and the rates of derived rules are solved
    again if there are training traces. The intervals hold for all policies at all points at once.

    Args:
        arrays: held-out prompts.
        policies: to compare.
        costs: of a profile with the decisions of the policies; its other costs are kept.
        clusters: to resample.
        tuning: training traces to solve rates on; without them the saved rates are used.
        ratios: cost of a draft step relative to a one-token target step, ascending.
        primary: see `evaluate`.
        seed: of the bootstrap.
        progress: see `Progress`.

    Returns:
        JSON values: `ratios`, the ratio `here` of the profile, `best_fixed` length and `best_fixed_tokens_per_s` by point,
        and `lines` by policy with ratios `to_best_fixed` and `to_plain` by point, the (first, last) ratio of every run of
        points where it `pays` (the interval of `to_best_fixed` is above 1), these in words as `verdict`, and a `note`.

    Raises:
        InputError: there is no policy, or draft or target steps of the profile take no time.
    """
    if not policies:
        raise InputError("--policy: expected at least one policy to sweep")
    profile, context, boot = costs.profile, typical_context(tuning or arrays), Resamples(clusters.of, seed)
    depth = min(arrays.depth, profile.max_depth)
    lengths, columns = range(depth + 1), range(depth + 1, depth + 1 + len(policies))
    # A policy that stops in the same places at every cost is replayed once; only its rounds are priced at each point.
    limited, tokens = [policy.limited(depth) for policy in policies], arrays.text_tokens.double().numpy()
    is_static = [not _depends_on_cost(policy, profile, tuning) for policy in limited]
    replays = [replay(arrays, policy, profile) for policy in (*map(FixedLength, lengths), *limited)]
    priced = Priced(boot, costs, replays, arrays.prompt_tokens)
    rates, to_best, to_plain = [], [], []
    for at, ratio in enumerate(ratios):
        progress("sweep", at, len(ratios))
        change = partial(with_cost_ratio, ratio=ratio, context=context)
        changed = change(profile)
        for column, policy, static in zip(columns, limited, is_static, strict=True):
            if not static:
                replays[column] = replay(arrays, _solve(policy, changed, tuning), changed)
        if not all(is_static):
            priced = Priced(boot, costs, replays, arrays.prompt_tokens)
        seconds, price = priced.by_text(change), -np.log(priced.factors(change=change))
        rates.append(tokens.sum() / seconds.sum(0)[: depth + 1])
        to_best.append(boot.log_ratios(tokens, seconds, columns, lengths, price))
        to_plain.append(boot.log_ratios(tokens, seconds, columns, [0], price))
    progress("sweep", len(ratios), len(ratios))
    names = [policy.shown_name for policy in policies]
    apart = names.index(primary) if primary in names else None
    # All policies at all points are one family, because where a policy pays is chosen among them.
    against_best, against_plain = (list(zip(*boot.simultaneous(of, apart), strict=True)) for of in (to_best, to_plain))
    lines = []
    for policy, best, plain in zip(policies, against_best, against_plain, strict=True):
        runs = itertools.groupby(zip(ratios, best, strict=True), lambda point: point[1].is_above and clusters.is_judged)
        points = [[ratio for ratio, _ in run] for is_above, run in runs if is_above]
        pays = [(run[0], run[-1]) for run in points]
        words = " and ".join(f"from {a:.3g} to {b:.3g}" if a < b else f"at {a:.3g}" for a, b in pays)
        lines.append({
            "name": policy.shown_name, "to_best_fixed": list(map(dataclasses.asdict, best)),
            "to_plain": list(map(dataclasses.asdict, plain)), "pays": pays, "note": _note(policy, tuning, clusters),
            "verdict": f"pays {words}" if pays else "at no point above the best fixed length beyond its interval",
        })  # fmt: skip
    return {
        "ratios": list(ratios), "here": cost_ratio(profile, context), "best_fixed": [int(rate.argmax()) for rate in rates],
        "best_fixed_tokens_per_s": [float(rate.max()) for rate in rates], "lines": lines,
    }  # fmt: skip


def cost_ratio(profile: Profile, context: float) -> float:
    """Return the seconds of a draft step relative to a target step of one token, at a context length.

    Raises:
        InputError: one of them is not above 0.
    """
    draft, target = profile.between(context, lambda table: (table.later_s, table.verify_s[0]))
    if draft <= 0 or target <= 0:
        raise InputError(f"--profile: expected draft and target steps that take time, got {draft:g} s and {target:g} s")
    return float(draft / target)


def with_cost_ratio(profile: Profile, ratio: float, context: float) -> Profile:
    """Return the profile with draft calls scaled so that `cost_ratio` is `ratio`."""
    return scaled(profile, draft=ratio / cost_ratio(profile, context))


def _depends_on_cost(policy: StopPolicy, profile: Profile, tuning: TraceArrays | None) -> bool:
    """Return whether a policy may stop elsewhere if a draft step has another cost."""
    is_solved = is_priced(policy) and tuning is not None
    observes_seconds = type(policy).observe is not StopPolicy.observe
    return is_solved or observes_seconds or isinstance(policy, BatchStop) or with_costs(policy, profile) is not policy


def _solve(policy: StopPolicy, profile: Profile, tuning: TraceArrays | None) -> StopPolicy:
    """Return the policy as it decides under a profile, a derived rule with its rate solved on the training traces."""
    if tuning is not None and is_priced(policy) and (unfitted := unfitted_prompts(policy, tuning)) is not None:
        return solve_rate(policy, unfitted, profile, policy.metadata.acceptance)[0]
    return settle_for(policy, None, profile)[0]


def _note(policy: StopPolicy, tuning: TraceArrays | None, clusters: Clusters) -> str:
    notes = [f"{clusters.text}: too few for a verdict, which needs {FEWEST}"] if not clusters.is_judged else []
    if isinstance(policy, BatchStop):
        notes.append("decides by the costs of each point")
    elif is_priced(policy):
        saved = "rho as saved; give the training traces to solve it at each point"
        notes.append(saved if tuning is None else "rho solved at each point on the training traces")
    return "; ".join(notes)
