"""Features: each against an obvious computation of its definition, and the columns they fill."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from reference_features import Rows, compiled, compute
from specstop.policies.errors import PolicyError
from specstop.policies.features import (
    ANCHOR_FEATURES,
    BOUND,
    CHAIN_FEATURES,
    FEATURES,
    Columns,
    DrawnTokens,
    Kind,
    Layout,
    feature,
    summarise,
)

ROWS, VOCABULARY = 40, 30
FLOAT32 = 1e-6
NEAR = 2e-5
"""Of rows whose logits lie near 500, where single precision has steps of 3e-5."""

NODE = tuple(name for name, f in FEATURES.items() if f.kind in (Kind.PRE, Kind.POST))
WIDTHS = (3, 1, 2)


def example(temperature: float, seed: int = 0) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(ROWS, VOCABULARY, generator=generator)).double()
    scores = logits
    if temperature:
        noise = torch.randn(ROWS, VOCABULARY, generator=generator, dtype=torch.float64)
        scores = (torch.log_softmax(logits / temperature, -1) + noise).float().double()
    logprob = -5 * torch.rand(ROWS, generator=generator, dtype=torch.float64)
    after = torch.randint(0, VOCABULARY, (ROWS,), generator=generator)
    return Rows(logits, temperature, scores, scores.argmax(-1), logprob, depth=3, parents=after)


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
        "above_token": int(rows.parents[i]),
        "before_token": int(rows.parents[i]),
    }
    return values[name]


@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("name", [n for n, f in FEATURES.items() if f.kind is not Kind.HISTORY])
def test_a_feature_is_what_its_definition_says_and_within_its_range(
    name: str, temperature: float, device: bool
) -> None:
    rows = example(temperature)
    (column,) = compiled([name], rows, device).unbind(-1)
    assert column.dtype == torch.float32
    assert column.tolist() == pytest.approx([reference(name, rows, i) for i in range(ROWS)], abs=FLOAT32, rel=FLOAT32)
    assert FEATURES[name].low <= float(column.min()) <= float(column.max()) <= FEATURES[name].high


def test_features_come_in_the_order_asked_for_and_alone_as_together() -> None:
    names = ("depth", "top2", "noisy_score", "entropy")
    together = compiled(names, example(0.7))
    for i, name in enumerate(names):
        assert torch.equal(together[:, i], compiled([name], example(0.7))[:, 0])
    assert compiled((), example(0.7)).shape == (ROWS, 0)


@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
def test_a_certain_row_and_a_small_vocabulary_give_finite_numbers(device: bool) -> None:
    """One token that can be drawn: margins to a token that cannot are the bound."""
    names = (*CHAIN_FEATURES, *ANCHOR_FEATURES, "noisy_lead")
    certain = torch.full((2, 30), -float("inf"))
    certain[:, 4] = 1.0
    for logits in (certain, torch.randn(2, 3)):
        rows = Rows(logits, 0.7, logits, logits.argmax(-1), torch.zeros(2, dtype=torch.float64), 1)
        assert bool(compiled(names, rows, device).isfinite().all())
        torch.testing.assert_close(compiled(names, rows, device), compute(names, rows), atol=1e-6, rtol=1e-6)
    rows = Rows(certain, 0.7, certain, certain.argmax(-1))
    assert compiled(("noisy_margin", "noisy_lead"), rows, device).tolist() == [[BOUND, BOUND]] * 2
    small = compiled(["top3", "top4", "top10"], Rows(torch.zeros(1, 3)), device)
    assert small[0].tolist() == pytest.approx([1 / 3, 0.0, 0.0])


@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("width", [4, 48, 1000])
@pytest.mark.parametrize("kind", ["plain", "masked", "tied", "certain", "shifted"])
def test_odd_rows_are_read_as_the_reference_does(kind: str, width: int, temperature: float, device: bool) -> None:
    logits = 3 * torch.randn(3, width, generator=torch.Generator().manual_seed(width))
    if kind == "masked":
        logits[:, ::2] = -float("inf")
    if kind == "tied":
        logits[:] = 1.5
    if kind == "certain":
        logits[:, 1] = 300.0
    if kind == "shifted":
        logits += 500.0
    scores = logits + torch.rand(3, width, generator=torch.Generator().manual_seed(1))
    path, token = torch.tensor([-1.25, -0.5, -7.0], dtype=torch.float64), scores.argmax(-1)
    rows = Rows(logits.double(), temperature, scores.double(), token, path, 3)
    found, expected = compiled(NODE, rows, device), compute(NODE, rows)
    torch.testing.assert_close(found, expected, rtol=NEAR, atol=NEAR)


def levels(temperature: float, masked: bool) -> list[Rows]:
    """Return two depths of a tree: a row with three tokens, and three rows with the tokens of `WIDTHS` below them."""
    generator = torch.Generator().manual_seed(5)
    out: list[Rows] = []
    for depth, widths in ((1, (3,)), (2, WIDTHS)):
        logits = 2.0 * torch.randn(len(widths), 12, generator=generator)
        sampled = None
        if masked:
            sampled = (logits / (temperature or 1.0)).masked_fill(logits < logits.topk(6).values[:, -1:], -torch.inf)
        noise = -torch.log(-torch.log(torch.rand(logits.shape, generator=generator)))
        base = logits if sampled is None else sampled
        scores = base + noise if temperature else base
        owner = torch.tensor([row for row, width in enumerate(widths) for _ in range(width)])
        rank = torch.tensor([at for width in widths for at in range(width)])
        tokens = scores.argsort(-1, descending=True)[owner, rank]
        path = None if depth == 1 else out[0].path_logprob[owner]
        parents = torch.full_like(tokens, 4) if depth == 1 else out[0].tokens[owner]
        shaped = None if sampled is None else sampled[owner]
        width = torch.tensor(widths)[owner]
        start = torch.zeros(len(owner)) if path is None else path
        out.append(Rows(logits[owner], temperature, scores[owner], tokens, start, depth, shaped, rank, width, parents))
    return out


@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("masked", [False, True])
def test_siblings_are_read_as_the_reference_does(temperature: float, masked: bool, device: bool) -> None:
    for rows in levels(temperature, masked and temperature > 0.0):
        torch.testing.assert_close(compiled(NODE, rows, device), compute(NODE, rows), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("width", [50, 51, 3072, 32003])
def test_a_row_gives_the_same_bits_alone_and_among_many(width: int) -> None:
    """Whatever lies before it in memory, and with how many others it is read."""
    generator = np.random.default_rng(width)
    raw = (3 * generator.standard_normal(64 * width + 3)).astype(np.float32)
    names = ("top1", "top7", "margin", "entropy", "drawn_prob", "path_logprob", "noisy_margin")
    columns = Columns(names)

    def read(rows: np.ndarray) -> np.ndarray:
        drawn = DrawnTokens.of([(i, int(row.argmax()), 0, 0, 1, 2) for i, row in enumerate(rows)])
        return columns(summarise(columns.needs, rows, drawn, 0.7, scores=rows), drawn, 0.7)

    for shift in (0, 1, 3):
        rows = raw[shift : shift + 64 * width].reshape(64, width)
        rows[0, 5:] = -np.inf
        together = read(rows)
        alone = np.concatenate([read(rows[i : i + 1]) for i in range(64)])
        parts = np.concatenate([read(rows[i : i + 7]) for i in range(0, 64, 7)])
        copied = read(np.ascontiguousarray(rows))
        assert together.tobytes() == alone.tobytes() == parts.tobytes() == copied.tobytes()
        assert np.isfinite(together).all()


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
        compiled([name], Rows(torch.zeros(2, 5), 0.7))


def test_layout_fills_the_columns_of_each_kind_in_the_policys_order() -> None:
    layout = Layout(["top1", "last_verified", "anchor_prob", "depth", "mean_full", "anchor_top1"])
    assert layout.node == ("top1", "depth")
    assert layout.anchor == ("anchor_prob", "anchor_top1")
    assert layout.history == ("last_verified", "mean_full")
    assert (layout.node_at, layout.anchor_at, layout.history_at) == ([0, 3], [2, 5], [1, 4])
    assert Layout(()).names == Layout(("top1",)).anchor == ()


def test_siblings_are_told_what_they_are_ahead_of() -> None:
    """The best one of the second, the others (less than nothing) of the best; the margin is to what was not drawn."""
    scores = torch.tensor([[1.0, 7.0, 4.0, 6.5, 0.0]]).repeat(3, 1)
    three = {"tokens": torch.tensor([1, 3, 2]), "rank": torch.arange(3), "width": torch.full((3,), 3)}
    rows = Rows(scores, 0.0, scores, **three)
    assert compiled(("noisy_lead", "noisy_margin"), rows).tolist() == [[0.5, 6.0], [-0.5, 5.5], [-3.0, 3.0]]


def test_recorded_features_are_those_of_a_chain() -> None:
    assert not {"branch_rank", "noisy_lead"} & set(CHAIN_FEATURES)
    kinds = {FEATURES[n].kind for n in CHAIN_FEATURES}
    assert kinds == {Kind.PRE, Kind.POST}
    assert {FEATURES[n].kind for n in ANCHOR_FEATURES} == {Kind.ANCHOR}
    assert all(f.name == n and f.definition and f.low < f.high for n, f in FEATURES.items())
