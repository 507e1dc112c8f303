"""`match`: ties, and the statistics of keyed Gumbel noise. tests/decode/test_loop.py compares texts with plain sampling."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from conftest import VOCABULARY
from scipy import stats
from specstop.collect.given_text import best_candidates
from specstop.decode.topology import parse_tree
from specstop.decode.verify.modes import Match, best_tokens
from specstop.decode.verify.noise import (
    KeyedSource,
    Purpose,
    fresh_uniform,
    gumbel,
    match_scores,
    stream_key,
    target_tokens,
    uniform,
    uniform_at,
)
from torch import Tensor

FALSE_ALARM = 2e-6  # of each statistical test; the keys are fixed, so that a test that passes keeps passing
KEYS = [stream_key(seed, f"prompt {i}", i % 2) for seed in (0, 1) for i in range(3)]
COUNT = 12000


# Ties


def greedy_candidates(rows: Tensor, width: int) -> tuple[list[list[int]], Any]:
    """Return the greedy candidates below one root per row, and the best scores."""
    round_state = SimpleNamespace(topology=parse_tree(str(width)), choices=[SimpleNamespace(greedy=True)] * len(rows))
    drawn = Match().draw(cast(Any, round_state), [(stream, [0]) for stream in range(len(rows))], rows)
    return drawn.tokens if isinstance(drawn.tokens, list) else drawn.tokens[:, None].tolist(), drawn.best


@pytest.mark.parametrize("width", [1, 2, 3, 10])
def test_of_equal_scores_the_first_token_is_drawn_first(width):
    """In a chain, a tree and a dense trace; tokens without a score are never drawn."""
    rows = torch.randint(0, 4, (40, VOCABULARY), generator=torch.Generator().manual_seed(5)).float()
    rows = rows.where(rows > 0, -torch.inf)
    possible = [[token for token in range(VOCABULARY) if row[token] > -torch.inf] for row in rows]
    ordered = [
        sorted(tokens, key=lambda t, row=row: (-float(row[t]), t)) for row, tokens in zip(rows, possible, strict=True)
    ]
    tokens, best = greedy_candidates(rows, width)
    assert tokens == best_tokens(rows, [width] * len(rows))[0] == [tokens[:width] for tokens in ordered]
    if width > 1:
        expected = [[float(row[t]) for t in o[: width + 1]] for row, o in zip(rows, ordered, strict=True)]
        assert best == expected
    dense = best_candidates(rows, torch.full((40,), -1), width, width + 1)
    assert dense.tokens.tolist() == tokens


# Keyed noise


def positions(*at: int) -> Tensor:
    return torch.tensor(at)


def test_a_number_depends_on_its_key_position_and_token_only():
    whole = uniform(KEYS[0], torch.arange(100), 50)
    assert torch.equal(uniform(KEYS[0], positions(70, 3, 3), 50), whole[[70, 3, 3]])
    assert torch.equal(uniform(KEYS[0], positions(9), 20), whole[9:10, :20])
    keys, places = torch.tensor(KEYS)[:, None], torch.tensor([0, 1, 15, 16, 2**40, 7])
    batch = uniform(keys, places, 333)
    assert torch.equal(batch, uniform_at(keys, places[:, None], torch.arange(333))), "on the host as on a device"
    for row, key, place in zip(batch, KEYS, places, strict=True):
        assert torch.equal(row[None], uniform(key, place[None], 333))
    assert len(uniform(keys, torch.full((6,), 3), 900).unique()) == 6 * 900


def independence(first: Tensor, second: Tensor) -> float:
    """Return the p-value of a chi-square test over 8 x 8 cells of pairs."""
    cells = (first * 8).long() * 8 + (second * 8).long()
    return float(stats.chisquare(torch.bincount(cells, minlength=64).numpy()).pvalue)


def keyed(key: int, position: int = 0, token: int = 0) -> Tensor:
    """Return [400 x 100] numbers of the keyed noise."""
    return uniform(key, torch.arange(400) + position, 101)[:, token : token + 100].flatten()


def fresh(round: int = 0, node: int = 0, purpose: Purpose = Purpose.ACCEPT) -> Tensor:
    """Return `COUNT` numbers of the rejection family, of 200 rounds with 60 nodes."""
    places = ((1 + round + i // 60, node + i % 60) for i in range(COUNT))
    return torch.tensor([fresh_uniform(KEYS[0], *place, purpose) for place in places], dtype=torch.float64)


@pytest.mark.parametrize("numbers", [partial(keyed, KEYS[0]), partial(keyed, KEYS[4]), fresh], ids=["a", "b", "fresh"])
def test_numbers_are_uniform(numbers):
    values = numbers()
    assert bool(((values > 0) & (values < 1)).all()) and len(values.unique()) == len(values)
    assert stats.kstest(values.numpy(), "uniform").pvalue > FALSE_ALARM


@pytest.mark.parametrize(
    ("first", "second"),
    [
        *((partial(keyed, KEYS[0], *one), partial(keyed, KEYS[0], *other))
          for one, other in (((0, 0), (1, 0)), ((0, 0), (0, 1)), ((0, 1), (1, 0)))),
        *((partial(keyed, one), partial(keyed, *other))
          for one, other in ((KEYS[0], (KEYS[1],)), (8, (9,)), (9, (8, 1)), (0, (1 << 62,)))),
        *((fresh, partial(fresh, *other)) for other in ((0, 1), (1,), (0, 0, Purpose.RESIDUAL), (0, 0, Purpose.DRAFT))),
        (fresh, lambda: uniform(KEYS[0], torch.arange(1, 1 + COUNT // 60), 60).flatten()),
    ],
    ids=["position", "token", "across", "key", "next key", "next key, position", "high bit", "fresh node", "fresh round",
         "residual", "draft", "fresh and keyed"],
)  # fmt: skip
def test_numbers_of_neighbouring_keys_are_independent(first, second):
    assert independence(first(), second()) > FALSE_ALARM


@pytest.mark.parametrize("bits", [0, -1, -(2**63), 2**11 - 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_bits_give_finite_noise(monkeypatch, bits, dtype):
    noise_module = "specstop.decode.verify.noise"
    monkeypatch.setattr(f"{noise_module}.mix_in_place", lambda value: torch.full_like(value, bits))
    extreme = uniform_at(0, positions(0), positions(0, 1)).numpy()[None]
    monkeypatch.setattr(f"{noise_module}.keyed_uniform", lambda *args: extreme)
    noise = gumbel(0, positions(0), 2, dtype)
    assert bool(noise.isfinite().all())
    assert abs(float(noise[0, 0])) < 40


def test_the_best_perturbed_token_is_a_sample():
    row = torch.tensor([[0.0, 1.0, -1.0, 2.0]], dtype=torch.float64)
    noise = gumbel(KEYS[3], torch.arange(20000), 4, torch.float64)
    for draws in (target_tokens(row, noise), match_scores(row, noise).argmax(-1)):
        counts = torch.bincount(draws, minlength=4).numpy()
        assert stats.chisquare(counts, (torch.softmax(row[0], -1) * 20000).numpy()).pvalue > FALSE_ALARM


# Fresh numbers of the rejection family


def test_categorical_and_bernoulli_draws_have_their_probabilities():
    """Weights need not sum to 1; a token without weight is never drawn."""
    source = KeyedSource(KEYS[4], 7, 1, torch.float64)
    for scale in (1.0, 0.37):
        weights = scale * torch.tensor([0.0, 0.3, 0.0, 0.05, 0.6, 0.05, 0.0], dtype=torch.float64)
        draws = [source.categorical(weights, i // 30, i % 30, Purpose.RESIDUAL) for i in range(COUNT)]
        counts, possible = torch.bincount(torch.tensor(draws), minlength=7), weights > 0
        assert not counts[~possible].any()
        expected = (weights / weights.sum() * COUNT)[possible].numpy()
        assert stats.chisquare(counts[possible].numpy(), expected, sum_check=False).pvalue > FALSE_ALARM
    for prob in (0.02, 0.5, 0.93):
        hits = sum(source.bernoulli(prob, i // 30, i % 30, Purpose.ACCEPT) for i in range(COUNT))
        assert stats.binomtest(hits, COUNT, prob).pvalue > FALSE_ALARM
