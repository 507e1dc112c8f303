"""Sweeps over the draft's cost and transfer tables: exact where costs make the answer known."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
from contract_policies import DEPTH, TEST_POLICIES
from specstop.collect.store.folder import Trace
from specstop.decode.benchmark import Ratio
from specstop.policies.errors import InputError, TraceError
from specstop.policies.fixed import Confidence, FixedLength
from specstop.policies.learned import LearnedPolicy
from specstop.policies.profile import Profile
from specstop.train.fit.rules import fixed_grid
from specstop.train.replay.run import replay
from specstop.train.replay.traces.arrays import trace_arrays, typical_context
from specstop.train.report.records import DEPLOY, INCONCLUSIVE, REFUSE, TOO_FEW, verdict
from specstop.train.report.whatif.records import SweepLine, write_whatif
from specstop.train.report.whatif.sweep import RATIOS, cost_ratio, sweep, with_cost_ratio
from specstop.train.report.whatif.transfer import transfer
from specstop.train.statistics import FEWEST

EXACT = 1e-12
POINTS = (0.02, 0.2, 2.0)


def test_the_points_are_those_promised() -> None:
    assert len(RATIOS) == 9
    assert (RATIOS[0], RATIOS[-1]) == (0.01, 0.5)
    steps = [b / a for a, b in itertools.pairwise(RATIOS)]
    assert max(steps) / min(steps) < 1.03, "evenly spaced in the logarithm"


@pytest.mark.parametrize("later", [None, 2.5e-3])
def test_scaling_changes_the_draft_alone(profile: Profile, later: float | None) -> None:
    low, high = (dataclasses.replace(t, later_draft_s=later) for t in (profile.low, profile.high))
    whole = dataclasses.replace(profile, low=low, high=high)
    scaled = with_cost_ratio(whole, 0.3, 20.0)
    assert cost_ratio(scaled, 20.0) == pytest.approx(0.3)
    factor = 0.3 / cost_ratio(whole, 20.0)
    for mine, before in ((scaled.low, low), (scaled.high, high)):
        assert mine.draft_s == pytest.approx([factor * s for s in before.draft_s])
        assert mine.draft_token_s == pytest.approx(factor * before.draft_token_s)
        assert mine.later_draft_s == (None if later is None else pytest.approx(factor * later))
        assert (mine.verify_s, mine.context) == (before.verify_s, before.context)
    rest = ("step_s", "round_s", "prefill_s", "decision_s", "temperature", "facts")
    assert all(getattr(scaled, name) == getattr(whole, name) for name in rest)


def test_the_ratio_is_taken_at_the_context(profile: Profile) -> None:
    assert cost_ratio(profile, profile.low.context) == pytest.approx(1.0e-3 / 4.0e-3)
    assert cost_ratio(profile, profile.high.context) == pytest.approx(1.5e-3 / 6.0e-3)
    assert cost_ratio(profile, 24.0) == pytest.approx(1.25e-3 / 5.0e-3)


def test_each_point_is_a_replay_under_its_costs(sides: tuple[Trace, Trace], full_profile: Profile) -> None:
    arrays, rule = trace_arrays(sides[1]), Confidence(0.4, DEPTH)
    found = sweep(sides[1], full_profile, [rule, FixedLength(2)], ratios=POINTS[::-1])
    assert found.ratios == POINTS
    context = typical_context(arrays)
    assert found.here == pytest.approx(cost_ratio(full_profile, context))
    for at, point in enumerate(POINTS):
        costs = with_cost_ratio(full_profile, point, context)
        grid = [r.rate for r in fixed_grid(arrays, costs)]
        assert found.best_fixed_tokens_per_s[at] == pytest.approx(max(grid), rel=EXACT)
        assert found.best_fixed[at] == grid.index(max(grid))
        line = found.line(rule.name)
        assert line.to_best_fixed[at].value == pytest.approx(replay(arrays, rule, costs).rate / max(grid), rel=EXACT)
        assert line.to_plain[at].value == pytest.approx(replay(arrays, rule, costs).rate / grid[0], rel=EXACT)
        assert found.line("fixed:2").to_best_fixed[at].value == pytest.approx(grid[2] / max(grid), rel=EXACT)
    assert found.best_fixed[0] > found.best_fixed[-1] == 0, "a draft twice as expensive as the target is not used"
    assert found.line("fixed:2").pays_from is None
    assert all(r.low <= r.value <= 1.0 for r in found.line("fixed:2").to_best_fixed)


def test_rates_are_solved_again_where_there_are_training_traces(
    sides: tuple[Trace, Trace], full_profile: Profile, learned: LearnedPolicy
) -> None:
    saved = sweep(sides[1], full_profile, [learned], ratios=POINTS)
    solved = sweep(sides[1], full_profile, [learned], train_traces=sides[0], ratios=POINTS)
    assert "as saved" in saved.lines[0].note
    assert "solved at each point" in solved.lines[0].note
    # Far from home the saved rule drafts on as if drafts were cheap.
    assert solved.lines[0].to_best_fixed[-1].value > saved.lines[0].to_best_fixed[-1].value
    assert saved.lines[0].kind == "learned"


def ones(lows: tuple[float, ...]) -> tuple[Ratio, ...]:
    return tuple(Ratio(low + 0.05, low, low + 0.1) for low in lows)


def test_a_policy_pays_where_its_interval_is_clear_of_1() -> None:
    from specstop.train.report.whatif.sweep import _runs

    assert _runs((0.1, 0.2, 0.3, 0.4, 0.5), ones((0.9, 1.01, 1.02, 1.0, 1.3))) == ((0.2, 0.3), (0.5, 0.5))
    assert _runs((0.1, 0.2), ones((0.9, 0.99))) == ()
    line = SweepLine("x", "rule", (), (), ((0.2, 0.3), (0.5, 0.5)))
    assert (line.pays_from, line.verdict) == (0.2, "pays from 0.2 to 0.3 and at 0.5")
    assert SweepLine("x", "rule", (), (), ()).verdict == "at no point above the best fixed length beyond its interval"


def test_bad_sweeps_are_refused(sides: tuple[Trace, Trace], full_profile: Profile) -> None:
    with pytest.raises(InputError, match="at least one policy"):
        sweep(sides[1], full_profile, [])
    with pytest.raises(InputError, match="cost ratios above 0"):
        sweep(sides[1], full_profile, [FixedLength(1)], ratios=[0.1, 0.0])
    with pytest.raises(TraceError, match="11 of 11 prompts are in `train_traces` too"):
        sweep(sides[1], full_profile, [FixedLength(1)], train_traces=sides[1])
    free = dataclasses.replace(full_profile.low, draft_s=(0.0, 0.0))
    with pytest.raises(InputError, match="steps that take time"):
        sweep(sides[1], dataclasses.replace(full_profile, low=free, high=free), [FixedLength(1)])


# Transfer


def test_a_cell_is_the_policy_beside_the_best_fixed_length_of_its_column(
    sides: tuple[Trace, Trace], traces: dict[float, Trace], full_profile: Profile, learned: LearnedPolicy
) -> None:
    policies = [learned, Confidence(0.4, DEPTH), FixedLength(0)]
    found = transfer(policies, [sides[1], traces[0.0]], [full_profile])
    assert found.rows == ("logistic", "confidence:0.4", "fixed:0")
    assert found.columns == (sides[1].folder.name, traces[0.0].folder.name)
    assert found.prompts == tuple(len(set(trace_arrays(t).prompt_ids)) for t in (sides[1], traces[0.0]))
    for column, trace in zip(found.columns, (sides[1], traces[0.0]), strict=True):
        arrays = trace_arrays(trace)
        best = max(r.rate for r in fixed_grid(arrays, full_profile))
        for policy in policies:
            cell = found.cell(policy.name, column)
            assert cell.to_best_fixed.value == pytest.approx(
                replay(arrays, policy, full_profile).rate / best, rel=EXACT
            )
            assert cell.verdict == verdict(cell.to_best_fixed, found.prompts[found.columns.index(column)])
    assert found.cell("logistic", found.columns[0]).own
    assert not found.cell("logistic", found.columns[1]).own, "trained at 0.7, used at 0"
    assert found.trained_on[0] == f"{sides[0].folder.parent.name}/{sides[0].folder.name}, T = 0.7"
    assert found.refused == tuple(
        (r, c) for r in found.rows for c in found.columns if found.cell(r, c).verdict == REFUSE
    )


def test_a_policy_below_best_fixed_is_not_to_be_deployed(sides: tuple[Trace, Trace], full_profile: Profile) -> None:
    found = transfer([FixedLength(DEPTH)], [sides[0]], [with_cost_ratio(full_profile, 2.0, 20.0)])
    assert found.cells[0][0].verdict == REFUSE
    assert found.refused == (("fixed:5", sides[0].folder.name),)
    assert "do not deploy" in found.to_markdown()


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


def test_groups_are_columns(traces: dict[float, Trace], sides: tuple[Trace, Trace], full_profile: Profile) -> None:
    found = transfer([FixedLength(1)], [traces[0.0]], [full_profile], by_group=True)
    assert found.columns == ("g0", "g1")
    assert found.prompts == (4, 4)
    assert [c.verdict for c in found.cells[0]] == [TOO_FEW, TOO_FEW]
    both = transfer([FixedLength(1)], list(traces.values()), [full_profile] * 2, by_group=True)
    assert len(both.columns) == 4
    assert both.columns[0].endswith("/g0")
    arrays = trace_arrays(traces[0.0])
    part = arrays.subset([s for s, g in enumerate(arrays.groups) if g == "g1"])
    rates = [r.rate for r in fixed_grid(part, full_profile)]
    assert found.cell("fixed:1", "g1").to_best_fixed.value == pytest.approx(rates[1] / max(rates), rel=EXACT)
    with pytest.raises(TraceError, match="by_group: the prompts of this trace have no group"):
        transfer([FixedLength(1)], [sides[1]], [full_profile], by_group=True)


def test_policies_of_one_name_are_told_apart(
    sides: tuple[Trace, Trace], full_profile: Profile, learned: LearnedPolicy
) -> None:
    other = learned.with_rule(learned.rule)
    other.metadata = dataclasses.replace(learned.metadata, temperature=0.0)
    assert transfer([learned, other], [sides[1]], [full_profile]).rows == ("logistic (T = 0.7)", "logistic (T = 0)")
    assert transfer([learned, other], [sides[1]], [full_profile], names=["a", "b"]).rows == ("a", "b")
    with pytest.raises(InputError, match="two policies are called"):
        transfer([learned, learned], [sides[1]], [full_profile])


def test_traces_of_one_folder_name_are_told_apart(sides: tuple[Trace, Trace], full_profile: Profile) -> None:
    one, two = (Trace(Path("/a", side, "test"), sides[1].header, sides[1].rows) for side in ("x", "y"))
    assert transfer([FixedLength(1)], [one, two], [full_profile]).columns == ("x/test", "y/test")


def test_a_policy_that_hears_seconds_is_replayed_at_each_point(
    sides: tuple[Trace, Trace], full_profile: Profile
) -> None:
    arrays, policy = trace_arrays(sides[1]), TEST_POLICIES["adaptive"]
    found = sweep(sides[1], full_profile, [policy], ratios=POINTS)
    for at, point in enumerate(POINTS):
        costs = with_cost_ratio(full_profile, point, typical_context(arrays))
        best = max(r.rate for r in fixed_grid(arrays, costs))
        assert found.lines[0].to_best_fixed[at].value == pytest.approx(
            replay(arrays, policy, costs).rate / best, rel=EXACT
        )


def test_bad_transfers_are_refused(sides: tuple[Trace, Trace], full_profile: Profile) -> None:
    with pytest.raises(InputError, match="at least one `policy`"):
        transfer([], [sides[1]], [full_profile])
    with pytest.raises(InputError, match="one for all traces or one for each of 1"):
        transfer([FixedLength(1)], [sides[1]], [full_profile] * 2)
    with pytest.raises(InputError, match="is there twice"):
        transfer([FixedLength(1)], [sides[1], sides[1]], [full_profile])


def test_what_is_written_is_what_was_found(sides: tuple[Trace, Trace], full_profile: Profile, tmp_path: Path) -> None:
    rule = Confidence(0.4, DEPTH)
    swept = sweep(sides[1], full_profile, [rule], ratios=POINTS)
    table = transfer([rule], [sides[1]], [full_profile])
    for value, name in ((swept, "sweep"), (table, "transfer")):
        write_whatif(value, tmp_path)
        raw = json.loads((tmp_path / f"{name}.json").read_text(), parse_constant=pytest.fail)
        assert raw == json.loads(json.dumps(value.to_dict()))
        assert (raw["schema"], raw["kind"]) == (1, name)
        assert (tmp_path / f"{name}.md").read_text() == value.to_markdown()
    text = swept.to_markdown()
    for at, point in enumerate(POINTS):
        ratio = swept.lines[0].to_best_fixed[at]
        assert (
            f"| {point:.3g} | {swept.best_fixed[at]} | {ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}] |" in text
        )
    assert swept.lines[0].verdict in text
