"""The dense collector: its rows are those of a slow search without cache, hidden states included, whatever the chunks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from conftest import EOS, NEW, VOCABULARY, build_model
from contract_policies import DEPTH
from reference_features import Rows, compute
from specstop.collect.dense import DenseCollector
from specstop.collect.prompts import Prompt
from specstop.collect.run import collect, plan_run
from specstop.collect.schema import PromptTask
from specstop.collect.store import Trace, hidden_text, load_trace
from specstop.decode.loop import Settings
from specstop.decode.models.pair import Pair, join
from specstop.decode.plain import plain_texts
from specstop.decode.topology import Topology, parse_tree
from specstop.decode.verify.noise import gumbel, stream_key
from specstop.policies.features import ANCHOR_FEATURES, CHAIN_FEATURES, HIDDEN_STATES
from trace_rows import assert_close, by_anchor, tasks
from transformers import PreTrainedTokenizerFast

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


TREE = "3,2,1,1,1"
BOTH = tuple(HIDDEN_STATES)
HALF = 2.0**-11


def with_states(pair: Pair, prompts: list[Prompt], out: Path, **more: Any) -> Trace:
    return collect(pair, prompts, out, **{"depth": DEPTH, "max_new_tokens": NEW, "hidden": BOTH, **more})


def last_states(model: Any, text: list[int]) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        states = model(torch.tensor([text]), output_hidden_states=True).hidden_states[-1][0]
    return np.asarray(states.numpy())


@pytest.mark.parametrize(("tree", "temperature"), [(None, 0.0), (None, 0.7), (TREE, 0.7), ("10", 1.0)])
def test_dense_rows_hold_the_states_of_whole_forwards(
    plain_pair: Pair, prompts: list[Prompt], prompt_ids: list[list[int]], tmp_path: Path, tree: str | None,
    temperature: float,
) -> None:  # fmt: skip
    """Every ninth row; a node's state is that after its parent, from which it was drawn."""
    trace = with_states(plain_pair, prompts[3:6], tmp_path, tree=tree, temperature=temperature)
    ids, keys = prompt_ids[3:6], [stream_key(0, p.id) for p in prompts[3:6]]
    texts = plain_texts(plain_pair, ids, keys, NEW, temperature).tokens
    assert trace.header.hidden == {"draft_hidden": 16, "target_hidden": 16}
    for (s, anchor), row in list(by_anchor(trace).items())[::9]:
        prefix = ids[s] + texts[s][:anchor]
        expected = last_states(plain_pair.target, prefix)[-2]
        np.testing.assert_allclose(row["target_hidden"].astype(float), expected, rtol=HALF, atol=1e-7)
        for node in range(len(row["tokens"])):
            path, parent = [], trace.header.topology[node]
            while parent >= 0:
                path.append(int(row["tokens"][parent]))
                parent = trace.header.topology[parent]
            expected = last_states(plain_pair.draft, prefix + path[::-1])[-1]
            np.testing.assert_allclose(row["draft_hidden"][node].astype(float), expected, rtol=HALF, atol=1e-7)


def test_a_trace_is_read_by_datasets_and_says_what_it_holds(pair: Pair, prompts: list[Prompt], tmp_path: Path) -> None:
    trace = with_states(pair, prompts[:3], tmp_path / "trace")
    again = load_trace(tmp_path / "trace")
    assert again.header.hidden == trace.header.hidden
    assert again.table().schema.field("draft_hidden").type == pa.list_(pa.float16(), 16 * DEPTH)
    assert f"draft_hidden ({DEPTH} x 16, float16), target_hidden (16, float16)" == hidden_text(trace.header)
    loaded = datasets.load_dataset(str(tmp_path / "trace"), split="train", cache_dir=str(tmp_path / "cache"))
    first, same = loaded.with_format("numpy")[0]["draft_hidden"], again.rows.with_format("numpy")[0]["draft_hidden"]
    assert first.shape == (16 * DEPTH,) and first.tolist() == same.tolist()


def test_large_states_make_more_shards(pair: Pair, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch) -> None:
    import specstop.collect.run as module

    monkeypatch.setattr(module, "SHARD_BYTES", 3 * 2 * 16 * (DEPTH + 1) * NEW)
    options: dict[str, Any] = {"depth": DEPTH, "max_new_tokens": NEW}
    assert plan_run(pair, prompts, **options, hidden=BOTH).header.shards == 3
    assert plan_run(pair, prompts, **options, hidden=BOTH, shards=2).header.shards == 2
    assert plan_run(pair, prompts, **options).header.shards == 1
    monkeypatch.setattr(module, "PROMPTS_PER_SHARD", len(prompts))
    twice: dict[str, Any] = {**options, "temperature": 0.7, "draws": 2}
    assert [plan_run(pair, prompts, **twice, hidden=hidden).header.shards for hidden in (BOTH, ())] == [6, 1]
