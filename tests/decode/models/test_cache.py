"""Cached reading: calls of any lengths, roll-backs, trees, several streams and each engine give the logits of the library."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hub
from conftest import VOCABULARY, build_model
from small_models import table
from specstop.decode import Settings, Speculator, load_pair, parse_tree
from specstop.decode.models import attention as attention_module
from specstop.decode.models.attention import Part, TreeRows, divided_attention
from specstop.decode.models.cache import CachedModel
from specstop.decode.models.cuda import CudaGraphModel
from specstop.decode.models.engine import CompactModel, PackedLinear, choose_engine, speed_up
from specstop.decode.models.pair import Pair
from specstop.decode.topology import Topology
from specstop.policies import FixedLength
from specstop.policies.errors import InputError
from tape import recorder, simulate_graphs
from torch.nn import functional

NEAR = {"sdpa": 1e-10, "eager": 1e-4}  # eager attention computes its softmax in float32 in every dtype
FLOAT32 = 2e-4
TREE, STREAMS = parse_tree("2,2,1"), 3
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(autouse=True)
def without_gradients() -> Any:
    with torch.no_grad():
        yield


@pytest.fixture(params=["sdpa", "eager"])
def model(request: pytest.FixtureRequest, plain_pair: Pair, eager_pair: Pair) -> hub.PreTrainedModel:
    return (plain_pair if request.param == "sdpa" else eager_pair).target


def full(model: hub.PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    return model(input_ids=tokens, use_cache=False).logits


def random_tokens(*shape: int, seed: int = 0, first: int = 0) -> torch.Tensor:
    return torch.randint(first, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def test_short_calls_and_roll_backs_equal_one_forward(model: hub.PreTrainedModel) -> None:
    near, draw, seed = NEAR[model.config._attn_implementation], random.Random(1), 1
    cached, text = CachedModel(model, 40, VOCABULARY), torch.zeros(1, 0, dtype=torch.int64)
    for step in range(20):
        new = random_tokens(1, 1 + draw.randrange(5), seed=100 * seed + step)
        text = torch.cat([text, new], 1)
        rows = draw.choice([0, 1])
        logits = cached.read(new, rows)
        assert cached.length == text.shape[1]
        torch.testing.assert_close(logits, full(model, text)[:, -(rows or new.shape[1]) :], atol=near, rtol=0)
        cached.roll_back(max(0, min(text.shape[1] - draw.randrange(4), 30)))
        text = text[:, : cached.length]


def subtree(tree: Topology, draw: random.Random) -> list[int]:
    """Return random rows of a tree that include their parents."""
    rows = [0]
    for row, parent in enumerate(tree.parent):
        if parent in rows and draw.random() < 0.7:
            rows.append(row)
    return rows


@pytest.mark.parametrize(
    ("kind", "attention", "engine"),
    [("llama", "eager", "plain"), ("mistral-window", "sdpa", "plain"), ("gemma2", "eager", "plain"),
     ("opt", "eager", "plain"), ("gpt2", "sdpa", "plain"), ("llama", "sdpa", "compact")],
)  # fmt: skip
def test_a_stream_in_a_batch_is_read_as_alone(kind: str, attention: str, engine: str) -> None:
    """Random calls of three streams in one cache and in three caches; texts end and others begin in their place."""
    draw, near = random.Random(5), NEAR[attention]
    model = speed_up(table.build(kind, torch.float64, attention), engine)
    together = CachedModel(model, 60, table.VOCABULARY, True, STREAMS)
    alone = [CachedModel(model, 60, table.VOCABULARY, True) for _ in range(STREAMS)]
    trees_kept = [0] * STREAMS
    for turn in range(24):
        parts, trees = [], {}
        for stream in draw.sample(range(STREAMS), draw.randint(1, STREAMS)):
            if together.lengths[stream] > 35:
                together.roll_back(0, stream)
                alone[stream].roll_back(0)
            length, count = together.lengths[stream], draw.randint(1, 5)
            if length and draw.random() < 0.5:
                trees[stream] = TreeRows(TREE, length, [], subtree(TREE, draw))
                count = len(trees[stream].rows)
            ids = [draw.randrange(3, table.VOCABULARY) for _ in range(count)]
            rows = 0 if stream in trees else draw.choice([0, 1, count])
            parts.append(Part(stream, ids, rows, tree=trees.get(stream)))
        logits, states = together.read_parts(parts), together.states
        expected = [alone[part.stream].read_parts([Part(0, part.tokens, part.rows, part.tree)]) for part in parts]
        expected_states = torch.cat([alone[part.stream].states for part in parts], 1)
        torch.testing.assert_close(logits, torch.cat(expected), atol=near, rtol=0)
        torch.testing.assert_close(states, expected_states, atol=10 * near, rtol=0)
        for stream, tree in trees.items():
            path = [0, *(row for row in tree.rows if TREE.parent[row] == 0)][:2]
            slots = [tree.base + list(tree.rows).index(row) for row in path]
            together.keep(tree.base, slots, stream)
            alone[stream].keep(tree.base, slots)
            trees_kept[stream] += 1
        assert list(together.lengths) == [cache.length for cache in alone], turn
    assert min(trees_kept) > 1


SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 96, "initializer_range": 0.3, "pad_token_id": 0,
}  # fmt: skip
ALL_HEADS = {name: SMALL[name] for name in SMALL if name != "num_key_value_heads"}
SCALED = {"rope_theta": 10000.0, "factor": 2.0}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 96, "initializer_range": 0.3}
OPT = {"vocab_size": 64, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "max_position_embeddings": 96}
ENGINES: dict[str, tuple[hub.PreTrainedConfig, tuple[str, ...]]] = {
    "llama": (hub.LlamaConfig(**SMALL), ("compact",)),
    "llama-biased-tied": (
        hub.LlamaConfig(**ALL_HEADS, attention_bias=True, tie_word_embeddings=True),
        ("compact", "packed"),
    ),
    "llama-linear": (hub.LlamaConfig(**SMALL, rope_parameters={"rope_type": "linear", **SCALED}), ("compact",)),
    "llama-3": (hub.LlamaConfig(**SMALL, rope_parameters={"rope_type": "llama3", **SCALED, **LLAMA3}), ("compact",)),
    "mistral": (hub.MistralConfig(**SMALL, sliding_window=None, head_dim=8), ("compact",)),
    "qwen3": (hub.Qwen3Config(**SMALL, head_dim=16), ("compact", "packed")),
    "gpt2": (hub.GPT2Config(**GPT2), ("packed",)),
    "gpt-neox": (hub.GPTNeoXConfig(**ALL_HEADS), ("packed",)),
    "opt": (hub.OPTConfig(**OPT, num_attention_heads=4, word_embed_proj_dim=32, init_std=0.3), ("packed",)),
}


def build(config: hub.PreTrainedConfig) -> hub.PreTrainedModel:
    torch.manual_seed(5)
    model: hub.PreTrainedModel = hub.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    for name, weight in model.named_parameters():
        if "norm" in name or name.endswith("bias"):  # their initial ones and zeros would hide a mistake
            weight.add_(0.3 * torch.randn(weight.shape))
    return model.float().eval()


def readings(model: hub.PreTrainedModel) -> list[torch.Tensor]:
    """Return logits and states of a prompt, one token, several, a long run, the last rows, a tree and a part of it."""
    cache, out = CachedModel(model, 96, 64, hidden=(0, -1)), []
    for count, rows in ((7, 1), (1, 0), (4, 0), (66, 3)):
        out.append(cache.read(random_tokens(1, count, seed=count, first=1), rows))
        assert cache.states is not None
        out.append(cache.states)
    cache.roll_back(20)
    row = random_tokens(len(TREE), first=1).tolist()
    out.append(cache.read_parts([Part(0, row[:3], tree=TreeRows(TREE, 20, [], [0, 1, 2]))]))
    out.append(cache.read_parts([Part(0, [row[4]], tree=TreeRows(TREE, 20, [0, 1, 2], [4]))]))
    cache.keep(20, [20, 22])
    return [*out, cache.read(random_tokens(1, 2, seed=9, first=1))]


@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_gives_the_librarys_logits_and_states(name: str) -> None:
    config, engines = ENGINES[name]
    model = build(config)
    expected, weights = readings(model), {name: weight.clone() for name, weight in model.state_dict().items()}
    for engine in engines:  # packed weights, which are changed in place, come last
        fast = speed_up(model, choose_engine(model, engine))
        assert engine == "compact" or sum(isinstance(module, PackedLinear) for module in fast.modules()) > 8
        for a, b in zip(expected, readings(fast), strict=True):
            assert float(a.std()) > 0.1
            torch.testing.assert_close(b, a, atol=FLOAT32, rtol=FLOAT32)
        if engine == "compact":
            assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())


def test_the_fastest_engine_is_chosen_and_others_are_refused_with_the_reason() -> None:
    llama, gpt2 = build(ENGINES["llama"][0]), build(ENGINES["gpt2"][0])
    windowed = build(hub.MistralConfig(**SMALL, sliding_window=8))
    assert [choose_engine(model) for model in (llama, gpt2)] == ["compact", "packed"]
    for model, engine, reason in (
        (gpt2, "compact", "not for gpt2"),
        (windowed, "compact", "sliding windows"),
        (windowed, "turbo", "not 'turbo'"),
        (llama.double(), "packed", "float64"),
    ):
        with pytest.raises(InputError, match=reason):
            choose_engine(model, engine)
    assert choose_engine(llama) == "plain"


def test_pairs_of_every_engine_have_one_fingerprint_and_one_text(
    pair_folder: Path, prompt_ids: list[list[int]]
) -> None:
    folders, engines = (pair_folder / "target", pair_folder / "draft"), ("plain", "packed", "compact", "auto")
    pairs = [load_pair(*folders, engine=engine) for engine in engines]
    assert [pair.engines[0] for pair in pairs] == ["plain", "packed", "compact", "compact"]
    assert len({tuple(pair.fingerprint.items()) for pair in pairs}) == 1
    for tree in (None, "2,2,1"):
        texts = [
            [
                Speculator(p, FixedLength(3), Settings(0.0, 12, tree=tree)).generate(ids).tokens
                for ids in prompt_ids[2:5]
            ]
            for p in pairs
        ]
        assert texts[1:] == texts[:1] * 3


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize(("queries", "visible"), [(1, 4096), (1, 700), (3, 4000), (9, 5)])
def test_attention_in_parts_equals_the_whole(queries: int, visible: int, device: str) -> None:
    """Parts without visible keys add nothing."""
    generator, dtype = torch.Generator().manual_seed(3), torch.float32
    query, key, value = (
        torch.randn(1, 2, count, 32, generator=generator).to(device) for count in (queries, 4096, 4096)
    )
    mask = torch.full((1, 1, queries, 4096), torch.finfo(dtype).min / 2)
    for row in range(queries):
        mask[..., row, : max(visible - row, 1)] = 0.0
    mask = mask.to(device)
    whole = functional.scaled_dot_product_attention(query.double(), key.double(), value.double(), mask.double())
    parts = divided_attention(query, key, value, mask, None)
    torch.testing.assert_close(parts, whole.to(dtype), atol=2e-5, rtol=2e-5)


def test_a_compact_model_with_grouped_heads_attends_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where queries that share a head are grouped."""
    divided: list[int] = []

    def counting(query: torch.Tensor, key: torch.Tensor, *rest: Any) -> torch.Tensor:
        divided.append(key.shape[2])
        return divided_attention(query, key, *rest)

    monkeypatch.setattr(attention_module, "is_divided", lambda query, key, mask: key.shape[2] >= 512)
    monkeypatch.setattr(attention_module, "divided_attention", counting)
    model = build_model(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=700).float()
    compact: Any = CompactModel(model)
    compact._grouped = True
    simulate_graphs(monkeypatch)
    caches = CachedModel(model, 640, VOCABULARY), CudaGraphModel(compact, 640, VOCABULARY, recorder=recorder)
    tokens = random_tokens(640, seed=1, first=1)
    steps = *((at, at + 2) for at in range(300, 306, 2)), (306, 510), *((at, at + 3) for at in range(510, 530, 3))
    for first, end in ((0, 300), *steps):
        expected, logits = (cache.read_parts([Part(0, tokens[first:end])]) for cache in caches)
        torch.testing.assert_close(logits, expected, atol=FLOAT32, rtol=FLOAT32)
    assert set(divided) == {512, 768}
