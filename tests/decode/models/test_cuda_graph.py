"""Recorded calls give the same logits and texts; on the CPU a tape simulates CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from conftest import VOCABULARY, build_draft, build_model
from small_models import table
from specstop.decode import Settings, Speculator, parse_tree
from specstop.decode.loop import Request
from specstop.decode.models import cuda as cuda_module
from specstop.decode.models.attention import Part, TreeRows
from specstop.decode.models.cache import CachedModel
from specstop.decode.models.cuda import CudaGraphModel
from specstop.decode.models.device import round_up_size
from specstop.decode.models.pair import Pair, join
from specstop.policies.errors import SpecstopWarning
from specstop.policies.fixed import Confidence
from tape import Graphs, record_calls, recorder, simulate_graphs
from transformers import PreTrainedModel

Patch = pytest.MonkeyPatch

TREE = parse_tree("2,2,1")
Logits = list[torch.Tensor]


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: Patch) -> None:
    """Let texts of dozens of tokens pass through several sizes of attention."""
    monkeypatch.setattr(cuda_module, "MIN_SLOTS", 16)


@pytest.fixture
def graphs(monkeypatch: Patch) -> Graphs:
    return simulate_graphs(monkeypatch)


@pytest.fixture
def recording(monkeypatch: Patch) -> Graphs:
    return record_calls(monkeypatch)


@pytest.fixture
def model() -> PreTrainedModel:
    """A new model: recordings are kept by model."""
    return build_model()


@pytest.fixture
def pair(model: PreTrainedModel) -> Pair:
    return join(model, build_draft(model))


def recorded_model(model: PreTrainedModel, capacity: int = 120, *options: Any) -> CudaGraphModel:
    return CudaGraphModel(model, capacity, VOCABULARY, *options, recorder=recorder)


def chain(cache: CachedModel, tokens: Sequence[int] | torch.Tensor, rows: int = 0) -> torch.Tensor:
    return cache.read_parts([Part(0, tokens, rows)])


def readings(cache: CachedModel) -> Logits:
    """Return logits of a prompt, single tokens, several, trees, and after a compaction, several times each."""
    generator, out = torch.Generator().manual_seed(4), []

    def tokens(count: int) -> torch.Tensor:
        return torch.randint(1, VOCABULARY, (count,), generator=generator)

    out.append(chain(cache, tokens(5), 1))
    for _ in range(6):
        out += [chain(cache, tokens(1), 1), chain(cache, tokens(3))]
        base, row = cache.length, tokens(len(TREE))
        out.append(cache.read_parts([Part(0, row[:3], tree=TreeRows(TREE, base, [], [0, 1, 2]))]))
        out.append(cache.read_parts([Part(0, row[4:5], tree=TreeRows(TREE, base, [0, 1, 2], [4]))]))
        out += [] if cache.states is None else [cache.states]
        cache.keep(base, [base, base + 2])
    return out


def assert_same(first: Logits, second: Logits, near: float = 1e-10) -> None:
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(b, a, atol=near, rtol=near)


def texts(pair: Pair, prompts: list[list[int]], batch: int = 1, tree: str | None = None) -> list[tuple[int, ...]]:
    settings = Settings(0.7, 12, tree=tree, verification="match")
    speculator = Speculator(pair, Confidence(0.2, 3), settings, batch=batch)
    return [text.tokens for text in speculator.run([Request(ids, key) for key, ids in enumerate(prompts)])]


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama states", "llama eager", "mistral-window", "gemma3", "gpt2", "opt"])
def test_recorded_calls_give_the_same_logits(name: str, graphs: Graphs) -> None:
    kind, states = name.split()[0], name.endswith("states")
    attention = "eager" if kind in table.EAGER_ONLY or name.endswith("eager") else "sdpa"
    model = table.build(kind, torch.float64, attention)
    fixed, near = recorded_model(model, 120, states), 1e-10 if attention == "sdpa" else 1e-4
    assert_same(readings(CachedModel(model, 120, VOCABULARY, states)), readings(fixed), near)
    assert graphs.played >= graphs.recorded > 4, "calls of several sizes of attention were recorded"
    assert len(graphs.pools) == 1 and model.config._attn_implementation == attention


@torch.no_grad()
def test_a_call_is_recorded_when_it_comes_again_and_a_prompt_never(model: PreTrainedModel, graphs: Graphs) -> None:
    cache = recorded_model(model)
    for _ in range(3):
        cache.roll_back(0)
        chain(cache, [1] * 9, 1)
    assert graphs.recorded == 0
    for count in (0, 1, 1, 1):
        chain(cache, [1], 1)
        assert graphs.recorded == count
    assert graphs.played == 3
    for _ in range(10):  # past 16 tokens, attention reads the next size
        chain(cache, [1], 1)
    assert graphs.recorded == 2


@torch.no_grad()
def test_calls_can_be_recorded_in_advance(model: PreTrainedModel, graphs: Graphs) -> None:
    cache, reference = recorded_model(model), CachedModel(model, 120, VOCABULARY)
    cache.prepare([(1, 1), (3, 0)], [10, 12, 40])
    assert (graphs.recorded, cache.length) == (4, 0), "two calls at two sizes of attention"
    for tokens in ([3] * 9, [5] * 3):
        assert_same([chain(reference, tokens)], [chain(cache, tokens)])
    assert graphs.recorded == 4


def test_texts_of_recorded_calls_are_the_same_and_batches_share_them(
    pair: Pair, prompt_ids: list[list[int]], monkeypatch: Patch
) -> None:
    """Batches of one, three and two texts: the smaller batch uses the recordings of the larger one."""
    expected = {tree: texts(pair, prompt_ids[:3], 1, tree) for tree in (None, "2,2,1")}
    graphs, recorded = record_calls(monkeypatch), []
    for _ in range(3):
        before = graphs.recorded
        for tree, tokens in expected.items():
            assert [texts(pair, prompt_ids[:3], batch, tree) for batch in (1, 3, 2)] == [tokens] * 3
        recorded.append(graphs.recorded - before)
    assert recorded[0] > recorded[2] == 0 and graphs.played > 100


def test_loops_in_several_threads_have_separate_recordings(
    pair: Pair, recording: Graphs, prompt_ids: list[list[int]]
) -> None:
    expected = texts(pair, prompt_ids[:3])
    with ThreadPoolExecutor(4) as pool:
        batches = [1, 2, 3, 1] * 2
        assert list(pool.map(lambda batch: texts(pair, prompt_ids[:3], batch), batches)) == [expected] * len(batches)
    assert recording.played


@torch.no_grad()
def test_a_call_that_cannot_be_recorded_is_warned_of_once(model: PreTrainedModel, graphs: Graphs) -> None:
    def read_back(module: object, inputs: object, output: torch.Tensor) -> None:
        output.sum().item()

    model.lm_head.register_forward_hook(read_back)
    with pytest.warns(SpecstopWarning, match="cuda:1 cannot be recorded .*not permitted when stream") as warned:
        assert_same(readings(CachedModel(model, 120, VOCABULARY)), readings(recorded_model(model)))
    assert len(warned) == 1 and graphs.recorded == 0
    assert graphs.stream[1] == "first", "the stream of the recording is left"


@torch.no_grad()
def test_a_smaller_cache_takes_over_the_recordings_of_a_model(model: PreTrainedModel, graphs: Graphs) -> None:
    cache = recorded_model(model)
    expected = readings(cache)
    cache.roll_back(0)
    assert_same(expected, readings(cache))
    recorded = graphs.recorded
    del cache
    assert_same(expected, readings(recorded_model(model, 60)))
    assert graphs.recorded == recorded


def test_long_calls_are_filled_up_to_few_sizes() -> None:
    sizes = [round_up_size(count) for count in range(1, 1025)]
    assert sizes == sorted(sizes) and len(set(sizes)) < 32
    assert all(count <= size <= max(32, 1.25 * count) for count, size in enumerate(sizes, 1))


@torch.no_grad()
def test_recordings_are_bounded_by_their_number_and_memory(
    model: PreTrainedModel, graphs: Graphs, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(cuda_module, "MAX_CALLS", 4)
    cache, reference = recorded_model(model), CachedModel(model, 120, VOCABULARY)

    def recordings_of(count: int) -> int:
        before = graphs.recorded
        for _ in range(2):
            assert_same(*([chain(one, [3] * 5, 1), chain(one, [7] * count)] for one in (cache, reference)))
            for one in (cache, reference):
                one.roll_back(0)
        return graphs.recorded - before

    assert [recordings_of(count) for count in (1, 2, 3, 4, 1, 5)] == [1, 1, 1, 1, 0, 1]  # 5 replaces the oldest, 2
    assert [recordings_of(count) for count in (1, 3, 4, 5, 2)] == [0, 0, 0, 0, 1]
    limit = 6 * VOCABULARY * torch.float64.itemsize  # six rows of logits
    monkeypatch.setattr(cuda_module, "device_bytes", lambda device: limit / cuda_module.RECORDED_SHARE)
    for count in (1, 2, 3, 4, 5, 6):
        recordings_of(count)
        assert sum(call.size for call in cache._memory.calls.values()) <= limit
