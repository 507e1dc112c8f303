"""The dense collector: its rows are what a slow search without cache finds, whatever the chunks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from conftest import EOS, NEW, VOCABULARY, build_model
from contract_policies import DEPTH
from reference_features import Rows, compute
from specstop.collect.dense import DenseCollector, memory_budget
from specstop.collect.prompts import Prompt
from specstop.collect.proposals import closure
from specstop.collect.run import collect, plan_run
from specstop.collect.schema import PromptTask
from specstop.decode.loop import Settings
from specstop.decode.models.pair import Pair, join
from specstop.decode.plain import plain_texts
from specstop.decode.topology import Topology, parse_tree
from specstop.decode.verify.noise import gumbel, stream_key
from specstop.policies.features import ANCHOR_FEATURES, CHAIN_FEATURES, HIDDEN_STATES
from trace_rows import assert_close, by_anchor, tasks
from transformers import PreTrainedTokenizerFast

EAGER = 1e-4  # the models' eager attention takes its softmax in float32 whatever their dtype
FLOAT32 = 2e-6  # a few units in the last place: rows are float64 results, rounded once
TEMPERATURES = pytest.mark.parametrize("temperature", [0.0, 0.7])
ODD = "parents:-1,-1,0,1,1,1,2,5,7"
"""Wider below the second branch than at the root."""


def search(
    pair: Pair, tree: Topology, names: tuple[str, ...], prefix: list[int], text: list[int], temperature: float, key: int
) -> list[dict[str, Any]]:
    """Return the columns of each node, one full forward of both models per node."""
    scale, out = temperature or 1.0, [dict[str, Any]() for _ in range(tree.nodes)]
    state = {0: (prefix, torch.zeros(1, dtype=torch.float64), text)}
    for row, below in enumerate(tree.children):
        if not below:
            continue
        read, logprob, ahead = state[row]
        with torch.no_grad():
            q, p = (model(torch.tensor([read])).logits[0, -1:] for model in (pair.draft, pair.target))
        scores = q
        if temperature:
            noise = gumbel(key, torch.tensor([len(read)]), pair.vocabulary, torch.float64)
            scores = torch.log_softmax(q / temperature, -1) + noise
        p_row, q_row = torch.softmax(p / scale, -1)[0], torch.softmax(q / scale, -1)[0]
        for rank, child in enumerate(below):
            token = scores.topk(len(below), -1).indices[:, rank]
            sibling = (torch.tensor([rank]), torch.tensor([len(below)]))
            rows = Rows(q, temperature, scores, token, logprob, tree.depth[child], None, *sibling)
            match = bool(ahead) and int(token) == ahead[0]
            out[child - 1] = dict(zip(names, compute(names, rows)[0].tolist(), strict=True)) | {
                "tokens": int(token), "observed": bool(ahead), "accepted": match, "draft_prob": float(q_row[token]),
                "target_prob": float(p_row[token]) * bool(ahead),
                "overlap": float(torch.minimum(p_row, q_row).sum()) * bool(ahead),
            }  # fmt: skip
            state[child] = ([*read, int(token)], rows.path_logprob, ahead[1:] if match else [])
    return out


@TEMPERATURES
@pytest.mark.parametrize("tree", [None, "3,2,1", ODD])
def test_rows_are_those_of_a_search_without_cache(
    plain_pair: Pair, prompts: list[Prompt], prompt_ids: list[list[int]], tmp_path: Path, tree: str | None,
    temperature: float,
) -> None:  # fmt: skip
    """Every anchor has a row; every sixth row is compared."""
    options: dict[str, Any] = {"temperature": temperature, "max_new_tokens": NEW, "verification": "match"}
    trace = collect(plain_pair, prompts, tmp_path, tree=tree, depth=DEPTH, **options)
    topology, names, keys = trace.header.tree, trace.header.features, [stream_key(0, prompt.id) for prompt in prompts]
    assert topology.parent == parse_tree(tree or f"chain:{DEPTH}").parent
    texts = plain_texts(plain_pair, prompt_ids, keys, NEW + topology.deepest, temperature).tokens
    rows, lengths = by_anchor(trace), [min(len(text), NEW) for text in texts]
    assert set(rows) == {(s, anchor) for s, length in enumerate(lengths) for anchor in range(1, length)}
    counts = {"second": 0, "deep": 0, "cut": 0, "eos": 0}
    for (s, anchor), row in rows.items():
        text, length = texts[s], int(row["accepted_length"])
        assert [row["before_token"], row["anchor_token"]] == [prompt_ids[s][-1], *text][anchor - 1 : anchor + 1]
        assert row["text_tokens"] == lengths[s] and length == row["accepted"].sum()
        assert bool(row["cut"]) == (text[-1] == EOS and anchor + topology.deepest > len(text))
        counts["cut"] += bool(row["cut"])
        counts["deep"] += length > 1
        counts["second"] += topology.nodes > 1 and bool(row["accepted"][1])
        counts["eos"] += EOS in row["tokens"][row["accepted"]]
    for (s, anchor), row in list(rows.items())[::6]:
        prefix, ahead = prompt_ids[s] + texts[s][:anchor], texts[s][anchor:]
        for node, expected in enumerate(search(plain_pair, topology, names, prefix, ahead, temperature, keys[s])):
            for name, value in expected.items():
                assert row[name][node] == pytest.approx(value, rel=FLOAT32, abs=FLOAT32), (name, node)
    assert all(counts.values()), counts


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize(
    ("tree", "verification"), [(None, "match"), ("2,2", "match"), ("2,2", "rejection"), ("2,1", "rejection_replace"),
                               ("chain:5", "block")]
)  # fmt: skip
def test_rows_do_not_depend_on_chunks_nor_on_the_batch(
    pair: Pair,
    prompts: list[Prompt],
    prompt_ids: list[list[int]],
    temperature: float,
    tree: str | None,
    verification: str,
) -> None:
    work, settings = (
        tasks(prompts, prompt_ids)[2:],
        Settings(temperature, NEW, DEPTH, tree=tree, verification=verification),
    )
    draws = 1 if verification == "match" or temperature == 0 else 2
    whole, pieces, single = (
        DenseCollector(pair, settings, tuple(HIDDEN_STATES), draws=draws, **size)
        for size in ({}, {"memory_bytes": 1}, {})
    )
    chunks = whole.rows(work)
    assert [int(chunk["sequence"][0]) for chunk in chunks] == list(range(2 * draws, 8 * draws))
    assert max(len(chunk["anchor"]) for chunk in chunks) > 16, "no text is longer than two of the smallest chunks"
    assert_close(chunks, pieces.rows(work))
    alone = [single.rows([one]) for one in reversed(work)]
    assert_close(chunks, [chunk for rows in reversed(alone) for chunk in rows])


def test_rows_are_the_same_under_eager_attention(
    pair: Pair, eager_pair: Pair, prompts: list[Prompt], prompt_ids: list[list[int]]
) -> None:
    work, settings = tasks(prompts, prompt_ids)[:4], Settings(0.7, NEW, DEPTH, verification="match")
    assert_close(*(DenseCollector(one, settings).rows(work) for one in (pair, eager_pair)), near=EAGER)


def test_a_text_of_one_token_has_no_row(pair: Pair, prompt_ids: list[list[int]]) -> None:
    first = plain_texts(pair, [prompt_ids[0]], [0], 1).tokens[0][0]
    ends_at_once = Pair(pair.target, pair.draft, None, pair.vocabulary, (first,))
    settings = Settings(0.0, NEW, 3, verification="match")
    assert DenseCollector(ends_at_once, settings).rows([PromptTask(0, "a", "", prompt_ids[0])]) == []


@pytest.mark.parametrize("tree", [None, "2,2"])
@pytest.mark.parametrize("collector", ["dense", "live"])
def test_traces_of_a_draft_that_knows_fewer_tokens_are_finite(
    tokenizer: PreTrainedTokenizerFast, prompts: list[Prompt], tmp_path: Path, tree: str | None, collector: str
) -> None:
    """Where the text has a token that the draft does not know, the draft proposes others."""
    target, draft = build_model(vocab_size=VOCABULARY + 8), build_model(1)
    with torch.no_grad():
        target.lm_head.weight[VOCABULARY:] *= 2.0
    wide = join(target, draft, tokenizer)
    options: dict[str, Any] = {"depth": 3, "tree": tree, "temperature": 0.7, "collector": collector}
    table = collect(wide, prompts[:4], tmp_path / "t", max_new_tokens=16, shards=1, **options).table()
    for name in (*ANCHOR_FEATURES, *(n for n in CHAIN_FEATURES if n in table.column_names), "target_prob", "overlap"):
        assert np.isfinite(np.array(table[name].to_pylist(), dtype=np.float64)).all(), name
    assert max(map(max, table["tokens"].to_pylist())) < VOCABULARY


@pytest.mark.parametrize(("free", "budget"), [(8 << 30, 512), (1 << 20, 64), (1 << 50, 1024)])
def test_the_default_memory_is_a_share_of_what_is_free(
    pair: Pair, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch, free: int, budget: int
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 << 30, 8 << 30))
    assert memory_budget(torch.device("cuda:1")) == 768
    assert plan_run(pair, prompts[:2], depth=2, max_new_tokens=4).header.facts["memory MiB"] == budget
    assert plan_run(pair, prompts[:2], depth=2, max_new_tokens=4, memory=70).header.facts["memory MiB"] == 70


@pytest.mark.parametrize(
    ("tree", "closed"),
    [
        ("4,2,2,1", "4,2,2,1"),
        ("chain:5", "chain:5"),
        ("parents:-1,0,0", "parents:-1,-1,0,0"),
        ("1,3", None),
        (ODD, None),
    ],
)
def test_the_closure_holds_every_sub_tree_at_its_root(tree: str, closed: str | None) -> None:
    topology = parse_tree(tree)

    def paths(t: Topology, row: int) -> set[tuple[int, ...]]:
        below = enumerate(t.children[row])
        return {path for rank, child in below for path in ((rank,), *((rank, *rest) for rest in paths(t, child)))}

    assert paths(closure(topology), 0) == set().union(*(paths(topology, row) for row in range(len(topology))))
    assert closed is None or closure(topology).parent == parse_tree(closed).parent
