"""Custom features: computed the same live, in replay and in training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_prompts
from specstop.collect.run import collect
from specstop.decode import Settings, decode
from specstop.decode.models.pair import Pair
from specstop.policies import DraftStep, PolicyError, StopPolicy
from specstop.policies.contract import Array, State
from specstop.policies.errors import PolicyFailure
from specstop.policies.features import (
    _CUSTOM,
    Kind,
    base_features,
    complete_features,
    custom_feature,
    feature,
)
from specstop.policies.host import PolicyHost
from specstop.policies.profile import Profile
from specstop.train import TraceArrays, train
from specstop.train.replay.arrays import seen_features, trace_arrays
from specstop.train.replay.run import replay


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    @custom_feature("top1", "top2", low=0.0, high=1.0)
    def lead_ratio(top1: Array, top2: Array) -> Array:
        """Second probability as a share of the first."""
        return 1.0 - top2 / np.maximum(top1, 1e-6)

    @custom_feature("anchor_token", "drawn_token", name="repeats")
    def is_repeated(anchor: Array, drawn: Array) -> Array:
        return (anchor == drawn).astype(np.float32)

    yield
    for name in ("lead-ratio", "repeats", "broken", "narrow"):
        _CUSTOM.pop(name, None)


class StopsBelow(StopPolicy):
    """Drafts while `lead-ratio` is large."""

    name, features, max_depth, first = "stops-below", ("depth", "lead-ratio", "repeats"), 4, 1

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        return step.alive & (step.features[:, :, 1] > 0.5) & (step.features[:, :, 2] < 1.0), state


def test_definition() -> None:
    one = feature("lead-ratio")
    assert (one.kind, one.is_probability, one.definition) == (
        Kind.PRE,
        True,
        "Second probability as a share of the first.",
    )
    assert feature("repeats").kind is Kind.POST
    assert base_features(("depth", "lead-ratio", "repeats")) == ("depth", "top1", "top2", "anchor_token", "drawn_token")


@pytest.mark.parametrize(
    ("inputs", "name"), [((), "x"), (("nope",), "x"), (("lead-ratio",), "x"), (("top1",), "entropy")]
)
def test_refuses_unknown_inputs_and_taken_names(inputs: tuple[str, ...], name: str) -> None:
    with pytest.raises(PolicyError, match="expected"):
        custom_feature(*inputs, name=name)(lambda *values: values[0])


def test_an_unknown_feature_names_custom_ones() -> None:
    with pytest.raises(PolicyError, match="lead-ratio"):
        feature("lead-rati")


def test_values_that_are_not_finite_and_wrong_shapes() -> None:
    custom_feature("entropy", name="broken")(lambda entropy: np.log(entropy * 0.0 - 1.0))
    with np.errstate(invalid="ignore"):
        values = complete_features(("broken", "depth"), np.ones((2, 3, 2), dtype=np.float32), False)
    assert (values[..., 0] == 0.0).all() and (values[..., 1] == 1.0).all()
    custom_feature("entropy", name="narrow")(lambda entropy: entropy[..., 0])
    with pytest.raises(PolicyError, match="shape"):
        complete_features(("narrow",), np.ones((2, 3, 1), dtype=np.float32), False)
    assert not complete_features(("lead-ratio",), np.ones((1, 1, 2), dtype=np.float32), True).any()


def test_errors_of_the_function_name_the_policy() -> None:
    def fails(entropy: Array) -> Array:
        raise RuntimeError("no")

    custom_feature("entropy", name="broken")(fails)
    policy = StopsBelow()
    policy.features = ("broken",)  # type: ignore[misc]
    host = PolicyHost(policy)
    host.start(np.arange(1))
    step = DraftStep(
        1, np.ones((1, 1), bool), np.zeros((1, 1), int), np.ones((1, 1, 1), np.float32), {}, np.zeros(1, int)
    )
    with pytest.raises(PolicyFailure, match="stops-below"):
        host.keep(step)


def test_replay_equals_live_and_rows_of_training(plain_pair: Pair, profile: Profile, tmp_path: Path) -> None:
    prompts = make_prompts(6, "live", 5)
    trace = collect(plain_pair, prompts, tmp_path / "trace", max_new_tokens=24, depth=4)
    arrays = trace_arrays(trace)
    played = replay(arrays, StopsBelow(), profile)
    settings = Settings(0.0, 24, verification="match")
    texts = decode(plain_pair, [one.text for one in prompts], StopsBelow(), settings=settings)
    order = [arrays.prompt_ids.index(one.id) for one in prompts]
    assert [len(text.rounds) for text in texts] == [int(played.sequence.bincount()[at]) for at in order]
    drafted = played.by_sequence(played.drafted).tolist()
    assert [sum(r.drafted for r in text.rounds) for text in texts] == [drafted[at] for at in order]
    assert len({r.drafted for text in texts for r in text.rounds}) > 1  # the feature decides
    row = torch.arange(4)
    seen = seen_features(arrays, ("top1", "top2", "lead-ratio"), row, played.history[:4]).numpy()
    expected = 1.0 - seen[:, 1:, 1] / np.maximum(seen[:, 1:, 0], 1e-6)
    np.testing.assert_allclose(seen[:, 1:, 2], expected, rtol=1e-6)
    assert not seen[:, 0, 2].any()


def test_heads_are_trained_on_custom_features(plain_pair: Pair, profile: Profile, tmp_path: Path) -> None:
    trace = collect(plain_pair, make_prompts(24, "train", 6), tmp_path / "trace", max_new_tokens=24, depth=4)
    trained = train(trace, profile, out=tmp_path / "policy", features=("depth", "lead-ratio", "repeats"))
    assert trained.policy.features == ("depth", "lead-ratio", "repeats")
    texts = decode(plain_pair, ["w7 w8 w9"], tmp_path / "policy", settings=Settings(0.0, 16, verification="match"))
    assert texts[0].failure is None


def test_arrays_have_only_what_they_read(plain_pair: Pair, tmp_path: Path) -> None:
    trace = collect(plain_pair, make_prompts(2, "few", 7), tmp_path / "trace", max_new_tokens=8, depth=2)
    arrays: TraceArrays = trace_arrays(trace, ("lead-ratio",))
    assert set(arrays.columns) == {"top1", "top2"}
