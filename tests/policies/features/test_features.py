"""Features: each against a plain computation of its definition, and the columns of a policy; history; custom features."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
import specstop.policies.features as f
import torch
from conftest import make_prompts
from reference_features import Rows, compiled, compute
from specstop.collect.run import collect
from specstop.decode import Settings, decode
from specstop.decode.models.pair import Pair
from specstop.policies.contract import Array, DraftStep, State, StopPolicy
from specstop.policies.errors import PolicyError, PolicyFailure
from specstop.policies.features import FEATURES, History, Kind, complete_features, custom_feature, feature
from specstop.policies.host import PolicyHost, take
from specstop.policies.profile import Profile
from specstop.train import trace_arrays, train
from specstop.train.evaluate.evaluate import evaluate
from steps import draft_step, round_outcome

ROWS, VOCABULARY = 40, 30
NEAR = 2e-5
"""For rows with logits near 500, where single precision has steps of 3e-5."""

NODE = tuple(name for name, entry in FEATURES.items() if entry.kind in (Kind.PRE, Kind.POST))
on_both = pytest.mark.parametrize("device", [False, True], ids=["host", "device"])


def example(temperature: float, seed: int = 0) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(ROWS, VOCABULARY, generator=generator)).double()
    scores = logits
    if temperature:
        noise = torch.randn(ROWS, VOCABULARY, generator=generator, dtype=torch.float64)
        scores = (torch.log_softmax(logits / temperature, -1) + noise).float().double()
    logprob = -5 * torch.rand(ROWS, generator=generator, dtype=torch.float64)
    parents = torch.randint(0, VOCABULARY, (ROWS,), generator=generator)
    return Rows(logits, temperature, scores, scores.argmax(-1), logprob, depth=3, parents=parents)


@on_both
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_each_feature_equals_the_reference_within_its_range(temperature: float, device: bool) -> None:
    rows = example(temperature)
    names = [n for n, entry in FEATURES.items() if entry.kind is not Kind.HISTORY]
    together = compiled(names, rows, device)
    assert together.dtype == torch.float32
    torch.testing.assert_close(together, compute(names, rows), atol=1e-6, rtol=1e-6)
    for name, column in zip(names, together.unbind(-1), strict=True):
        assert torch.equal(column, compiled([name], rows, device)[:, 0]), "alone as together"
        assert FEATURES[name].low <= float(column.min()) <= float(column.max()) <= FEATURES[name].high
    assert compiled((), rows).shape == (ROWS, 0)


@on_both
def test_a_certain_row_and_a_small_vocabulary_have_finite_features(device: bool) -> None:
    """If one token only can be drawn, margins are the bound."""
    names = (*f.CHAIN_FEATURES, *f.ANCHOR_FEATURES, "noisy_lead")
    certain = torch.full((2, 30), -float("inf"))
    certain[:, 4] = 1.0
    for logits in (certain, torch.randn(2, 3)):
        rows = Rows(logits, 0.7, logits, logits.argmax(-1), torch.zeros(2, dtype=torch.float64), 1)
        assert bool(compiled(names, rows, device).isfinite().all())
        torch.testing.assert_close(compiled(names, rows, device), compute(names, rows), atol=1e-6, rtol=1e-6)
    rows = Rows(certain, 0.7, certain, certain.argmax(-1))
    assert compiled(("noisy_margin", "noisy_lead"), rows, device).tolist() == [[f.BOUND, f.BOUND]] * 2
    small = compiled(["top3", "top4", "top10"], Rows(torch.zeros(1, 3)), device)
    assert small[0].tolist() == pytest.approx([1 / 3, 0.0, 0.0])


@on_both
@pytest.mark.parametrize("kind", ["plain", "masked", "tied", "certain", "shifted"])
def test_unusual_rows_equal_the_reference(kind: str, device: bool) -> None:
    for width, temperature in ((4, 0.0), (48, 0.7), (65, 1.0), (1000, 0.7), (3072, 0.0)):
        logits = 3 * torch.randn(3, width, generator=torch.Generator().manual_seed(width))
        if kind == "masked":
            logits[:, ::2] = -float("inf")
        elif kind == "tied":
            logits[:] = 1.5
        elif kind == "certain":
            logits[:, 1] = 300.0
        elif kind == "shifted":
            logits += 500.0
        scores = logits + torch.rand(3, width, generator=torch.Generator().manual_seed(1))
        path, token = torch.tensor([-1.25, -0.5, -7.0], dtype=torch.float64), scores.argmax(-1)
        rows = Rows(logits.double(), temperature, scores.double(), token, path, 3)
        torch.testing.assert_close(compiled(NODE, rows, device), compute(NODE, rows), rtol=NEAR, atol=NEAR)


def levels(temperature: float, masked: bool) -> list[Rows]:
    """Return two depths of a tree: a row with three tokens, and three rows with 3, 1 and 2 tokens below them."""
    generator = torch.Generator().manual_seed(5)
    out: list[Rows] = []
    for depth, widths in ((1, (3,)), (2, (3, 1, 2))):
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
        parents = torch.full_like(tokens, 4) if depth == 1 else out[0].tokens[owner]
        shaped = None if sampled is None else sampled[owner]
        start = torch.zeros(len(owner)) if depth == 1 else out[0].path_logprob[owner]
        width = torch.tensor(widths)[owner]
        out.append(Rows(logits[owner], temperature, scores[owner], tokens, start, depth, shaped, rank, width, parents))
    return out


@on_both
@pytest.mark.parametrize(("temperature", "masked"), [(0.0, False), (0.7, False), (0.7, True), (1.0, True)])
def test_siblings_equal_the_reference(temperature: float, masked: bool, device: bool) -> None:
    for rows in levels(temperature, masked):
        torch.testing.assert_close(compiled(NODE, rows, device), compute(NODE, rows), atol=2e-6, rtol=1e-5)


def test_the_lead_and_margin_of_siblings() -> None:
    """The lead is to the best sibling, or of the best to the second; the margin is to the best token not drawn."""
    scores = torch.tensor([[1.0, 7.0, 4.0, 6.5, 0.0]]).repeat(3, 1)
    three = {"tokens": torch.tensor([1, 3, 2]), "rank": torch.arange(3), "width": torch.full((3,), 3)}
    rows = Rows(scores, 0.0, scores, **three)
    assert compiled(("noisy_lead", "noisy_margin"), rows).tolist() == [[0.5, 6.0], [-0.5, 5.5], [-3.0, 3.0]]


@pytest.mark.parametrize("width", [50, 51, 3072])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(width: int) -> None:
    """At any offset in memory."""
    raw = (3 * np.random.default_rng(width).standard_normal(64 * width + 3)).astype(np.float32)
    columns = f.Columns(("top1", "top7", "margin", "entropy", "drawn_prob", "path_logprob", "noisy_margin"))

    def read(rows: Array) -> Array:
        drawn = f.DrawnTokens.of([(i, int(row.argmax()), 0, 0, 1, 2) for i, row in enumerate(rows)])
        return columns(f.summarise(columns.needs, rows, drawn, 0.7, scores=rows), drawn, 0.7)

    for shift in (0, 1, 3):
        rows = raw[shift : shift + 64 * width].reshape(64, width)
        rows[0, 5:] = -np.inf
        together = read(rows)
        for size in (1, 7):
            parts = np.concatenate([read(rows[i : i + size]) for i in range(0, 64, size)])
            assert together.tobytes() == parts.tobytes()
        assert together.tobytes() == read(rows.copy()).tobytes() and np.isfinite(together).all()


def test_unknown_names_and_missing_scores_are_refused() -> None:
    for build, nouns in (
        (lambda: feature("entropi"), "'entropi'.*'entropy'"),
        (lambda: f.Layout(["top1", "zzz"]), "'zzz'"),
    ):
        with pytest.raises(PolicyError, match=nouns):
            build()
    for name in ("noisy_margin", "noisy_score"):
        with pytest.raises(PolicyError, match="match"):
            compiled([name], Rows(torch.zeros(2, 5), 0.7))


def test_a_layout_has_the_columns_of_each_kind_in_the_order_of_the_policy() -> None:
    layout = f.Layout(["top1", "last_verified", "anchor_prob", "depth", "mean_full", "anchor_top1"])
    assert (layout.node, layout.node_at) == (("top1", "depth"), [0, 3])
    assert (layout.anchor, layout.anchor_at) == (("anchor_prob", "anchor_top1"), [2, 5])
    assert (layout.history, layout.history_at) == (("last_verified", "mean_full"), [1, 4])
    assert f.Layout(()).names == f.Layout(("top1",)).anchor == ()


# History


def test_history_is_the_running_mean_of_counted_rounds_to_the_bit() -> None:
    """Boosted trees split at observed values, where the least difference decides."""
    rng, streams = np.random.default_rng(0), 6
    history = History.start(streams)
    past: list[list[tuple[int, int]]] = [[] for _ in range(streams)]
    records = [([0.0] * 4, 0.0) for _ in range(streams)]
    names = ("mean_accepted", "mean_full", "last_accepted", "last_verified")
    for _ in range(40):
        active, verified = rng.random(streams) < 0.6, rng.integers(0, 6, streams)
        accepted = np.minimum(verified, rng.integers(0, 7, streams))
        history = history.after(round_outcome(accepted, verified, active=active))
        for s in np.flatnonzero(active).tolist():
            a, k = int(accepted[s]), int(verified[s])
            past[s].append((a, k))
            (mean, full, *_), weight = records[s]
            weight = f.PAST_WEIGHT * weight + (1.0 - f.PAST_WEIGHT)
            share = (1.0 - f.PAST_WEIGHT) / weight
            records[s] = [mean + share * (a - mean), full + share * ((a == k) - full), float(a), float(k)], weight
        for s, (record, weight) in enumerate(records):
            assert history.record[s].tolist() == [*record, weight]
            weights = [f.PAST_WEIGHT ** (len(past[s]) - 1 - i) for i in range(len(past[s]))]
            total = sum(weights) or 1.0
            expected = [sum(w * a for w, (a, _) in zip(weights, past[s], strict=True)) / total,
                        sum(w * (a == k) for w, (a, k) in zip(weights, past[s], strict=True)) / total,
                        *(past[s][-1] if past[s] else (0, 0))]  # fmt: skip
            assert history.values(names)[s].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)
    alone = take(history, [1]).after(round_outcome([2], [5]))
    together = history.after(round_outcome([0, 2, 1, 0, 0, 0], [0, 5, 1, 0, 0, 0]))
    assert np.array_equal(alone.record[0], together.record[1])
    assert history.values().dtype == np.float32 and history.values().shape == (streams, len(f.HISTORY_FEATURES))
    assert np.array_equal(history.values(names[::-1]), history.values(names)[:, ::-1])


# Custom features


@pytest.fixture
def registered() -> Iterator[None]:
    @custom_feature("top1", "top2", low=0.0, high=1.0)
    def lead_ratio(top1: Array, top2: Array) -> Array:
        """Difference of the two largest probabilities as a share of the larger one."""
        return 1.0 - top2 / np.maximum(top1, 1e-6)

    @custom_feature("anchor_token", "drawn_token", name="repeats")
    def is_repeated(anchor: Array, drawn: Array) -> Array:
        return (anchor == drawn).astype(np.float32)

    yield
    for name in ("lead-ratio", "repeats", "broken", "narrow"):
        f._CUSTOM.pop(name, None)


class StopsBelow(StopPolicy):
    """Drafts while `lead-ratio` is large."""

    name, features, max_depth, first = "stops-below", ("depth", "lead-ratio", "repeats"), 4, 1

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        return step.alive & (step.features[:, :, 1] > 0.5) & (step.features[:, :, 2] < 1.0), state


@pytest.mark.usefixtures("registered")
def test_custom_features_are_defined_by_a_function_of_built_in_ones() -> None:
    ratio = feature("lead-ratio")
    assert (ratio.kind, ratio.is_probability) == (Kind.PRE, True) and ratio.definition.startswith("Difference")
    assert feature("repeats").kind is Kind.POST
    assert f.base_features(("depth", "lead-ratio", "repeats")) == (
        "depth",
        "top1",
        "top2",
        "anchor_token",
        "drawn_token",
    )
    values = complete_features(("lead-ratio",), np.array([[[0.8, 0.2]]], dtype=np.float32), False)
    assert values.item() == pytest.approx(0.75)
    assert not complete_features(("lead-ratio",), np.ones((1, 1, 2), dtype=np.float32), True).any(), "no PRE value yet"
    custom_feature("entropy", name="broken")(lambda entropy: np.log(entropy * 0.0 - 1.0))
    with np.errstate(invalid="ignore"):
        values = complete_features(("broken", "depth"), np.ones((2, 3, 2), dtype=np.float32), False)
    assert (values[..., 0] == 0.0).all() and (values[..., 1] == 1.0).all(), "finite"


@pytest.mark.usefixtures("registered")
def test_invalid_custom_features_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for inputs, name in (((), "x"), (("nope",), "x"), (("lead-ratio",), "x"), (("top1",), "entropy")):
        with pytest.raises(PolicyError, match="expected"):
            custom_feature(*inputs, name=name)(lambda *values: values[0])
    with pytest.raises(PolicyError, match="lead-ratio"):
        feature("lead-rati")
    for value in ("no_such_module:x", "math:missing"):
        monkeypatch.setattr(f, "entry_points", lambda group, value=value: [EntryPoint("damaged", value, group)])
        with pytest.raises(PolicyFailure, match="'damaged'"):
            feature("damaged")
    custom_feature("entropy", name="narrow")(lambda entropy: entropy[..., 0])
    with pytest.raises(PolicyError, match="shape"):
        complete_features(("narrow",), np.ones((2, 3, 1), dtype=np.float32), False)
    custom_feature("entropy", name="broken")(lambda entropy: 1 / 0)
    host = PolicyHost(type("Broken", (StopsBelow,), {"features": ("broken",)})())
    host.start(np.arange(1))
    with pytest.raises(PolicyFailure, match="stops-below"):
        host.keep(draft_step(1, np.ones((1, 1, 1))))


@pytest.mark.usefixtures("registered")
def test_custom_features_are_the_same_live_in_evaluation_and_in_training(
    plain_pair: Pair, profile: Profile, tmp_path: Path
) -> None:
    prompts, settings = make_prompts(24, "train", 6), Settings(0.0, 24, verification="match")
    trace = collect(plain_pair, prompts, tmp_path / "trace", max_new_tokens=24, depth=4)
    report = evaluate(trace, profile.with_decisions({"stops-below": 1e-5}), [StopsBelow()])
    (line,) = (line for line in report.lines if line.name == "stops-below")
    rounds = [
        r
        for text in decode(plain_pair, [p.text for p in prompts], StopsBelow(), settings=settings)
        for r in text.rounds
    ]
    assert line.drafted == pytest.approx(np.mean([r.drafted for r in rounds]))
    assert line.accepted == pytest.approx(np.mean([r.accepted for r in rounds]))
    assert len({r.drafted for r in rounds}) > 1, "the feature decides"
    assert set(trace_arrays(trace, ("lead-ratio",)).columns) == {"top1", "top2"}
    names = ("depth", "lead-ratio", "repeats")
    assert train(trace, profile, out=tmp_path / "policy", features=names).policy.features == names
    texts = decode(plain_pair, ["w7 w8 w9"], tmp_path / "policy", settings=Settings(0.0, 16, verification="match"))
    assert texts[0].failure is None
