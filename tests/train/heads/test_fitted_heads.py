"""Heads learn a known rule, are exported as they were fitted, and decode as published; mixed texts."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xgboost as xgb
from conftest import make_prompts
from contract_policies import DEPTH
from specstop.collect import collect
from specstop.decode import stream_key
from specstop.policies.heads.base import Head
from specstop.policies.heads.layers import HARD_FEATURES
from specstop.policies.storage import load_policy_folder
from specstop.train import HeadEstimator, head_class, make_head, trace_arrays, train
from specstop.train.heads import published
from specstop.train.heads.calibration import log_loss
from specstop.train.heads.linear import LogisticEstimator
from specstop.train.heads.networks import MLPEstimator, ResNetEstimator
from specstop.train.heads.rows import IS_DRAFT_SAMPLE, SOFT_COLUMNS, FitRows, Visits, fit_rows, mixed_arrays, mixed_rows
from synthetic import NAMES, TRUE_BIAS, TRUE_WEIGHT, synthetic_rows, synthetic_trace, true_logits
from torch import Tensor

from specstop import Settings, Speculator, replay

DRAFT, TARGET = 8, 6
LOSS = 0.02  # nats above the truth; a head that learned nothing is 0.1 and more behind
MEAN = 0.025  # 4 standard errors of the mean over 6,000 rows are 0.02


def hidden_rows(count: int, seed: int) -> tuple[FitRows, Tensor, Tensor]:
    """Return rows, the chance that x_j is accepted given the draft's state, and the chance given everything.

    The draft's state moves the log-odds of `accept`, the target's those of `next`, and the scalars both.
    """
    base = synthetic_rows(count, seed)
    generator = torch.Generator().manual_seed(seed + 100)
    draft, target = (torch.randn(count, size, generator=generator) for size in (DRAFT, TARGET))
    first = base.depth == 0
    draft = torch.where(first[:, None], 0.0, draft)
    soft = torch.sigmoid(1.5 * draft[:, 0] - draft[:, 1] + 0.8)
    logits = true_logits(base.features, first)
    full = torch.sigmoid(
        torch.stack([logits[:, 0] + 1.5 * draft[:, 0] - draft[:, 1], logits[:, 1] + 1.5 * target[:, 0]], 1)
    )
    drawn = torch.rand(count, 2, generator=generator) < full
    accepted = drawn[:, 0] | first
    labels, known = (
        torch.stack(x, 1)
        for x in ([accepted, drawn[:, 1] & accepted], [~first, accepted & (base.depth < 3)])
    )  # fmt: skip
    hidden = {"draft_hidden": draft.half(), "target_hidden": target.half()}
    return FitRows(base.features, base.depth, labels.float(), known, hidden), soft, full


def published_rows(count: int, seed: int) -> tuple[FitRows, Tensor]:
    """Return rows without scalars whose label of `accept` is min(1, p/q), and that chance."""
    rows, soft, _ = hidden_rows(count, seed)
    labels = torch.stack([soft, rows.labels[:, 1]], 1)
    return dataclasses.replace(rows, features=torch.zeros(count, 0), labels=labels), soft


def scored(head: Head, rows: FitRows, depth: int) -> Tensor:
    """Return [M, 2] float32, the head's scores of all rows as if they were at this depth."""
    states = {name: rows.hidden[name].float().numpy() for name in head.sizes}
    return torch.from_numpy(head.scores(rows.features.numpy(), depth, states)).float()


def at_their_depths(head: Head, rows: FitRows) -> Tensor:
    """Return [M, 2] float32, the head's scores of all rows."""
    return torch.where((rows.depth == 0)[:, None], *(scored(head, rows, depth) for depth in (0, 1)))


def fitted(model: HeadEstimator, rows: FitRows, stop_rows: FitRows) -> Head:
    """Return the head of a fitted estimator."""
    return model.fit(rows, stop_rows=stop_rows).export()


def test_the_residual_head_learns_from_scalars_and_both_states():
    fit, (held, _, truth) = hidden_rows(14_000, 1)[0], hidden_rows(6_000, 2)
    head, blind = fitted(ResNetEstimator(NAMES, epochs=8), fit, held), fitted(LogisticEstimator(NAMES), fit, held)
    assert dict(head.sizes) == {"draft_hidden": DRAFT, "target_hidden": TARGET}
    outputs = [torch.sigmoid(at_their_depths(one, held)) for one in (head, blind)]
    for column, use in enumerate(held.has_label.T):
        labels = held.labels[use, column].numpy()
        loss, without, best = (log_loss(p[use, column].numpy(), labels) for p in (*outputs, truth))
        assert loss < best + LOSS < without - LOSS, "hidden states hold what scalars do not"


def test_dynasds_soft_model_learns_the_ratio():
    fit, (held, soft) = published_rows(8_000, 4)[0], published_rows(6_000, 5)
    head = fitted(published.DynaSDSoftEstimator(epochs=3), fit, held)
    chance, truth = torch.sigmoid(scored(head, held, 1)[:, 0])[held.drawn], soft[held.drawn]
    assert float((chance - truth).abs().mean()) < 0.04 and abs(float(chance.mean() - truth.mean())) < MEAN
    first = held.labels[~held.drawn & held.has_label[:, 1], 1].mean()
    assert float(torch.sigmoid(scored(head, held, 0))[0, 1]) == pytest.approx(float(first), abs=0.05)


@pytest.mark.parametrize("soft", [False, True])
def test_dynasds_hard_model_is_fitted_on_as_many_accepted_rows_as_rejected(soft):
    generator = torch.Generator().manual_seed(0)
    features = torch.rand(9_000, 11, generator=generator)
    chance = torch.sigmoid(4 * features[:, 1] - 2 * features[:, 0] + 1.0)  # 0.87 on average
    hits = (torch.rand(9_000, generator=generator) < chance).float()
    labels, known = torch.stack([chance if soft else hits, hits], 1), torch.tensor([True, False]).expand(9_000, 2)
    rows = FitRows(features, torch.ones(9_000, dtype=torch.int64), labels, known)
    sample = published.balance_classes(rows, 3)
    assert float(sample.labels[:, 0].mean()) == 0.5 and set(sample.labels[:, 0].tolist()) == {0.0, 1.0}
    assert len(sample) == pytest.approx(2 * float((1 - hits).sum()), rel=0.1)
    assert not torch.equal(sample.features, published.balance_classes(rows, 4).features)
    head = fitted(published.DynaSDHardEstimator(HARD_FEATURES, epochs=6, learning_rate=5e-3), rows, rows)
    output = torch.sigmoid(scored(head, rows, 1)[:, 0])
    odds = float(hits.mean() / (1 - hits.mean()))
    expected = chance / (chance + odds * (1 - chance))  # the sample has rejected rows `odds` times as often
    assert float((output - expected).abs().mean()) < 0.05 and float((output - chance).abs().mean()) > 0.2


@pytest.mark.parametrize("is_published", [False, True])
def test_the_rejection_weights_bias_stays_in_the_published_head_only(is_published):
    """With weight w the least loss is at a / (a + w (1 - a)), the mean of which is known here."""
    fit, (held, soft) = published_rows(10_000, 6)[0], published_rows(6_000, 7)
    build = published.SpecDecPublishedEstimator if is_published else published.SpecDecEstimator
    head = fitted(build(epochs=10, learning_rate=1e-2), fit, held)
    assert head.lag == 1 and (len(head.tensors()["block.weight"]) == 1) == is_published
    use = held.drawn
    output = torch.sigmoid(scored(head, held, 2)[use, 0])
    expected = soft[use] / (soft[use] + (6.0 * (1.0 - soft[use]) if is_published else 1.0 - soft[use]))
    assert float(output.mean()) == pytest.approx(float(expected.mean()), abs=MEAN)
    assert float((output - expected).abs().mean()) < 0.05


# Rows


def test_soft_labels_are_the_clipped_ratio_and_a_lagging_head_has_no_row_for_the_last_token():
    arrays = synthetic_trace([[1, 0, 2, 3, 1, 0, 0, 0]], 3, ((), ("top1",)))
    generator = torch.Generator().manual_seed(0)
    q, p = (torch.rand(8, 3, generator=generator) for _ in range(2))
    q[0, 0] = 0.0
    visited = Visits(torch.arange(4), torch.zeros(4, 4))
    hard = fit_rows(arrays, ("top1",), visited, soft=True)
    arrays = dataclasses.replace(arrays, extra={"draft_prob": q, "target_prob": p})
    assert torch.equal(fit_rows(arrays, ("top1",), visited).labels, hard.labels)
    rows = fit_rows(arrays, ("top1",), visited, soft=True)
    places = [(row, d) for row in range(4) for d in range(4) if int(arrays.accepted[row]) >= d - 1]
    expected = [float((p / q)[row, d - 1].clamp(max=1)) if d and q[row, d - 1] else 0.0 for row, d in places]
    assert rows.labels[:, 0].tolist() == pytest.approx(expected)
    assert 1.0 in expected and any(0 < x < 1 for x in expected)
    assert torch.equal(rows.labels[:, 1], hard.labels[:, 1]) and torch.equal(rows.has_label, hard.has_label)
    # The state after x_K is not recorded, because x_K is never fed.
    lagging = fit_rows(arrays, ("top1",), visited, lag=1)
    assert lagging.depth.tolist() == [d for _, d in places if d < 3]


# Through `train`, replay and the live loop

NEW = 20
QUICK = {"epochs": 1}
READS = {
    "dynasd-soft": ((), ("draft_hidden",), "any"),
    "dynasd-hard": (HARD_FEATURES, (), "any"),
    "specdec": ((), ("draft_hidden",), "survival"),
    "specdec-published": ((), ("draft_hidden",), "survival"),
    "resnet": (None, ("draft_hidden", "target_hidden"), "derived"),
}


@pytest.fixture(scope="module")
def hidden(pair, tmp_path_factory):
    """Traces with hidden states to train on and to evaluate on, and a mixed one of the first prompts."""
    folder = tmp_path_factory.mktemp("hidden")
    both = ("draft_hidden", "target_hidden")
    options = {"temperature": 0.7, "verification": "match", "max_new_tokens": NEW, "shards": 2}
    fit, held = make_prompts(16, "fit", 21), make_prompts(6, "held", 22)
    return (
        collect(pair, fit, folder / "fit", depth=DEPTH, hidden=both, **options),
        collect(pair, held, folder / "held", depth=DEPTH, hidden=both, **options),
        collect(pair, fit, folder / "mixed", depth=1, mix=0.15, hidden=both[:1], **options),
    )


@pytest.fixture(scope="module")
def costs(profile):
    return profile.with_decisions(dict.fromkeys(READS, 7.0e-5))


@pytest.fixture(scope="module")
def trained(hidden, costs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    options = {"params": QUICK, "cross_fit": False}
    return {kind: train(hidden[0], costs, head=kind, out=folder / kind, **options) for kind in READS}


@pytest.mark.parametrize("kind", READS)
def test_a_published_head_decodes_as_it_replays_under_its_rule(pair, hidden, costs, trained, kind):
    features, states, rule = READS[kind]
    policy, build = trained[kind].policy, head_class(kind)
    assert (policy.hidden, policy.rule.kind) == (states, rule) and features in (None, policy.features)
    if not build.calibrated:
        assert policy.rule.to_dict()["threshold"] in build.thresholds
        assert (policy.accept.kind, policy.next.kind, policy.survival) == ("identity", "identity", None)
    prompts, arrays, live = {p.id: p for p in make_prompts(6, "held", 22)}, trace_arrays(hidden[1]), []
    speculator = Speculator(pair, policy, Settings(0.7, NEW, verification="match"))
    for s, name in enumerate(arrays.prompt_ids):
        text = speculator.generate(pair.tokenizer(prompts[name].text)["input_ids"], stream_key(0, name))
        live += [[s, r.anchor, r.drafted, r.verified, r.accepted] for r in text.rounds]
    log = replay(arrays, policy, costs).log
    assert log.tolist() == live and len(log) > 15
    path = trained[kind].path
    assert isinstance(path, Path) and torch.equal(replay(arrays, load_policy_folder(path), costs).log, log)


# Mixed texts


@pytest.fixture(scope="module")
def mixed(hidden):
    return mixed_arrays(hidden[2], hidden[0], (), ("draft_hidden",))


def test_rows_of_mixed_texts_pair_each_own_token_with_the_state_after_it(mixed):
    """By hand: the next place's state, where the draft read its own token there; the label of this place."""
    held = {mixed.clusters[0], mixed.clusters[3]}
    rows = mixed_rows(mixed, held, (), 1, soft=True)
    q, p = (mixed.extra[name] for name in SOFT_COLUMNS)
    expected = []
    for s, name in enumerate(mixed.clusters):
        start, count = int(mixed.offset[s]), int(mixed.rows[s])
        for row in range(start, start + count - 1):
            if name not in held and not bool(mixed.cut[row]) and bool(mixed.extra[IS_DRAFT_SAMPLE][row + 1]):
                state = mixed.hidden_state("draft_hidden").at(torch.tensor([row + 1]), torch.tensor([0]))[0]
                expected.append((state, min(1.0, float(p[row, 0] / q[row, 0])), float(mixed.accepted[row] >= 1)))
    states, ratios, hits = zip(*expected, strict=True)
    assert len(rows) == len(expected) > 100 and torch.equal(rows.hidden["draft_hidden"], torch.stack(states))
    assert rows.labels[:, 0].tolist() == pytest.approx(ratios)
    assert bool(rows.drawn.all()) and not rows.has_label[:, 1].any()
    hard = mixed_rows(mixed, held, (), 1)
    assert hard.labels[:, 0].tolist() == list(hits) and len(mixed_rows(mixed, set(), (), 1)) > len(rows)
    # A head without lag reads the place itself.
    rows, every = mixed_rows(mixed, set(), (), 0), (~mixed.cut).nonzero()[:, 0]
    whole = fit_rows(mixed, (), Visits.without_history(every), ("draft_hidden",))
    assert torch.equal(rows.hidden["draft_hidden"], whole.hidden["draft_hidden"])
    assert torch.equal(rows.labels, whole.labels) and set(rows.depth.tolist()) == {0, 1}


MARGIN = 2e-5  # float32 sums of up to 150 leaves, in another order
COEFFICIENT = 0.08  # over 3 standard errors of a coefficient fitted on the fewest rows, about 0.025


@pytest.fixture(scope="module")
def parts():
    return synthetic_rows(24_000, 1), synthetic_rows(8_000, 2)


def losses(head_logits: torch.Tensor, rows: FitRows) -> list[tuple[float, float, float]]:
    """Return (loss of the head, of the truth, of the constant) for both outputs."""
    truth = true_logits(rows.features, rows.depth == 0)
    result = []
    for column, (label, use) in enumerate(zip(rows.labels.T, rows.has_label.T, strict=True)):
        constant = np.full(int(use.sum()), float(label[use].double().mean()))
        logits = (head_logits[use, column], truth[use, column])
        chances = (*(torch.sigmoid(x).numpy() for x in logits), constant)
        result.append(tuple(log_loss(chance, label[use].numpy()) for chance in chances))
    return result


def test_the_linear_head_recovers_known_coefficients(parts):
    head, first = fitted(LogisticEstimator(NAMES), *parts), parts[1].depth == 0
    tensors = {name: torch.from_numpy(array) for name, array in head.tensors().items()}
    weight = tensors["weight"] / tensors["scale"]
    bias = tensors["bias"] - weight @ (tensors["mean"])
    torch.testing.assert_close(weight[:2], TRUE_WEIGHT[:2], atol=COEFFICIENT, rtol=0)
    torch.testing.assert_close(bias[:2], TRUE_BIAS[:2], atol=COEFFICIENT, rtol=0)
    opening, truth = at_their_depths(head, parts[1])[first, 1], true_logits(parts[1].features, first)[first, 1]
    torch.testing.assert_close(opening, truth, atol=4 * COEFFICIENT, rtol=0)
    seen = parts[0].features[parts[0].drawn].numpy()
    assert [head.tensors()[end][2] for end in ("low", "high")] == [seen[:, 2].min(), seen[:, 2].max()]


def test_the_boosted_head_has_the_margins_of_the_booster(parts):
    model = make_head("xgboost").set_params(features=NAMES).fit(parts[0], stop_rows=parts[1])
    head = model.export()
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
    for column, booster in enumerate(model.boosters_.values()):
        margin = booster.predict(xgb.DMatrix(within, feature_names=list(NAMES)), output_margin=True)
        np.testing.assert_allclose(result[:, column], margin, atol=MARGIN, rtol=MARGIN)
    assert result.std() > 0.5
    assert np.array_equal(head.scores(within.astype(np.float32), 0), result), "trees know the depth by its feature only"


def test_the_mlp_learns_the_truth_and_restores_random_states(parts):
    def states() -> list[Any]:
        numbers = np.random.get_state()[1].tolist()  # noqa: NPY002 - the global state is what this is about
        return [torch.get_rng_state().tolist(), random.getstate(), numbers]

    before = states()
    head = fitted(MLPEstimator(NAMES, epochs=4), *parts)
    assert states() == before
    for loss, truth, constant in losses(at_their_depths(head, parts[1]), parts[1]):
        assert loss < truth + LOSS < constant - LOSS
