"""Tuning of the rules: what is taken replays fastest of all that was to choose from, and none has more to choose from."""

from __future__ import annotations

import dataclasses

import pytest
from benchmark_scripts import script
from contract_policies import DEPTH
from specstop.collect.store import Trace
from specstop.policies.contract import StopPolicy
from specstop.policies.errors import InputError
from specstop.policies.profile import Profile
from specstop.policies.registry import BUILTINS
from specstop.train.fit.rules import fixed_grid
from specstop.train.replay.arrays import TraceArrays, trace_arrays
from specstop.train.replay.run import replay

rules = script("tuned_rules")
BUDGET = rules.BUDGET
GRIDS = rules.GRIDS
fastest = rules.fastest
place = rules.place
rule_defaults = rules.rule_defaults
tuned_rules = rules.tuned_rules


CHEAP = ("entropy", "heuristic-transient", "gain")


@pytest.fixture(scope="module")
def arrays(sides: tuple[Trace, Trace]) -> TraceArrays:
    return trace_arrays(sides[0]).subset(range(6))


def settings(policy: StopPolicy) -> str:
    return str(sorted((k, v) for k, v in vars(policy).items() if k != "arms")) + str(
        [arm.name for arm in getattr(policy, "arms", ())]
    )


def test_each_rule_has_the_same_number_of_different_settings(arrays: TraceArrays, profile: Profile) -> None:
    at = place(arrays, profile, 200.0)
    of_batches = {"adaptive-verification", "load", "smartspec", "tetris"}  # say nothing of one text alone
    assert set(GRIDS) == set(BUILTINS) - {"fixed"} - of_batches
    for name, grid in GRIDS.items():
        policies = grid(at)
        assert len({settings(policy) for policy in policies}) == len(policies) == BUDGET, name
        assert all(policy.max_depth <= at.depth for policy in policies), name


@pytest.mark.parametrize("name", CHEAP)
def test_the_tuned_rule_is_the_fastest_of_its_grid(arrays: TraceArrays, profile: Profile, name: str) -> None:
    rho = max(r.rate for r in fixed_grid(arrays, profile))
    choices = [rule_defaults(DEPTH)[name], *GRIDS[name](place(arrays, profile, rho))]
    rates = [replay(arrays, policy, profile).rate for policy in choices]
    tuned = tuned_rules([name], arrays, profile)[name]
    assert replay(arrays, tuned, profile).rate == max(rates) > min(rates)
    assert settings(tuned) == settings(choices[rates.index(max(rates))])


def test_the_fastest_comes_with_its_replay(arrays: TraceArrays, profile: Profile) -> None:
    policies = GRIDS["maxprob"](place(arrays, profile, 200.0))
    policy, played = fastest(policies, arrays, profile)
    assert played.name == policy.name
    assert played.rate == replay(arrays, policy, profile).rate


def test_published_rules_are_limited_to_the_trace() -> None:
    rules = rule_defaults(4)
    assert list(rules) == list(GRIDS)
    assert {rule.max_depth for rule in rules.values()} == {4}


def test_prices_are_seconds_at_the_rate(arrays: TraceArrays, profile: Profile) -> None:
    """At the short context, of a chain: each further verified token at its padded price, a step with what is around it."""
    flat = dataclasses.replace(profile, high=profile.low, decision_s={"gain": 5e-5})
    at = place(arrays, flat, 100.0)
    best = [min(flat.low.verify_s[n:]) for n in range(DEPTH + 1)]
    assert at.depth == DEPTH
    assert at.target_prices == pytest.approx([100.0 * (s - best[0]) for s in best])
    assert at.draft_prices == pytest.approx([100.0 * (flat.low.draft_s[0] + flat.step_s + 5e-5)])
    higher = place(arrays, profile, 100.0)
    assert higher.draft_prices[0] > 100.0 * (profile.low.draft_s[0] + profile.step_s)


def test_an_unknown_rule_is_told(arrays: TraceArrays, profile: Profile) -> None:
    with pytest.raises(InputError, match=r"not 'entropie' \(did you mean 'entropy'"):
        tuned_rules(["entropie"], arrays, profile)
