"""Cached reading: calls of any lengths, roll-backs, trees, several streams, each engine, and calls that are recorded.

On the CPU a tape simulates CUDA graphs.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import random_models as table
import torch
import transformers as hub
from conftest import VOCABULARY, build_draft, build_model
from specstop.decode import Settings, Speculator, join, parse_tree
from specstop.decode.loop import Request
from specstop.decode.models import cuda as cuda_module
from specstop.decode.models.attention import PACKED, Part, TreeRows
from specstop.decode.models.cache import CachedModel
from specstop.decode.models.cuda import CudaGraphModel
from specstop.decode.models.engine import PackedLinear, choose_engine, speed_up
from specstop.decode.models.view import open_view
from specstop.policies import Confidence, InputError, SpecstopWarning
from tape import record_calls, recorder, simulate_graphs

NEAR = {"sdpa": 1e-10, "eager": 1e-4}  # eager attention computes its softmax in float32 in every dtype
FLOAT32 = 2e-4
TREE, STREAMS = parse_tree("2,2,1"), 3
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture
def without_gradients():
    with torch.no_grad():
        yield


def random_tokens(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))


def chain(cache: CachedModel, tokens: Sequence[int] | torch.Tensor, rows: int = 0) -> torch.Tensor:
    return cache.read_parts([Part(0, tokens, rows)])


def readings(cache: CachedModel) -> list[torch.Tensor]:
    """Return logits and states of a prompt, single tokens, several, trees and a part of them, and a long run.

    Each call comes several times. Rejected tokens are removed in between.
    """
    out = [chain(cache, random_tokens(5), 1)]
    for seed in range(6):
        out += [chain(cache, random_tokens(1, seed), 1), chain(cache, random_tokens(3, seed))]
        base, row = cache.lengths[0], random_tokens(len(TREE), seed)
        out.append(cache.read_parts([Part(0, row[:3], tree=TreeRows(TREE, base, [], [0, 1, 2]))]))
        out.append(cache.read_parts([Part(0, row[4:5], tree=TreeRows(TREE, base, [0, 1, 2], [4]))]))
        out += [] if cache.states is None else [cache.states]
        cache.keep(base, [base, base + 2])
    return [*out, chain(cache, random_tokens(66), 3)]


def assert_same(expected: list[torch.Tensor], observed: list[torch.Tensor], near: float = 1e-10) -> None:
    for a, b in zip(expected, observed, strict=True):
        torch.testing.assert_close(b, a, atol=near, rtol=near)


# Streams and trees


def subtree(draw: random.Random) -> list[int]:
    """Return random rows of the tree that include their parents."""
    rows = [0]
    for row, parent in enumerate(TREE.parent):
        if parent in rows and draw.random() < 0.7:
            rows.append(row)
    return rows


@pytest.mark.usefixtures("without_gradients")
@pytest.mark.parametrize(
    ("kind", "attention"),
    [
        ("llama", "sdpa"), ("llama", "eager"), ("mistral-window", "sdpa"), ("gemma2", "eager"), ("opt", "eager"),
        ("gpt2", "sdpa"),
    ],
)  # fmt: skip
def test_each_row_has_the_logits_and_states_of_a_whole_forward_pass(kind, attention):
    """Random calls of three streams; tokens are rolled back, trees are cut to a path, and texts are replaced by others."""
    draw, near = random.Random(5), NEAR[attention]
    model = table.build(kind, torch.float64, attention)
    cache = CachedModel(model, 60, table.VOCABULARY, True, STREAMS)
    texts: list[list[int]] = [[] for _ in range(STREAMS)]
    trees_kept = [0] * STREAMS
    for _ in range(24):
        parts, trees, prefixes = list[Part](), list[tuple[TreeRows, int]](), list[list[int]]()
        for stream in draw.sample(range(STREAMS), draw.randint(1, STREAMS)):
            text = texts[stream]
            del text[0 if len(text) > 35 else max(0, len(text) - draw.randrange(4)) :]
            cache.roll_back(len(text), stream)
            if text and draw.random() < 0.5:
                rows = subtree(draw)
                ids = {row: draw.randrange(3, table.VOCABULARY) for row in rows}
                trees.append((tree := TreeRows(TREE, len(text), [], rows), stream))
                parts.append(Part(stream, list(ids.values()), tree=tree))
                paths = {-1: list(text)}
                for row in rows:
                    paths[row] = [*paths[TREE.parent[row]], ids[row]]
                    prefixes.append(paths[row])
                text += [ids[row] for row in rows[:1] + [row for row in rows if TREE.parent[row] == 0][:1]]
            else:
                new = [draw.randrange(3, table.VOCABULARY) for _ in range(draw.randint(1, 5))]
                text += new
                parts.append(Part(stream, new, last := draw.choice([0, 1, len(new)])))
                prefixes += [text[: len(text) - back] for back in range(last or len(new))[::-1]]
        logits, states = cache.read_parts(parts), cache.states
        assert states is not None
        for prefix, row, state in zip(prefixes, logits, states[0], strict=True):
            expected = model(torch.tensor([prefix]), use_cache=False, output_hidden_states=True)
            torch.testing.assert_close(row, expected.logits[0, -1], atol=near, rtol=0)
            torch.testing.assert_close(state, expected.hidden_states[-1][0, -1], atol=10 * near, rtol=0)
        for tree, stream in trees:
            path = [0, *(row for row in tree.rows if TREE.parent[row] == 0)][:2]
            cache.keep(tree.base, [tree.base + list(tree.rows).index(row) for row in path], stream)
            trees_kept[stream] += 1
        assert list(cache.lengths) == [len(text) for text in texts]
    assert min(trees_kept) > 1


# Engines

SCALED = {"rope_theta": 10000.0, "factor": 2.0}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
ENGINES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "llama": ("llama", {}, ("compact",)),
    "llama-biased-tied": ("llama", {"attention_bias": True, "tie_word_embeddings": True}, ("compact", "packed")),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", **SCALED}}, ("compact",)),
    "llama-3": ("llama", {"rope_parameters": {"rope_type": "llama3", **SCALED, **LLAMA3}}, ("compact",)),
    "mistral": ("mistral", {}, ("compact",)),
    "qwen3": ("qwen3", {"head_dim": 16}, ("compact", "packed")),
    **{name: (name, {}, ("packed",)) for name in ("gpt2", "gpt-neox", "opt", "mistral-window", "gemma3")},
}
"""Kind of model, further fields, and the engines that it is compared with."""


@torch.no_grad()
def build(kind: str, **fields: Any) -> hub.PreTrainedModel:
    model = table.build(kind, torch.float32, seed=5, **fields)
    for name, weight in model.named_parameters():
        if "norm" in name or name.endswith("bias"):  # their initial ones and zeros would hide a mistake
            weight.add_(0.3 * torch.randn(weight.shape))
    return model


@pytest.mark.usefixtures("without_gradients")
@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_gives_the_librarys_logits_and_states(name):
    kind, fields, engines = ENGINES[name]
    model = build(kind, **fields)

    def read(model: hub.PreTrainedModel) -> list[torch.Tensor]:
        return readings(CachedModel(model, 120, table.VOCABULARY, hidden=(0, -1)))

    expected, weights = read(model), {name: weight.clone() for name, weight in model.state_dict().items()}
    assert min(float(one.std()) for one in expected) > 0.1
    for engine in engines:  # packed weights, which are changed in place, come last
        fast = speed_up(model, choose_engine(model, engine))
        assert engine == "compact" or sum(isinstance(module, PackedLinear) for module in fast.modules()) > 8
        assert_same(expected, read(fast), FLOAT32)
        if engine == "compact":
            assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())


def test_the_fastest_engine_is_chosen_and_others_are_refused_with_the_reason():
    llama, gpt2, windowed = build("llama"), build("gpt2"), build("mistral-window")
    assert [choose_engine(model) for model in (llama, gpt2)] == ["compact", "packed"]
    for model, engine, reason in (
        (gpt2, "compact", "not for gpt2"), (windowed, "compact", "sliding windows"), (windowed, "turbo", "not 'turbo'"),
        (llama.double(), "packed", "float64"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=reason):
            choose_engine(model, engine)
    assert choose_engine(llama) == "plain"


# Recorded calls


@pytest.fixture
def graphs(monkeypatch):
    """Simulate CUDA graphs, with texts of dozens of tokens passing through several sizes of attention."""
    monkeypatch.setattr(cuda_module, "MIN_SLOTS", 16)
    return simulate_graphs(monkeypatch)


@pytest.fixture
def model():
    """A new model: recordings are kept by model."""
    return build_model()


def recorded_model(model: hub.PreTrainedModel, capacity: int = 120, *options: Any) -> CudaGraphModel:
    return CudaGraphModel(model, capacity, VOCABULARY, *options, recorder=recorder)


@pytest.mark.usefixtures("without_gradients")
@pytest.mark.parametrize("name", ["llama states", "llama eager", "mistral-window", "gemma3", "gpt2", "opt"])
def test_recorded_calls_give_the_same_logits(name, graphs):
    kind, states = name.split()[0], name.endswith("states")
    attention = "eager" if kind in table.EAGER_ONLY or name.endswith("eager") else "sdpa"
    model = table.build(kind, torch.float64, attention)
    expected, cache = readings(CachedModel(model, 120, VOCABULARY, states)), recorded_model(model, 120, states)
    for _ in range(2):
        cache.roll_back(0)
        assert_same(expected, readings(cache), NEAR[attention])
    recorded = graphs.recorded
    assert graphs.played >= recorded > 4, "calls of several sizes of attention were recorded"
    del cache
    assert_same(expected, readings(recorded_model(model, 110, states)), NEAR[attention])
    assert graphs.recorded == recorded, "a smaller cache takes over the recordings"
    assert len(graphs.pools) == 1 and model.config._attn_implementation == attention


def test_texts_of_recorded_calls_are_the_same_in_batches_and_in_threads(model, prompt_ids, monkeypatch):
    """A smaller batch uses the recordings of a larger one; each thread has separate recordings."""
    monkeypatch.setattr(cuda_module, "MIN_SLOTS", 16)
    pair = join(model, build_draft(model))

    def texts(batch: int, tree: str | None = None) -> list[tuple[int, ...]]:
        settings = Settings(0.7, 12, tree=tree, verification="match")
        speculator = Speculator(pair, Confidence(0.2, 3), settings, batch=batch)
        return [text.tokens for text in speculator.run([Request(ids, key) for key, ids in enumerate(prompt_ids[:3])])]

    expected = {tree: texts(1, tree) for tree in (None, "2,2,1")}
    graphs, recorded = record_calls(monkeypatch), []
    for _ in range(3):
        before = graphs.recorded
        for tree, tokens in expected.items():
            assert [texts(batch, tree) for batch in (1, 3, 2)] == [tokens] * 3
        recorded.append(graphs.recorded - before)
    assert recorded[0] > recorded[2] == 0 and graphs.played > 100
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(texts, [1, 2, 3, 1] * 2)) == [expected[None]] * 8


@pytest.mark.usefixtures("without_gradients")
@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma3"])
def test_prompts_attend_by_our_kernels_as_by_those_of_the_library(name):
    """On a GPU, views read prompts by `attend`. Only the view's config changes."""
    model = table.build(name, torch.float64, "sdpa")
    view, _ = open_view(model)
    ids = torch.randint(1, VOCABULARY, (1, 40), generator=torch.Generator().manual_seed(0))
    expected = model(ids).logits
    view.config.get_text_config()._attn_implementation = PACKED
    assert torch.allclose(view(ids).logits, expected, atol=NEAR["sdpa"])
    assert model.config.get_text_config()._attn_implementation == "sdpa"


@pytest.mark.usefixtures("without_gradients")
def test_long_verifications_and_backlogs_of_a_draft_are_recorded(model, graphs):
    cache, reference = recorded_model(model), CachedModel(model, 120, VOCABULARY)
    cache.prepare([(100, 0), (4, 1)], [13, 110])
    recorded = graphs.recorded
    for count, rows in ((100, 0), (97, 0), (3, 1), (4, 1)):
        logits = []
        for one in (cache, reference):
            one.roll_back(0)
            one.read(torch.tensor([[3] * 9]))
            logits.append(one.read_parts([Part(0, random_tokens(count), rows)]))
        assert_same([logits[0]], [logits[1]])
    assert graphs.recorded == recorded > 0, "all of them were recorded before"


@pytest.mark.usefixtures("without_gradients")
def test_a_call_that_cannot_be_recorded_is_warned_of_once(model, graphs):
    model.lm_head.register_forward_hook(lambda module, inputs, output: output.sum().item() and None)
    with pytest.warns(SpecstopWarning, match="cuda:1 cannot be recorded .*not permitted when stream") as warned:
        assert_same(readings(CachedModel(model, 120, VOCABULARY)), readings(recorded_model(model)))
    assert len(warned) == 1 and graphs.recorded == 0
    assert graphs.stream[1] == "first", "the stream of the recording is left"
