"""Training of policies: folders, options, searches, held-out prompts, rows, labels and achievable estimates."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import optuna
import pytest
import torch
from commands import files
from conftest import NEW, make_prompts
from contract_policies import DEPTH
from specstop.collect import collect
from specstop.decode import join
from specstop.policies import FixedLength, InputError, PolicyError
from specstop.policies.costs import BatchCosts, BatchTable, CostTable
from specstop.policies.features import PAST_WEIGHT
from specstop.policies.storage import load_policy_folder
from specstop.train import TraceArrays, make_head, trace_arrays, train
from specstop.train.evaluate.batches import by_batch
from specstop.train.fit.achievable import NAME, achievable_estimate, achievable_in_batches
from specstop.train.fit.adapt import adapt_to_profile
from specstop.train.fit.plan import REPORT_SHARE, Plan, TrainOptions, split_report
from specstop.train.fit.rules import best_of, fixed_grid
from specstop.train.fit.run import fit_policy
from specstop.train.fit.tune import search
from specstop.train.heads import rows as fitting_rows
from specstop.train.heads.crossfit import on_policy_rounds, prompt_folds
from specstop.train.heads.rows import Visits, fit_rows, visits
from synthetic import synthetic_trace, telling_trace, with_signal

from specstop import LearnedPolicy, Profile, Trace, evaluate, replay

PLAIN = ("logistic", "mlp", "xgboost")
"""Heads of any scalar features; what other kinds ask for is in tests of their own."""


def few_epochs(head: str) -> dict[str, int]:
    """Return parameters for what holds however well a network is fitted."""
    return {"epochs": 6} if head == "mlp" else {}


@pytest.mark.parametrize(
    ("head", "rule"),
    [  # every rule with the head that is fitted soonest, and one with each of the others
        *(("logistic", rule) for rule in ("derived", "survival", "step", "batch")),
        ("mlp", "survival"),
        ("xgboost", "derived"),
    ],
)
def test_a_trained_folder_replays_as_the_returned_policy(sides, full_profile, tmp_path, head, rule):
    options = {"cross_fit": rule == "derived", "folds": 2, "params": few_epochs(head)}
    options["threshold"] = None if rule == "batch" else 0.45
    full_profile = full_profile.with_decisions({"logistic?rule=batch": 1e-5})  # else it is timed
    trained = train(sides[0], full_profile, head=head, rule=rule, out=tmp_path / "p", **options)
    assert trained.path == tmp_path / "p"
    again = load_policy_folder(tmp_path / "p")
    arrays = trace_arrays(sides[1])
    mine, theirs = (replay(arrays, policy, full_profile) for policy in (trained.policy, again))
    for name in ("log", "seconds", "tokens", "history"):
        assert torch.equal(getattr(mine, name), getattr(theirs, name))
    assert again.metadata == trained.policy.metadata
    assert (again.name, again.head.kind, again.rule.kind, again.max_depth) == (head, head, rule, DEPTH)
    facts = again.metadata
    assert (facts.temperature, facts.verification, facts.label) == (0.7, "match", "match")
    assert facts.pair == dict(sides[0].header.pair) and full_profile.same_costs(facts.profile)
    assert len(facts.acceptance) == DEPTH and (facts.rho > 0 or rule != "derived")
    assert len(mine.log[:, 2].unique()) > 1, "the policy decides something"


@pytest.mark.parametrize("head", PLAIN)
def test_a_seed_determines_the_bytes(sides, full_profile, tmp_path, head):
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
        ({"rule": "step", "threshold": 1.5}, "between 0 and 1"),
        ({"rule": "batch", "threshold": 0.3}, "threshold"),
        ({"rule": "derived", "nodes": [4]}, "nodes"),
        ({"folds": 1}, "folds"),
        ({"tune": 1, "rule": "gain"}, "gain"),
        ({"storage": "trials.log"}, "tune"),
        ({"rule": "gain", "head": "dynasd-soft"}, "hidden states"),
    ],
)
def test_an_invalid_option_is_refused_before_anything_is_written(sides, full_profile, tmp_path, options, noun):
    with pytest.raises((InputError, PolicyError), match=noun):
        train(sides[0], full_profile, out=tmp_path / "p", **options)
    assert not (tmp_path / "p").exists()


def test_a_draft_that_is_never_wrong(pair, endless_pair, full_profile, tmp_path):
    """All labels are of one kind: heads are constants, and what cannot be measured is not NaN in the file."""
    twin = join(endless_pair.target, endless_pair.target, pair.tokenizer)
    trace = collect(twin, make_prompts(6, "twin", 5), tmp_path / "t", depth=3, max_new_tokens=20)
    policy = train(trace, full_profile, out=tmp_path / "p").policy
    assert replay(trace_arrays(trace), policy, full_profile).log[:, 2].max() == 3
    json.loads((tmp_path / "p" / "policy.json").read_text(), parse_constant=pytest.fail)


Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def arrays(sides):
    return trace_arrays(sides[0])


def searched(
    arrays: TraceArrays, profile: Profile, count: int, heads: Sequence[str] = ("logistic",),
    rules: Sequence[str] = ("survival",), **options: Any,
) -> tuple[Plan, Rows]:  # fmt: skip
    settings = TrainOptions(tune=count, **options)
    plans = [Plan(make_head(head), rule, options=settings) for rule in rules for head in heads]
    return search(plans, arrays, profile, fit_policy, 2)


def test_the_best_trial_is_the_fastest_on_prompts_left_out(arrays, full_profile):
    """Each head and rule is tried with its defaults, and a seed repeats the search."""
    plan, rows = searched(arrays, full_profile, 5, heads=("logistic", "xgboost"), rules=("survival", "step"))
    assert rows == searched(arrays, full_profile, 5, heads=("logistic", "xgboost"), rules=("survival", "step"))[1]
    defaults = {(row["policy"], row["rule"]) for row in rows if row["parameters"] is None}
    assert defaults == {(head, rule) for head in ("logistic", "xgboost") for rule in ("survival", "step")}
    complete = [row for row in rows if row["folds"] == 2]
    assert rows[0]["tokens_per_s"] == max(row["tokens_per_s"] for row in complete) > 0
    assert (plan.head.form, plan.rule) == (rows[0]["policy"], rows[0]["rule"])
    best = max(replay(arrays, f"fixed:{k}", full_profile).rate for k in range(arrays.depth + 1))
    for row in complete:
        assert row["ratio_to_best_fixed"] == pytest.approx(row["tokens_per_s"] / best, rel=1e-6)


def test_a_search_continues_from_its_journal(arrays, full_profile, tmp_path):
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


FEW = ("top1", "noisy_margin", "depth")


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
def test_report_prompts_influence_nothing_but_the_figures(arrays, sides, full_profile, head, rule, tune, monkeypatch):
    """Compare with training on a trace in which the report prompts have other outcomes."""
    report = split_report(arrays, REPORT_SHARE, 0)[1]
    assert report is not None
    is_report = torch.tensor([name in set(report.clusters) for name in arrays.clusters])[arrays.owner]
    changed, trained = dataclasses.replace(arrays, accepted=torch.where(is_report, 0, arrays.accepted)), []
    for source in (arrays, changed):
        monkeypatch.setattr("specstop.train.fit.run.joined_arrays", lambda *_, source=source: source)
        trained.append(train(sides[0], full_profile, head=head, rule=rule, features=FEW, tune=tune))
    one, other = trained
    assert decisive_parts(one.policy) == decisive_parts(other.policy)
    assert one.metrics.get("trials") == other.metrics.get("trials")
    assert one.metrics["held_out_tokens_per_s"] != other.metrics["held_out_tokens_per_s"]


def test_fit_select_and_report_prompts_are_disjoint(arrays, sides, full_profile):
    policy = train(sides[0], full_profile, features=FEW).policy
    prompts = policy.metadata.prompts
    fit, select = set(prompts["fit"]), set(prompts["select"])
    _, report = split_report(arrays, REPORT_SHARE, 0)
    assert report is not None
    assert not fit & select and not (fit | select) & set(report.clusters)
    assert fit | select | set(report.clusters) == set(arrays.clusters)
    assert set(prompts["report"]) == set(report.clusters)
    bare = train(sides[0], full_profile, features=FEW, report_share=0).metrics
    assert not [name for name in bare if "held_out" in name or name.endswith("_auc")]
    costly = dataclasses.replace(full_profile, round_s=2 * full_profile.round_s + 1e-3)
    settled, note = adapt_to_profile(policy, arrays, costly)
    assert "that the head was not fitted on" in note
    # Other outcomes of the prompts that the head was fitted on, and of report prompts, change nothing.
    fitted = torch.tensor([name not in select for name in arrays.clusters])[arrays.owner]
    changed = dataclasses.replace(arrays, accepted=torch.where(fitted, 0, arrays.accepted))
    again, _ = adapt_to_profile(policy, changed, costly)
    assert decisive_parts(settled) == decisive_parts(again)  # type: ignore[arg-type]
    only = arrays.subset([at for at, name in enumerate(arrays.clusters) if name in fit])
    assert adapt_to_profile(policy, only, costly)[0] is policy


MIXED = ("top1", "mean_full", "anchor_top1", "depth", "last_accepted")
ROW_DEPTH = 3


@pytest.fixture(scope="module")
def trace():
    chance = random.Random(1)
    lengths = [[min(chance.choice((0, 1, 1, 2, 3)), n - t) for t in range(n)] for n in (12, 3, 20, 1)]
    return synthetic_trace(lengths, ROW_DEPTH, (("anchor_top1",), ("top1", "depth")))


# Rows
Slow = tuple[list[float], int, bool, bool, bool]


def slow_rows(trace: TraceArrays, length: int) -> Iterator[Slow]:
    """Play a fixed length by hand; yield (features, depth, accepted, followed, followed known) of each row."""
    for s in range(trace.sequences):
        anchor, past = 1, []
        while anchor < int(trace.text_tokens[s]):
            row = int(trace.offset[s]) + anchor - 1
            accepted = int(trace.accepted[row])
            weights = [PAST_WEIGHT**i for i in range(len(past))][::-1]
            total = sum(weights) or 1.0
            known = {
                "mean_accepted": sum(w * a for w, a in zip(weights, past, strict=True)) / total,
                "mean_full": sum(w * (a == length) for w, a in zip(weights, past, strict=True)) / total,
                "last_accepted": float(past[-1]) if past else 0.0,
                "last_verified": float(length) if past else 0.0,
                "anchor_top1": float(trace.columns["anchor_top1"][row]),
            }
            for depth in range(ROW_DEPTH + 1):
                if accepted < depth - 1 or bool(trace.cut[row]):
                    break
                current = {n: float(trace.columns[n][row, depth - 1]) if depth else 0.0 for n in ("top1", "depth")}
                features = [{**known, **current}[name] for name in MIXED]
                yield features, depth, accepted >= depth, accepted > depth, accepted >= depth and depth < ROW_DEPTH
            past.append(min(accepted, length))
            anchor += min(accepted, length) + 1


def test_rows_are_those_of_a_slow_loop(trace, profile):
    lengths = (1, 2, 3)
    rows = fit_rows(trace, MIXED, visits(trace, [replay(trace, FixedLength(k), profile) for k in lengths]))
    slow = [row for k in lengths for row in slow_rows(trace, k)]
    assert len(rows) == len(slow) > 40
    np.testing.assert_allclose(rows.features.numpy(), [row[0] for row in slow], rtol=1e-5, atol=1e-6)
    assert rows.depth.tolist() == [row[1] for row in slow]
    drawn = rows.drawn.tolist()
    assert drawn == [row[1] > 0 for row in slow]
    assert rows.has_label.T.tolist() == [drawn, [row[4] for row in slow]]
    accept, following = (rows.labels[rows.has_label[:, at], at] for at in (0, 1))
    assert accept.tolist() == [row[2] for row, use in zip(slow, drawn, strict=True) if use]
    assert following.tolist() == [row[3] for row in slow if row[4]]


def test_each_fold_is_visited_by_its_own_policy(profile):
    trace = synthetic_trace([[3, 0, 1, 2] * 5, [1, 3] * 12, [0, 2] * 9, [2, 3, 3] * 7], ROW_DEPTH)
    folds = prompt_folds(trace, 3, 0)
    result = on_policy_rounds(trace, folds, [FixedLength(2), FixedLength(1)], profile)
    for fold, length in enumerate((2, 1, 2)):
        whole = visits(trace, [replay(trace, FixedLength(length), profile)])
        mine, expected = (folds.of_rows(trace, part) == fold for part in (result, whole))
        assert len(result.row[mine]) > 2
        torch.testing.assert_close(result.row[mine], whole.row[expected])
        torch.testing.assert_close(result.history[mine], whole.history[expected])


OPTIONS: dict[str, Any] = {"depth": ROW_DEPTH, "temperature": 0.7, "max_new_tokens": NEW, "shards": 1}


@pytest.fixture(scope="module")
def block(pair, tmp_path_factory):
    """Traces of block verification to train on and to evaluate on, of two draws each."""
    folder = tmp_path_factory.mktemp("block")
    output = ((24, "fit", 21), (12, "held", 22))
    return tuple(
        collect(pair, make_prompts(*args), folder / args[1], verification="block", draws=2, **OPTIONS)
        for args in output
    )


def rows_of(trace: Trace, chances: bool) -> Any:
    arrays = trace_arrays(trace, ("top1", "drawn_prob"), fitting_rows.CHANCE_COLUMNS if chances else ())
    row = (~arrays.cut).nonzero()[:, 0]
    return fit_rows(arrays, ("top1", "drawn_prob"), Visits(row, torch.zeros(len(row), 4)))


def test_labels_are_chances_with_the_same_means_and_less_variance(block):
    assert fitting_rows.label_columns([block[0].header], False) == fitting_rows.CHANCE_COLUMNS
    soft, hard = rows_of(block[0], True), rows_of(block[0], False)
    assert torch.equal(soft.features, hard.features) and torch.equal(soft.depth, hard.depth)
    assert set(hard.labels.unique().tolist()) == {0.0, 1.0} and hard.labels.dtype == torch.float32
    for column, use in enumerate(soft.has_label.T):
        chance, bit = soft.labels[use, column], hard.labels[use, column]
        assert abs(float(chance.mean() - bit.mean())) < 4 * float(bit.std()) / len(bit) ** 0.5
        assert float(chance.std()) < float(bit.std())
        assert float(np.corrcoef(chance, bit)[0, 1]) > 0.2


def test_a_head_is_fitted_under_its_verification(block, full_profile):
    policy = train(block[0], full_profile).policy
    assert (policy.metadata.verification, policy.metadata.label) == ("block", "block")
    assert "noisy_margin" not in policy.features and "drawn_prob" in policy.features
    report = evaluate(block[1], full_profile, [policy], train_traces=block[0])
    assert report.facts["exactness"] == "exact in law, 2 draws of each text" and 8 < report.facts["prompts"] <= 12


@pytest.mark.parametrize("is_informative", [True, False])
def test_the_achievable_estimate_depends_on_the_information_in_features(is_informative):
    """A draft step takes a quarter of a second, a verification 4 s and half a second for each token beyond one a stream."""
    low = CostTable(1.0, (0.25, 0.25), 0.0, tuple(4.0 + 0.5 * n for n in range(5)))
    many = BatchTable(
        1.0, ((1, 0.25), (4, 0.25)), {size: ((size, 4.0), (5 * size, 4.0 + 2.0 * size)) for size in (1, 4)}
    )
    high, batch = dataclasses.replace(low, context=99.0), BatchCosts(many, dataclasses.replace(many, context=99.0))
    arrays, profile = telling_trace(8), Profile(low, high, 0.0, 0.0, (0.0, 0.0), batch=batch)
    if not is_informative:
        noise = torch.rand(arrays.ends.shape, generator=torch.Generator().manual_seed(1))
        arrays = with_signal(arrays, noise, noise[:, 0])
    alone = achievable_estimate(arrays, profile).rate
    result = by_batch(arrays, [], profile, [4], estimate=achievable_in_batches(arrays, profile))
    best, known, bound = (line["to_best_fixed"][0]["value"] for line in result["lines"])
    assert best == 1.0 and known < bound and result["use"][0] != NAME
    for gain in (known, alone / best_of(fixed_grid(arrays, profile)).rate):
        assert gain > 1.08 if is_informative else gain < 1.03
