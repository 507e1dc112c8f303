"""Training of policies: folders, options, searches, and held-out prompts."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from conftest import make_prompts
from contract_policies import DEPTH
from specstop.collect import collect
from specstop.decode import join
from specstop.policies import InputError, PolicyError, TraceError, load_policy_folder
from specstop.train import TraceArrays, make_head, trace_arrays, train
from specstop.train.fit.plan import FEATURES, REPORT_SHARE, Plan, TrainOptions, split_report
from specstop.train.fit.run import fit_policy
from specstop.train.fit.settle import settle_for, unfitted_prompts
from specstop.train.fit.tune import TUNE_FOLDS, search

from specstop import LearnedPolicy, Pair, Profile, Trace, evaluate, load_trace, replay

PLAIN = ("logistic", "mlp", "xgboost")
"""Heads of any scalar features; what other kinds ask for is in tests of their own."""


def few_epochs(head: str) -> dict[str, int]:
    """Return parameters for what holds however well a network is fitted."""
    return {"epochs": 6} if head == "mlp" else {}


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_the_rule_for_batches_keeps_costs_and_acceptance(
    sides: tuple[Trace, Trace], full_profile: Profile, tmp_path: Path
) -> None:
    full_profile = full_profile.with_decisions({"logistic?rule=batch": 1e-5})  # else it is timed
    output = train(sides[0], full_profile, rule="batch", out=tmp_path / "p").policy
    again = load_policy_folder(tmp_path / "p")
    assert again.joint and again.rule.to_dict() == {"kind": "batch", "send": "best"}
    assert full_profile.same_costs(again.metadata.profile) and len(again.metadata.acceptance) == DEPTH
    arrays = trace_arrays(sides[1])
    mine, theirs = (replay(arrays, policy, full_profile) for policy in (output, again))
    assert torch.equal(mine.log, theirs.log)
    assert len(mine.log[:, 2].unique()) > 1, "the policy decides something"
    report = evaluate(sides[1], dataclasses.replace(full_profile, round_s=full_profile.round_s + 1e-3), [again])
    assert report[again.name].note == "decides by the costs of this profile"


@pytest.mark.parametrize(
    ("head", "rule"),
    [  # every rule with the head that is fitted soonest, and one with each of the others
        *(("logistic", rule) for rule in ("derived", "survival", "step")),
        ("mlp", "survival"),
        ("xgboost", "derived"),
    ],
)
def test_a_trained_folder_replays_as_the_returned_policy(
    sides: tuple[Trace, Trace], full_profile: Profile, tmp_path: Path, head: str, rule: str
) -> None:
    options = {"cross_fit": rule == "derived", "folds": 2, "params": few_epochs(head)}
    trained = train(sides[0], full_profile, head=head, rule=rule, threshold=0.45, out=tmp_path / "p", **options)
    assert trained.path == tmp_path / "p"
    again = load_policy_folder(tmp_path / "p")
    arrays = trace_arrays(sides[1])
    mine, theirs = (replay(arrays, policy, full_profile) for policy in (trained.policy, again))
    for name in ("log", "seconds", "tokens", "history"):
        assert torch.equal(getattr(mine, name), getattr(theirs, name))
    assert again.metadata == trained.policy.metadata
    assert (again.name, again.head.kind, again.rule.kind, again.max_depth) == (head, head, rule, DEPTH)
    assert again.features == FEATURES
    facts = again.metadata
    assert (facts.temperature, facts.verification, facts.label) == (0.7, "match", "match")
    assert facts.pair == dict(sides[0].header.pair) and full_profile.same_costs(facts.profile)
    assert len(facts.acceptance) == DEPTH and (facts.rho > 0) == (rule == "derived")
    assert len(mine.log[:, 2].unique()) > 1, "the policy decides something"


@pytest.mark.parametrize("head", PLAIN)
def test_the_same_seed_gives_the_same_bytes_and_another_does_not(
    sides: tuple[Trace, Trace], full_profile: Profile, tmp_path: Path, head: str
) -> None:
    for number, seed in enumerate((3, 3, 4)):
        train(
            sides[1], full_profile, head=head, out=tmp_path / str(number), seed=seed, folds=2, params=few_epochs(head)
        )
    first, second, third = (files(tmp_path / str(n)) for n in range(3))
    assert first == second
    assert first["weights.safetensors"] != third["weights.safetensors"]


@pytest.mark.parametrize(
    ("options", "noun"),
    [
        ({"head": "xgbost"}, "xgboost"),
        ({"features": ["drawn_porb"]}, "drawn_prob"),
        ({"rule": "surviva"}, "survival"),
        ({"rule": "step", "threshold": 1.5}, "between 0 and 1"),
        ({"rule": "batch", "threshold": 0.3}, "threshold"),
        ({"rule": "derived", "nodes": [4]}, "nodes"),
        ({"folds": 1}, "folds"),
        ({"report_share": 1.5}, "report"),
        ({"tune": 0}, "tune"),
        ({"tune": 1, "head": "xgbost"}, "xgboost"),
        ({"tune": 1, "rule": "surviva"}, "survival"),
        ({"tune": 1, "threshold": 0.5}, "threshold"),
        ({"tune": 1, "rule": "gain"}, "gain"),
        ({"head": ["logistic", "mlp"]}, "tune"),
        ({"storage": "trials.log"}, "tune"),
        ({"rule": "gain", "head": "dynasd-soft"}, "hidden states"),
        ({"rule": "gain", "passes": 0}, "passes"),
        ({"rule": "gain", "threshold": 0.5}, "threshold"),
        ({"rule": "gain", "nodes": [0]}, "nodes"),
        ({"rule": "gain", "cross_fit": False}, "cross_fit"),
    ],
)
def test_an_invalid_option_is_refused_before_anything_is_written(
    sides: tuple[Trace, Trace], full_profile: Profile, tmp_path: Path, options: dict[str, object], noun: str
) -> None:
    with pytest.raises((InputError, PolicyError), match=noun):
        train(sides[0], full_profile, out=tmp_path / "p", **options)
    assert not (tmp_path / "p").exists()


def test_a_policy_never_replaces_what_it_is_made_from(
    sides: tuple[Trace, Trace], full_profile: Profile, tmp_path: Path
) -> None:
    trace = load_trace(shutil.copytree(sides[0].folder, tmp_path / "traces"))
    full_profile.save(tmp_path / "profiles" / "p.json")
    before, work = files(tmp_path), tmp_path / "work"
    options = {"tune": 1, "storage": work / "trials.log"}
    for out in (tmp_path, tmp_path / "traces", tmp_path / "traces" / "data" / "new", tmp_path / "profiles", work):
        noun = "which is replaced" if out == work else "which the command reads"
        with pytest.raises(InputError, match=noun):
            train(trace, Profile.load(tmp_path / "profiles" / "p.json"), out=out, overwrite=True, **options)
    assert files(tmp_path) == before


def test_traces_that_cannot_be_trained_on_are_refused(pair: Pair, full_profile: Profile, tmp_path: Path) -> None:
    options = {"depth": 3, "max_new_tokens": 12}
    few = collect(pair, make_prompts(3, "few", 5), tmp_path / "few", **options)
    live = collect(pair, make_prompts(4, "live", 5), tmp_path / "live", collector="live", policy="fixed:2", **options)
    for trace, rule, noun in ((few, "derived", "at least 4 different prompts"), (live, "gain", "rule gain")):
        with pytest.raises(TraceError, match=noun):
            train(trace, full_profile, rule=rule)


def test_a_draft_that_is_never_wrong_can_be_trained_on(
    pair: Pair, endless_pair: Pair, full_profile: Profile, tmp_path: Path
) -> None:
    """All labels are of one kind: heads are constants, and what cannot be measured is not NaN in the file."""
    twin = join(endless_pair.target, endless_pair.target, pair.tokenizer)
    trace = collect(twin, make_prompts(6, "twin", 5), tmp_path / "t", depth=3, max_new_tokens=20)
    policy = train(trace, full_profile, out=tmp_path / "p").policy
    assert replay(trace_arrays(trace), policy, full_profile).log[:, 2].max() == 3
    json.loads((tmp_path / "p" / "policy.json").read_text(), parse_constant=pytest.fail)


Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def arrays(sides: tuple[Trace, Trace]) -> TraceArrays:
    return trace_arrays(sides[0])


def searched(
    arrays: TraceArrays, profile: Profile, count: int, heads: Sequence[str] = ("logistic",),
    rules: Sequence[str] = ("survival",), **options: Any,
) -> tuple[Plan, Rows]:  # fmt: skip
    settings = TrainOptions(tune=count, **options)
    plans = [Plan(make_head(head), rule, options=settings) for rule in rules for head in heads]
    return search(plans, arrays, profile, fit_policy, 2)


def test_the_best_trial_is_the_fastest_on_prompts_left_out(arrays: TraceArrays, full_profile: Profile) -> None:
    plan, rows = searched(arrays, full_profile, 5, rules=("survival", "step"))
    assert {row["rule"] for row in rows} == {"survival", "step"}
    complete = [row for row in rows if row["folds"] == 2]
    assert rows[0]["tokens_per_s"] == max(row["tokens_per_s"] for row in complete) > 0
    assert (plan.head.form, plan.rule) == ("logistic", rows[0]["rule"])
    best = max(replay(arrays, f"fixed:{k}", full_profile).rate for k in range(arrays.depth + 1))
    for row in complete:
        assert row["ratio_to_best_fixed"] == pytest.approx(row["tokens_per_s"] / best, rel=1e-6)


def test_every_candidate_is_tried_with_its_defaults_first_and_seeds_repeat(
    arrays: TraceArrays, full_profile: Profile
) -> None:
    runs = [searched(arrays, full_profile, 3, heads=("logistic", "xgboost"))[1] for _ in range(2)]
    assert runs[0] == runs[1]
    assert {("logistic", None), ("xgboost", None)} <= {(row["policy"], row["parameters"]) for row in runs[0]}


def test_a_search_continues_from_its_journal(arrays: TraceArrays, full_profile: Profile, tmp_path: Path) -> None:
    journal = tmp_path / "trials.log"

    def trials(count: int, **options: Any) -> set[tuple[str, str | None]]:
        rows = searched(arrays, full_profile, count, storage=journal, **options)[1]
        return {(row["policy"], row["parameters"]) for row in rows}

    begun, more = trials(2), trials(9)
    assert 1 <= len(begun) <= 2 and begun < more and trials(9) == more
    trials(1, rules=["step"])  # other candidates are another study
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(journal)))
    assert len(optuna.get_all_study_names(storage)) == 2
    journal.write_text("not a journal\n")
    with pytest.raises(InputError, match="journal of optuna"):
        trials(2)


def test_the_best_head_is_trained_and_saved_with_the_table(
    sides: tuple[Trace, Trace], full_profile: Profile, tmp_path: Path
) -> None:
    trained = train(
        sides[0], full_profile, head=["xgboost", "logistic"], rule="survival", tune=2, out=tmp_path / "p", name="mine",
        seed=1,
    )  # fmt: skip
    policy, trials = load_policy_folder(tmp_path / "p"), trained.metrics["trials"]
    assert (policy.name, policy.head.kind, policy.rule.kind) == ("mine", trials[0]["policy"], "survival")
    assert trials == policy.metadata.metrics["trials"] and {row["folds"] for row in trials} == {TUNE_FOLDS}


NAMES = ("top1", "noisy_margin", "depth")


def decisive_parts(policy: LearnedPolicy) -> list[Any]:
    """Return all that decides, as values that can be compared."""
    tables = [] if policy.survival is None else [policy.survival.tables.tolist()]
    weights = {name: array.tolist() for name, array in policy.head.tensors().items()}
    maps = [[c.kind, c.temperature, c.knots.tolist()] for c in (policy.accept, policy.next)]
    return [weights, maps, tables, policy.rule.to_dict(), policy.metadata.rho, policy.metadata.acceptance]


@pytest.mark.parametrize(
    ("head", "rule", "tune"),
    [("logistic", "derived", None), ("xgboost", "survival", None), ("logistic", "survival", 2)],
)
def test_report_prompts_influence_nothing_but_the_figures(
    arrays: TraceArrays, sides: tuple[Trace, Trace], full_profile: Profile, head: str, rule: str, tune: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Compare with training on a trace in which the report prompts have other outcomes."""
    report = split_report(arrays, REPORT_SHARE, 0)[1]
    assert report is not None
    is_report = torch.tensor([name in set(report.clusters) for name in arrays.clusters])[arrays.owner]
    changed, trained = dataclasses.replace(arrays, accepted=torch.where(is_report, 0, arrays.accepted)), []
    for source in (arrays, changed):
        monkeypatch.setattr("specstop.train.fit.run.joined_arrays", lambda *_, source=source: source)
        trained.append(train(sides[0], full_profile, head=head, rule=rule, features=NAMES, tune=tune))
    one, other = trained
    assert decisive_parts(one.policy) == decisive_parts(other.policy)
    assert one.metrics.get("trials") == other.metrics.get("trials")
    assert one.metrics["held_out_tokens_per_s"] != other.metrics["held_out_tokens_per_s"]


def test_the_three_sets_are_disjoint_and_recorded(sides: tuple[Trace, Trace], full_profile: Profile) -> None:
    trained = train(sides[0], full_profile, features=NAMES)
    prompts, arrays = trained.policy.metadata.prompts, trace_arrays(sides[0])
    fit, select = set(prompts["fit"]), set(prompts["select"])
    _, report = split_report(arrays, REPORT_SHARE, 0)
    assert report is not None
    assert not fit & select and not (fit | select) & set(report.clusters)
    assert fit | select | set(report.clusters) == set(arrays.clusters)
    assert set(prompts["report"]) == set(report.clusters)
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
    assert decisive_parts(settled) == decisive_parts(again)  # type: ignore[arg-type]
    only = arrays.subset([at for at, name in enumerate(arrays.clusters) if name in set(policy.metadata.prompts["fit"])])
    assert settle_for(policy, only, costly)[0] is policy
