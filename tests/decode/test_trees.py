"""Trees in the cache: every path reads as the chain it is, and what is kept is as if it had been read alone."""

from __future__ import annotations

import functools
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

NEAR = {"sdpa": 1e-10, "eager": 1e-4}  # eager attention computes its softmax in float32 whatever the dtype
CAPACITY = 60
TREES = ["chain:5", "3,2,1", "fork:3x3", "parents:-1,-1,0,0,1,2,5", "7"]

build = functools.cache(lambda kind, attention: table.build(kind, torch.float64, attention))


@pytest.fixture(
    params=[("llama", "sdpa"), ("llama", "eager"), ("mistral-window", "sdpa"), ("gemma3", "sdpa"), ("opt", "eager")],
    ids="-".join,
)
def model(request):
    return build(*request.param)


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(3, table.VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def check(model: PreTrainedModel, logits: Tensor, texts: Sequence[Sequence[int]]) -> None:
    """Compare logits with the last row of each text in one forward without a cache."""
    assert logits.shape == (1, len(texts), table.VOCABULARY)
    alone = [model(torch.tensor([list(text)]), use_cache=False).logits[0, -1] for text in texts]
    near = NEAR[model.config._attn_implementation]
    torch.testing.assert_close(logits[0], torch.stack(alone), atol=near, rtol=0)


def path(tree: Topology, row: int) -> list[int]:
    return [*path(tree, tree.parent[row]), row] if row >= 0 else []


class Tree:
    """A cache after a prefix, and a tree whose rows have tokens."""

    def __init__(
        self,
        model: PreTrainedModel,
        tree: Topology,
        prefix: list[int],
        seed: int = 0,
        cached: CachedModel | None = None,
    ) -> None:
        self.model, self.tree, self.prefix = model, tree, prefix
        self.tokens = tokens(len(tree), seed + 1)
        self.read_rows: list[int] = []
        self.cached = cached or CachedModel(model, CAPACITY, table.VOCABULARY)
        if cached is None:
            self.read_text(prefix)

    def read_text(self, text: list[int]) -> Tensor:
        with torch.no_grad():
            return self.cached.read(torch.tensor([text]))

    def check(self, rows: Sequence[int]) -> None:
        """Read rows and compare each with the chain that it ends."""
        with torch.no_grad():
            tree = TreeRows(self.tree, len(self.prefix), self.read_rows, rows)
            logits = self.cached.read_parts([Part(0, [self.tokens[r] for r in rows], tree=tree)])
        self.read_rows += rows
        check(self.model, logits[None], [self.text(row) for row in rows])

    def check_all(self) -> None:
        self.check(list(range(len(self.tree))))

    def keep(self, rows: Sequence[int]) -> list[int]:
        """Keep a path of rows and return the text after it."""
        self.cached.keep(len(self.prefix), [len(self.prefix) + self.read_rows.index(row) for row in rows])
        text = self.text(rows[-1])
        assert self.cached.length == len(text)
        return text

    def text(self, row: int) -> list[int]:
        return [*self.prefix, *(self.tokens[r] for r in path(self.tree, row))]


def pruned(tree: Topology, draw: random.Random) -> list[int]:
    """Return rows closed under parents, at least one in the middle left out."""
    while True:
        rows: list[int] = []
        for row in range(len(tree)):
            if tree.parent[row] in (-1, *rows) and (row == 0 or draw.random() < 0.7):
                rows.append(row)
        if rows != list(range(len(rows))):
            return rows


@pytest.mark.parametrize("text", TREES)
def test_each_row_of_a_tree_is_the_end_of_its_own_chain(model, text):
    """At once, and level by level."""
    Tree(model, parse_tree(text), tokens(9, 0)).check_all()
    by_level = Tree(model, parse_tree(text), tokens(4, 0))
    for level in by_level.tree.levels:
        by_level.check(level)


@pytest.mark.parametrize("seed", range(2))
def test_a_pruned_tree_and_what_is_kept_of_it(model, seed):
    """Rows in the middle are missing; then compaction along a path, a chain, and another tree."""
    topology, draw = parse_tree("3,2,2"), random.Random(seed)
    rows = pruned(topology, draw)
    by_level = Tree(model, topology, tokens(5 + seed, seed), seed)
    for depth in range(topology.deepest + 1):
        if level := [row for row in rows if topology.depth[row] == depth]:
            by_level.check(level)
    tree = Tree(model, topology, tokens(6, seed), seed)
    tree.check(rows)
    text, more = tree.keep(path(topology, draw.choice(rows[2:]))), tokens(4, seed + 50)
    check(model, tree.read_text(more), [[*text, *more[: i + 1]] for i in range(4)])
    Tree(model, topology, [*text, *more], seed + 9, tree.cached).check(rows)


@pytest.mark.parametrize("kind", ["mistral-window", "gemma3"])
@pytest.mark.parametrize("prefix", [2, 12])
def test_an_attention_window_may_end_inside_the_tree(kind, prefix):
    model, topology = build(kind, "sdpa"), parse_tree(f"fork:2x{table.WINDOW + 4}")
    tree = Tree(model, topology, tokens(prefix, 0))
    tree.check_all()
    text = tree.keep(path(topology, len(topology) - 1))
    check(model, tree.read_text([7]), [[*text, 7]])


def test_a_model_that_returns_all_rows_is_cut_to_those_wanted():
    model = table.build("llama", torch.float64)
    original, ids = model.forward, torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        expected = CachedModel(model, 9, table.VOCABULARY).read(ids, rows=2)
        model.forward = lambda *args, logits_to_keep, **more: original(*args, **more)
        assert torch.equal(CachedModel(model, 9, table.VOCABULARY).read(ids, rows=2), expected)
