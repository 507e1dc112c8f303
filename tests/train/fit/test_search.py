"""`train(tune=N)`: trials of heads and rules, compared on prompts left out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
import pytest
from specstop.collect.store import Trace
from specstop.policies.errors import InputError
from specstop.policies.profile import Profile
from specstop.policies.storage import load_policy_folder
from specstop.train.fit.plan import Plan, TrainOptions
from specstop.train.fit.run import train
from specstop.train.fit.tune import TUNE_FOLDS, search
from specstop.train.heads import make_head
from specstop.train.replay.arrays import TraceArrays, trace_arrays
from specstop.train.replay.run import replay

Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def arrays(sides: tuple[Trace, Trace]) -> TraceArrays:
    return trace_arrays(sides[0])


def searched(
    arrays: TraceArrays, profile: Profile, count: int, heads: Sequence[str] = ("logistic",),
    rules: Sequence[str] = ("survival",), **options: Any,
) -> tuple[Plan, Rows]:  # fmt: skip
    settings = TrainOptions(tune=count, **options)
    return search(
        [Plan(make_head(head), rule, options=settings) for rule in rules for head in heads], arrays, profile, 2
    )


def test_the_best_trial_is_the_fastest_on_prompts_left_out(arrays: TraceArrays, full_profile: Profile) -> None:
    plan, rows = searched(arrays, full_profile, 5, rules=("survival", "step"))
    assert {row["rule"] for row in rows} == {"survival", "step"}
    complete = [row for row in rows if row["folds"] == 2]
    assert rows[0]["tokens_per_s"] == max(row["tokens_per_s"] for row in complete) > 0
    assert [row["trial"] for row in rows] == list(range(1, len(rows) + 1))
    assert (plan.head.form, plan.rule) == ("logistic", rows[0]["rule"])
    # Two halves by prompt, each replayed by a head of the other one.
    default = next(row for row in complete if row["parameters"] is None and row["rule"] == "step")
    names = sorted(set(arrays.clusters))
    assert default["ratio_to_best_fixed"] == pytest.approx(
        default["tokens_per_s"] / max(replay(arrays, f"fixed:{k}", full_profile).rate for k in range(arrays.depth + 1)),
        rel=1e-6,
    )
    assert len(names) > 4


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
    assert "## Trials" in (tmp_path / "p" / "README.md").read_text()


@pytest.mark.parametrize(
    ("options", "noun"),
    [
        ({"tune": 0}, "tune"),
        ({"tune": 1, "head": "xgbost"}, "xgboost"),
        ({"tune": 1, "rule": "surviva"}, "survival"),
        ({"tune": 1, "threshold": 0.5}, "threshold"),
        ({"head": ["logistic", "mlp"]}, "tune"),
        ({"storage": "trials.log"}, "tune"),
        ({"tune": 1, "rule": "gain"}, "gain"),
    ],
)
def test_options_that_cannot_be_searched_are_refused(
    sides: tuple[Trace, Trace], full_profile: Profile, options: dict[str, Any], noun: str
) -> None:
    with pytest.raises(InputError, match=noun):
        train(sides[0], full_profile, **options)
