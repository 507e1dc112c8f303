"""Trees in the cache: each row has the logits of its chain, and a kept path equals the same text read without a tree."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from small_models import table
from specstop.decode.models.attention import Part, TreeRows
from specstop.decode.models.cache import CachedModel
from specstop.decode.topology import Topology, parse_tree
from torch import Tensor
from transformers import PreTrainedModel

NEAR = {"sdpa": 1e-10, "eager": 1e-4}  # eager attention computes its softmax in float32
MODELS = [("llama", "sdpa"), ("llama", "eager"), ("mistral-window", "sdpa"), ("gemma3", "sdpa"), ("opt", "eager")]
TREES = ["chain:5", "3,2,2", "fork:3x3", "parents:-1,-1,0,0,1,2,5", f"fork:2x{table.WINDOW + 4}"]


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(3, table.VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def check(model: PreTrainedModel, logits: Tensor, texts: Sequence[Sequence[int]]) -> None:
    """Compare logits with the last row of each text in one forward pass without a cache."""
    alone = [model(torch.tensor([list(text)]), use_cache=False).logits[0, -1] for text in texts]
    near = NEAR[model.config._attn_implementation]
    torch.testing.assert_close(logits, torch.stack(alone), atol=near, rtol=0)


def path(tree: Topology, row: int) -> list[int]:
    return [*path(tree, tree.parent[row]), row] if row >= 0 else []


@pytest.mark.parametrize(("kind", "attention"), MODELS, ids="-".join)
@torch.no_grad()
def test_rows_of_a_tree_have_the_logits_of_their_chains_before_and_after_a_path_is_kept(kind, attention):
    """The rows are read at once, or level by level with rows missing; a second tree follows the kept path."""
    model = table.build(kind, torch.float64, attention)
    for seed, name in enumerate(TREES):
        tree, draw = parse_tree(name), random.Random(seed)
        rows = list(range(len(tree)))
        if seed % 2:
            rows = [row for row in rows if row != len(tree) // 2 and len(tree) // 2 not in path(tree, row)]
        levels = [[row for row in rows if tree.depth[row] == depth] for depth in range(tree.deepest + 1)]
        prefix = tokens((2, 9, 12)[seed % 3], seed)
        cached = CachedModel(model, 80, table.VOCABULARY)
        cached.read(torch.tensor([prefix]))
        for parts in ([rows], [level for level in levels if level]):
            words, read = tokens(len(tree), seed + 1), list[int]()
            for part in parts:
                at = TreeRows(tree, len(prefix), read, part)
                logits = cached.read_parts([Part(0, [words[row] for row in part], tree=at)])
                read += part
                check(model, logits, [[*prefix, *(words[r] for r in path(tree, row))] for row in part])
            kept = path(tree, draw.choice(rows[2:]))
            cached.keep(len(prefix), [len(prefix) + read.index(row) for row in kept])
            prefix = [*prefix, *(words[row] for row in kept)]
            assert cached.length == len(prefix)
            check(model, cached.read(torch.tensor([[7, 9]]))[0], [[*prefix, 7], [*prefix, 7, 9]])
            prefix += [7, 9]


def test_a_model_that_returns_all_rows_is_cut_to_those_requested():
    model = table.build("llama", torch.float64)
    original, ids = model.forward, torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        expected = CachedModel(model, 9, table.VOCABULARY).read(ids, rows=2)
        model.forward = lambda *args, logits_to_keep, **more: original(*args, **more)
        assert torch.equal(CachedModel(model, 9, table.VOCABULARY).read(ids, rows=2), expected)
