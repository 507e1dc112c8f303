"""Replays priced again in every resample: exact beside brute force, and a verdict that timings alone cannot turn."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from contract_policies import DEPTH, TEST_POLICIES
from specstop.collect.prompts import Prompt
from specstop.collect.run import collect
from specstop.collect.store import Trace
from specstop.decode.models.pair import Pair
from specstop.policies.fixed import Confidence, FixedLength
from specstop.policies.measurements import DECISIONS, Measurements
from specstop.policies.profile import Profile
from specstop.policies.storage import load_policy_folder, save_policy
from specstop.train.evaluate import pricing as prices
from specstop.train.evaluate.evaluate import evaluate
from specstop.train.evaluate.pricing import (
    TIMED,
    TRAINED,
    Priced,
    ProfileBootstrap,
    ResampleSource,
    unpriced_finding,
    with_prices,
)
from specstop.train.evaluate.statistics import Resamples
from specstop.train.fit.run import train
from specstop.train.replay.arrays import TraceArrays, trace_arrays
from specstop.train.replay.rounds import Rounds
from specstop.train.replay.run import replay
from timed import timed_profile

EXACT = 1e-12  # the same sums, in another order
REPLICATES, DRAWS = 30, 7


@pytest.fixture(scope="module")
def noisy(full_profile: Profile) -> Profile:
    return timed_profile(full_profile, ["confidence", "trimming"], pace=0.1, jitter=0.2, seed=1)


@pytest.fixture(scope="module")
def chains(sides: tuple[Trace, Trace]) -> TraceArrays:
    return trace_arrays(sides[1])


@pytest.fixture(scope="module")
def tree(pair: Pair, prompts: list[Prompt], tmp_path_factory: pytest.TempPathFactory) -> TraceArrays:
    folder = tmp_path_factory.mktemp("tree")
    return trace_arrays(collect(pair, prompts, folder, tree="2,2,1", temperature=0.7, max_new_tokens=16))


def brute(
    boot: Resamples, draws: ProfileBootstrap, arrays: TraceArrays, replays: list[Rounds], row: int
) -> list[float]:
    """Return what the texts of a resample take under its draw, round by round."""
    profile = draws.profiles[(row - 1) % len(draws.profiles)]
    return [float(boot.total(one.text_seconds(profile))[row]) for one in replays]


@pytest.mark.parametrize("shape", ["chains", "tree"])
def test_every_resample_is_priced_by_its_own_profile(
    shape: str, noisy: Profile, request: pytest.FixtureRequest
) -> None:
    arrays: TraceArrays = request.getfixturevalue(shape)
    depth = min(arrays.depth, noisy.max_depth)
    policies = [FixedLength(0), FixedLength(2), Confidence(0.4, depth), TEST_POLICIES["trimming"].limited(depth)]
    replays = [replay(arrays, policy, noisy) for policy in policies]
    boot, draws = Resamples(arrays.prompt_ids, 0, REPLICATES), ProfileBootstrap(noisy, 3, DRAWS)
    spent = Priced(boot, draws, replays, arrays.prompt_tokens).seconds()
    assert spent.shape == (1 + REPLICATES, len(policies))
    assert spent[0] == pytest.approx([float(one.seconds.sum()) for one in replays], rel=EXACT)
    for row in (1, DRAWS, DRAWS + 1, REPLICATES):
        assert spent[row] == pytest.approx(brute(boot, draws, arrays, replays, row), rel=EXACT)


def test_sources_of_error_are_resampled_one_at_a_time(chains: TraceArrays, noisy: Profile) -> None:
    replays = [replay(chains, policy, noisy) for policy in (FixedLength(2), Confidence(0.4, DEPTH))]
    boot, draws = Resamples(chains.prompt_ids, 0, REPLICATES), ProfileBootstrap(noisy, 3, DRAWS)
    priced = Priced(boot, draws, replays, chains.prompt_tokens)
    prompts, profile = (priced.seconds(source) for source in (ResampleSource.PROMPTS, ResampleSource.PROFILE))
    assert profile.shape == (1 + DRAWS, 2)
    for at, one in enumerate(replays):
        assert prompts[:, at] == pytest.approx(boot.total(one.seconds), rel=EXACT)
        under = [float(one.text_seconds(costs).sum()) for costs in (noisy, *draws.profiles)]
        assert profile[:, at] == pytest.approx(under, rel=EXACT)


def test_without_timings_nothing_but_prompts_is_drawn(chains: TraceArrays, full_profile: Profile) -> None:
    replays = [replay(chains, Confidence(0.4, DEPTH), full_profile)]
    boot, draws = Resamples(chains.prompt_ids), ProfileBootstrap(full_profile)
    priced = Priced(boot, draws, [replays[0]], chains.prompt_tokens, replays[0].seconds[:, None])
    assert draws.profiles == () and "kept no repeated timings" in draws.describe()
    assert np.array_equal(priced.seconds()[:, 0], boot.total(replays[0].seconds))
    assert priced.seconds(ResampleSource.PROFILE).shape == (1, 1)


# The verdict


def test_noise_of_the_profile_widens_intervals_and_is_shown(
    sides: tuple[Trace, Trace], full_profile: Profile, tmp_path: Path
) -> None:
    policies = [Confidence(0.7, DEPTH)]
    quiet, busy = (
        timed_profile(full_profile, ["confidence"], pace=noise, jitter=noise, seed=2) for noise in (0.001, 0.6)
    )
    reports = [
        evaluate(sides[1], profile, policies, out=tmp_path / str(at)) for at, profile in enumerate((quiet, busy))
    ]
    lines = [report["confidence:0.7"] for report in reports]
    widths = [{part: ratio.high - ratio.low for part, ratio in line.parts.items()} for line in lines]
    assert set(widths[0]) == {"all", "prompts", "profile"}
    assert lines[0].parts["all"] == lines[0].to_best_fixed
    assert widths[0]["profile"] < 0.1 * widths[0]["prompts"]
    assert widths[1]["all"] > widths[1]["profile"] > 10 * widths[0]["profile"]
    assert reports[0].findings == () and "this machine was busy" in reports[1].findings[0]
    text = (tmp_path / "1" / "report.md").read_text()
    assert "## Sources of uncertainty" in text and "this machine was busy" in text
    page = (tmp_path / "1" / "report.html").read_text()
    assert 'id="uncertainty"' in page and lines[1].parts["profile"].text() in page


# Decisions that the profile does not price


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
    assert lacking == {"confidence": ("confidence:0.4", TIMED), "trimming": ("trimming", TIMED)}
    assert len(list(cache.iterdir())) == 2 and "fixed" not in first.decision_s
    assert first.decision("confidence") > 0
    timed = {key[1:] for key in first.measurements.where(lambda key: key.what == DECISIONS).series}
    assert timed == {(name, (3,)) for name in ("confidence", "trimming")}
    monkeypatch.setattr(prices, "measure_decision", never)
    again, same = with_prices(bare, policies, header)
    assert again == first and same == lacking
    known, none = with_prices(first, policies, header)
    assert known is first and none == {}
    for other in (
        dataclasses.replace(bare, step_s=2 * bare.step_s),
        dataclasses.replace(bare, facts={"device": "another"}),
    ):
        with pytest.raises(AssertionError, match="timed again"):
            with_prices(other, policies, header)
    with pytest.raises(AssertionError, match="timed again"):
        with_prices(bare, [Confidence(0.5, DEPTH)], header)


def test_a_policy_trained_for_the_profile_brings_its_timings(
    cache: Path, bare: Profile, sides: tuple[Trace, Trace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = load_policy_folder(save_policy(train(sides[0], bare).policy, tmp_path / "policy"))
    monkeypatch.setattr(prices, "measure_decision", never)
    priced, unpriced = with_prices(bare, [policy], sides[1].header)
    assert unpriced == {"logistic": (str(tmp_path / "policy"), TRAINED)} and not cache.exists()
    assert priced.decision("logistic") == Profile.from_dict(policy.metadata.profile, "").decision("logistic")
    assert any(key[:2] == (DECISIONS, "logistic") for key in priced.measurements.series), (
        "timings, not their mean alone"
    )
    inside = dataclasses.replace(priced, facts={"engine": "vllm 0.32.0"})
    (line,) = unpriced_finding(unpriced, priced, sides[1].header)
    assert f"--policy {tmp_path / 'policy'} --profile profile.json" in line and "outside" not in line
    assert "trained, outside vllm 0.32.0: " in unpriced_finding(unpriced, inside, sides[1].header)[0]
    with pytest.raises(AssertionError, match="timed again"):
        with_prices(dataclasses.replace(bare, step_s=2 * bare.step_s), [policy], sides[1].header)
