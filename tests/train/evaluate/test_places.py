"""Several traces or profiles at once: each place is an evaluation, and all intervals hold together."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

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
from specstop.train.evaluate.report import FILES
from specstop.train.evaluate.report_comparison import read_report
from specstop.train.evaluate.statistics import Resamples
from specstop.train.evaluate.verdict import verdict
from specstop.train.fit.rules import fixed_grid
from specstop.train.replay.arrays import trace_arrays
from specstop.train.replay.rounds import scaled
from specstop.train.replay.run import replay

EXACT = 1e-12
WORLDS = int(os.environ.get("SPECSTOP_WORLDS", "100"))
"""Worlds of the simulation. A longer run: SPECSTOP_WORLDS=2000 pytest -k false_deploy tests/train/evaluate/test_places.py"""


@pytest.mark.filterwarnings("ignore:logistic was trained for another temperature")
def test_each_place_is_compared_with_its_best_fixed_length(
    sides: tuple[Trace, Trace],
    traces: dict[float, Trace],
    full_profile: Profile,
    learned: LearnedPolicy,
    tmp_path: Path,
) -> None:
    policies, profiles = [learned, Confidence(0.4, DEPTH), FixedLength(0)], [full_profile, scaled(full_profile, 3.0)]
    held_out = [sides[1], traces[0.0]]
    report = evaluate(held_out, profiles, policies, out=tmp_path / "out")
    assert list(report.places) == [f"{trace.folder}, profile {at}" for trace in held_out for at in (1, 2)]
    places = [(trace, profile) for trace in held_out for profile in profiles]
    for place, (trace, profile) in zip(report.places.values(), places, strict=True):
        arrays = trace_arrays(trace)
        rates = [r.rate for r in fixed_grid(arrays, profile)]
        assert place.facts["prompts"] == len(set(arrays.clusters)) and place.fixed == pytest.approx(rates)
        for policy in policies:
            line, rate = place[policy.name], replay(arrays, policy, profile).rate
            assert line.tokens_per_s == pytest.approx(rate, rel=EXACT)
            assert line.to_best_fixed.value == pytest.approx(rate / max(rates), rel=EXACT)
            assert line.verdict == verdict(line.speedup, place.facts["clusters"], line.parts)
    assert {row["place"] for row in report.table} == set(report.places) and report.plot().axes
    with pytest.raises(KeyError, match="places"):
        report["logistic"]
    data = json.loads((tmp_path / "out" / "report.json").read_text())
    assert list(data["places"]) == list(report.places) and len(report.summary) == len(policies)
    for name in FILES[:3]:
        text = (tmp_path / "out" / name).read_text()
        assert all(sentence in text.replace("\\", "") for sentence in report.summary)
    with pytest.raises(InputError, match="several"):
        read_report(tmp_path / "out")


def test_intervals_hold_for_all_places_at_once(sides: tuple[Trace, Trace], full_profile: Profile) -> None:
    """With more places intervals are wider in each of them; with copies of a place they are the same."""
    policies = [Confidence(0.4, DEPTH), FixedLength(1)]
    profiles = [full_profile, scaled(full_profile, 2.0)]
    both, most = evaluate(sides[1], profiles, policies), evaluate(list(sides[::-1]), profiles, policies)
    for policy in policies:
        few, many = (next(iter(report.places.values()))[policy.name].speedup for report in (both, most))
        assert few.value == many.value and many.low < few.low < few.high < many.high  # type: ignore[operator]
    alone = evaluate(sides[1], full_profile, policies[1:], primary="fixed:1")["fixed:1"]
    copies = [full_profile, dataclasses.replace(full_profile, facts={"device": "another"})]
    for place in evaluate(sides[1], copies, policies[1:]).places.values():
        assert dataclasses.astuple(place["fixed:1"].speedup) == pytest.approx(dataclasses.astuple(alone.speedup))


def test_places_that_cannot_be_evaluated_are_refused(
    sides: tuple[Trace, Trace], full_profile: Profile, learned: LearnedPolicy
) -> None:
    two = [full_profile, scaled(full_profile, 2.0)]
    for traces, profiles, policies, options, word in (
        (sides[1], two, [], {}, "policy"),
        (sides[1], two, [learned, learned], {}, "two policies are called"),
        (sides[1], [full_profile, full_profile], [learned], {}, "once"),
        ([], full_profile, [learned], {}, "at least one"),
        (sides[1], two, [learned], {"primary": "logistic"}, "primary"),
        (sides[1], two, [learned], {"train_traces": sides[0]}, "train_traces"),
    ):
        with pytest.raises(InputError, match=word):
            evaluate(traces, profiles, policies, **options)  # type: ignore[arg-type]
    with pytest.raises(TraceError, match="training prompts of logistic"):
        evaluate(sides[0], two, [learned])
    trace, name = sides[1], sides[1].rows["prompt_id"][0]
    one = Trace(trace.folder, trace.header, trace.rows.filter(lambda prompt: prompt == name, input_columns="prompt_id"))
    with pytest.raises(InputError, match="two prompts or more"):
        evaluate(one, two, [FixedLength(1)])


SHARED = {"same prompts": 1.0, "half of the prompts": 0.5, "other prompts": 0.0}


def place_ratios(shared: float, seed: int, places: int = 3, policies: int = 4, prompts: int = 30) -> list[Ratio]:
    """Return the ratios in a world of policies as fast as their rival, in places with a share of common prompts.

    A policy gains or loses on the same prompts in every place, so that its ratios are correlated over the places.
    """
    rng = np.random.default_rng([seed, round(10 * shared)])
    common = round(shared * prompts)
    names = [[f"{place if at >= common else 'all'} {at:02d}" for at in range(prompts)] for place in range(places)]
    among = sorted({name for of_place in names for name in of_place})
    hard, gain = (dict(zip(among, values, strict=True)) for values in (
        rng.gamma(4.0, size=len(among)), rng.normal(0.0, 0.08, (len(among), policies))))  # fmt: skip
    families = []
    for of_place in names:
        pace = 1.0 + np.array([gain[name] for name in of_place]) + rng.normal(0.0, 0.02, (prompts, policies))
        seconds = np.array([hard[name] for name in of_place])[:, None] * np.concatenate(
            [np.ones((prompts, 1)), pace], 1
        )
        boot = Resamples(of_place, replicates=500, among=among)
        families.append(boot.log_ratios(np.full(prompts, 60.0), seconds, range(1, policies + 1), [0]))
    return [ratio for family in boot.simultaneous(families) for ratio in family]


@pytest.mark.parametrize("shared", SHARED.values(), ids=SHARED)
def test_a_false_deploy_in_any_place_is_rare(shared: float) -> None:
    """At most 2.5% false deployments, and intervals that hold in 95% of the worlds, within three standard errors."""
    worlds = [place_ratios(shared, seed) for seed in range(WORLDS)]
    false_deploy = np.mean([any(ratio.is_above for ratio in ratios) for ratios in worlds])
    missed = np.mean([any(ratio.is_above or ratio.is_below for ratio in ratios) for ratios in worlds])
    rates = f"{WORLDS} worlds: false deploy {false_deploy:.2%}, missed {missed:.2%}"
    assert false_deploy <= 0.025 + 3 * (0.025 * 0.975 / WORLDS) ** 0.5, rates
    assert missed <= 0.05 + 3 * (0.05 * 0.95 / WORLDS) ** 0.5, rates
