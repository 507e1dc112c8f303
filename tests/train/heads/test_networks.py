"""Networks on hidden states: they find a rule that is known, are exported as they were trained, and weigh as published."""

from __future__ import annotations

import dataclasses
import itertools

import lightning
import numpy as np
import pytest
import torch
from specstop.policies.errors import TraceError
from specstop.policies.heads.base import Head
from specstop.policies.heads.layers import HARD_FEATURES
from specstop.train.heads.base import HeadEstimator, basis_columns
from specstop.train.heads.calibration import log_loss
from specstop.train.heads.linear import LogisticEstimator
from specstop.train.heads.networks import NetworkModule, ResNet, ResNetEstimator, batch_loader, perceptron
from specstop.train.heads.published import (
    AcceptanceNetwork,
    DynaSDHardEstimator,
    DynaSDSoftEstimator,
    SpecDecEstimator,
    SpecDecPublishedEstimator,
    balanced,
)
from specstop.train.heads.rows import FitRows, Visits, fit_rows
from synthetic import NAMES, synthetic_rows, synthetic_trace, true_logits
from told_head import biased
from torch import Tensor

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
    full = torch.stack([logits[:, 0] + 1.5 * draft[:, 0] - draft[:, 1], logits[:, 1] + 1.5 * target[:, 0]], 1)
    drawn = torch.rand(count, 2, generator=generator) < torch.sigmoid(full)
    accepted = drawn[:, 0] | first
    hidden = {"draft_hidden": draft.half(), "target_hidden": target.half()}
    rows = FitRows(
        base.features, base.depth, accepted, drawn[:, 1] & accepted, accepted & (base.depth < 3), hidden
    )  # fmt: skip
    return rows, soft, torch.sigmoid(full)


def published_rows(count: int, seed: int) -> tuple[FitRows, Tensor]:
    """Return rows without scalars whose label is min(1, p/q), and that chance."""
    rows, soft, _ = hidden_rows(count, seed)
    chance = torch.Generator().manual_seed(seed)
    accepted = (torch.rand(count, generator=chance) < soft) | ~rows.drawn
    return dataclasses.replace(rows, features=torch.zeros(count, 0), accepted=accepted,
                               chances=torch.stack([soft, rows.followed.float()], 1)), soft  # fmt: skip


def scored(head: Head, rows: FitRows, depth: int) -> Tensor:
    """Return [M, 2] float32, the head's scores of all rows as if they were at this depth."""
    states = {name: rows.hidden[name].float().numpy() for name in head.sizes}
    return torch.from_numpy(head.scores(rows.features.numpy(), depth, states)).float()


def fitted(model: HeadEstimator, rows: FitRows, stop_rows: FitRows) -> Head:
    """Return the head of a fitted estimator."""
    return model.fit(rows, stop_rows=stop_rows).export()


@pytest.fixture(scope="module")
def parts() -> tuple[FitRows, FitRows, Tensor]:
    fit, (held, _, truth) = hidden_rows(14_000, 1)[0], hidden_rows(6_000, 2)
    return fit, held, truth


def test_the_residual_head_learns_from_scalars_and_both_states(parts: tuple[FitRows, FitRows, Tensor]) -> None:
    fit, held, truth = parts
    head = fitted(ResNetEstimator(NAMES, epochs=8), fit, held)
    assert dict(head.sizes) == {"draft_hidden": DRAFT, "target_hidden": TARGET}
    first = (held.depth == 0)[:, None]
    blind = fitted(LogisticEstimator(NAMES), fit, held)
    logits, scalars = (torch.where(first, *(scored(one, held, depth) for depth in (0, 1))) for one in (head, blind))
    for column, label, use in ((0, held.accepted, held.drawn), (1, held.followed, held.followed_known)):
        loss, best, without = (
            log_loss(p[use].numpy(), label[use].numpy())
            for p in (torch.sigmoid(logits[:, column]), truth[:, column], torch.sigmoid(scalars[:, column]))
        )
        assert loss < best + LOSS < without - LOSS, "hidden states tell what scalars do not"


@pytest.mark.parametrize("names", [NAMES, ()])
@pytest.mark.parametrize("states", [(), ("draft_hidden",), ("draft_hidden", "target_hidden")])
def test_the_residual_head_scores_as_its_network_does(names: tuple[str, ...], states: tuple[str, ...]) -> None:
    if not names and not states:
        return
    rows = hidden_rows(400, 3)[0]
    rows = dataclasses.replace(rows, hidden={name: rows.hidden[name] for name in states})
    if not names:
        rows = dataclasses.replace(rows, features=torch.zeros(len(rows), 0))
    head = fitted(ResNetEstimator(names, epochs=1, width=12, blocks=2, dropout=0.5), rows, rows)
    t = {name: torch.from_numpy(array) for name, array in head.tensors().items()}
    network = ResNet([len(names) + 1, *(len(t[f"mean.{name}"]) for name in states)], 12, 2).eval()
    weights = {"enter.0.weight": t["enter.weight"], "enter.0.bias": t["enter.bias"]}
    weights |= {f"enter.{at}.weight": t[f"enter.{name}"] for at, name in enumerate(states, 1)}
    for at in range(2):
        weights |= {f"blocks.{at}.weight": t["block.weight"][at], f"blocks.{at}.bias": t["block.bias"][at]}
    network.load_state_dict({**weights, "leave.weight": t["leave.weight"], "leave.bias": t["leave.bias"]})
    for depth in (0, 1):
        mine = rows.depth == 0 if depth == 0 else rows.drawn
        flag = torch.full((int(mine.sum()), 1), float(depth == 0))
        columns = torch.cat(
            [torch.from_numpy(basis_columns(head.basis, rows.features[mine], rows.depth[mine])), flag], 1
        )
        inputs = [
            (rows.hidden[name][mine].float() - t[f"mean.{name}"]) / t[f"scale.{name}"]
            * (depth > 0 or name == "target_hidden")
            for name in states
        ]  # fmt: skip
        with torch.no_grad():
            expected = network(columns, *inputs)
        torch.testing.assert_close(scored(head, rows, depth)[mine], expected, atol=1e-4, rtol=1e-4)


def test_dynasds_soft_model_learns_the_ratio() -> None:
    fit, (held, soft) = published_rows(8_000, 4)[0], published_rows(6_000, 5)
    head = fitted(DynaSDSoftEstimator(epochs=3), fit, held)
    sizes = [tuple(head.tensors()[f"weight.{i}"].shape) for i in range(3)]
    assert sizes == [(512, DRAFT), (256, 512), (1, 256)]
    chance = torch.sigmoid(scored(head, held, 1)[:, 0])[held.drawn]
    error = (chance - soft[held.drawn]).abs()
    assert float(error.mean()) < 0.04
    assert abs(float(chance.mean() - soft[held.drawn].mean())) < MEAN
    first = held.followed[(held.depth == 0) & held.followed_known].float().mean()
    assert float(torch.sigmoid(scored(head, held, 0))[0, 1]) == pytest.approx(float(first), abs=0.05)


def test_dynasds_hard_model_is_fitted_on_as_many_accepted_rows_as_rejected() -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.rand(9_000, 11, generator=generator)
    chance = torch.sigmoid(4 * features[:, 1] - 2 * features[:, 0] + 1.0)  # 0.87 on average
    accepted = torch.rand(9_000, generator=generator) < chance
    depth = torch.ones(9_000, dtype=torch.int64)
    rows = FitRows(features, depth, accepted, accepted, torch.zeros_like(accepted))
    use = balanced(rows, 3)
    assert len(use) == 2 * int((~accepted).sum()) and len(set(use.tolist())) == len(use)
    assert float(accepted[use].float().mean()) == 0.5
    assert not torch.equal(use, balanced(rows, 4))
    head = fitted(DynaSDHardEstimator(HARD_FEATURES, epochs=6, learning_rate=5e-3), rows, rows)
    assert head.tensors()["weight.0"].shape == (44, 11)
    found = torch.sigmoid(scored(head, rows, 1)[:, 0])
    odds = float(accepted.float().mean() / (1 - accepted.float().mean()))
    expected = chance / (chance + odds * (1 - chance))  # the sample has rejected rows `odds` times as often
    assert float((found - expected).abs().mean()) < 0.05
    assert float((found - chance).abs().mean()) > 0.2, "the outputs are not chances of these rows"


def test_rows_of_one_kind_are_all_kept() -> None:
    rows = synthetic_rows(50)
    flat = dataclasses.replace(rows, accepted=torch.ones_like(rows.accepted))
    assert len(balanced(flat, 0)) == int(flat.drawn.sum())


@pytest.mark.parametrize("published", [False, True])
def test_the_rejection_weights_bias_is_in_the_published_head_and_not_in_ours(published: bool) -> None:
    """With weight w the least loss is at a / (a + w (1 - a)), the mean of which is known here."""
    fit, (held, soft) = published_rows(10_000, 6)[0], published_rows(6_000, 7)
    build = SpecDecPublishedEstimator if published else SpecDecEstimator
    head = fitted(build(epochs=10, learning_rate=1e-2), fit, held)
    assert head.lag == 1 and (len(head.tensors()["block.weight"]) == 1) == published
    use = held.drawn
    found = torch.sigmoid(scored(head, held, 2)[use, 0])
    wrong = torch.from_numpy(biased(soft[use].numpy(), 6.0))
    truth, off = float(soft[use].mean()), float(wrong.mean())
    assert truth - off > 0.25
    assert float(found.mean()) == pytest.approx(off if published else truth, abs=MEAN)
    expected = wrong if published else soft[use]
    assert float((found - expected).abs().mean()) < 0.05
    three = [soft[use][i::3][:1500] for i in range(3)]
    mine = [found[i::3][:1500] for i in range(3)]
    survival, guess = (float(torch.stack(x).prod(0).mean()) for x in (three, mine))
    assert (abs(guess - survival) < 2 * MEAN) is (not published), "the bias multiplies along the path"


def test_weights_count_rejections_as_the_published_loss_does() -> None:
    """[w (1 - P)(-ln(1 - p)) + P (-ln p)] over the sum of the weights, by hand."""
    module = NetworkModule(torch.nn.Identity(), rejection_weight=6.0)
    logits, labels = torch.tensor([[0.3], [-1.0], [2.0]]), torch.tensor([[0.9], [0.2], [0.5]])
    known = torch.tensor([[1.0], [1.0], [0.0]])
    p = torch.sigmoid(logits)
    terms = 6 * (1 - labels) * -(1 - p).log() + labels * -p.log()
    expected = terms[:2].sum() / (6 * (1 - labels) + labels)[:2].sum()
    torch.testing.assert_close(module.training_step([logits, labels, known], 0), expected)
    plain = NetworkModule(torch.nn.Identity()).training_step([logits, (labels > 0.3).float(), known], 0)
    mean = torch.nn.functional.binary_cross_entropy_with_logits(logits[:2], (labels[:2] > 0.3).float())
    torch.testing.assert_close(plain, mean)


def test_the_published_network_has_one_block() -> None:
    ours, theirs = AcceptanceNetwork(8, 3), AcceptanceNetwork(8, 3, shared=True)
    counts = [sum(p.numel() for p in network.parameters()) for network in (ours, theirs)]
    assert counts == [3 * 72 + 18, 72 + 18]  # 72 parameters where 216 were meant
    block = theirs.blocks[0]
    x = torch.randn(4, 8)
    y = x
    for _ in range(3):
        y = y + torch.nn.functional.silu(block(y))
    logits = theirs.leave(y)
    torch.testing.assert_close(theirs(x), logits[:, 1:] - logits[:, :1])


@pytest.mark.parametrize("build", [ResNetEstimator, DynaSDSoftEstimator, SpecDecEstimator])
def test_the_same_seed_gives_the_same_weights_and_leaves_random_states_alone(build: type[HeadEstimator]) -> None:
    rows = published_rows(300, 8)[0]
    torch.manual_seed(5)
    before = torch.get_rng_state()
    made = [fitted(build(epochs=2, random_state=seed), rows, rows).tensors() for seed in (0, 0, 1)]  # type: ignore[call-arg]
    assert torch.equal(torch.get_rng_state(), before)
    assert all(np.array_equal(value, made[1][name]) for name, value in made[0].items())
    assert any(not np.array_equal(value, made[2][name]) for name, value in made[0].items())


@pytest.mark.parametrize("build", [DynaSDSoftEstimator, SpecDecEstimator])
def test_rows_without_the_drafts_state_are_refused(build: type[HeadEstimator]) -> None:
    rows = dataclasses.replace(published_rows(50, 9)[0], hidden={})
    with pytest.raises(
        TraceError, match="reads draft_hidden, which the trace does not hold; collect it with `hidden` draft"
    ):
        fitted(build(), rows, rows)


@pytest.mark.filterwarnings("ignore")
def test_module_and_loaders_work_with_a_trainer_of_your_own() -> None:
    rows = published_rows(300, 10)[0]
    inputs = (rows.hidden["draft_hidden"], rows.chances[:, :1], torch.ones(len(rows), 1))
    module = NetworkModule(perceptron((DRAFT, 4, 1), torch.nn.ReLU), one_cycle=False)
    trainer = lightning.Trainer(fast_dev_run=True, accelerator="cpu", enable_progress_bar=False)
    trainer.fit(module, batch_loader(inputs, 64, 0), batch_loader(inputs, 64))
    assert float(trainer.callback_metrics["held_out_loss"]) > 0


@pytest.mark.parametrize("shuffled", [True, False])
def test_a_loader_yields_every_row_once_in_whole_batches(shuffled: bool) -> None:
    rows = torch.arange(10)
    loader = batch_loader((rows, 2 * rows), 4, 3 if shuffled else None)
    first, second = ([batch[0].tolist() for batch in loader] for _ in range(2))
    assert list(map(len, first)) == [4, 4, 2] and sorted(itertools.chain(*first)) == rows.tolist()
    assert (first == second == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]) is not shuffled
    assert all(torch.equal(2 * x, y) for x, y in loader)


# Rows


def test_soft_labels_are_the_clipped_ratio_at_each_depth() -> None:
    arrays = synthetic_trace([[1, 0, 2, 3, 1, 0, 0, 0]], 3, ((), ("top1",)))
    generator = torch.Generator().manual_seed(0)
    q, p = (torch.rand(8, 3, generator=generator) for _ in range(2))
    q[0, 0] = 0.0
    visited = Visits(torch.arange(4), torch.zeros(4, 4))
    assert fit_rows(arrays, ("top1",), visited, soft=True).chances is None
    arrays = dataclasses.replace(arrays, extra={"draft_prob": q, "target_prob": p})
    assert fit_rows(arrays, ("top1",), visited).chances is None
    rows = fit_rows(arrays, ("top1",), visited, soft=True)
    expected = [
        0.0 if depth == 0 or q[row, depth - 1] == 0 else min(1.0, float(p[row, depth - 1] / q[row, depth - 1]))
        for row in range(4)
        for depth in range(4)
        if int(arrays.accepted[row]) >= depth - 1
    ]
    assert rows.chances is not None and rows.chances[:, 0].tolist() == pytest.approx(expected)
    assert 1.0 in expected and any(0 < x < 1 for x in expected)


def test_a_lagging_head_has_no_row_for_the_last_token() -> None:
    """The state after x_K is not recorded, for x_K is never fed."""
    arrays = synthetic_trace([[3, 3, 3, 0, 0, 0]], 3, ((), ("top1",)))
    visited = Visits(torch.arange(2), torch.zeros(2, 4))
    assert fit_rows(arrays, ("top1",), visited).depth.tolist() == [0, 1, 2, 3] * 2
    assert fit_rows(arrays, ("top1",), visited, lag=1).depth.tolist() == [0, 1, 2] * 2
