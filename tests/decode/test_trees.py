"""Trees in the cache: every path reads as the chain it is, whatever is beside it, and what is kept is as if read alone."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from small_models import table
from specstop.decode.models.attention import LayerMasks, Part, TreeRows
from specstop.decode.models.cache import CachedModel
from specstop.decode.topology import Topology, chain, from_parents, parse_tree
from torch import Tensor
from transformers import PreTrainedModel

NEAR = {"sdpa": 1e-10, "eager": 1e-4}  # eager attention takes its softmax in float32 whatever the dtype
MODELS = [
    ("llama", "sdpa"), ("llama", "eager"), ("mistral-window", "sdpa"), ("gemma2", "eager"), ("gemma3", "sdpa"),
    ("opt", "eager"),
]  # fmt: skip
WINDOWED = {"mistral-window": False, "gemma2": True, "gemma3": True, "qwen2-window": True}
CAPACITY = 60
_MADE: dict[tuple[str, str], PreTrainedModel] = {}


@pytest.fixture(params=MODELS, ids=lambda made: "-".join(made))
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    if request.param not in _MADE:
        _MADE[request.param] = table.build(request.param[0], torch.float64, request.param[1])
    return _MADE[request.param]


@pytest.fixture(params=["llama-sdpa", "gemma3-eager", "mistral-window-sdpa"])
def some(request: pytest.FixtureRequest) -> PreTrainedModel:
    kind, _, attention = request.param.rpartition("-")
    return table.build(kind, torch.float64, attention)


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(3, table.VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def alone(model: PreTrainedModel, text: Sequence[int]) -> Tensor:
    """The last row of a text read in one forward without a cache."""
    return model(torch.tensor([list(text)]), use_cache=False).logits[0, -1]


def check(model: PreTrainedModel, logits: Tensor, texts: Sequence[Sequence[int]]) -> None:
    assert logits.shape == (1, len(texts), table.VOCABULARY)
    expected = torch.stack([alone(model, text) for text in texts])
    torch.testing.assert_close(logits[0], expected, atol=NEAR[model.config._attn_implementation], rtol=0)


def path(tree: Topology, row: int) -> list[int]:
    return [*path(tree, tree.parent[row]), row] if row >= 0 else []


class Tree:
    """A model that has read a prefix, and a tree whose rows have tokens."""

    def __init__(self, model: PreTrainedModel, tree: Topology, prefix: int, seed: int = 0) -> None:
        self.cached = CachedModel(model, CAPACITY, table.VOCABULARY)
        self.prefix, self.tree, self.base = tokens(prefix, seed), tree, prefix
        self.tokens = tokens(len(tree), seed + 1)
        self.seen: list[int] = []
        with torch.no_grad():
            self.cached.read(torch.tensor([self.prefix]), rows=1)

    def read(self, rows: Sequence[int]) -> Tensor:
        with torch.no_grad():
            tree = TreeRows(self.tree, self.base, self.seen, rows)
            logits = self.cached.read_parts([Part(0, [self.tokens[r] for r in rows], tree=tree)])
        self.seen += rows
        return logits[None]

    def text(self, row: int) -> list[int]:
        return [*self.prefix, *(self.tokens[r] for r in path(self.tree, row))]


TREES = ["chain:5", "3,2,1", "fork:3x3", "parents:-1,-1,0,0,1,2,5", "7"]


@pytest.mark.parametrize("text", TREES)
def test_each_row_of_a_tree_is_the_end_of_its_own_chain(model: PreTrainedModel, text: str) -> None:
    """The whole tree in one read: a slice of the mask."""
    made = Tree(model, parse_tree(text), 9)
    rows = list(range(len(made.tree)))
    check(model, made.read(rows), [made.text(row) for row in rows])


@pytest.mark.parametrize("text", TREES[1:2])
def test_a_tree_may_be_read_level_by_level(model: PreTrainedModel, text: str) -> None:
    made = Tree(model, parse_tree(text), 4)
    for level in made.tree.levels:
        check(model, made.read(level), [made.text(row) for row in level])


def pruned(tree: Topology, draw: random.Random) -> list[int]:
    """Rows closed under parents, at least one of them left out."""
    while True:
        kept: list[int] = []
        for row in range(len(tree)):
            if tree.parent[row] in (-1, *kept) and (row == 0 or draw.random() < 0.7):
                kept.append(row)
        if kept != list(range(len(kept))):
            return kept


@pytest.mark.parametrize("seed", range(2))
def test_a_pruned_tree_reads_as_the_chains_it_has(model: PreTrainedModel, seed: int) -> None:
    """Rows in the middle are missing: the mask is gathered, at once or level by level."""
    tree, draw = parse_tree("3,2,2"), random.Random(seed)
    rows = pruned(tree, draw)
    made = Tree(model, tree, 5 + seed, seed)
    check(model, made.read(rows), [made.text(row) for row in rows])
    again = Tree(model, tree, 5 + seed, seed)
    for depth in range(tree.deepest + 1):
        level = [row for row in rows if tree.depth[row] == depth]
        if level:
            check(model, again.read(level), [again.text(row) for row in level])


def test_parts_of_a_tree_come_and_come_again_in_any_order(
    some: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of changing sizes after prefixes of changing lengths."""
    tree, draw = parse_tree("3,2,2"), random.Random(4)
    made = Tree(some, tree, 9)
    parts = [pruned(tree, draw) for _ in range(4)]
    for rows in [*parts, *parts[::-1], list(range(4)), *draw.choices(parts, k=4)]:
        made.base = draw.randint(3, 9)
        made.prefix, made.seen = made.prefix[: made.base], []
        made.cached.roll_back(0)
        with torch.no_grad():
            made.cached.read(torch.tensor([made.prefix]), rows=1)
        check(some, made.read(rows), [made.text(row) for row in rows])
        made.prefix = tokens(9, draw.randint(0, 99))


@pytest.mark.parametrize("seed", range(2))
def test_what_is_kept_is_as_if_it_had_been_read_alone(model: PreTrainedModel, seed: int) -> None:
    """Compaction along a path, then a chain and another tree after it."""
    tree, draw = parse_tree("3,2,2"), random.Random(seed)
    rows = pruned(tree, draw)
    made = Tree(model, tree, 6, seed)
    made.read(rows)
    end = draw.choice(rows[2:])
    kept = path(tree, end)
    made.cached.keep(made.base, [made.base + rows.index(row) for row in kept])
    text = made.text(end)
    assert made.cached.length == len(text)
    more = tokens(4, seed + 50)
    with torch.no_grad():
        logits = made.cached.read(torch.tensor([more]))
    check(model, logits, [[*text, *more[: i + 1]] for i in range(4)])
    after = Tree(model, tree, 1, seed + 9)
    after.cached, after.prefix, after.base = made.cached, [*text, *more], len(text) + 4
    check(model, after.read(rows), [after.text(row) for row in rows])


def test_many_rounds_of_trees_and_chains_stay_exact(some: PreTrainedModel) -> None:
    draw = random.Random(3)
    text = tokens(3, 1)
    cached = CachedModel(some, CAPACITY, table.VOCABULARY)
    with torch.no_grad():
        cached.read(torch.tensor([text]), rows=1)
    trees = [parse_tree(t) for t in TREES]
    for turn in range(6):
        made = Tree(some, draw.choice(trees), 1, turn)
        made.cached, made.prefix, made.base = cached, text, len(text)
        rows = list(range(len(made.tree)))
        check(some, made.read(rows), [made.text(row) for row in rows])
        kept = path(made.tree, draw.choice(rows))[: draw.randint(1, 4)]
        cached.keep(made.base, [made.base + row for row in kept])
        text = made.text(kept[-1])
    assert len(text) > 10


def test_a_tree_at_the_very_start_and_at_the_very_end(some: PreTrainedModel) -> None:
    tree = parse_tree("2,2")
    for prefix in (1, CAPACITY - len(tree)):
        made = Tree(some, tree, prefix)
        check(some, made.read(list(range(len(tree)))), [made.text(row) for row in range(len(tree))])


def test_two_trees_of_one_model_have_a_mask_each(some: PreTrainedModel) -> None:
    """Topologies come and go; a mask that was kept for one of them must not serve another."""
    cached = CachedModel(some, CAPACITY, table.VOCABULARY)
    prefix = tokens(4, 0)
    with torch.no_grad():
        cached.read(torch.tensor([prefix]), rows=1)
    for parents in ([-1, -1, 0, 1], [-1, 0, 1, 2], [-1, -1, -1, 0], [-1, 0, 0, 1], [-1, -1, 1, 0]):
        made = Tree(some, from_parents(parents), 1)
        made.cached, made.prefix, made.base = cached, prefix, len(prefix)
        check(some, made.read(list(range(5))), [made.text(row) for row in range(5)])
        cached.roll_back(len(prefix))
        del made


@pytest.mark.parametrize("kind", WINDOWED)
@pytest.mark.parametrize("length", [3, 20, 70])
def test_a_window_shorter_than_the_text_is_kept(kind: str, length: int) -> None:
    """In one read (by the library beyond 64 tokens), one by one, and in pieces with roll-backs."""
    model = table.build(kind, torch.float64, "eager" if kind in table.EAGER_ONLY else "sdpa")
    masks = LayerMasks.of(model)
    assert masks is not None and (masks.window, len(masks.layer_types) > 1) == (table.WINDOW, WINDOWED[kind])
    text = tokens(length, 2)
    near = NEAR[model.config._attn_implementation]
    with torch.no_grad():
        expected = model(torch.tensor([text]), use_cache=False).logits
        whole = CachedModel(model, 80, table.VOCABULARY)
        torch.testing.assert_close(whole.read(torch.tensor([text])), expected, atol=near, rtol=0)
        check(model, whole.read(torch.tensor([[5, 6]])), [[*text, 5], [*text, 5, 6]])
        single = CachedModel(model, 80, table.VOCABULARY)
        rows = [single.read(torch.tensor([[token]])) for token in text]
        torch.testing.assert_close(torch.cat(rows, 1), expected, atol=near, rtol=0)
        single.roll_back(length // 2)
        half = text[: length // 2]
        check(model, single.read(torch.tensor([[8, 9, 4]])), [[*half, 8], [*half, 8, 9], [*half, 8, 9, 4]])


@pytest.mark.parametrize("kind", ["mistral-window", "gemma3"])
def test_a_window_may_end_inside_the_tree(kind: str) -> None:
    """The tree is deeper than the window is long: its lower rows do not see its root any more."""
    model = table.build(kind, torch.float64)
    tree = parse_tree(f"fork:2x{table.WINDOW + 4}")
    for prefix in (2, 12):
        made = Tree(model, tree, prefix)
        check(model, made.read(list(range(len(tree)))), [made.text(row) for row in range(len(tree))])
        short = [row for row in range(len(tree)) if row in path(tree, len(tree) - 1)]
        made.cached.keep(made.base, [made.base + row for row in short])
        with torch.no_grad():
            check(model, made.cached.read(torch.tensor([[7]])), [[*made.text(short[-1]), 7]])


def test_a_chain_is_kept_without_moving_anything(some: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Tree(some, chain(5), 6)
    made.read(list(range(6)))
    monkeypatch.setattr("specstop.decode.models.attention.KVCache.move", lambda *_: pytest.fail("moved"))
    made.cached.keep(6, [6, 7, 8])
    assert made.cached.length == 9


def test_a_model_that_returns_all_rows_whatever_it_is_told_is_cut_to_those_wanted() -> None:
    model = table.build("llama", torch.float64)
    stock = model.forward

    def forward(*args: object, logits_to_keep: int, **more: object) -> object:
        return stock(*args, **more)

    expected = CachedModel(model, 9, table.VOCABULARY).read(torch.tensor([[5, 6, 7]]), rows=2)
    model.forward = forward
    with torch.no_grad():
        assert torch.equal(CachedModel(model, 9, table.VOCABULARY).read(torch.tensor([[5, 6, 7]]), rows=2), expected)
