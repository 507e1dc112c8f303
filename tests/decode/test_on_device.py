"""Summaries of rows on a device: the numbers of the host's kernel, from recordings that are played."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from specstop.decode import summaries as module
from specstop.decode.summaries import RecordedReading, largest, summarise_on_device
from specstop.policies.features import Columns, DrawnTokens, summarise
from tape import Graphs, recorder, simulate_graphs

NAMES = ("top1", "top10", "entropy", "drawn_prob", "path_logprob", "noisy_margin")
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Graphs]:
    """Record simulated graphs, and forget them after the test."""
    made = simulate_graphs(monkeypatch)
    monkeypatch.setattr(module, "recorder", recorder)
    module.recorded_reading.cache_clear()
    yield made
    module.recorded_reading.cache_clear()


@pytest.mark.parametrize("width", [5, module.LONG_ROW - 1, module.LONG_ROW, module.LONG_ROW + 700])
def test_the_largest_are_those_of_a_sort(width: int) -> None:
    rows = torch.randn(3, width, generator=torch.Generator().manual_seed(1))
    rows[1] = rows[1].round()  # equal ones
    rows[2, 2:] = -torch.inf
    for count in (1, 2, 5):
        assert torch.equal(largest(rows, count), rows.sort(-1, descending=True).values[:, :count])


def compare(width: int, temperature: float, told: bool, device: str, generator: torch.Generator) -> None:
    """Compare rows of changing numbers with what the host's kernel reads of them."""
    for count in (1, 3, 1, 2, 4, 3, 1):
        logits, scores, sampled = 3 * torch.randn(3, count, width, generator=generator)
        of = sorted(torch.randint(count, (count + 1,), generator=generator).tolist())
        ids = torch.randint(width, (count + 1,), generator=generator).tolist()
        drawn = DrawnTokens.of(
            [(row, token, 0, 0, 2, 1) for row, token in zip(of, ids, strict=True)], np.zeros(count + 1)
        )
        columns = Columns(NAMES)
        weights = sampled if told else None
        here = summarise(
            columns.needs, logits.numpy(), drawn, temperature, sampled.numpy() if told else None, scores.numpy()
        )
        on = [None if rows is None else rows.to(device) for rows in (logits, weights, scores)]
        assert on[0] is not None
        there = summarise_on_device(columns.needs, on[0], drawn, temperature, *on[1:])
        expected, found = (columns(one, drawn, temperature) for one in (here, there))
        np.testing.assert_allclose(found, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("told", [False, True], ids=["by temperature", "told"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("width", [48, module.LONG_ROW + 700])
def test_recorded_readings_are_those_of_the_host(width: int, temperature: float, told: bool, graphs: Graphs) -> None:
    compare(width, temperature, told, "cpu", torch.Generator().manual_seed(2))
    assert 0 < graphs.recorded <= 4 < graphs.played + graphs.recorded, "3 rows are read as 4"


def test_few_recordings_are_kept(graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "recorded_reading", functools.lru_cache(2)(RecordedReading))
    for width in (20, 30, 40, 50):
        compare(width, 0.7, False, "cpu", torch.Generator().manual_seed(3))
    assert module.recorded_reading.cache_info().currsize == 2
    monkeypatch.setattr(module, "MAX_RECORDED_ROWS", 0)
    recorded = graphs.recorded
    compare(60, 0.7, False, "cpu", torch.Generator().manual_seed(4))
    assert graphs.recorded == recorded


@CUDA
@pytest.mark.gpu
@pytest.mark.parametrize("width", [48, 128256])
def test_readings_on_a_gpu_are_those_of_the_host(width: int) -> None:
    module.recorded_reading.cache_clear()
    for temperature, told in ((0.0, False), (0.7, False), (0.7, True)):
        compare(width, temperature, told, "cuda", torch.Generator().manual_seed(5))
    assert module.recorder(torch.device("cuda:0")).works, "no recording failed"
    assert module.recorded_reading.cache_info().hits, "a shape is recorded when it comes for the second time"
