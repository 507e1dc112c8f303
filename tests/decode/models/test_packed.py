"""Packed calls: several streams read at once as each would by itself, in every kind of model."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import pytest
import torch
from small_models import table
from specstop.decode.models.attention import Part, TreeRows
from specstop.decode.models.cache import CachedModel
from specstop.decode.models.engine import speed_up
from specstop.decode.topology import Topology, parse_tree
from transformers import PreTrainedModel

NEAR = {"sdpa": 1e-10, "eager": 1e-4}  # eager attention takes its softmax in float32 whatever the dtype
MODELS = [
    ("llama", "sdpa"), ("llama", "eager"), ("mistral-window", "sdpa"), ("gemma2", "eager"), ("gemma3", "sdpa"),
    ("opt", "eager"), ("gpt2", "sdpa"), ("qwen3", "sdpa"),
]  # fmt: skip
TREE = parse_tree("2,2,1")
STREAMS = 3


def tokens(count: int, draw: random.Random) -> list[int]:
    return [draw.randrange(3, table.VOCABULARY) for _ in range(count)]


def subtree(tree: Topology, draw: random.Random) -> list[int]:
    """Rows of a part of a tree that is closed under parents."""
    rows = [0]
    for row, parent in enumerate(tree.parent):
        if parent in rows and draw.random() < 0.7:
            rows.append(row)
    return rows


@torch.no_grad()
def check(model: PreTrainedModel, near: float, hidden: bool = True) -> None:
    """Three streams in one cache against three caches of one stream, in pieces of every kind, with texts that begin anew."""
    draw = random.Random(5)
    together = CachedModel(model, 60, table.VOCABULARY, hidden, STREAMS)
    alone = [CachedModel(model, 60, table.VOCABULARY, hidden) for _ in range(STREAMS)]
    kept = [0] * STREAMS
    for turn in range(24):
        streams = sorted(draw.sample(range(STREAMS), draw.randint(1, STREAMS)), key=lambda _: draw.random())
        parts, trees = [], {}
        for stream in streams:
            length = together.lengths[stream]
            if length > 35:  # a text ends, and another begins in its place
                together.roll_back(0, stream)
                alone[stream].roll_back(0)
                length = 0
            if length and draw.random() < 0.5:
                trees[stream] = TreeRows(TREE, length, [], subtree(TREE, draw))
                parts.append(Part(stream, tokens(len(trees[stream].rows), draw), tree=trees[stream]))
            else:
                count = draw.randint(1, 5)
                parts.append(Part(stream, tokens(count, draw), draw.choice([0, 1, count])))
        logits, states = together.read_parts(parts), together.states
        expected, expected_states = [], []
        for part in parts:
            own = Part(0, part.tokens, part.rows, part.tree)
            expected.append(alone[part.stream].read_parts([own]))
            expected_states.append(alone[part.stream].states)
        torch.testing.assert_close(logits, torch.cat(expected), atol=near, rtol=0)
        if hidden:
            torch.testing.assert_close(states, torch.cat(expected_states, 1), atol=10 * near, rtol=0)
        for stream, tree in trees.items():
            path = [0, *(row for row in tree.rows if TREE.parent[row] == 0)][:2]
            slots = [tree.base + list(tree.rows).index(row) for row in path]
            together.keep(tree.base, slots, stream)
            alone[stream].keep(tree.base, slots)
            kept[stream] += 1
        assert list(together.lengths) == [cache.length for cache in alone], turn
    assert min(kept) > 1


@pytest.mark.parametrize("kind", MODELS, ids="-".join)
def test_streams_read_together_as_they_do_alone(kind: tuple[str, str]) -> None:
    check(table.build(kind[0], torch.float64, kind[1]), NEAR[kind[1]])


def test_the_compact_forward_reads_them_too() -> None:
    for kind in ("llama", "qwen3"):
        check(speed_up(table.build(kind, torch.float64), "compact"), NEAR["sdpa"])


def test_a_long_part_is_read_by_itself() -> None:
    """Beside others of one token: these are not filled up to its length."""
    model = table.build("llama", torch.float64)
    draw = random.Random(2)
    with torch.no_grad():
        cache = CachedModel(model, 200, table.VOCABULARY, streams=3)
        cache.read_parts([Part(stream, tokens(3, draw), 1) for stream in range(3)])
        sizes = []
        stock = cache.model.forward

        def forward(*args: object, **more: torch.Tensor) -> object:
            sizes.append(more["input_ids"].shape[1])
            return stock(*args, **more)

        cache.model.forward = forward  # type: ignore[method-assign]
        cache.read_parts([Part(0, tokens(1, draw)), Part(1, tokens(90, draw), 1), Part(2, tokens(2, draw))])
    assert sizes == [90, 3]


def test_attention_reads_the_rows_up_to_the_last_in_use() -> None:
    model = table.build("llama", torch.float64)
    draw = random.Random(3)
    read: list[tuple[int, ...]] = []
    stock = torch.nn.functional.scaled_dot_product_attention

    def attention(query: torch.Tensor, key: torch.Tensor, *args: Any, **more: Any) -> torch.Tensor:
        read.append((len(query), len(key)))
        return stock(query, key, *args, **more)

    with torch.no_grad(), mock.patch("torch.nn.functional.scaled_dot_product_attention", attention):
        cache = CachedModel(model, 40, table.VOCABULARY, streams=6)
        for stream in range(6):
            cache.read_parts([Part(stream, tokens(5, draw), 1)])
        read.clear()
        cache.read_parts([Part(2, tokens(1, draw)), Part(0, tokens(2, draw))])
    assert set(read) == {(3, 3)}
