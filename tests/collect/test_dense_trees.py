"""Dense trees: what a slow search without cache finds, whatever the chunks; the closure of a tree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import EOS, NEW
from reference_features import Rows, compute
from specstop.collect.dense import DenseCollector
from specstop.collect.prompts import Prompt
from specstop.collect.proposals import closure
from specstop.collect.run import collect
from specstop.collect.schema import PromptTask
from specstop.collect.store import load_trace
from specstop.decode.models.pair import Pair
from specstop.decode.plain import plain_texts
from specstop.decode.settings import Settings
from specstop.decode.topology import Topology, parse_tree
from specstop.decode.verify.noise import gumbel, stream_key
from specstop.policies.features import TREE_FEATURES
from trace_rows import numpy_rows

FLOAT32 = 2e-6
ODD = "parents:-1,-1,0,1,1,1,2,5,7"
"""Wider below the second branch than at the root."""


def search(
    pair: Pair, tree: Topology, prefix: list[int], text: list[int], temperature: float, key: int
) -> dict[str, Any]:
    """Return tokens, features, p, overlap, accepted and labelled by node, one full forward of both models per node."""
    scale = temperature or 1.0
    out: dict[str, Any] = {"tokens": {}, "features": {}, "accepted": {}, "observed": {}, "p": {}, "overlap": {}}
    state = {0: (prefix, torch.zeros(1, dtype=torch.float64), text)}
    for row in range(len(tree)):
        if not tree.children[row]:
            continue
        here, logprob, ahead = state[row]
        with torch.no_grad():
            q, p = (model(torch.tensor([here])).logits[0, -1:] for model in (pair.draft, pair.target))
        scores = q
        if temperature:
            noise = gumbel(key, torch.tensor([len(here)]), pair.vocabulary, torch.float64)
            scores = torch.log_softmax(q / temperature, -1) + noise
        below = tree.children[row]
        for rank, child in enumerate(below):
            token = scores.topk(len(below), -1).indices[:, rank]
            sibling = (torch.tensor([rank]), torch.tensor([len(below)]))
            rows = Rows(q, temperature, scores, token, logprob, tree.depth[child], None, *sibling)
            out["tokens"][child - 1] = int(token)
            out["features"][child - 1] = compute(TREE_FEATURES, rows)[0].numpy()
            known = bool(ahead)
            match = known and int(token) == ahead[0]
            out["observed"][child - 1], out["accepted"][child - 1] = known, match
            chance = torch.softmax(p / scale, -1)[0]
            out["p"][child - 1] = float(chance[token]) * known
            out["overlap"][child - 1] = float(torch.minimum(chance, torch.softmax(q / scale, -1)[0]).sum()) * known
            state[child] = ([*here, int(token)], rows.path_logprob, ahead[1:] if match else [])
    return out


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("tree", ["3,2,1", ODD])
def test_rows_are_those_of_a_search_without_cache(
    plain_pair: Pair, prompts: list[Prompt], prompt_ids: list[list[int]], tmp_path: Path, tree: str, temperature: float
) -> None:
    trace = collect(plain_pair, prompts, tmp_path, tree=tree, temperature=temperature, max_new_tokens=NEW)
    topology = trace.header.tree
    assert topology.parent == parse_tree(tree).parent
    keys = [stream_key(0, prompt.id) for prompt in prompts]
    texts = plain_texts(plain_pair, prompt_ids, keys, NEW + topology.deepest, temperature).tokens
    second = deep = 0
    for row in numpy_rows(trace)[::6]:
        s, anchor = int(row["sequence"]), int(row["anchor"])
        ahead = texts[s][anchor:]
        slow = search(plain_pair, topology, prompt_ids[s] + texts[s][:anchor], ahead, temperature, keys[s])
        for node in range(topology.nodes):
            assert row["tokens"][node] == slow["tokens"][node]
            assert bool(row["observed"][node]) == slow["observed"][node]
            assert bool(row["accepted"][node]) == slow["accepted"][node]
            assert row["target_prob"][node] == pytest.approx(slow["p"][node], abs=FLOAT32)
            assert row["overlap"][node] == pytest.approx(slow["overlap"][node], abs=FLOAT32)
            features = [row[name][node] for name in TREE_FEATURES]
            np.testing.assert_allclose(features, slow["features"][node], rtol=FLOAT32, atol=FLOAT32)
        assert row["accepted_length"] == row["accepted"].sum()
        second += bool(row["accepted"][1])
        deep += int(row["accepted_length"]) > 1
        assert bool(row["cut"]) == (texts[s][-1] == EOS and anchor + topology.deepest > len(texts[s]))
    assert second > 0, "no second candidate is accepted"
    assert deep > 0


@pytest.mark.parametrize("tree", ["3,2,1,1,1", ODD])
def test_rows_do_not_depend_on_the_chunks(
    pair: Pair, prompts: list[Prompt], prompt_ids: list[list[int]], tree: str
) -> None:
    work = [PromptTask(i, p.id, p.group, prompt_ids[i], stream_key(0, p.id)) for i, p in enumerate(prompts)]
    settings = Settings(0.7, NEW, tree=tree, verification="match")
    whole = DenseCollector(pair, settings).rows(work)
    pieces = DenseCollector(pair, settings, memory_bytes=1).rows(work)
    for one, other in zip(whole, pieces, strict=True):
        for name, values in one.items():
            if getattr(values, "dtype", None) in (np.float32, np.float64):
                np.testing.assert_allclose(values, other[name], rtol=FLOAT32, atol=FLOAT32, err_msg=name)
            else:
                np.testing.assert_array_equal(values, other[name], err_msg=name)


@pytest.mark.parametrize(
    ("tree", "closed"),
    [
        ("4,2,2,1", "4,2,2,1"),
        ("chain:5", "chain:5"),
        ("1,3", "3"),
        (ODD, None),
        ("parents:-1,0,0", "parents:-1,-1,0,0"),
    ],
)
def test_the_closure_holds_every_sub_tree_at_its_root(tree: str, closed: str | None) -> None:
    topology = parse_tree(tree)
    made = closure(topology)

    def paths(t: Topology, row: int) -> set[tuple[int, ...]]:
        out: set[tuple[int, ...]] = set()
        for rank, child in enumerate(t.children[row]):
            out |= {(rank,)} | {(rank, *rest) for rest in paths(t, child)}
        return out

    wanted = set().union(*(paths(topology, row) for row in range(len(topology))))
    assert paths(made, 0) == wanted
    if closed is not None and tree != "1,3":
        assert made.parent == parse_tree(closed).parent


def test_the_trace_keeps_the_tree(pair: Pair, prompts: list[Prompt], tmp_path: Path) -> None:
    collect(pair, prompts[:2], tmp_path, tree="2,2", max_new_tokens=4)
    header = load_trace(tmp_path).header
    assert header.topology == (-1, -1, 0, 0, 1, 1)
    assert (header.depth, header.tree.name, header.features) == (2, "2,2", TREE_FEATURES)
