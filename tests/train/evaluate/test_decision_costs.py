"""Decisions that the profile does not price: timed once, kept, and the same in every report."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from contract_policies import DEPTH, TEST_POLICIES
from specstop.collect.store import Trace
from specstop.policies.fixed import Confidence, FixedLength
from specstop.policies.measurements import DECISIONS, Measurements
from specstop.policies.profile import Profile
from specstop.policies.storage import load_policy_folder, save_policy
from specstop.train.evaluate import pricing as prices
from specstop.train.evaluate.evaluate import evaluate
from specstop.train.evaluate.pricing import TIMED, TRAINED, unpriced_finding, with_prices
from specstop.train.fit.run import train
from timed import timed_profile


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECSTOP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "decisions"


@pytest.fixture(scope="module")
def bare(full_profile: Profile) -> Profile:
    """A noisy profile without any decision."""
    return timed_profile(dataclasses.replace(full_profile, decision_s={}), pace=0.1, jitter=0.1)


def never(*_: object, **__: object) -> Measurements:
    raise AssertionError("timed again")


def test_what_is_timed_is_kept_and_used_again(
    cache: Path, bare: Profile, sides: tuple[Trace, Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    header, policies = sides[1].header, [FixedLength(2), Confidence(0.4, DEPTH), TEST_POLICIES["trimming"]]
    first, lacking = with_prices(bare, policies, header)
    assert [(one.policy.cost_name, one.source) for one in lacking] == [("confidence", TIMED), ("trimming", TIMED)]
    assert len(list(cache.iterdir())) == 2 and "fixed" not in first.decision_s
    assert first.decision("confidence") > 0
    timed = {key[1:] for key in first.measurements.where(lambda key: key.what == DECISIONS).series}
    assert timed == {(name, (3,)) for name in ("confidence", "trimming")}
    monkeypatch.setattr(prices, "measure_decision", never)
    again, same = with_prices(bare, policies, header)
    assert again == first and [one.price for one in same] == [one.price for one in lacking]
    known, none = with_prices(first, policies, header)
    assert known is first and none == ()
    for other in (
        dataclasses.replace(bare, step_s=2 * bare.step_s),
        dataclasses.replace(bare, facts={"device": "another"}),
    ):
        with pytest.raises(AssertionError, match="timed again"):
            with_prices(other, policies, header)
    with pytest.raises(AssertionError, match="timed again"):
        with_prices(bare, [Confidence(0.5, DEPTH)], header)


def test_a_damaged_or_foreign_file_is_timed_again_and_a_cache_that_cannot_be_written_is_done_without(
    cache: Path, bare: Profile, sides: tuple[Trace, Trace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header, policies = sides[1].header, [Confidence(0.4, DEPTH)]
    with_prices(bare, policies, header)
    (kept,) = cache.iterdir()
    whole = json.loads(kept.read_text())
    for damage in ({**whole, "measurements": 3}, {"decisions": 3}, [], {**whole, "measurements": [{"key": 1}]}):
        kept.write_text(json.dumps(damage))
        again, _ = with_prices(bare, policies, header)
        assert again.decision("confidence") > 0
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECSTOP_CACHE", str(tmp_path / "file"))
    priced, _ = with_prices(bare, policies, header)
    assert priced.decision("confidence") > 0


def test_a_policy_trained_for_the_profile_brings_its_timings(
    cache: Path, bare: Profile, sides: tuple[Trace, Trace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = load_policy_folder(save_policy(train(sides[0], bare).policy, tmp_path / "policy"))
    monkeypatch.setattr(prices, "measure_decision", never)
    priced, (one,) = with_prices(bare, [policy], sides[1].header)
    assert one.source == TRAINED and not cache.exists()
    assert priced.decision("logistic") == Profile.from_dict(policy.metadata.profile, "").decision("logistic")
    assert any(key[:2] == (DECISIONS, "logistic") for key in priced.measurements.series), (
        "timings, not their mean alone"
    )
    inside = dataclasses.replace(bare, facts={"engine": "vllm 0.32.0"})
    assert "trained, outside vllm 0.32.0: " in unpriced_finding([one], inside, sides[1].header)[0]
    (line,) = unpriced_finding([one], bare, sides[1].header)
    assert "outside" not in line
    assert f"--policy {tmp_path / 'policy'} --profile profile.json" in line and "as timed when it was trained" in line
    with pytest.raises(AssertionError, match="timed again"):
        with_prices(dataclasses.replace(bare, step_s=2 * bare.step_s), [policy], sides[1].header)


def test_evaluating_twice_gives_the_same_report(
    few_draws: None, cache: Path, bare: Profile, sides: tuple[Trace, Trace]
) -> None:
    known, _ = with_prices(bare, [Confidence(0.4, DEPTH), TEST_POLICIES["trimming"]], sides[1].header)
    for profile in (known, bare):
        one, two = (evaluate(sides[1], profile, [TEST_POLICIES["trimming"]], sweep=profile is known) for _ in range(2))
        assert one.to_dict() == two.to_dict()
