"""Giving a policy its stop rule: a threshold as given, the threshold that replays fastest, or the rule derived from costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

from ...policies.errors import InputError, close_match
from ...policies.learned import LearnedPolicy
from ...policies.profile import Profile
from ...policies.rules import THRESHOLD_RULES, Continuation, Derived, Rule, Threshold
from ..replay.traces.arrays import TraceArrays, typical_context
from .rates import Part, Rates, replayed_rates
from .tuning.batches import settle_batch, settle_lengths
from .tuning.rates import THRESHOLDS, derived_thresholds, solve_rate

FINER = (-0.025, -0.0125, 0.0125, 0.025)
"""Tried around the best of `THRESHOLDS`."""

RULES: dict[str, Callable[[float], Rule]] = {
    "derived": lambda threshold: Derived([threshold], 1),
    **{kind: partial(Threshold, kind) for kind in THRESHOLD_RULES},
    "continuation": Continuation,
    "batch": lambda threshold: Derived([threshold], 1),
}
"""Each rule by name, from a threshold; those of the derived rule are solved, and `batch` takes its place in the end."""


def check_rule(kind: str, threshold: float | None = None) -> None:
    """Refuse an unknown rule, or a threshold that it cannot have."""
    if kind not in RULES:
        known = ", ".join([*RULES][:-1]) + f" or {[*RULES][-1]}"
        raise InputError(f"--rule: expected {known}, not {kind!r}{close_match(kind, RULES)}")
    if threshold is not None and kind == "batch":
        raise InputError("--threshold: the rule batch has none, it weighs tokens against seconds")
    if threshold is not None and kind != "derived":
        RULES[kind](threshold)


def is_tuned(kind: str, threshold: float | None) -> bool:
    """Whether the rule is settled by replay."""
    return kind in ("derived", "batch") or threshold is None


def passing_rule(
    policy: LearnedPolicy,
    kind: str,
    threshold: float | None,
    arrays: TraceArrays,
    profile: Profile,
    acceptance: Sequence[float],
    rho: float,
) -> Rule:
    """Return a rule near the one that `ruled` will find, without a search: for the rounds that such a policy visits.

    Arguments as there, and `rho`, the rate of the best fixed length.
    """
    if threshold is not None and not is_tuned(kind, threshold):
        return RULES[kind](threshold)
    costs = profile.chain_costs(typical_context(arrays), profile.decision(policy.cost_name), 1, policy.max_depth)
    return Derived(derived_thresholds(rho, costs, acceptance), 1)


def ruled(
    policy: LearnedPolicy,
    kind: str,
    threshold: float | None,
    arrays: TraceArrays,
    profile: Profile,
    acceptance: Sequence[float],
    published: Sequence[float] = (),
    parts: Sequence[Part] | None = None,
) -> tuple[LearnedPolicy, float]:
    """Return the policy under its rule, and rho of a derived one (else 0).

    Args:
        policy: head and calibration.
        kind: of `RULES`.
        threshold: None = the one that replays fastest, on a grid of 19 and then 4 around the best.
        arrays: training traces, never the evaluated ones.
        profile: what rounds cost.
        acceptance: a_1..a_K of the training traces.
        published: thresholds, the only ones that are tried where there are some.
        parts: of these traces, on which rates are taken; by default they are one, played by the policy's own head.
    """
    parts = parts or [Part(arrays)]
    rates = replayed_rates(parts, profile)
    if kind == "derived":
        solved, rate = solve_rate(policy, arrays, profile, acceptance, rates=rates)
        return settle_lengths(solved, parts, profile), rate
    if kind == "batch":
        verification = arrays.header.verification
        # The rule looks ahead with `acceptance`, and the verification says whether drawn tokens may be left out.
        policy.metadata = dataclasses.replace(policy.metadata, acceptance=tuple(acceptance), verification=verification)
        return settle_batch(policy, parts, profile), 0.0
    if threshold is not None:
        return policy.with_rule(RULES[kind](threshold)), 0.0
    if published:
        return policy.with_rule(RULES[kind](_fastest(policy, kind, published, rates))), 0.0
    best = _fastest(policy, kind, THRESHOLDS, rates)
    near = [t for t in (best, *(best + step for step in FINER)) if 0.0 < t < 1.0]
    return policy.with_rule(RULES[kind](_fastest(policy, kind, near, rates))), 0.0


def _fastest(policy: LearnedPolicy, kind: str, thresholds: Sequence[float], rates: Rates) -> float:
    found = rates([policy.with_rule(RULES[kind](t)) for t in thresholds])
    return thresholds[found.index(max(found))]
