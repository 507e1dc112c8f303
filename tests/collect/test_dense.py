"""Dense traces of any drafter: rows are those of a slow search without cache, and replay has the rounds of the live loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import EOS, NEW, VOCABULARY, build_model
from contract_policies import DEPTH, TEST_POLICIES
from reference_features import Rows, compute
from small_drafters import TRAINED, output_weight, small_network
from specstop.collect.dense import DenseCollector
from specstop.collect.positions import PositionsCollector
from specstop.collect.prompts import Prompt
from specstop.collect.run import collect, plan_run
from specstop.collect.schema import PromptTask
from specstop.decode.drafters import TrainedDrafter, load_drafter, save_drafter, with_drafter
from specstop.decode.loop import Settings
from specstop.decode.models.pair import Pair, join
from specstop.decode.plain import plain_texts
from specstop.decode.topology import Topology, parse_tree
from specstop.decode.verify.noise import gumbel, stream_key
from specstop.policies.features import ANCHOR_FEATURES, CHAIN_FEATURES, DRAFT_HIDDEN, HIDDEN_STATES, TARGET_HIDDEN
from specstop.policies.fixed import Confidence, FixedLength
from trace_helpers import assert_close, assert_replay_is_live, by_anchor, tasks

FLOAT32 = 2e-6  # a few units in the last place: rows are float64 results, rounded once
TEMPERATURES = pytest.mark.parametrize("temperature", [0.0, 0.7])
BOTH, HALF = tuple(HIDDEN_STATES), 2.0**-11
ODD = "parents:-1,-1,0,1,1,1,2,5,7"
"""Wider below the second branch than at the root."""


def search(
    pair: Pair, tree: Topology, names: tuple[str, ...], prefix: list[int], text: list[int], temperature: float, key: int
) -> list[dict[str, Any]]:
    """Return the columns of each node. Each node takes a forward of both models over the whole text before it."""
    scale, out = temperature or 1.0, [dict[str, Any]() for _ in range(tree.nodes)]
    state = {0: (prefix, torch.zeros(1, dtype=torch.float64), text)}
    for row, below in enumerate(tree.children):
        if not below:
            continue
        read, logprob, ahead = state[row]
        with torch.no_grad():
            draft, target = (
                model(torch.tensor([read]), output_hidden_states=True) for model in (pair.draft, pair.target)
            )
        q, p = (model.logits[0, -1:] for model in (draft, target))
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
                "draft_hidden": draft.hidden_states[-1][0, -1].tolist(),
            }  # fmt: skip
            if row == 0:  # the target has not read the anchor yet
                out[child - 1]["target_hidden"] = target.hidden_states[-1][0, -2].tolist()
            state[child] = ([*read, int(token)], rows.path_logprob, ahead[1:] if match else [])
    return out


@TEMPERATURES
@pytest.mark.parametrize("tree", [None, "3,2,1", ODD])
def test_rows_are_those_of_a_search_without_cache(plain_pair, prompts, prompt_ids, tmp_path, tree, temperature):
    """Every anchor has a row; every tenth row is compared."""
    options = {"temperature": temperature, "max_new_tokens": NEW, "verification": "match", "hidden": BOTH}
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
    for (s, anchor), row in list(rows.items())[::10]:
        prefix, ahead = prompt_ids[s] + texts[s][:anchor], texts[s][anchor:]
        for node, expected in enumerate(search(plain_pair, topology, names, prefix, ahead, temperature, keys[s])):
            for name, value in expected.items():
                recorded = row[name] if name == "target_hidden" else row[name][node]
                near = HALF if name.endswith("hidden") else FLOAT32
                np.testing.assert_allclose(
                    recorded, value, rtol=near, atol=min(near, FLOAT32), err_msg=f"{name} {node}"
                )
    assert all(counts.values()), counts


@pytest.mark.parametrize(
    ("tree", "verification", "temperature"),
    [(None, "match", 0.0), (None, "match", 0.7), ("2,2", "match", 0.0), ("2,2", "rejection", 0.7),
     ("2,1", "rejection_replace", 0.7), ("chain:5", "block", 0.7)],
)  # fmt: skip
def test_rows_do_not_depend_on_chunks_nor_on_the_batch(pair, prompts, prompt_ids, temperature, tree, verification):
    work = tasks(prompts, prompt_ids)[2:]
    settings = Settings(temperature, NEW, DEPTH, tree=tree, verification=verification)
    draws = 1 if verification == "match" or temperature == 0 else 2
    whole, pieces, single = (
        DenseCollector(pair, settings, BOTH, draws=draws, **size) for size in ({}, {"memory_bytes": 1}, {})
    )
    chunks = whole.rows(work)
    assert [int(chunk["sequence"][0]) for chunk in chunks] == list(range(2 * draws, 8 * draws))
    assert max(len(chunk["anchor"]) for chunk in chunks) > 16, "no text is longer than two of the smallest chunks"
    assert_close(chunks, pieces.rows(work))
    alone = [single.rows([one]) for one in reversed(work)]
    assert_close(chunks, [chunk for rows in reversed(alone) for chunk in rows])


@pytest.mark.parametrize("tree", [None, "2,2"])
@pytest.mark.parametrize("collector", ["dense", "live"])
def test_traces_of_a_draft_that_knows_fewer_tokens_are_finite(tokenizer, prompts, tmp_path, tree, collector):
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


# Any drafter

SHORT = 3
SPECS = (*("lookup", "suffix", "medusa", "hydra", "ctc", "ctc-released", "layer"), *("suffix+model", "lookup+medusa"))


@pytest.fixture(scope="module")
def folders(pair, tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafters")
    output = output_weight(pair).float()
    for kind in TRAINED:
        network = small_network(kind, output.shape[1], pair.vocabulary, output, SHORT, 0.05)
        save_drafter(TrainedDrafter(kind, network, pair.fingerprint["target"]), folder / kind)
    return folder


def drafting(pair: Pair, folders: Path, kind: str) -> Pair:
    """Return the pair with a drafter, the last one from its folder if it is a trained one."""
    folder = folders / kind.rpartition("+")[2].removesuffix("-released")
    return with_drafter(pair, f"{kind}:{folder}" if folder.exists() else kind)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("tree", [None, "2,2,1"])
def test_with_the_draft_model_the_rows_are_those_of_the_other_dense_collector(
    pair, prompts, prompt_ids, tree, temperature
):
    settings = Settings(temperature, NEW, SHORT, tree=tree, verification="match")
    dense, positions = (
        collector(pair, settings, (TARGET_HIDDEN,)).rows(tasks(prompts[:3], prompt_ids))
        for collector in (DenseCollector, PositionsCollector)
    )
    for chunk, other in zip(dense, positions, strict=True):
        drawable = other["tokens"] >= 0  # what stands below an end of text is never drawn live
        assert drawable.any()
        for chunks in (chunk, other):
            for name, values in chunks.items():
                if np.shape(values) == drawable.shape:
                    chunks[name] = np.where(drawable, values, 0)
    assert_close(dense, positions, 1e-5)


@pytest.mark.parametrize(
    ("kind", "temperature", "tree"),
    [("suffix", 0.0, None), ("hydra", 0.7, "2,2,1"), ("suffix+medusa", 0.7, None),
     ("suffix+medusa", 0.7, "2,2,1")],
)  # fmt: skip
def test_texts_side_by_side_give_the_rows_of_each_alone(pair, folders, prompt_ids, kind, temperature, tree):
    # Of unlike lengths, so that the places of their rounds never agree.
    work = [PromptTask(i, f"p{i}", "g", ids[i % 3 :], stream_key(0, f"p{i}")) for i, ids in enumerate(prompt_ids[:5])]
    settings = Settings(temperature, NEW, SHORT, tree=tree, verification="match")
    single, several = (
        PositionsCollector(drafting(pair, folders, kind), settings, (TARGET_HIDDEN,), memory) for memory in (1, 1 << 28)
    )
    assert (single.batch, several.batch) == (1, 16)
    assert_close(several.rows(work), single.rows(work), 1e-5)


@pytest.mark.parametrize(
    ("kind", "tree"),
    [(kind, (None, "2,2,1")[at % 2]) for at, kind in enumerate(SPECS)] + [("medusa", None), ("ctc", "2,2,1")],
)
def test_replay_has_the_rounds_of_the_loop(pair, folders, prompts, profile, tmp_path, kind, tree):
    alone = drafting(pair, folders, kind)
    assert (alone.draft is None) == (not kind.endswith("model"))
    assert alone.fingerprint["draft"] != pair.fingerprint["draft"]
    temperature = (0.0, 0.7)[(SPECS.index(kind) + bool(tree)) % 2]  # a chain at one, a tree at the other
    settings = Settings(temperature, NEW, SHORT, tree=tree, verification="match")
    policies = (
        [FixedLength(3), Confidence(0.3)] if tree else [FixedLength(2), Confidence(0.3), TEST_POLICIES["trimming"]]
    )
    rounds = assert_replay_is_live(alone, prompts[1:3], policies, settings, profile, tmp_path / "trace")
    assert any(r.accepted for r in rounds) or kind in ("lookup", "suffix")


@pytest.mark.parametrize("collector", ["dense", "live"])
def test_the_rows_of_a_shard_depend_on_its_own_texts(pair, tmp_path, collector):
    """A drafter that keeps texts begins anew with each shard, and has one shard by default."""
    texts = [Prompt(f"p{i}", "w7 w8 w9 w10 w7 w8", "g") for i in range(6)]
    options: dict[str, Any] = {"depth": SHORT, "max_new_tokens": NEW, "collector": collector}
    keeping = with_drafter(pair, "suffix?keep=1")
    assert plan_run(keeping, texts, **options).header.shards == 1
    for shard in collect(keeping, texts, tmp_path / "several", shards=3, **options).batches():
        names = shard["prompt_id"].unique().to_pylist()
        alone = collect(keeping, [p for p in texts if p.id in names], tmp_path / f"alone-{names[0]}", **options)
        columns = ["anchor", "tokens", "accepted_length", "draft_prob"]
        assert shard.select(columns).to_pydict() == alone.table(columns).to_pydict()


@pytest.mark.filterwarnings("ignore:.* are left out")
@pytest.mark.parametrize("collector", ["dense", "live"])
def test_prompts_may_be_as_long_as_the_models_can_read(pair, tmp_path, collector):
    """A prompt is left out if it, the new tokens and the depth are too long: one token more if it stops at every position."""
    most = pair.readable - NEW - SHORT
    texts = [Prompt(f"{n}", " ".join(f"w{20 + i % 20}" for i in range(n)), "g") for n in (most - 1, most, most + 1)]
    options: dict[str, Any] = {"depth": SHORT, "max_new_tokens": NEW, "collector": collector}
    suffix = with_drafter(pair, "suffix")
    kept = [max(len(task.tokens) for task in plan_run(who, texts, **options).tasks[0]) for who in (pair, suffix)]
    assert kept == [most, most - (collector == "dense")]
    assert collect(suffix, texts, tmp_path, **options).row_count > 0


@pytest.mark.parametrize("kind", ["medusa", "hydra", "layer"])
def test_the_states_that_a_drafter_scores_by_are_recorded(pair, folders, prompts, tmp_path, kind):
    alone = drafting(pair, folders, kind)
    options: dict[str, Any] = {"depth": SHORT, "max_new_tokens": NEW, "hidden": [DRAFT_HIDDEN, TARGET_HIDDEN]}
    dense, live = (
        collect(alone, prompts[1:4], tmp_path / collector, collector=collector, **options)
        for collector in ("dense", "live")
    )
    assert dense.header.hidden == live.header.hidden == {DRAFT_HIDDEN: 16, TARGET_HIDDEN: 16}
    rows, network = by_anchor(dense), load_drafter(folders / kind).network
    assert len(rows) > 10
    for at, row in by_anchor(live).items():
        drawn, states = row["drawn"], row[DRAFT_HIDDEN].astype(np.float32)
        if not drawn.any():  # no token but the target's is left to decode
            continue
        assert np.abs(states[drawn]).max() > 0
        np.testing.assert_allclose(states[drawn], rows[at][DRAFT_HIDDEN][drawn], rtol=2e-3, atol=1e-5)  # half precision
        if kind == "medusa":
            known = torch.tensor(row[TARGET_HIDDEN].astype(np.float32))
            heads = [network.state(head, known, None).detach().numpy() for head in np.flatnonzero(drawn)]
            np.testing.assert_allclose(states[drawn], heads, atol=1e-2)
