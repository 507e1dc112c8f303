"""`train --tune`: trials of heads, rules and specs, compared on prompts left out."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from specstop.collect.store import Trace
from specstop.policies.errors import InputError
from specstop.policies.fixed import Confidence
from specstop.policies.profile import Profile
from specstop.policies.storage import load_policy_folder
from specstop.train.fit.plan import Plan
from specstop.train.fit.tuning.search import SearchOptions, group_folds, search, train_best
from specstop.train.fit.tuning.study import JOURNAL, STARTUP, Study
from specstop.train.fit.tuning.trials import HeadSpace, SpecSpace, Trial, spec_of
from specstop.train.replay.run import replay
from specstop.train.replay.traces.arrays import TraceArrays, trace_arrays

SMALL = SearchOptions(2, ("logistic",), ("survival", "step"), ("confidence?threshold=0.2|0.6",), folds=2)


def drawn(
    space: HeadSpace | SpecSpace, seed: int = 0, count: int | None = None, folder: Path | None = None
) -> list[Trial]:
    """Return the trials of a search whose rates are 100, 99, 98, ..., resumed where the folder has some."""
    study = Study("search", space, seed, folder, resume=True)

    def measure(job: Trial, behind: Callable[[float], bool]) -> Trial:
        rate = 100.0 - study.ended
        return dataclasses.replace(job, rate=rate, folds=1 if behind(rate) else 2)

    study.run(measure, space.count if count is None else count)
    return study.trials()


@pytest.fixture(scope="module")
def arrays(sides: tuple[Trace, Trace]) -> TraceArrays:
    return trace_arrays(sides[0])


def test_prompts_are_left_out_whole_and_once(arrays: TraceArrays) -> None:
    folds = group_folds(arrays, 4)
    assert sorted(s for _, out in folds for s in out) == list(range(arrays.sequences))
    for fit, out in folds:
        assert not {arrays.prompt_ids[s] for s in fit} & {arrays.prompt_ids[s] for s in out}
        assert len(fit) + len(out) == arrays.sequences
    with pytest.raises(InputError, match=r"expected 2 to \d+ folds"):
        group_folds(arrays, 1)


def test_the_best_trial_is_the_fastest_on_prompts_left_out(arrays: TraceArrays, full_profile: Profile) -> None:
    found = search(Plan(name=""), arrays, full_profile, (0.7,), SMALL)
    assert len(found.trials) == 4
    assert {(t.name, t.rule) for t in found.trials if t.rule} == {("logistic", "survival"), ("logistic", "step")}
    complete = [t for t in found.trials if t.folds == 2]
    assert found.best.rate == max(t.rate for t in complete)
    assert all(t.error == "" and t.rate > 0 for t in found.trials)
    assert found.plan.head.form == "logistic"
    for trial in found.trials:
        if not trial.rule and trial.folds == 2:
            policy = Confidence(float(trial.params["threshold"])).limited(arrays.depth)
            played = replay(arrays, policy, full_profile)
            assert trial.rate == pytest.approx(played.rate, rel=1e-6), (
                "a spec needs no fit: both folds are the whole trace"
            )
    rows = found.rows()
    assert [row["trial"] for row in rows] == [1, 2, 3, 4]
    assert "threshold=0.6" in {row["parameters"] for row in rows}


def test_the_same_seed_draws_the_same_trials() -> None:
    space = HeadSpace(("logistic", "xgboost"), ("survival", "step"), 12)
    one, same, other = (drawn(space, seed) for seed in (1, 1, 2))
    assert one == same != other
    assert [(t.rule, t.name, t.params) for t in one[:4]] == [(r, h, {}) for r in space.rules for h in space.heads]
    assert {len(t.params) for t in one[4:] if t.name == "xgboost"} <= {0, 5} and any(t.params for t in one[4:])


def test_a_head_that_is_behind_after_the_first_fold_is_given_up() -> None:
    trials = drawn(HeadSpace(("logistic",), ("survival",), 7))
    assert [t.folds for t in trials] == [2] * STARTUP + [1] * (7 - STARTUP), "each is slower than all before it"


def test_a_search_goes_on_from_its_file(tmp_path: Path) -> None:
    space = HeadSpace(("logistic", "xgboost"), ("survival",), 5)
    begun = drawn(space, count=3, folder=tmp_path)
    whole = drawn(space, folder=tmp_path)
    assert whole[:3] == begun and [t.rate for t in whole] == [100.0, 99.0, 98.0, 97.0, 96.0]
    assert len({str(t.params) for t in whole if t.params}) == sum(bool(t.params) for t in whole), "none drawn twice"
    Study("search", space, 0, tmp_path, resume=True).draw()
    assert all((tmp_path / f"tune_{name}.svg").stat().st_size > 1000 for name in ("history", "importances"))
    assert Study("search", space, 0, tmp_path, resume=False).ended == 0, "without --resume it begins anew"
    for text in ("not a journal\n{", "not a journal"):
        (tmp_path / JOURNAL).write_text(text)
        with pytest.raises(InputError, match="not the file of a search"):
            Study("search", space, 0, tmp_path, resume=True)
        assert (tmp_path / JOURNAL).read_text() == text


@pytest.mark.parametrize("half", [b"", b"{", b'{"op_code":4,"worker_id":"a'])
def test_a_search_killed_in_the_middle_of_a_trial_goes_on_with_it(tmp_path: Path, half: bytes) -> None:
    """The lock, the half of a line and the running trial are left as SIGKILL leaves them."""
    space = HeadSpace(("logistic", "xgboost"), ("survival",), 3)

    def killed(job: Trial, behind: Callable[[float], bool]) -> Trial:
        assert job.name == "logistic"
        for path in tmp_path.iterdir():
            shutil.copy(path, left / path.name)
        raise KeyboardInterrupt

    left = tmp_path.parent / f"{tmp_path.name}-left"
    left.mkdir()
    with pytest.raises(KeyboardInterrupt):
        Study("search", space, 0, tmp_path, resume=True).run(killed, 3)
    journal, lock = left / JOURNAL, left / f"{JOURNAL}.lock"
    journal.write_bytes(journal.read_bytes() + half)
    lock.symlink_to(journal)
    os.utime(lock, (0, 0), follow_symlinks=False)
    for folder in (left, tmp_path):
        trials = drawn(space, folder=folder)
        assert [(t.name, t.rate) for t in trials[:2]] == [("xgboost", 100.0), ("logistic", 99.0)] and len(trials) == 3
        assert drawn(space, folder=folder) == trials, "there is nothing left to do"
    assert not lock.is_symlink()


def test_the_best_head_is_trained_and_saved_with_the_table(
    sides: tuple[Trace, Trace], full_profile: Profile, tmp_path: Path
) -> None:
    options = SearchOptions(2, ("xgboost", "logistic"), ("survival",), folds=2)
    trained, found = train_best(sides[0], full_profile, options, out=tmp_path / "p", name="mine", seed=1)
    policy = load_policy_folder(tmp_path / "p")
    assert (policy.name, policy.head.kind, policy.rule.kind) == ("mine", found.plan.head.form, "survival")
    assert trained.metrics["trials"] == found.rows() == policy.metadata.metrics["trials"]
    assert "## Trials" in (tmp_path / "p" / "README.md").read_text()


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("fixed:4", ["fixed:4"]),
        ("confidence?threshold=0.2|0.6", ["confidence?threshold=0.2", "confidence?threshold=0.6"]),
        ("entropy?level=1..2&max_depth=3", ["entropy?max_depth=3&level=1", "entropy?max_depth=3&level=2"]),
        ("maxprob?threshold=0.2..0.8", [f"maxprob?threshold={t}" for t in ("0.2", "0.4", "0.6", "0.8")]),
    ],
)
def test_ranges_of_a_spec(spec: str, expected: list[str]) -> None:
    trials = drawn(SpecSpace.parse(spec, 4))
    assert sorted(spec_of(trial) for trial in trials) == sorted(expected)


def test_a_budget_holds_for_ranges_too() -> None:
    trials = drawn(SpecSpace.parse("online?threshold=0.1..0.9&rate=0.1|0.2|0.3", 5))
    assert len({spec_of(trial) for trial in trials}) == 5
    assert spec_of(Trial("a?b=1", "", {"c": 2})) == "a?b=1&c=2"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (SearchOptions(0), "tune: .*trials"),
        (SearchOptions(1, ("forest",)), "head: expected some of logistic"),
        (SearchOptions(1, rules=("never",)), "rule: expected derived"),
        (SearchOptions(1, specs=("confidence?threshold",)), "expected key=value after the question mark"),
        (SearchOptions(1, specs=("confidence?threshold=a..b",)), "expected threshold=number..number"),
        (SearchOptions(1, specs=("confidence?threshold=0.9..0.1",)), "low below high"),
    ],
    ids=["trials", "head", "rule", "no value", "no number", "falling"],
)
def test_what_cannot_be_searched_is_said(
    arrays: TraceArrays, full_profile: Profile, options: SearchOptions, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        search(Plan(name=""), arrays, full_profile, (0.7,), options)


def test_a_policy_that_does_not_exist_is_a_trial_with_its_reason(arrays: TraceArrays, full_profile: Profile) -> None:
    options = SearchOptions(1, ("logistic",), ("survival",), ("confidnce?threshold=0.2",), folds=2)
    found = search(Plan(name=""), arrays, full_profile, (0.7,), options)
    wrong = [trial for trial in found.trials if trial.error]
    assert [trial.name for trial in wrong] == ["confidnce?threshold=0.2"]
    assert "did you mean" in wrong[0].error
    assert found.best.rule == "survival"


def test_a_search_among_other_choices_is_another_one(
    arrays: TraceArrays, full_profile: Profile, tmp_path: Path
) -> None:
    """More trials of a spec have other values between its ends, which optuna refuses under the same name."""
    made = []
    for number, heads in ((1, ("logistic",)), (2, ("logistic", "xgboost"))):
        specs = ("confidence?threshold=0.1..0.9",)
        options = SearchOptions(number, heads, ("survival",), specs, folds=2, work=tmp_path, resume=number > 1)
        made.append(search(Plan(name=""), arrays, full_profile, (0.7,), options))
    assert [len(found.trials) for found in made] == [2, 4] and not any(t.error for t in made[1].trials)
