"""The dense collector: its rows are what the live loop meets, and what a slow loop without cache finds."""

from __future__ import annotations

from collections.abc import Mapping
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
from specstop.collect.run import collect, plan_run
from specstop.collect.schema import PromptTask
from specstop.collect.store import Trace
from specstop.decode.loop import Settings, Speculator
from specstop.decode.models.pair import Pair, join
from specstop.decode.plain import plain_texts
from specstop.decode.verify.noise import gumbel, stream_key
from specstop.policies.contract import Array, DraftStep, DraftTree, RoundOutcome, State, StopPolicy
from specstop.policies.features import ANCHOR_FEATURES, CHAIN_FEATURES
from transformers import PreTrainedTokenizerFast

EAGER = 1e-4  # the models' eager attention takes its softmax in float32 whatever their dtype
FLOAT32 = 2e-6  # a few units in the last place: rows are float64 results, rounded once
TEMPERATURES = pytest.mark.parametrize("temperature", [0.0, 0.7])


class Recording(StopPolicy):
    """Drafts `DEPTH` tokens and remembers what it was shown."""

    features, first, max_depth = (*ANCHOR_FEATURES, *CHAIN_FEATURES), 0, DEPTH + 1

    def __init__(self) -> None:
        self.rounds: list[dict[str, Any]] = []
        self.steps: dict[int, Array] = {}
        self.tokens: list[int] = []

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        self.steps[step.depth] = step.features[0, 0].copy()
        return step.alive & (step.depth < DEPTH), state

    def select(self, tree: DraftTree, state: State) -> None:
        self.tokens = tree.tokens[tree.drawn].tolist()

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        self.rounds.append({"steps": self.steps, "tokens": self.tokens, "accepted": int(outcome.accepted[0])})
        self.steps, self.tokens = {}, []
        return state


def by_anchor(trace: Trace) -> dict[tuple[int, int], dict[str, Any]]:
    rows = trace.rows.with_format("numpy")
    return {(int(row["sequence"]), int(row["anchor"])): row for row in rows}


@pytest.fixture(scope="module")
def texts(pair: Pair, prompt_ids: list[list[int]]) -> dict[float, list[list[int]]]:
    """The texts `DEPTH` tokens past the limit, as labels need them."""
    keys = [stream_key(0, f"p{i}") for i in range(len(prompt_ids))]
    return {t: plain_texts(pair, prompt_ids, keys, NEW + DEPTH, t).tokens for t in (0.0, 0.7)}


@TEMPERATURES
def test_a_row_holds_what_the_live_loop_meets_at_its_anchor(
    pair: Pair, prompt_ids: list[list[int]], traces: dict[float, Trace], temperature: float
) -> None:
    rows = by_anchor(traces[temperature])
    visited = 0
    for sequence, prompt in enumerate(prompt_ids):
        policy = Recording()
        generation = Speculator(pair, policy, Settings(temperature, NEW, verification="match")).generate(
            prompt, stream_key(0, f"p{sequence}")
        )
        assert len(policy.rounds) == len(generation.rounds)
        for live, record in zip(policy.rounds, generation.rounds, strict=True):
            row = rows[sequence, record.anchor]
            assert row["tokens"][: record.drafted].tolist() == live["tokens"]
            assert min(row["accepted_length"], record.drafted) == live["accepted"]
            for depth, features in live["steps"].items():
                anchor = [row[name] for name in ANCHOR_FEATURES]
                node = [row[name][depth - 1] if depth else 0.0 for name in CHAIN_FEATURES]
                np.testing.assert_allclose(features, [*anchor, *node], rtol=FLOAT32, atol=FLOAT32)
                visited += 1
    assert visited > 200


@TEMPERATURES
def test_there_is_one_row_for_each_anchor_of_each_text(
    traces: dict[float, Trace], texts: dict[float, list[list[int]]], temperature: float
) -> None:
    lengths = [min(len(text), NEW) for text in texts[temperature]]
    expected = {(s, a) for s, length in enumerate(lengths) for a in range(1, length)}
    rows = by_anchor(traces[temperature])
    assert set(rows) == expected
    assert len(traces[temperature].rows) == len(expected)
    assert all(rows[key]["text_tokens"] == lengths[key[0]] for key in rows)


@TEMPERATURES
def test_the_anchor_and_the_token_before_it_are_those_of_the_text(
    prompt_ids: list[list[int]], traces: dict[float, Trace], texts: dict[float, list[list[int]]], temperature: float
) -> None:
    for (sequence, anchor), row in by_anchor(traces[temperature]).items():
        text = [prompt_ids[sequence][-1], *texts[temperature][sequence]]
        assert [row["before_token"], row["anchor_token"]] == text[anchor - 1 : anchor + 1]


@TEMPERATURES
def test_labels_are_those_of_a_walk_along_the_text(
    traces: dict[float, Trace], texts: dict[float, list[list[int]]], temperature: float
) -> None:
    seen_cut = seen_eos_accepted = False
    for (sequence, anchor), row in by_anchor(traces[temperature]).items():
        text = texts[temperature][sequence]
        accepted, labelled, alive = [], [], True
        for node, token in enumerate(row["tokens"].tolist()):
            at = anchor + node
            labelled.append(alive and at < len(text))
            accepted.append(labelled[-1] and token == text[at])
            alive = accepted[-1]
            seen_eos_accepted |= bool(accepted[-1] and token == EOS)
        assert row["accepted"].tolist() == accepted
        assert row["observed"].tolist() == labelled
        assert row["accepted_length"] == sum(accepted)
        assert bool(row["cut"]) == (text[-1] == EOS and anchor + DEPTH > len(text))
        for name in ("target_prob", "overlap"):
            assert not row[name][~row["observed"]].any()
        seen_cut |= bool(row["cut"])
    assert seen_cut
    assert seen_eos_accepted


@TEMPERATURES
def test_tokens_and_probabilities_are_those_of_a_loop_without_cache(
    plain_pair: Pair, prompts: list[Prompt], prompt_ids: list[list[int]], texts: dict[float, list[list[int]]],
    tmp_path: Path, temperature: float,
) -> None:  # fmt: skip
    """Every tenth row, one full forward per node."""
    scale, options = temperature or 1.0, {"depth": DEPTH, "verification": "match", "max_new_tokens": NEW}
    trace = collect(plain_pair, prompts, tmp_path, temperature=temperature, **options)
    for (sequence, anchor), row in list(by_anchor(trace).items())[::10]:
        key, text = stream_key(0, f"p{sequence}"), texts[temperature][sequence]
        prefix = prompt_ids[sequence] + text[:anchor]
        logprob = torch.zeros(1, dtype=torch.float64)
        for node in range(DEPTH):
            with torch.no_grad():
                q_row = plain_pair.draft(torch.tensor([prefix])).logits[0, -1:]
                p_row = plain_pair.target(torch.tensor([prefix])).logits[0, -1:]
            scores = q_row
            if temperature:
                noise = gumbel(key, torch.tensor([len(prefix)]), plain_pair.vocabulary, torch.float64)
                scores = torch.log_softmax(q_row / temperature, -1) + noise
            token = scores.argmax(-1)
            rows = Rows(q_row, temperature, scores, token, logprob, node + 1)
            assert int(token) == row["tokens"][node]
            expected = compute(CHAIN_FEATURES, rows)[0].numpy()
            np.testing.assert_allclose([row[n][node] for n in CHAIN_FEATURES], expected, rtol=FLOAT32, atol=FLOAT32)
            q, p = torch.softmax(q_row / scale, -1)[0], torch.softmax(p_row / scale, -1)[0]
            assert row["draft_prob"][node] == pytest.approx(float(q[token]), abs=FLOAT32)
            if row["observed"][node]:
                assert row["target_prob"][node] == pytest.approx(float(p[token]), abs=FLOAT32)
                assert row["overlap"][node] == pytest.approx(float(torch.minimum(p, q).sum()), abs=FLOAT32)
            logprob = rows.path_logprob
            prefix = [*prefix, int(token)]


def collector(pair: Pair, temperature: float, depth: int = DEPTH, **more: Any) -> DenseCollector:
    return DenseCollector(pair, Settings(temperature, NEW, depth, verification="match"), **more)


def batch(prompts: list[Prompt], ids: list[list[int]]) -> list[PromptTask]:
    return [PromptTask(i, p.id, p.group, ids[i], stream_key(0, p.id)) for i, p in enumerate(prompts)]


def assert_same(one: list[Mapping[str, Any]], other: list[Mapping[str, Any]], near: float = FLOAT32) -> None:
    assert len(one) == len(other)
    for first, second in zip(one, other, strict=True):
        for name in first:
            if getattr(first[name], "dtype", None) in (np.float32, np.float64):
                np.testing.assert_allclose(first[name], second[name], rtol=near, atol=near, err_msg=name)
            else:
                np.testing.assert_array_equal(first[name], second[name], err_msg=name)


@TEMPERATURES
def test_rows_do_not_depend_on_the_chunk_size(
    pair: Pair, prompts: list[Prompt], prompt_ids: list[list[int]], temperature: float
) -> None:
    work = batch(prompts, prompt_ids)
    whole = collector(pair, temperature).rows(work)
    pieces = collector(pair, temperature, memory_bytes=1).rows(work)
    assert max(len(chunk["anchor"]) for chunk in whole) > 16, "no text is longer than two of the smallest chunks"
    assert_same(whole, pieces)


def test_rows_do_not_depend_on_the_batch(pair: Pair, prompts: list[Prompt], prompt_ids: list[list[int]]) -> None:
    work = batch(prompts, prompt_ids)
    together = collector(pair, 0.7).rows(work)
    single = collector(pair, 0.7)
    alone = [chunk for one in reversed(work) for chunk in single.rows([one])][::-1]
    assert_same(together, alone)


def test_rows_are_the_same_under_eager_attention(
    pair: Pair, eager_pair: Pair, prompts: list[Prompt], prompt_ids: list[list[int]]
) -> None:
    work = batch(prompts, prompt_ids)[:4]
    assert_same(
        collector(pair, 0.7).rows(work),
        collector(eager_pair, 0.7).rows(work),
        EAGER,
    )


def test_a_text_of_one_token_has_no_row(pair: Pair, prompt_ids: list[list[int]]) -> None:
    first = plain_texts(pair, [prompt_ids[0]], [0], 1).tokens[0][0]
    ends_at_once = Pair(pair.target, pair.draft, None, pair.vocabulary, (first,))
    assert collector(ends_at_once, 0.0, 3).rows([PromptTask(0, "a", "", prompt_ids[0])]) == []


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
    (table,) = collect(wide, prompts[:4], tmp_path / "t", max_new_tokens=16, shards=1, **options).shards()
    for name in (*ANCHOR_FEATURES, *(n for n in CHAIN_FEATURES if n in table.column_names), "target_prob", "overlap"):
        values = table[name].to_pylist()
        assert np.isfinite(np.array(values, dtype=np.float64)).all(), name
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
    assert "memory MiB" not in plan_run(pair, prompts[:2], depth=2, max_new_tokens=4, collector="live").header.facts
