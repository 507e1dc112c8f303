"""Features: each against an obvious computation of its definition, and the columns they fill."""

from __future__ import annotations

import math

import pytest
import torch
from specstop.policies.errors import PolicyError
from specstop.policies.features import (
    ANCHOR_FEATURES,
    CHAIN_FEATURES,
    FEATURES,
    Kind,
    Layout,
    Rows,
    compute,
    feature,
)

ROWS, VOCABULARY = 40, 30
FLOAT32 = 1e-6


def example(temperature: float, seed: int = 0) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(ROWS, VOCABULARY, generator=generator, dtype=torch.float64)
    scores = logits
    if temperature:
        noise = torch.randn(ROWS, VOCABULARY, generator=generator, dtype=torch.float64)
        scores = torch.log_softmax(logits / temperature, -1) + noise
    above = -5 * torch.rand(ROWS, generator=generator, dtype=torch.float64)
    behind = torch.randint(0, VOCABULARY, (ROWS,), generator=generator)
    return Rows(logits, temperature, scores, scores.argmax(-1), above, depth=3, above=behind)


def softmax(logits: list[float], temperature: float = 1.0) -> list[float]:
    total = sum(math.exp(x / temperature) for x in logits)
    return [math.exp(x / temperature) / total for x in logits]


def reference(name: str, rows: Rows, i: int) -> float:
    logits, scores = rows.logits[i].tolist(), sorted(rows.scores[i].tolist())
    drawn = int(rows.tokens[i])
    probs = softmax(logits)
    ranked = sorted(probs, reverse=True)
    values = {
        "temperature": rows.temperature,
        "anchor_entropy": -sum(p * math.log(p) for p in probs),
        "anchor_top1": ranked[0],
        "anchor_margin": ranked[0] - ranked[1],
        "anchor_prob": probs[drawn],
        **{f"top{k}": ranked[k - 1] for k in range(1, 11)},
        "margin": ranked[0] - ranked[1],
        "top1_logit": max(logits),
        "entropy": -sum(p * math.log(p) for p in probs),
        "drawn_prob": softmax(logits, rows.temperature or 1.0)[drawn],
        "path_logprob": float(rows.parent_logprob[i]) + math.log(probs[drawn]),
        "noisy_margin": scores[-1] - scores[-2],
        "noisy_score": scores[-1],
        "depth": 3.0,
        "noisy_lead": scores[-1] - scores[-2],
        "branch_rank": 0.0,
        "anchor_token": drawn,
        "drawn_token": drawn,
        "above_token": int(rows.above[i]),
        "before_token": int(rows.above[i]),
    }
    return values[name]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("name", [n for n, f in FEATURES.items() if f.kind is not Kind.HISTORY])
def test_a_feature_is_what_its_definition_says_and_within_its_range(name: str, temperature: float) -> None:
    rows = example(temperature)
    (column,) = compute([name], rows).unbind(-1)
    assert column.dtype == torch.float32
    assert column.tolist() == pytest.approx([reference(name, rows, i) for i in range(ROWS)], abs=FLOAT32, rel=FLOAT32)
    assert FEATURES[name].low <= float(column.min()) <= float(column.max()) <= FEATURES[name].high


def test_features_come_in_the_order_asked_for_and_alone_as_together() -> None:
    names = ("depth", "top2", "noisy_score", "entropy")
    together = compute(names, example(0.7))
    for i, name in enumerate(names):
        assert torch.equal(together[:, i], compute([name], example(0.7))[:, 0])
    assert compute((), example(0.7)).shape == (ROWS, 0)


def test_a_certain_row_and_a_small_vocabulary_give_finite_numbers() -> None:
    names = [n for n in (*CHAIN_FEATURES, *ANCHOR_FEATURES) if n != "noisy_margin"]
    certain = torch.full((2, 30), -float("inf"), dtype=torch.float64)
    certain[:, 4] = 1.0
    for logits in (certain, torch.randn(2, 3, dtype=torch.float64)):
        rows = Rows(logits, 0.7, logits, logits.argmax(-1), torch.zeros(2, dtype=torch.float64), 1)
        assert bool(compute(names, rows).isfinite().all())
    small = compute(["top3", "top4", "top10"], Rows(torch.zeros(1, 3)))
    assert small[0].tolist() == pytest.approx([1 / 3, 0.0, 0.0])


def test_an_unknown_name_has_a_close_match() -> None:
    with pytest.raises(
        PolicyError, match=r"unknown feature 'entropi' \(did you mean 'entropy'\?\); known: anchor_entropy"
    ):
        feature("entropi")
    with pytest.raises(PolicyError, match="unknown feature 'zzz'; known"):
        Layout(["top1", "zzz"])


@pytest.mark.parametrize("name", ["noisy_margin", "noisy_score"])
def test_noisy_features_are_refused_without_scores(name: str) -> None:
    with pytest.raises(PolicyError, match="need the match verification"):
        compute([name], Rows(torch.zeros(2, 5), 0.7))


def test_history_is_not_computed_from_logits() -> None:
    with pytest.raises(PolicyError, match="HISTORY"):
        compute(["mean_full"], example(0.7))


def test_layout_fills_the_columns_of_each_kind_in_the_policys_order() -> None:
    layout = Layout(["top1", "last_verified", "anchor_prob", "depth", "mean_full", "anchor_top1"])
    assert layout.node == ("top1", "depth")
    assert layout.anchor == ("anchor_prob", "anchor_top1")
    assert layout.history == ("last_verified", "mean_full")
    base = layout.base(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]]))
    for nodes in ([[5.0, 6.0]], [[7.0, 8.0]]):
        ((top1, depth),) = nodes
        assert layout.step(base, torch.tensor(nodes)).tolist() == [[top1, 3.0, 1.0, depth, 4.0, 2.0]]
    assert layout.step(base).tolist() == [[0.0, 3.0, 1.0, 0.0, 4.0, 2.0]]


@pytest.mark.parametrize("names", [(), ("top1",), ("anchor_top1",), ("mean_full",)])
def test_layout_of_one_kind_or_none(names: tuple[str, ...]) -> None:
    layout = Layout(names)
    base = layout.base(torch.ones(2, len(layout.anchor)), torch.ones(2, len(layout.history)))
    assert layout.step(base).shape == (2, len(names))
    assert layout.step(base, torch.ones(2, len(layout.node))).tolist() == [[1.0] * len(names)] * 2


def test_siblings_are_told_what_they_are_ahead_of() -> None:
    """The best one of the second, the others (less than nothing) of the best; the margin is to what was not drawn."""
    scores = torch.tensor([[1.0, 7.0, 4.0, 6.5, 0.0]]).repeat(3, 1)
    three = {"tokens": torch.tensor([1, 3, 2]), "rank": torch.arange(3), "width": torch.full((3,), 3)}
    rows = Rows(scores, 0.0, scores, **three)
    assert compute(("noisy_lead", "noisy_margin"), rows).tolist() == [[0.5, 6.0], [-0.5, 5.5], [-3.0, 3.0]]


def test_recorded_features_are_those_of_a_chain() -> None:
    assert not {"branch_rank", "noisy_lead"} & set(CHAIN_FEATURES)
    kinds = {FEATURES[n].kind for n in CHAIN_FEATURES}
    assert kinds == {Kind.PRE, Kind.POST}
    assert {FEATURES[n].kind for n in ANCHOR_FEATURES} == {Kind.ANCHOR}
    assert all(f.name == n and f.definition and f.low < f.high for n, f in FEATURES.items())
