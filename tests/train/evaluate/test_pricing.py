"""Replays priced again in every resample: exact beside brute force, and a verdict that timings alone cannot turn."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from contract_policies import DEPTH, TEST_POLICIES
from specstop.collect.prompts import Prompt
from specstop.collect.run import collect
from specstop.collect.store import Trace
from specstop.decode.models.pair import Pair
from specstop.policies.fixed import Confidence, FixedLength
from specstop.policies.measurements import DECISIONS, Key, collected
from specstop.policies.profile import Profile
from specstop.train.evaluate.evaluate import evaluate
from specstop.train.evaluate.pricing import Priced, ProfileBootstrap, ResampleSource
from specstop.train.evaluate.statistics import Resamples
from specstop.train.replay.arrays import TraceArrays, trace_arrays
from specstop.train.replay.bounds import oracle_plan, planned_rounds
from specstop.train.replay.rounds import Rounds, scaled
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


def test_parts_are_drawn_one_at_a_time(chains: TraceArrays, noisy: Profile) -> None:
    replays = [replay(chains, policy, noisy) for policy in (FixedLength(2), Confidence(0.4, DEPTH))]
    boot, draws = Resamples(chains.prompt_ids, 0, REPLICATES), ProfileBootstrap(noisy, 3, DRAWS)
    priced = Priced(boot, draws, replays, chains.prompt_tokens)
    prompts, profile, decisions = (
        priced.seconds(vary) for vary in (ResampleSource.PROMPTS, ResampleSource.PROFILE, ResampleSource.DECISIONS)
    )
    for at, one in enumerate(replays):
        assert prompts[:, at] == pytest.approx(boot.total(one.seconds), rel=EXACT)
        for number, drawn in enumerate(draws.profiles, 1):
            own = noisy.decision_s["confidence"], drawn.decision_s["confidence"]
            calls, decided = drawn.with_decisions({"confidence": own[0]}), noisy.with_decisions({"confidence": own[1]})
            assert profile[number, at] == pytest.approx(float(one.text_seconds(calls).sum()), rel=EXACT)
            assert decisions[number, at] == pytest.approx(float(one.text_seconds(decided).sum()), rel=EXACT)
    assert np.ptp(decisions[:, 0]) == 0.0 < np.ptp(decisions[:, 1]), "fixed lengths decide nothing"


def test_draws_of_model_calls_are_the_same_whatever_decisions_were_timed(noisy: Profile) -> None:
    more = collected([{Key(DECISIONS, "mine", (1,)): [1e-4]}] * 40)
    mine, theirs = (
        ProfileBootstrap(noisy, 3, DRAWS).profiles,
        ProfileBootstrap(noisy.with_measured_decisions(more), 3, DRAWS).profiles,
    )
    for one, other in zip(mine, theirs, strict=True):
        assert one.same_costs(other.to_dict()) and one.decision("confidence") == other.decision("confidence")


def test_changes_are_made_to_every_draw(chains: TraceArrays, noisy: Profile) -> None:
    replays = [replay(chains, FixedLength(3), noisy)]
    boot, draws = Resamples(chains.prompt_ids, 0, REPLICATES), ProfileBootstrap(noisy, 3, DRAWS)
    priced = Priced(boot, draws, [replays[0]], chains.prompt_tokens)
    twice = partial(scaled, draft=2.0)
    spent = priced.seconds(change=twice)
    for row in (1, 5):
        under = twice(draws.profiles[(row - 1) % DRAWS])
        assert spent[row, 0] == pytest.approx(float(boot.total(replays[0].text_seconds(under))[row]), rel=EXACT)


def test_without_timings_nothing_but_prompts_is_drawn(chains: TraceArrays, full_profile: Profile) -> None:
    replays = [replay(chains, Confidence(0.4, DEPTH), full_profile)]
    boot, draws = Resamples(chains.prompt_ids), ProfileBootstrap(full_profile)
    priced = Priced(boot, draws, [replays[0]], chains.prompt_tokens, replays[0].seconds[:, None])
    assert draws.profiles == () and "kept no repeated timings" in draws.describe()
    assert np.array_equal(priced.seconds()[:, 0], boot.total(replays[0].seconds))
    assert priced.seconds(ResampleSource.PROFILE).shape == (1, 1)


def test_the_plans_rounds_take_what_the_bound_says(chains: TraceArrays, tree: TraceArrays, profile: Profile) -> None:
    for arrays in (chains, tree):
        plan = oracle_plan(arrays, profile)
        rounds = planned_rounds(arrays, plan)
        torch.testing.assert_close(rounds.text_seconds(profile), plan.seconds, rtol=EXACT, atol=0.0)


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
    assert set(widths[0]) == {"all", "prompts", "profile", "decisions"}
    assert lines[0].parts["all"] == lines[0].to_best_fixed
    assert widths[0]["profile"] < 0.1 * widths[0]["prompts"]
    assert widths[1]["all"] > widths[1]["profile"] > 10 * widths[0]["profile"]
    assert reports[0].findings == () and "this machine was busy" in reports[1].findings[0]
    text = (tmp_path / "1" / "report.md").read_text()
    assert "## Sources of uncertainty" in text and "this machine was busy" in text
    page = (tmp_path / "1" / "report.html").read_text()
    assert 'id="uncertainty"' in page and lines[1].parts["profile"].text() in page
