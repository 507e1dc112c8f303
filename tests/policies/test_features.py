"""Features: compiled columns against a slow reference, the running history, and custom features."""

from __future__ import annotations

import numpy as np
import pytest
import specstop.policies.features as f
import torch
from conftest import make_prompts
from reference_features import Rows, compiled, compute
from specstop.collect.run import collect
from specstop.decode import Settings, decode
from specstop.policies.contract import Array, DraftStep, State, StopPolicy
from specstop.policies.errors import PolicyError, PolicyFailure
from specstop.policies.features import FEATURES, History, Kind, complete_features, custom_feature, feature
from specstop.policies.host import PolicyHost
from specstop.train import trace_arrays, train
from specstop.train.evaluate.evaluate import evaluate
from steps import draft_step, round_outcome


def random_rows(kind: str, width: int, temperature: float, siblings: list[int]) -> Rows:
    """Return rows [B] of the tokens drawn from each random row of logits, `siblings` by row."""
    generator, rows = torch.Generator().manual_seed(width), len(siblings)
    logits, sampled = 3 * torch.randn(rows, width, generator=generator), None
    if kind == "masked":
        logits[:, ::2] = -torch.inf
    elif kind == "tied":
        logits[:] = 1.5
    elif kind == "certain":  # no other token can be drawn
        logits[:] = -torch.inf
        logits[:, 1] = 1.0
    elif kind == "shifted":
        logits += 500.0
    weights = logits / (temperature or 1.0)
    if kind == "filtered":  # top-k
        weights = sampled = weights.masked_fill(logits < logits.topk(6).values[:, -1:], -torch.inf)
    scores = weights + torch.randn(rows, width, generator=generator) if temperature else weights
    row, width_of = torch.arange(rows).repeat_interleave(torch.tensor(siblings)), torch.tensor(siblings)
    rank = torch.cat([torch.arange(n) for n in siblings])
    tokens = scores.argsort(-1, descending=True)[row, rank]
    path = -5 * torch.rand(len(row), generator=generator, dtype=torch.float64)
    parents = torch.randint(0, width, (len(row),), generator=generator)
    shaped = None if sampled is None else sampled[row].double()
    drawn = (tokens, path, 3, shaped, rank, width_of[row], parents)
    return Rows(logits[row].double(), temperature, scores[row].double(), *drawn)


CHAIN, TREE = [1] * 40, [3, 1, 2, 4]
CASES = [
    *(("plain", width, t, CHAIN) for width, t in ((3, 0.7), (4, 0.0), (48, 0.7), (65, 1.0), (1000, 0.7), (3072, 0.0))),
    *((kind, *size, CHAIN) for kind in ("masked", "tied", "certain", "shifted") for size in ((4, 0.0), (65, 1.0))),
    *((kind, 12, t, TREE) for kind in ("plain", "filtered") for t in (0.0, 0.7, 1.0)),
]  # fmt: skip


@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize(("kind", "width", "temperature", "siblings"), CASES)
def test_features_equal_the_reference_within_their_ranges(kind, width, temperature, siblings, device):
    rows = random_rows(kind, width, temperature, siblings)
    names = [n for n in FEATURES if FEATURES[n].kind not in (Kind.HISTORY, Kind.ROUTE)]
    columns, near = compiled(names, rows, device), 2e-5 if kind == "shifted" else 2e-6  # float32 near 500: 3e-5
    torch.testing.assert_close(columns, compute(names, rows), rtol=near, atol=near)
    for name, column in zip(names, columns.unbind(-1), strict=True):
        assert torch.equal(column, compiled([name], rows, device)[:, 0]), "a feature alone differs"
        assert FEATURES[name].low <= float(column.min()) <= float(column.max()) <= FEATURES[name].high


@pytest.mark.parametrize("width", [50, 51, 3072])
def test_a_row_has_the_same_bits_in_any_batch_and_at_any_address(width):
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


def test_history_is_the_weighted_mean_of_the_rounds_that_count():
    rng, streams = np.random.default_rng(0), 6
    history, rounds = History.start(streams), [list[tuple[int, int]]() for _ in range(streams)]
    for _ in range(40):
        active, cut, verified = rng.random(streams) < 0.6, rng.random(streams) < 0.1, rng.integers(0, 6, streams)
        accepted = np.minimum(verified, rng.integers(0, 7, streams))
        after = history.after(round_outcome(accepted, verified, active=active, cut=cut))
        for s in range(streams):
            if active[s] and not cut[s]:
                rounds[s].append((int(accepted[s]), int(verified[s])))
            weights = f.PAST_WEIGHT ** np.arange(len(rounds[s]))[::-1]
            total = weights.sum() or 1.0
            expected = {
                "mean_accepted": sum(w * a for w, (a, _) in zip(weights, rounds[s], strict=True)) / total,
                "mean_full": sum(w * (a == k) for w, (a, k) in zip(weights, rounds[s], strict=True)) / total,
                "last_accepted": rounds[s][-1][0] if rounds[s] else 0,
                "last_verified": rounds[s][-1][1] if rounds[s] else 0,
            }
            assert after.values(list(expected))[s] == pytest.approx(list(expected.values()), rel=1e-5, abs=1e-6)
            part = [values[s : s + 1] for values in (accepted, verified, active, cut)]
            alone = History(history.record[s : s + 1]).after(round_outcome(*part[:2], active=part[2], cut=part[3]))
            # Boosted trees split at observed values, where the last bit decides.
            assert np.array_equal(alone.record[0], after.record[s])
        history = after


# Custom features


@pytest.fixture
def registered():
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
def test_a_custom_feature_is_known_when_its_inputs_are_and_is_finite():
    ratio = feature("lead-ratio")
    assert (ratio.kind, ratio.is_probability) == (Kind.PRE, True) and ratio.definition.startswith("Difference")
    assert feature("repeats").kind is Kind.POST
    custom_feature("entropy", name="broken")(lambda entropy: np.log(entropy * 0.0 - 1.0))
    with np.errstate(invalid="ignore"):
        values = complete_features(("broken", "depth"), np.ones((2, 3, 2), dtype=np.float32), False)
    assert (values[..., 0] == 0.0).all() and (values[..., 1] == 1.0).all()


@pytest.mark.usefixtures("registered")
def test_unknown_and_invalid_features_are_refused():
    with pytest.raises(PolicyError, match=r"'lead-rati'.*lead-ratio"):
        feature("lead-rati")
    with pytest.raises(PolicyError, match="match"):
        compiled(["noisy_margin"], Rows(torch.zeros(2, 5), 0.7))
    for inputs, name in (((), "x"), (("nope",), "x"), (("lead-ratio",), "x"), (("top1",), "entropy")):
        with pytest.raises(PolicyError, match="expected"):
            custom_feature(*inputs, name=name)(lambda *values: values[0])
    custom_feature("entropy", name="narrow")(lambda entropy: entropy[..., 0])
    with pytest.raises(PolicyError, match="shape"):
        complete_features(("narrow",), np.ones((2, 3, 1), dtype=np.float32), False)
    custom_feature("entropy", name="broken")(lambda entropy: 1 / 0)
    host = PolicyHost(type("Broken", (StopsBelow,), {"features": ("broken",)})())
    host.start(np.arange(1))
    with pytest.raises(PolicyFailure, match="stops-below"):
        host.keep(draft_step(1, np.ones((1, 1, 1))))


@pytest.mark.usefixtures("registered")
def test_custom_features_are_the_same_live_in_evaluation_and_in_training(plain_pair, profile, tmp_path):
    prompts, settings = make_prompts(24, "train", 6), Settings(0.0, 24, verification="match")
    trace = collect(plain_pair, prompts, tmp_path / "trace", max_new_tokens=24, depth=4)
    report = evaluate(trace, profile.with_decisions({"stops-below": 1e-5}), [StopsBelow()])
    (line,) = (line for line in report.lines if line.name == "stops-below")
    texts = decode(plain_pair, [p.text for p in prompts], StopsBelow(), settings=settings)
    rounds = [r for text in texts for r in text.rounds]
    assert line.drafted == pytest.approx(np.mean([r.drafted for r in rounds]))
    assert line.accepted == pytest.approx(np.mean([r.accepted for r in rounds]))
    assert len({r.drafted for r in rounds}) > 1, "the feature decides"
    assert set(trace_arrays(trace, ("lead-ratio",)).columns) == {"top1", "top2"}
    names = ("depth", "lead-ratio", "repeats")
    assert train(trace, profile, out=tmp_path / "policy", features=names).policy.features == names
    texts = decode(plain_pair, ["w7 w8 w9"], tmp_path / "policy", settings=Settings(0.0, 16, verification="match"))
    assert texts[0].failure is None
