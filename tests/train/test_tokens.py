"""The token head's fit finds which tokens are followed by what the draft gets right; thresholds are cut where it pays."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from made import made_trace
from specstop.collect.store import Trace
from specstop.policies.costs import Profile
from specstop.policies.errors import InputError
from specstop.policies.features import TOKEN_FEATURES
from specstop.train.fit.run import train
from specstop.train.fit.thresholds import NEVER, cut_where_it_pays, settle_thresholds
from specstop.train.heads.calibrate import auc
from specstop.train.heads.fitting import FitOptions, FitTask
from specstop.train.heads.rows import FitRows
from specstop.train.heads.tokens import fit_tokens
from specstop.train.traces.data import trace_arrays
from specstop.train.traces.replay import replay


def made_rows(count: int, seed: int) -> FitRows:
    generator = torch.Generator().manual_seed(seed)
    token = torch.randint(0, 12, (count,), generator=generator)
    chance = 0.1 + 0.8 * (token % 2).double()
    hit, later = (torch.rand(count, generator=generator, dtype=torch.float64) < c for c in (chance, 1.0 - chance))
    return FitRows(token[:, None].float(), torch.ones(count, dtype=torch.int64), hit, later, hit)


def test_each_token_gets_the_weight_that_it_has() -> None:
    head, files = fit_tokens(FitTask(made_rows(4000, 0), made_rows(1000, 1), ("drawn_token",)))
    assert files == {}
    odds = torch.sigmoid(head.logits(torch.arange(12.0)[:, None], 1))
    assert odds[1::2, 0].min() > 0.8 > 0.2 > odds[::2, 0].max()
    assert odds[::2, 1].min() > 0.65 > 0.35 > odds[1::2, 1].max()  # of the second output few rows are known
    held = made_rows(1000, 2)
    assert (auc(head.logits(held.features, 1)[:, 0], held.accepted) or 0.0) > 0.85


def test_pairs_tell_what_neither_token_tells() -> None:
    def drawn(count: int, seed: int) -> FitRows:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, 8, (count, 2), generator=generator)
        hit = (ids.sum(1) % 2 == 0) ^ (torch.rand(count, generator=generator) < 0.1)
        return FitRows(ids.float(), torch.ones(count, dtype=torch.int64), hit, ~hit, torch.ones_like(hit))

    names, held = ("drawn_token", "above_token"), drawn(1000, 2)
    found = {}
    for buckets in (0, 97):
        head, _ = fit_tokens(
            FitTask(drawn(3000, 0), drawn(500, 1), names, options=FitOptions(params={"buckets": buckets}))
        )
        found[buckets] = auc(head.logits(held.features, 1)[:, 0], held.accepted) or 0.0
    assert found[0] < 0.6 and found[97] > 0.85


def test_tokens_of_a_trace_are_the_ones_drawn_and_the_ones_above() -> None:
    arrays = made_trace([[1, 2, 0]], 3, (("anchor_token",), ()))
    arrays = dataclasses.replace(
        arrays, tokens=torch.arange(9).view(3, 3), columns={"anchor_token": torch.tensor([7.0, 8.0, 9.0])}
    )
    assert arrays.column("drawn_token").tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert arrays.column("above_token").tolist() == [[7, 0, 1], [8, 3, 4], [9, 6, 7]]


def test_the_token_above_can_be_asked_for_alone(sides: tuple[Trace, Trace], full_profile: Profile) -> None:
    few, every = trace_arrays(sides[0], ("above_token", "depth")), trace_arrays(sides[0])
    assert torch.equal(few.column("above_token"), every.column("above_token"))
    policy = train(sides[0], full_profile, head="tokens", features=["drawn_token", "above_token", "depth"]).policy
    assert replay(every, policy, full_profile).rate > 0.0


def test_tokens_are_read_unless_told_otherwise(sides: tuple[Trace, Trace], full_profile: Profile) -> None:
    usual = train(sides[0], full_profile, head="tokens").policy.features
    assert set(TOKEN_FEATURES) < set(usual) and "top1" not in usual
    named = train(sides[0], full_profile, head="tokens", features=("top1", "drawn_token")).policy.features
    assert named == ("top1", "drawn_token")


def test_a_fit_without_token_features_is_refused() -> None:
    with pytest.raises(InputError, match="the tokens head needs one of before_token"):
        fit_tokens(FitTask(made_rows(40, 0), made_rows(40, 1), ("entropy",)))


def test_a_cut_takes_what_pays_and_nothing_where_nothing_does() -> None:
    score, gain = torch.tensor([0.9, 0.2, 0.6, 0.4]), torch.tensor([1.0, -5.0, 2.0, -1.0])
    assert cut_where_it_pays(score, gain) == pytest.approx(0.5)
    assert cut_where_it_pays(score, -gain.abs()) == NEVER
    assert cut_where_it_pays(score[:0], gain[:0]) == NEVER
    assert cut_where_it_pays(torch.tensor([0.5, 0.5]), torch.tensor([3.0, -4.0])) == NEVER  # equal scores go together


def test_settled_thresholds_replay_as_planned_and_no_slower_than_derived_ones(
    sides: tuple[Trace, Trace], full_profile: Profile
) -> None:
    arrays = trace_arrays(sides[0])
    policy = train(sides[0], full_profile).policy
    settled, rate = settle_thresholds(policy, arrays, full_profile)
    played = replay(arrays, settled, full_profile).rate
    assert played == rate
    assert played > 0.99 * replay(arrays, policy, full_profile).rate
