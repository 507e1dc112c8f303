"""Keyed noise: one number for each key, position and token, uniform, independent, whoever asks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scipy import stats
from specstop.decode.verify.noise import (
    KeyedSource,
    Purpose,
    best_of_rows,
    fresh_uniform,
    gumbel,
    match_scores,
    mix,
    stream_key,
    target_tokens,
    uniform,
    uniform_at,
)

FALSE_ALARM = 2e-6  # of each of some 50 statistical tests, 1e-4 of all; keys are fixed: what passes goes on passing
KEYS = [stream_key(seed, f"prompt {i}", i % 2) for seed in (0, 1) for i in range(3)]


def at(*positions: int) -> torch.Tensor:
    return torch.tensor(positions)


def test_a_number_depends_on_its_key_position_and_token_only() -> None:
    whole = uniform(KEYS[0], torch.arange(100), 50)
    assert torch.equal(uniform(KEYS[0], at(70, 3, 3), 50), whole[[70, 3, 3]])
    assert torch.equal(uniform(KEYS[0], at(9), 20), whole[9:10, :20])
    keys = torch.tensor(KEYS)[:, None]
    batch = uniform(keys, torch.full((len(KEYS),), 31), 50)
    for row, key in zip(batch, KEYS, strict=True):
        assert torch.equal(row[None], uniform(key, at(31), 50))


def test_host_and_device_have_the_same_bits() -> None:
    places = torch.tensor([0, 1, 15, 16, 2**40, 7])
    keys = torch.tensor(KEYS)[:, None]
    tokens = torch.arange(333)
    assert torch.equal(uniform(keys, places, 333), uniform_at(keys, places[:, None], tokens))
    assert torch.equal(uniform(KEYS[0], places[::2], 333), uniform_at(KEYS[0], places[::2, None], tokens))


def test_keys_differ_with_seed_prompt_and_sample() -> None:
    keys = {stream_key(s, p, n) for s in range(20) for p in ("a", "b", "1", "") for n in range(20)}
    assert len(keys) == 20 * 4 * 20
    assert stream_key(1, "2", 3) != stream_key(12, "", 3)
    assert all(-(2**63) <= key < 2**63 for key in keys)
    assert stream_key(7, "p", 1) == stream_key(7, "p", 1)


def test_mix_is_the_splitmix64_finaliser() -> None:
    def reference(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    values = [0, 1, -1, 2**63 - 1, -(2**63), 0x9E3779B97F4A7C15 - 2**64, *KEYS]
    assert [v % 2**64 for v in mix(torch.tensor(values)).tolist()] == [reference(v % 2**64) for v in values]


@pytest.mark.parametrize("key", KEYS)
def test_uniforms_are_uniform(key: int) -> None:
    values = uniform(key, torch.arange(400), 100).flatten()
    assert bool(((values > 0) & (values < 1)).all())
    assert stats.kstest(values.numpy(), "uniform").pvalue > FALSE_ALARM


def test_gumbel_noise_has_the_gumbel_distribution() -> None:
    values = gumbel(KEYS[1], torch.arange(300), 100, torch.float64).flatten()
    assert stats.kstest(values.numpy(), "gumbel_r").pvalue > FALSE_ALARM


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((KEYS[0], 0, 0), (KEYS[0], 1, 0)),
        ((KEYS[0], 0, 0), (KEYS[0], 0, 1)),
        ((KEYS[0], 0, 0), (KEYS[0], 1, 1)),
        ((KEYS[0], 0, 1), (KEYS[0], 1, 0)),
        ((KEYS[0], 0, 0), (KEYS[1], 0, 0)),
        ((8, 0, 0), (9, 0, 0)),
        ((8, 1, 0), (9, 0, 0)),
        ((0, 0, 0), (1 << 62, 0, 0)),
    ],
    ids=["position", "token", "both", "across", "key", "next key", "next key, position", "high bit"],
)
def test_neighbours_are_independent(first: tuple[int, int, int], second: tuple[int, int, int]) -> None:
    """Chi-square of 8 x 8 cells over 40,000 pairs that differ by a step in key, position or token."""
    values = []
    for key, position, token in (first, second):
        values.append(uniform(key, torch.arange(400) + position, 101)[:, token : token + 100].flatten())
    cell = (values[0] * 8).long() * 8 + (values[1] * 8).long()
    assert stats.chisquare(torch.bincount(cell, minlength=64).numpy()).pvalue > FALSE_ALARM


def test_no_number_repeats() -> None:
    values = torch.cat([uniform(key, torch.arange(200), 100).flatten() for key in KEYS])
    assert len(values.unique()) == len(values)


@pytest.mark.parametrize("bits", [0, -1, 1, -(2**63), 2**11, 2**11 - 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_bits_give_finite_noise(monkeypatch: pytest.MonkeyPatch, bits: int, dtype: torch.dtype) -> None:
    monkeypatch.setattr("specstop.decode.verify.noise.mix_in_place", lambda value: torch.full_like(value, bits))
    monkeypatch.setattr(
        "specstop.decode.verify.noise.keyed_uniform", lambda *args: uniform_at(0, at(0), at(0, 1)).numpy()[None]
    )
    noise = gumbel(0, at(0), 2, dtype)
    assert bool(noise.isfinite().all())
    assert abs(float(noise[0, 0])) < 40


@pytest.mark.parametrize("window", [0, 1, 5, 21])
def test_a_source_gives_the_noise_of_its_key_wherever_it_is_asked(window: int) -> None:
    source = KeyedSource(KEYS[2], 7, window, torch.float64)
    generator = torch.Generator().manual_seed(window)
    position = 13
    for _ in range(300):
        count = 1 + int(torch.randint(0, window + 1, (), generator=generator))
        expected = gumbel(KEYS[2], torch.arange(position, position + count), 7, torch.float64)
        assert torch.equal(source.gumbel(position, count), expected)
        position += int(torch.randint(-window, window + 4, (), generator=generator))
        position = max(0, position)
    for jump in (1000, 0, 999, 16, 15, 48):
        assert torch.equal(source.gumbel(jump, 1), gumbel(KEYS[2], at(jump), 7, torch.float64))


def test_scores_are_logits_at_temperature_0_and_perturbed_log_probabilities_else() -> None:
    logits, noise = torch.randn(4, 9, dtype=torch.float64), torch.randn(4, 9, dtype=torch.float64)
    assert torch.equal(match_scores(logits, None), logits)
    expected = logits / 0.5 - torch.logsumexp(logits / 0.5, -1, keepdim=True) + noise
    torch.testing.assert_close(match_scores(logits / 0.5, noise), expected)
    assert target_tokens(logits / 0.5, noise).tolist() == expected.argmax(-1).tolist()
    assert target_tokens(logits, None).tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_best_of_rows_is_the_first_of_the_largest_scores(dtype: torch.dtype) -> None:
    rows = torch.randint(-3, 4, (50, 33), generator=torch.Generator().manual_seed(0)).to(dtype)  # many are equal
    rows[1], rows[2, 7:], rows[3, 5] = -torch.inf, -torch.inf, torch.nan
    expected = [next((i for i, v in enumerate(row) if math.isnan(v)), row.index(max(row))) for row in rows.tolist()]
    assert best_of_rows(rows).tolist() == expected
    assert best_of_rows(rows[:, 3:20]).tolist() == rows[:, 3:20].contiguous().argmax(-1).tolist()


def test_the_argmax_of_scores_is_a_draw_from_the_softmax() -> None:
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0]], dtype=torch.float64)
    noise = gumbel(KEYS[3], torch.arange(20000), 4, torch.float64)
    counts = torch.bincount(match_scores(logits / 0.8, noise).argmax(-1), minlength=4)
    expected = torch.softmax(logits[0] / 0.8, -1) * 20000
    assert math.isclose(float(expected.sum()), 20000)
    assert stats.chisquare(counts.numpy(), expected.numpy()).pvalue > FALSE_ALARM


COUNT = 12000
FRESH = {
    "node": lambda i: (7, 3, i, Purpose.ACCEPT),
    "round": lambda i: (7, i, 2, Purpose.RESIDUAL),
    "round and node": lambda i: (-5, i // 40, i % 40, Purpose.DRAFT),
    "key": lambda i: (i, 1, 0, Purpose.DRAFT),
    "hashed key": lambda i: (stream_key(3, str(i)), 1, 1, Purpose.ACCEPT),
}


@pytest.mark.parametrize("along", FRESH)
def test_fresh_numbers_are_uniform_and_do_not_repeat(along: str) -> None:
    values = [fresh_uniform(*FRESH[along](i)) for i in range(COUNT)]
    assert min(values) > 0.0 and max(values) < 1.0
    assert stats.kstest(values, "uniform").pvalue > FALSE_ALARM
    assert len(set(values)) == COUNT


@pytest.mark.parametrize(
    "step",
    [
        lambda r, n, p: (r, n, Purpose.RESIDUAL if p is Purpose.ACCEPT else Purpose.ACCEPT),
        lambda r, n, p: (r, n, Purpose.DRAFT),
        lambda r, n, p: (r, n + 1, p),
        lambda r, n, p: (r + 1, n, p),
        lambda r, n, p: (r + 1, n + 1, Purpose.RESIDUAL),
        lambda r, n, p: (n, r + 200, p),
    ],
    ids=["purpose", "draft", "node", "round", "all", "round and node exchanged"],
)
def test_fresh_numbers_of_neighbours_are_independent(step: Any) -> None:
    """Chi-square of 8 x 8 cells over pairs whose keys differ by a step."""
    places = [(1 + i // 60, i % 60, Purpose.ACCEPT) for i in range(COUNT)]
    cells = torch.zeros(64)
    for place in places:
        first, second = fresh_uniform(KEYS[0], *place), fresh_uniform(KEYS[0], *step(*place))
        cells[int(first * 8) * 8 + int(second * 8)] += 1
    assert stats.chisquare(cells.numpy()).pvalue > FALSE_ALARM


def test_fresh_numbers_do_not_depend_on_the_keyed_noise() -> None:
    """They are made from the same mixing of key, round or position, and node or token."""
    noise = uniform(KEYS[1], torch.arange(120), 100)
    pairs = [(noise[r, n], fresh_uniform(KEYS[1], r, n, Purpose.DRAFT)) for r in range(120) for n in range(100)]
    cells = torch.zeros(64)
    for first, second in pairs:
        cells[int(first * 8) * 8 + int(second * 8)] += 1
    assert stats.chisquare(cells.numpy()).pvalue > FALSE_ALARM


@pytest.mark.parametrize("scale", [1.0, 0.37])
def test_categorical_draws_have_their_probabilities(scale: float) -> None:
    """Weights need not sum to 1, and what has none is never drawn, be it first, last or between."""
    weights = scale * torch.tensor([0.0, 0.3, 0.0, 0.05, 0.6, 0.05, 0.0], dtype=torch.float64)
    source = KeyedSource(KEYS[4], 7, 1, torch.float64)
    counts = torch.zeros(7)
    for i in range(COUNT):
        counts[source.categorical(weights, i // 30, i % 30, Purpose.RESIDUAL)] += 1
    some = weights > 0
    assert not counts[~some].any()
    expected = (weights / weights.sum() * COUNT)[some]
    assert stats.chisquare(counts[some].numpy(), expected.numpy(), sum_check=False).pvalue > FALSE_ALARM


def test_bernoulli_draws_have_their_probability() -> None:
    source = KeyedSource(KEYS[5], 7, 1, torch.float64)
    for prob in (0.02, 0.5, 0.93):
        hits = sum(source.bernoulli(prob, i // 30, i % 30, Purpose.ACCEPT) for i in range(COUNT))
        assert stats.binomtest(hits, COUNT, prob).pvalue > FALSE_ALARM
    assert all(source.bernoulli(1.0, i, 0, Purpose.ACCEPT) for i in range(500))
    assert not any(source.bernoulli(0.0, i, 0, Purpose.ACCEPT) for i in range(500))


@pytest.mark.parametrize("number", [2.0**-54, 0.5, 1.0 - 2.0**-53])
def test_extreme_numbers_draw_tokens_that_have_a_chance(monkeypatch: pytest.MonkeyPatch, number: float) -> None:
    monkeypatch.setattr("specstop.decode.verify.noise.fresh_uniform", lambda *args: number)
    source = KeyedSource(0, 4, 1, torch.float64)
    for weights in ([0.0, 0.1, 0.2, 0.0], [0.0, 1.0 / 3.0, 0.0, 0.0], [0.7, 0.0, 0.0, 0.1]):
        token = source.categorical(torch.tensor(weights, dtype=torch.float64), 0, 0, Purpose.DRAFT)
        assert weights[token] > 0.0
    assert source.bernoulli(1.0, 0, 0, Purpose.ACCEPT) and not source.bernoulli(0.0, 0, 0, Purpose.ACCEPT)
