"""Policies in several places: each place is a replay, and all intervals hold at once."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from contract_policies import DEPTH
from specstop.collect.store import Trace
from specstop.decode.benchmark import Ratio
from specstop.policies.errors import InputError, TraceError
from specstop.policies.fixed import Confidence, FixedLength
from specstop.policies.learned import LearnedPolicy
from specstop.policies.profile import Profile
from specstop.train.evaluate.evaluate import evaluate
from specstop.train.evaluate.places import evaluate_places
from specstop.train.evaluate.records import DEPLOY, INCONCLUSIVE, REFUSE, TOO_FEW
from specstop.train.evaluate.statistics import FEWEST, Resamples
from specstop.train.evaluate.sweep import with_cost_ratio
from specstop.train.evaluate.verdict import verdict
from specstop.train.fit.rules import fixed_grid
from specstop.train.replay.arrays import trace_arrays
from specstop.train.replay.rounds import scaled
from specstop.train.replay.run import replay

EXACT = 1e-12


def test_a_policy_is_compared_with_the_best_fixed_length_of_each_place(
    sides: tuple[Trace, Trace], traces: dict[float, Trace], full_profile: Profile, learned: LearnedPolicy
) -> None:
    policies = [learned, Confidence(0.4, DEPTH), FixedLength(0)]
    expensive = scaled(full_profile, draft=3.0)
    places = {
        "here": (sides[1], full_profile),
        "expensive": (sides[1], expensive),
        "greedy": (traces[0.0], full_profile),
    }
    found = evaluate_places(policies, places)
    assert [place.name for place in found.places] == list(places)
    for place, (trace, profile) in zip(found.places, places.values(), strict=True):
        arrays = trace_arrays(trace)
        rates = [r.rate for r in fixed_grid(arrays, profile)]
        assert place.prompts == len(set(arrays.prompt_ids)) and place.best_fixed == int(np.argmax(rates))
        for policy in policies:
            line = found.line(policy.name, place.name)
            rate = replay(arrays, policy, profile).rate
            assert line.tokens_per_s == pytest.approx(rate, rel=EXACT)
            assert line.to_best_fixed.value == pytest.approx(rate / max(rates), rel=EXACT)
            assert line.verdict == verdict(line.to_best_fixed, place.prompts, line.parts, place.largest)
    home, greedy = (found.line("logistic", name).note for name in ("here", "greedy"))
    assert home == f"trained on {sides[0].folder.parent.name}/{sides[0].folder.name}"
    assert greedy == f"{home}, for another temperature", "trained at 0.7, used at 0"
    assert json.loads(json.dumps(found.to_dict()))["kind"] == "places"


def test_intervals_hold_for_all_places_at_once(sides: tuple[Trace, Trace], full_profile: Profile) -> None:
    """One place has the intervals of `evaluate`; with more places they are wider, in each of them."""
    policies = [Confidence(0.4, DEPTH), FixedLength(1)]
    places = {
        "one": (sides[1], full_profile),
        "two": (sides[0], full_profile),
        "three": (sides[1], scaled(full_profile, 2)),
    }
    single, several = evaluate_places(policies, {"one": places["one"]}), evaluate_places(policies, places)
    report = evaluate(sides[1], full_profile, policies, primary="fixed:1")
    alone = evaluate_places(policies[1:], {"one": places["one"]}).line("fixed:1", "one")
    assert dataclasses.astuple(alone.to_best_fixed) == pytest.approx(
        dataclasses.astuple(report["fixed:1"].to_best_fixed), rel=EXACT
    )
    for policy in policies:
        narrow, wide = (of.line(policy.name, "one").to_best_fixed for of in (single, several))
        assert wide.value == narrow.value
        assert wide.low <= narrow.low <= narrow.high <= wide.high and (wide.low, wide.high) != (narrow.low, narrow.high)


def test_a_policy_below_best_fixed_is_not_to_be_deployed(sides: tuple[Trace, Trace], full_profile: Profile) -> None:
    places = {
        "slow drafts": (sides[0], with_cost_ratio(full_profile, 2.0, 20.0)),
        "few prompts": (sides[1], full_profile),
    }
    found = evaluate_places([FixedLength(DEPTH)], places)
    assert [place.lines[0].verdict for place in found.places] == [REFUSE, TOO_FEW]
    assert list(found.summary()) == ["fixed:5: do not deploy on slow drafts; too few prompts on few prompts."]
    text = found.to_markdown()
    assert "do not deploy on slow drafts" in text and found.line("fixed:5", "slow drafts").to_best_fixed.text() in text


@pytest.mark.parametrize(
    ("low", "high", "prompts", "expected"),
    [
        (1.01, 1.2, FEWEST, DEPLOY),
        (1.0, 1.2, 50, INCONCLUSIVE),
        (0.9, 1.0, 50, INCONCLUSIVE),
        (0.9, 0.99, 50, REFUSE),
        (1.1, 1.2, FEWEST - 1, TOO_FEW),
    ],
)
def test_the_verdict_is_that_of_the_interval(low: float, high: float, prompts: int, expected: str) -> None:
    assert verdict(Ratio(1.0, low, high), prompts) == expected


def test_bad_places_are_refused(sides: tuple[Trace, Trace], full_profile: Profile, learned: LearnedPolicy) -> None:
    with pytest.raises(InputError, match="at least one `policy`"):
        evaluate_places([], {"a": (sides[1], full_profile)})
    with pytest.raises(InputError, match="two policies are called 'logistic'"):
        evaluate_places([learned, learned], {"a": (sides[1], full_profile)})
    with pytest.raises(TraceError, match="training prompts of logistic"):
        evaluate_places([learned], {"a": (sides[0], full_profile)})
    trace, name = sides[1], sides[1].rows["prompt_id"][0]
    one = Trace(trace.folder, trace.header, trace.rows.filter(lambda prompt: prompt == name, input_columns="prompt_id"))
    with pytest.raises(InputError, match="a: expected two prompts or more"):
        evaluate_places([FixedLength(1)], {"a": (one, full_profile)})


@pytest.mark.parametrize("is_same", [False, True], ids=["other prompts", "same prompts"])
def test_simultaneous_intervals_over_places_cover(is_same: bool) -> None:
    """Three places of policies as fast as their rival. At 95% more than 13 misses in 100 happen once in 1,000."""
    false_deploy = misses = 0
    for seed in range(100):
        rng, families = np.random.default_rng(seed), []
        shared = rng.gamma(4.0, size=30)
        for place in range(3):
            hard = shared if is_same else rng.gamma(4.0, size=30 + 5 * place)
            seconds = hard[:, None] * np.concatenate(
                [np.ones((len(hard), 1)), rng.normal(1.0, 0.05, (len(hard), 4))], 1
            )
            boot = Resamples([f"prompt {at:02d}" for at in range(len(hard))], replicates=500)
            families.append(boot.log_ratios(np.full(len(hard), 60.0), seconds, range(1, 5), [0]))
        ratios = [ratio for family in boot.simultaneous(families) for ratio in family]
        false_deploy += any(ratio.is_above for ratio in ratios)
        misses += any(ratio.is_above or ratio.is_below for ratio in ratios)
    assert false_deploy <= 8 and misses <= 13
