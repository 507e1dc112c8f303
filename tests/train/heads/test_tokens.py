"""The token head's fit finds which tokens are followed by what the draft gets right."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from scipy.special import expit, logit
from sklearn.linear_model import LogisticRegression
from specstop.collect.store import Trace
from specstop.policies.errors import InputError
from specstop.policies.features import TOKEN_FEATURES
from specstop.policies.profile import Profile
from specstop.train.fit.run import train
from specstop.train.heads.calibration import auc
from specstop.train.heads.rows import FitRows
from specstop.train.heads.tokens import TokensEstimator
from specstop.train.replay.arrays import trace_arrays
from specstop.train.replay.run import replay
from synthetic import synthetic_trace


def synthetic_rows(count: int, seed: int) -> FitRows:
    generator = torch.Generator().manual_seed(seed)
    token = torch.randint(0, 12, (count,), generator=generator)
    chance = 0.1 + 0.8 * (token % 2).double()
    hit, later = (torch.rand(count, generator=generator, dtype=torch.float64) < c for c in (chance, 1.0 - chance))
    return FitRows(token[:, None].float(), torch.ones(count, dtype=torch.int64), hit, later, hit)


def test_each_token_gets_the_weight_that_it_has() -> None:
    model = TokensEstimator(("drawn_token",)).fit(synthetic_rows(4000, 0), stop_rows=synthetic_rows(1000, 1))
    head = model.export()
    assert model.files_ == {}
    odds = expit(head.scores(np.arange(12, dtype=np.float32)[:, None], 1))
    assert odds[1::2, 0].min() > 0.8 > 0.2 > odds[::2, 0].max()
    assert odds[::2, 1].min() > 0.65 > 0.35 > odds[1::2, 1].max()  # of the second output few rows are known
    held = synthetic_rows(1000, 2)
    assert (auc(head.scores(held.features.numpy(), 1)[:, 0], held.accepted.numpy()) or 0.0) > 0.85


def test_rare_tokens_are_fitted_as_far_as_frequent_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    chances = 1.0 / torch.arange(1, 200).double()
    ids = torch.multinomial(chances, 2 * 10_000, replacement=True, generator=generator).view(-1, 2)
    odds = 2.0 * torch.randn(len(chances), generator=generator)
    hit = torch.rand(len(ids), generator=generator) < torch.sigmoid(odds[ids].sum(1))
    rows = FitRows(ids.float(), torch.ones(len(ids), dtype=torch.int64), hit, hit, hit)
    head = TokensEstimator(("drawn_token", "above_token"), C=0.5, buckets=0).fit(rows, stop_rows=rows).export()
    x = torch.nn.functional.one_hot(ids, len(chances)).flatten(1).double().numpy()
    best = LogisticRegression(C=0.5, solver="newton-cholesky", tol=1e-10, max_iter=1000).fit(x, hit.numpy())
    found = logit(best.predict_proba(x)[:, 1])
    assert np.abs(head.scores(rows.features.numpy(), 1)[:, 0] - found).max() < 0.15  # 3.0 where the fit ends early


def test_pairs_tell_what_neither_token_tells() -> None:
    def drawn(count: int, seed: int) -> FitRows:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, 8, (count, 2), generator=generator)
        hit = (ids.sum(1) % 2 == 0) ^ (torch.rand(count, generator=generator) < 0.1)
        return FitRows(ids.float(), torch.ones(count, dtype=torch.int64), hit, ~hit, torch.ones_like(hit))

    names, held = ("drawn_token", "above_token"), drawn(1000, 2)
    found = {}
    for buckets in (0, 97):
        head = TokensEstimator(names, buckets=buckets).fit(drawn(3000, 0), stop_rows=drawn(500, 1)).export()
        found[buckets] = auc(head.scores(held.features.numpy(), 1)[:, 0], held.accepted.numpy()) or 0.0
    assert found[0] < 0.6 and found[97] > 0.85


def test_tokens_of_a_trace_are_the_ones_drawn_and_their_parents() -> None:
    arrays = synthetic_trace([[1, 2, 0]], 3, (("anchor_token",), ()))
    arrays = dataclasses.replace(
        arrays, tokens=torch.arange(9).view(3, 3), columns={"anchor_token": torch.tensor([7.0, 8.0, 9.0])}
    )
    assert arrays.column("drawn_token").tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert arrays.column("above_token").tolist() == [[7, 0, 1], [8, 3, 4], [9, 6, 7]]


def test_the_parent_token_can_be_asked_for_alone(sides: tuple[Trace, Trace], full_profile: Profile) -> None:
    few, every = trace_arrays(sides[0], ("above_token", "depth")), trace_arrays(sides[0])
    assert torch.equal(few.column("above_token"), every.column("above_token"))
    names = ["drawn_token", "above_token", "depth"]
    policy = train(sides[0], full_profile, head="tokens", features=names, cross_fit=False).policy
    assert replay(every, policy, full_profile).rate > 0.0


def test_tokens_are_read_unless_told_otherwise(sides: tuple[Trace, Trace], full_profile: Profile) -> None:
    usual = train(sides[0], full_profile, head="tokens", cross_fit=False).policy.features
    assert set(TOKEN_FEATURES) < set(usual) and "top1" not in usual
    asked = ("top1", "drawn_token")
    assert train(sides[0], full_profile, head="tokens", features=asked, cross_fit=False).policy.features == asked


def test_it_is_fitted_again_on_its_own_rounds(sides: tuple[Trace, Trace], full_profile: Profile) -> None:
    profile = full_profile.with_decisions({"tokens": 30e-6})
    usual, once, twice = (
        train(sides[0], profile, head="tokens", passes=n, cross_fit=False).metrics for n in (None, 1, 2)
    )
    assert usual == twice != once


def test_a_fit_without_token_features_is_refused() -> None:
    with pytest.raises(InputError, match="the tokens head needs one of before_token"):
        TokensEstimator(("entropy",)).fit(synthetic_rows(40, 0), stop_rows=synthetic_rows(40, 1))
