"""Figures called held-out are of prompts that influence nothing in a policy."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from specstop.collect.store import Trace
from specstop.policies.learned import LearnedPolicy
from specstop.policies.profile import Profile
from specstop.train.evaluate.evaluate import evaluate
from specstop.train.fit.plan import REPORT_SHARE, Plan, TrainOptions, split_report
from specstop.train.fit.run import fit_policy, train
from specstop.train.fit.settle import settle_for, unfitted_prompts
from specstop.train.heads import make_head
from specstop.train.replay.arrays import TraceArrays, joined_arrays, trace_arrays

NAMES = ("top1", "noisy_margin", "depth")


@pytest.fixture(scope="module")
def arrays(sides: tuple[Trace, Trace]) -> TraceArrays:
    return trace_arrays(sides[0])


def other_report(arrays: TraceArrays, seed: int = 0) -> TraceArrays:
    """Return the trace with other outcomes of the report prompts."""
    _, report = split_report(arrays, REPORT_SHARE, seed)
    assert report is not None
    mine = torch.tensor([name in set(report.clusters) for name in arrays.clusters])[arrays.owner]
    accepted = torch.where(mine, 0, arrays.accepted)
    return dataclasses.replace(arrays, accepted=accepted)


def parts(policy: LearnedPolicy) -> list[Any]:
    """Return all that decides, as values that can be compared."""
    tables = [] if policy.survival is None else [policy.survival.tables.tolist()]
    weights = {name: array.tolist() for name, array in policy.head.tensors().items()}
    maps = [[c.kind, c.temperature, c.knots.tolist()] for c in (policy.accept, policy.next)]
    return [weights, maps, tables, policy.rule.to_dict(), policy.metadata.rho, policy.metadata.acceptance]


@pytest.mark.parametrize(
    ("head", "rule"),
    [("logistic", "derived"), ("xgboost", "survival"), ("mlp", "derived")],
)
def test_report_prompts_influence_nothing(arrays: TraceArrays, full_profile: Profile, head: str, rule: str) -> None:
    profile = full_profile.with_decisions({head: 1e-5})
    short = make_head(head, {"epochs": 2} if head == "mlp" else {})
    plan = Plan(short, rule, NAMES, options=TrainOptions(passes=2, report_share=REPORT_SHARE))
    one, other = (fit_policy(plan, of, profile)[0] for of in (arrays, other_report(arrays)))
    assert parts(one) == parts(other)
    figure = "held_out_tokens_per_s"
    assert one.metadata.metrics[figure] != other.metadata.metrics[figure], "while the figures are of these prompts"


def test_a_search_sees_no_report_prompt(
    sides: tuple[Trace, Trace], full_profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = full_profile.with_decisions({"logistic": 1e-5})
    found = []
    for changed in (False, True):
        read = joined_arrays if not changed else lambda *args: other_report(joined_arrays(*args))
        monkeypatch.setattr("specstop.train.fit.run.joined_arrays", read)
        trained = train(sides[0], profile, head="logistic", rule="survival", features=NAMES, tune=2)
        found.append((trained.metrics["trials"], parts(trained.policy), trained.metrics["held_out_tokens_per_s"]))
    assert found[0][:2] == found[1][:2] and found[0][2] != found[1][2]


def test_the_three_sets_are_disjoint_and_recorded(sides: tuple[Trace, Trace], full_profile: Profile) -> None:
    trained = train(sides[0], full_profile, features=NAMES)
    prompts, arrays = trained.policy.metadata.prompts, trace_arrays(sides[0])
    fit, select = set(prompts["fit"]), set(prompts["select"])
    _, report = split_report(arrays, REPORT_SHARE, 0)
    assert report is not None
    assert not fit & select and not (fit | select) & set(report.clusters)
    assert fit | select | set(report.clusters) == set(arrays.clusters)
    assert set(prompts["report"]) == set(report.clusters)
    counts = {name: trained.metrics[f"{name}_prompts"] for name in ("fit", "select", "report")}
    assert counts == {"fit": len(fit), "select": len(select), "report": report.sequences}
    bare = train(sides[0], full_profile, features=NAMES, report_share=0).metrics
    assert not [name for name in bare if "held_out" in name or name.endswith("_auc")]


def test_rho_is_solved_again_on_prompts_that_the_head_was_not_fitted_on(
    sides: tuple[Trace, Trace], full_profile: Profile
) -> None:
    arrays, policy = trace_arrays(sides[0]), train(sides[0], full_profile, features=NAMES).policy
    free = unfitted_prompts(policy, arrays)
    assert free is not None and set(free.clusters) == set(policy.metadata.prompts["select"])
    costly = dataclasses.replace(full_profile, round_s=2 * full_profile.round_s + 1e-3)
    settled, note = settle_for(policy, arrays, costly)
    assert "that the head was not fitted on" in note
    # Other outcomes of the prompts that the head was fitted on, and of report prompts, change nothing.
    used = {*policy.metadata.prompts["fit"], *policy.metadata.prompts["report"]}
    fitted = torch.tensor([name in used for name in arrays.clusters])[arrays.owner]
    changed = dataclasses.replace(arrays, accepted=torch.where(fitted, 0, arrays.accepted))
    again, _ = settle_for(policy, changed, costly)
    assert isinstance(settled, LearnedPolicy) and isinstance(again, LearnedPolicy)
    assert settled.metadata.rho == again.metadata.rho and settled.rule.to_dict() == again.rule.to_dict()
    only = arrays.subset([at for at, name in enumerate(arrays.clusters) if name in set(policy.metadata.prompts["fit"])])
    assert settle_for(policy, only, costly)[0] is policy


def test_evaluation_on_training_prompts_is_refused(sides: tuple[Trace, Trace], full_profile: Profile) -> None:
    policy = train(sides[0], full_profile, features=NAMES).policy
    profile = full_profile.with_decisions({policy.cost_name: 1e-5})
    known = len(policy.metadata.prompts["fit"]) + len(policy.metadata.prompts["select"])
    with pytest.raises(Exception, match=f"{known} of .* prompts are in the training prompts of logistic"):
        evaluate(sides[0], profile, [policy])
    with pytest.warns(Warning, match="not held-out"):
        evaluate(sides[0], profile, [policy], allow_overlap=True)
    evaluate(sides[1], profile, [policy])
