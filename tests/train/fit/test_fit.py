"""Fitting: rows are those of a slow loop, each head is what its library fitted, labels given the text."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xgboost as xgb
from conftest import NEW, make_prompts
from specstop.collect import collect
from specstop.collect.schema import NO_TOKEN
from specstop.decode.hf import generate
from specstop.policies import CostTable, FixedLength
from specstop.policies.costs import BatchCosts, BatchTable
from specstop.policies.features import PAST_WEIGHT
from specstop.policies.heads.base import Head
from specstop.train import TraceArrays, make_head, trace_arrays, train
from specstop.train.evaluate.batches import by_batch
from specstop.train.fit.achievable import NAME, achievable_estimate, achievable_in_batches
from specstop.train.fit.plan import without_noise
from specstop.train.fit.rules import best_of, fixed_grid
from specstop.train.heads.calibration import log_loss
from specstop.train.heads.crossfit import on_policy_rounds, prompt_folds
from specstop.train.heads.rows import (
    CHANCE_COLUMNS,
    FitRows,
    Visits,
    conditional_acceptance,
    fit_rows,
    label_columns,
    split_prompts,
    visits,
)
from synthetic import (
    NAMES,
    TRUE_BIAS,
    TRUE_WEIGHT,
    synthetic_rows,
    synthetic_trace,
    telling_trace,
    true_logits,
    with_signal,
)

from specstop import Pair, Profile, Speculator, Trace, deploy, evaluate, replay

DEPTH = 3
MARGIN = 2e-5  # float32 sums of up to 150 leaves, in another order
COEFFICIENT = 0.08  # over 3 standard errors of a coefficient fitted on the fewest rows, about 0.025
LOSS = 0.02  # nats; a head that learned nothing is over 0.1 behind
MIXED = ("top1", "mean_full", "anchor_top1", "depth", "last_accepted")


@pytest.fixture(scope="module")
def trace() -> TraceArrays:
    chance = random.Random(1)
    lengths = [[min(chance.choice((0, 1, 1, 2, 3)), n - t) for t in range(n)] for n in (12, 3, 20, 1)]
    return synthetic_trace(lengths, DEPTH, (("anchor_top1",), ("top1", "depth")))


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
            for depth in range(DEPTH + 1):
                if accepted < depth - 1 or bool(trace.cut[row]):
                    break
                current = {n: float(trace.columns[n][row, depth - 1]) if depth else 0.0 for n in ("top1", "depth")}
                features = [{**known, **current}[name] for name in MIXED]
                yield features, depth, accepted >= depth, accepted > depth, accepted >= depth and depth < DEPTH
            past.append(min(accepted, length))
            anchor += min(accepted, length) + 1


def test_rows_are_those_of_a_slow_loop(trace: TraceArrays, profile: Profile) -> None:
    lengths = (1, 2, 3)
    rows = fit_rows(trace, MIXED, visits(trace, [replay(trace, FixedLength(k), profile) for k in lengths]))
    slow = [row for k in lengths for row in slow_rows(trace, k)]
    assert len(rows) == len(slow) > 40
    np.testing.assert_allclose(rows.features.numpy(), [row[0] for row in slow], rtol=1e-5, atol=1e-6)
    assert rows.depth.tolist() == [row[1] for row in slow]
    drawn = rows.drawn.tolist()
    assert drawn == [row[1] > 0 for row in slow]
    assert rows.known.T.tolist() == [drawn, [row[4] for row in slow]]
    accept, following = (rows.labels[rows.known[:, at], at] for at in (0, 1))
    assert accept.tolist() == [row[2] for row, use in zip(slow, drawn, strict=True) if use]
    assert following.tolist() == [row[3] for row in slow if row[4]]


def test_samples_of_a_prompt_are_on_one_side_which_the_seed_decides() -> None:
    trace = synthetic_trace([[0, 0]] * 20, DEPTH)
    trace.prompt_ids[:] = [str(i // 2) for i in range(20)]
    splits = [split_prompts(trace, 0.25, seed) for seed in (0, 0, 1)]
    assert splits[0] == splits[1] != splits[2]
    for fit, held in splits:
        assert sorted(fit + held) == list(range(20)) and 4 <= len(held) <= 6
        assert not {trace.prompt_ids[s] for s in fit} & {trace.prompt_ids[s] for s in held}


def test_each_fold_is_visited_by_its_own_policy(profile: Profile) -> None:
    trace = synthetic_trace([[3, 0, 1, 2] * 5, [1, 3] * 12, [0, 2] * 9, [2, 3, 3] * 7], DEPTH)
    folds = prompt_folds(trace, 3, 0)
    result = on_policy_rounds(trace, folds, [FixedLength(2), FixedLength(1)], profile)
    for fold, length in enumerate((2, 1, 2)):
        whole = visits(trace, [replay(trace, FixedLength(length), profile)])
        mine, expected = (folds.of_rows(trace, part) == fold for part in (result, whole))
        assert len(result.row[mine]) > 2
        torch.testing.assert_close(result.row[mine], whole.row[expected])
        torch.testing.assert_close(result.history[mine], whole.history[expected])


def test_conditional_acceptance_counts_the_rounds_that_came_so_far(trace: TraceArrays, profile: Profile) -> None:
    visited = visits(trace, [replay(trace, FixedLength(2), profile)])
    lengths = trace.accepted[visited.row].tolist()
    expected = [sum(a >= j for a in lengths) / sum(a >= j - 1 for a in lengths) for j in range(1, DEPTH + 1)]
    assert conditional_acceptance(trace, visited) == pytest.approx(expected)
    never = synthetic_trace([[1] * 9], DEPTH)
    assert conditional_acceptance(never, visits(never, [replay(never, FixedLength(1), profile)])) == (1.0, 0.0, 0.0)
    lookup = synthetic_trace([[1, 0, 2, 0, 1, 0]], DEPTH)
    lookup.tokens[1::2] = NO_TOKEN
    every = Visits.once(torch.arange(6))
    assert conditional_acceptance(lookup, every)[:2] == (1.0, pytest.approx(1 / 3)), "of rounds that have a token"


# Heads


@pytest.fixture(scope="module")
def parts() -> tuple[FitRows, FitRows]:
    return synthetic_rows(24_000, 1), synthetic_rows(8_000, 2)


def scored(head: Head, rows: FitRows) -> torch.Tensor:
    """Return [M, 2], the head's scores of rows at their depths."""
    result = (torch.from_numpy(head.scores(rows.features.numpy(), depth)) for depth in (0, 1))
    return torch.where((rows.depth == 0)[:, None], *result)


def fitted(kind: str, rows: FitRows, stop_rows: FitRows, **params: Any) -> Head:
    """Return the head of a fitted estimator of the features `NAMES`."""
    return make_head(kind).set_params(features=NAMES, **params).fit(rows, stop_rows=stop_rows).export()


def losses(head_logits: torch.Tensor, rows: FitRows) -> list[tuple[float, float, float]]:
    """Return (loss of the head, of the truth, of the constant) for both outputs."""
    truth = true_logits(rows.features, rows.depth == 0)
    result = []
    for column, (label, use) in enumerate(zip(rows.labels.T, rows.known.T, strict=True)):
        constant = np.full(int(use.sum()), float(label[use].double().mean()))
        logits = (head_logits[use, column], truth[use, column])
        chances = (*(torch.sigmoid(x).numpy() for x in logits), constant)
        result.append(tuple(log_loss(chance, label[use].numpy()) for chance in chances))
    return result


def test_the_linear_head_recovers_known_coefficients(parts: tuple[FitRows, FitRows]) -> None:
    head, first = fitted("logistic", *parts), parts[1].depth == 0
    tensors = {name: torch.from_numpy(array) for name, array in head.tensors().items()}
    weight = tensors["weight"] / tensors["scale"]
    bias = tensors["bias"] - weight @ (tensors["mean"])
    torch.testing.assert_close(weight[:2], TRUE_WEIGHT[:2], atol=COEFFICIENT, rtol=0)
    torch.testing.assert_close(bias[:2], TRUE_BIAS[:2], atol=COEFFICIENT, rtol=0)
    opening, truth = scored(head, parts[1])[first, 1].float(), true_logits(parts[1].features, first)[first, 1]
    torch.testing.assert_close(opening, truth, atol=4 * COEFFICIENT, rtol=0)


@pytest.mark.parametrize("kind", ["logistic", "xgboost", "mlp"])
def test_a_head_answers_beyond_its_training_range_as_at_the_end_of_it(kind: str) -> None:
    rows = synthetic_rows(1500, 4)
    head = fitted(kind, rows, rows, **({"epochs": 1} if kind == "mlp" else {}))
    seen = rows.features[rows.drawn].numpy()
    end = seen[:50].copy()
    end[:, 2] = seen[:, 2].max()
    far = end.copy()
    far[:, 2] = 1e6
    for depth in (0, 1):  # at depth 0 the feature is not read, or fed as 0
        assert np.isfinite(head.scores(far, depth)).all()
    assert np.array_equal(head.scores(far, 1), head.scores(end, 1))
    assert head.tensors()["high"][2] == seen[:, 2].max()


def test_the_boosted_head_has_the_margins_of_the_booster(parts: tuple[FitRows, FitRows]) -> None:
    model = make_head("xgboost").set_params(features=NAMES).fit(parts[0], stop_rows=parts[1])
    head, files = model.export(), model.files_
    tensors = {name: torch.from_numpy(array) for name, array in head.tensors().items()}
    x = parts[1].features[:3000].clone()
    x[torch.rand(x.shape, generator=torch.Generator().manual_seed(3)) < 0.2] = float("nan")
    split, threshold = tensors["feature"].flatten(), tensors["threshold"].flatten()
    real = (threshold < np.finfo(np.float32).max).nonzero()[:, 0]
    on = parts[1].features[: len(real)].clone()[torch.arange(len(real)) % 3000]
    on[torch.arange(len(real)), split[real]] = threshold[real]  # exactly on a threshold
    rows = torch.cat([x, on, 3.0 * x[:200]]).numpy()
    assert len(on) > 500
    result = head.scores(rows, 1)
    within = np.clip(rows, tensors["low"].numpy(), tensors["high"].numpy())
    for column, name in enumerate(("accept.ubj", "next.ubj")):
        booster = xgb.Booster()
        booster.load_model(bytearray(files[name]))
        margin = booster.predict(xgb.DMatrix(within, feature_names=list(NAMES)), output_margin=True)
        np.testing.assert_allclose(result[:, column], margin, atol=MARGIN, rtol=MARGIN)
    assert result.std() > 0.5
    assert np.array_equal(head.scores(within.astype(np.float32), 0), result), "trees know the depth by its feature only"


def test_the_mlp_learns_the_truth_and_restores_random_states(parts: tuple[FitRows, FitRows]) -> None:
    def states() -> list[Any]:
        numbers = np.random.get_state()[1].tolist()  # noqa: NPY002 - the global state is what this is about
        return [torch.get_rng_state().tolist(), random.getstate(), numbers]

    before = states()
    head = fitted("mlp", *parts, epochs=4)
    assert states() == before
    for loss, truth, constant in losses(scored(head, parts[1]), parts[1]):
        assert loss < truth + LOSS < constant - LOSS


OPTIONS: dict[str, Any] = {"depth": DEPTH, "temperature": 0.7, "max_new_tokens": NEW, "shards": 1}


@pytest.fixture(scope="module")
def block(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, Trace]:
    """Traces of block verification to train on and to evaluate on, of two draws each."""
    folder = tmp_path_factory.mktemp("block")
    output = ((24, "fit", 21), (12, "held", 22))
    return tuple(
        collect(pair, make_prompts(*args), folder / args[1], verification="block", draws=2, **OPTIONS)
        for args in output
    )


def rows_of(trace: Trace, chances: bool) -> Any:
    arrays = trace_arrays(trace, ("top1", "drawn_prob"), CHANCE_COLUMNS if chances else ())
    row = (~arrays.cut).nonzero()[:, 0]
    return fit_rows(arrays, ("top1", "drawn_prob"), Visits(row, torch.zeros(len(row), 4)))


def test_labels_are_chances_with_the_same_means_and_less_variance(block: tuple[Trace, Trace]) -> None:
    assert label_columns([block[0].header], False) == CHANCE_COLUMNS
    soft, hard = rows_of(block[0], True), rows_of(block[0], False)
    assert torch.equal(soft.features, hard.features) and torch.equal(soft.depth, hard.depth)
    assert set(hard.labels.unique().tolist()) == {0.0, 1.0} and hard.labels.dtype == torch.float32
    for column, use in enumerate(soft.known.T):
        chance, bit = soft.labels[use, column], hard.labels[use, column]
        assert abs(float(chance.mean() - bit.mean())) < 4 * float(bit.std()) / len(bit) ** 0.5
        assert float(chance.std()) < float(bit.std())
        assert float(np.corrcoef(chance, bit)[0, 1]) > 0.2


def test_match_traces_keep_bits(traces: dict[float, Trace], block: tuple[Trace, Trace]) -> None:
    assert label_columns([traces[0.7].header], False) == ()
    assert label_columns([traces[0.7].header, block[0].header], True) == ("draft_prob", "target_prob")
    assert without_noise(("top1", "noisy_margin"), traces[0.7].header) == ("top1", "noisy_margin")
    assert without_noise(("top1", "noisy_margin", "noisy_score"), block[0].header) == ("top1", "drawn_prob")


@pytest.mark.usefixtures("module_cache")
def test_a_head_is_fitted_and_runs_under_its_verification(
    plain_pair: Pair, block: tuple[Trace, Trace], full_profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = train(block[0], full_profile, out=tmp_path / "p").policy
    assert (policy.metadata.verification, policy.metadata.label) == ("block", "block")
    assert "noisy_margin" not in policy.features and "drawn_prob" in policy.features
    report = evaluate(block[1], full_profile, [policy], train_traces=block[0])
    assert report.facts["exactness"] == "exact in law, 2 draws of each text" and 8 < report.facts["prompts"] <= 12
    deploy("hf", tmp_path / "hf", tmp_path / "p")
    created: list[Speculator] = []
    monkeypatch.setattr(generate, "Speculator", lambda *a, **k: created.append(Speculator(*a, **k)) or created[-1])
    options = {"do_sample": True, "temperature": 0.7, "max_new_tokens": 8, "assistant_model": plain_pair.draft}
    custom = {"custom_generate": str(tmp_path / "hf"), "trust_remote_code": True}
    plain_pair.target.generate(torch.tensor([[5, 6, 7]]), **custom, **options)
    assert [speculator.mode.name for speculator in created] == ["block"], "an exported policy, too"


@pytest.mark.parametrize("tells", [True, False])
def test_the_achievable_estimate_is_worth_what_the_features_tell(tells: bool) -> None:
    """A draft step takes a quarter of a second, a verification 4 s and half a second for each token beyond one a stream."""
    low = CostTable(1.0, (0.25, 0.25), 0.0, tuple(4.0 + 0.5 * n for n in range(5)))
    many = BatchTable(
        1.0, ((1, 0.25), (4, 0.25)), {size: ((size, 4.0), (5 * size, 4.0 + 2.0 * size)) for size in (1, 4)}
    )
    high, batch = dataclasses.replace(low, context=99.0), BatchCosts(many, dataclasses.replace(many, context=99.0))
    arrays, profile = telling_trace(12), Profile(low, high, 0.0, 0.0, (0.0, 0.0), batch=batch)
    if not tells:
        noise = torch.rand(arrays.ends.shape, generator=torch.Generator().manual_seed(1))
        arrays = with_signal(arrays, noise, noise[:, 0])
    alone = achievable_estimate(arrays, profile, ("entropy", "anchor_entropy", "depth")).rate
    result = by_batch(arrays, [], profile, [4], estimate=achievable_in_batches(arrays, profile))
    best, known, bound = (line["to_best_fixed"][0]["value"] for line in result["lines"])
    assert best == 1.0 and known < bound and result["use"][0] != NAME
    for gain in (known, alone / best_of(fixed_grid(arrays, profile)).rate):
        assert gain > 1.08 if tells else gain < 1.03
