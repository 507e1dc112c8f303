"""`train(tune=N)`: trials of heads, rules and specs, compared on prompts left out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
import pytest
from specstop.collect.store import Trace
from specstop.policies.errors import InputError
from specstop.policies.fixed import Confidence
from specstop.policies.learned import LearnedPolicy
from specstop.policies.profile import Profile
from specstop.policies.storage import load_policy_folder
from specstop.train.fit.plan import Plan
from specstop.train.fit.run import train, train_arrays
from specstop.train.fit.tune import TUNE_FOLDS, PolicySpace, group_folds, search
from specstop.train.heads import make_head
from specstop.train.replay.arrays import TraceArrays, trace_arrays
from specstop.train.replay.run import replay


@pytest.fixture(scope="module")
def arrays(sides: tuple[Trace, Trace]) -> TraceArrays:
    return trace_arrays(sides[0])


def plans(heads: Sequence[str] = ("logistic",), rules: Sequence[str] = ("survival",)) -> list[Plan]:
    return [Plan(make_head(head), rule) for rule in rules for head in heads]


def found(arrays: TraceArrays, profile: Profile, count: int, **options: Any) -> tuple[Plan, list[dict[str, Any]]]:
    def fit(plan: Plan, part: TraceArrays) -> LearnedPolicy:
        return train_arrays(plan, part, profile, (0.7,)).policy

    return search(options.pop("plans", plans()), arrays, profile, count, fit, folds=2, **options)


def test_prompts_are_left_out_whole_and_once(arrays: TraceArrays) -> None:
    folds = group_folds(arrays, 4)
    assert sorted(s for _, out in folds for s in out) == list(range(arrays.sequences))
    for fit, out in folds:
        assert not {arrays.prompt_ids[s] for s in fit} & {arrays.prompt_ids[s] for s in out}
        assert len(fit) + len(out) == arrays.sequences
    with pytest.raises(InputError, match=r"expected 2 to \d+ folds"):
        group_folds(arrays, 1)


def test_the_best_trial_is_the_fastest_on_prompts_left_out(arrays: TraceArrays, full_profile: Profile) -> None:
    both = plans(rules=("survival", "step"))
    plan, rows = found(arrays, full_profile, 6, plans=both, policies=["confidence?threshold=0.2|0.6"])
    assert {(row["policy"], row["rule"]) for row in rows} == {
        ("logistic", "survival"), ("logistic", "step"), ("confidence", None)
    }  # fmt: skip
    complete = [row for row in rows if row["folds"] == 2]
    assert rows[0]["tokens_per_s"] == max(row["tokens_per_s"] for row in complete)
    assert all("error" not in row and row["tokens_per_s"] > 0 for row in rows)
    assert [row["trial"] for row in rows] == list(range(1, len(rows) + 1))
    assert (plan.head.form, plan.rule) == ("logistic", next(row["rule"] for row in complete if row["rule"]))
    specs = [row for row in complete if not row["rule"]]
    for row in specs:
        policy = Confidence(float(row["parameters"].partition("=")[2])).limited(arrays.depth)
        # A spec needs no fit, so that the folds together are the whole trace.
        assert row["tokens_per_s"] == pytest.approx(replay(arrays, policy, full_profile).rate, rel=1e-6)
    assert specs


def test_every_candidate_is_tried_with_its_defaults_before_others(arrays: TraceArrays, full_profile: Profile) -> None:
    both = plans(("logistic", "xgboost"))
    runs = [found(arrays, full_profile, 3, plans=both, policies=["fixed:2"])[1] for _ in range(2)]
    assert runs[0] == runs[1], "the same seed draws the same trials"
    first = {(row["policy"], row["parameters"]) for row in runs[0]}
    assert first == {("logistic", None), ("xgboost", None), ("fixed:2", None)}


def test_a_trial_that_is_behind_after_the_first_fold_is_given_up(arrays: TraceArrays, full_profile: Profile) -> None:
    _, rows = found(arrays, full_profile, 7, policies=["fixed:2", "confidence:0.4", "fixed:1", "fixed:3", "fixed:0"])
    folds = {row["policy"]: row["folds"] for row in rows}
    assert folds["fixed:0"] == 1 and folds["fixed:2"] == 2


def test_a_search_goes_on_from_its_file(arrays: TraceArrays, full_profile: Profile, tmp_path: Path) -> None:
    journal, specs = tmp_path / "trials.log", ["confidence?threshold=0.1..0.9"]
    _, begun = found(arrays, full_profile, 2, policies=specs, storage=journal)
    _, more = found(arrays, full_profile, 4, policies=specs, storage=journal)
    assert len(begun) == 2 and 3 <= len(more) <= 4

    def trials(rows: list[dict[str, Any]]) -> set[tuple[str, str | None]]:
        return {(row["policy"], row["parameters"]) for row in rows}

    assert trials(begun) < trials(more)
    assert trials(found(arrays, full_profile, 4, policies=specs, storage=journal)[1]) == trials(more)
    found(arrays, full_profile, 1, policies=["fixed:3"], storage=journal)  # other candidates are another study
    assert len(optuna.get_all_study_names(_storage(journal))) == 2
    journal.write_text("not a journal\n")
    with pytest.raises(InputError, match=r"storage.* is not a journal of optuna"):
        found(arrays, full_profile, 2, policies=specs, storage=journal)


def _storage(path: Path) -> optuna.storages.JournalStorage:
    return optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(path)))


def test_the_best_head_is_trained_and_saved_with_the_table(
    sides: tuple[Trace, Trace], full_profile: Profile, tmp_path: Path
) -> None:
    trained = train(
        sides[0], full_profile, head=["xgboost", "logistic"], rule="survival", tune=2, out=tmp_path / "p", name="mine",
        seed=1,
    )  # fmt: skip
    policy = load_policy_folder(tmp_path / "p")
    trials = trained.metrics["trials"]
    assert (policy.name, policy.head.kind, policy.rule.kind) == ("mine", trials[0]["policy"], "survival")
    assert trials == policy.metadata.metrics["trials"] and {row["folds"] for row in trials} == {TUNE_FOLDS}
    assert "## Trials" in (tmp_path / "p" / "README.md").read_text()


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("fixed:4", {"fixed:4"}),
        ("confidence?threshold=0.2|0.6", {"confidence?threshold=0.2", "confidence?threshold=0.6"}),
        ("entropy?level=1..2&max_depth=3", {"entropy?max_depth=3&level=1", "entropy?max_depth=3&level=2"}),
    ],
)
def test_ranges_of_a_spec(spec: str, expected: set[str]) -> None:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(0))
    assert {PolicySpace(spec).suggest(study.ask()) for _ in range(20)} == expected


def test_a_range_of_numbers_is_continuous() -> None:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(0))
    specs = {PolicySpace("maxprob?threshold=0.2..0.8").suggest(study.ask()) for _ in range(10)}
    assert len(specs) == 10 and all(0.2 <= float(spec.partition("=")[2]) <= 0.8 for spec in specs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tune": 0}, "tune: .*trials"),
        ({"tune": 1, "head": "forest"}, "head: unknown head 'forest'"),
        ({"tune": 1, "rule": "never"}, "rule: expected derived"),
        ({"tune": 1, "policies": ["confidence?threshold"]}, "expected key=value after the question mark"),
        ({"tune": 1, "policies": ["confidence?threshold=a..b"]}, "expected threshold=number..number"),
        ({"tune": 1, "policies": ["confidence?threshold=0.9..0.1"]}, "low below high"),
        ({"tune": 1, "threshold": 0.5}, "tune: leave out `threshold`"),
        ({"policies": ["fixed:4"]}, "policies are compared with"),
    ],
    ids=["trials", "head", "rule", "no value", "no number", "falling", "threshold", "no search"],
)
def test_what_cannot_be_searched_is_said(
    sides: tuple[Trace, Trace], full_profile: Profile, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        train(sides[0], full_profile, **options)


def test_a_policy_that_does_not_exist_is_a_trial_with_its_reason(arrays: TraceArrays, full_profile: Profile) -> None:
    _, rows = found(arrays, full_profile, 2, policies=["confidnce?threshold=0.2"])
    wrong = [row for row in rows if "error" in row]
    assert [row["policy"] for row in wrong] == ["confidnce"]
    assert "did you mean" in wrong[0]["error"]
    assert rows[0]["rule"] == "survival"
