"""Hidden states in traces: dense and live ones hold what the models compute, and only where they were asked for."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import NEW
from contract_policies import DEPTH, ReadsDraftStates
from random_trace import HEADER, write
from specstop.collect.prompts import Prompt
from specstop.collect.run import collect, plan_run
from specstop.collect.schema import Header, PromptTask, arrow_schema
from specstop.collect.store import Trace, data_card, load_trace
from specstop.decode.models.pair import Pair
from specstop.decode.plain import plain_texts
from specstop.decode.verify.noise import stream_key
from specstop.policies.contract import Array, DraftStep, RoundOutcome, State, StopPolicy
from specstop.policies.errors import PolicyError, PolicyFailure, TraceError
from specstop.policies.features import HIDDEN_STATES
from specstop.policies.fixed import Confidence, FixedLength
from trace_rows import numpy_rows

TREE = "3,2,1,1,1"
BOTH = tuple(HIDDEN_STATES)
HALF = 2.0**-11


def run(pair: Pair, prompts: list[Prompt], out: Path, **more: Any) -> Trace:
    return collect(pair, prompts, out, **{"depth": DEPTH, "max_new_tokens": NEW, "hidden": BOTH, **more})


def by_anchor(trace: Trace) -> dict[tuple[int, int], dict[str, Any]]:
    """Rows by sequence and anchor, the hidden states of the nodes side by side."""
    found = {}
    for row in numpy_rows(trace):
        for name in trace.header.hidden:
            row[name] = np.asarray(row[name], dtype=np.float16).reshape(trace.header.hidden_shape(name))
        found[int(row["sequence"]), int(row["anchor"])] = row
    return found


def last_states(model: Any, text: list[int]) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        states: np.ndarray[Any, Any] = (
            model(torch.tensor([text]), output_hidden_states=True).hidden_states[-1][0].numpy()
        )
    return states


def near_half(stored: np.ndarray[Any, Any], exact: np.ndarray[Any, Any]) -> None:
    np.testing.assert_allclose(stored.astype(np.float64), exact, rtol=HALF, atol=1e-7)


@pytest.mark.parametrize(("tree", "temperature"), [(None, 0.0), (None, 0.7), (TREE, 0.7)])
def test_dense_rows_hold_the_states_of_whole_forwards(
    plain_pair: Pair,
    prompts: list[Prompt],
    prompt_ids: list[list[int]],
    tmp_path: Path,
    tree: str | None,
    temperature: float,
) -> None:
    """Every ninth row; a node's state is that after its parent, from which it was drawn."""
    trace = run(plain_pair, prompts[3:6], tmp_path, tree=tree, temperature=temperature)
    ids = prompt_ids[3:6]
    keys = [stream_key(0, p.id) for p in prompts[3:6]]
    texts = plain_texts(plain_pair, ids, keys, NEW, temperature).tokens
    assert trace.header.hidden == {"draft_hidden": 16, "target_hidden": 16}
    for (s, anchor), row in list(by_anchor(trace).items())[::9]:
        prefix = ids[s] + texts[s][:anchor]
        near_half(row["target_hidden"], last_states(plain_pair.target, prefix)[-2])
        for node in range(len(row["tokens"])):
            path, parent = [], trace.header.topology[node]
            while parent >= 0:
                path.append(int(row["tokens"][parent]))
                parent = trace.header.topology[parent]
            near_half(row["draft_hidden"][node], last_states(plain_pair.draft, prefix + path[::-1])[-1])


@pytest.mark.parametrize(("tree", "temperature"), [(None, 0.0), (None, 0.7), (TREE, 0.0), (TREE, 0.7)])
def test_live_rows_hold_what_dense_ones_do(
    pair: Pair, prompts: list[Prompt], tmp_path: Path, tree: str | None, temperature: float
) -> None:
    options = {"tree": tree, "temperature": temperature, "verification": "match"}
    dense = by_anchor(run(pair, prompts[2:6], tmp_path / "dense", **options))
    live = by_anchor(run(pair, prompts[2:6], tmp_path / "live", collector="live", policy=ReadsDraftStates(), **options))
    differ = total = 0
    for key, row in live.items():
        drawn = row["drawn"]
        assert not row["draft_hidden"][~drawn].any()
        assert row["draft_hidden"][drawn].any(-1).all()
        for name, here in (("draft_hidden", drawn), ("target_hidden", slice(None))):
            one, other = row[name][here].astype(np.float64), dense[key][name][here].astype(np.float64)
            np.testing.assert_allclose(one, other, rtol=2 * HALF, atol=1e-7)
            differ, total = differ + int((one != other).sum()), total + one.size
    assert total > 2000
    assert differ <= total // 10_000, "float64 results differ by 1e-12: next to none falls on the other side"


def test_rows_do_not_depend_on_the_chunk_size(pair: Pair, prompts: list[Prompt], prompt_ids: list[list[int]]) -> None:
    from specstop.collect.dense import DenseCollector
    from specstop.decode.settings import Settings

    work = [PromptTask(i, p.id, p.group, prompt_ids[i], stream_key(0, p.id)) for i, p in enumerate(prompts[:4])]
    for tree in (None, TREE):
        settings = Settings(0.7, NEW, DEPTH, tree=tree, verification="match")
        one, other = (DenseCollector(pair, settings, BOTH, memory).rows(work) for memory in (1 << 28, 1))
        for first, second in zip(one, other, strict=True):
            for name in BOTH:
                np.testing.assert_allclose(
                    first[name].astype(np.float64), second[name].astype(np.float64), rtol=2 * HALF, atol=1e-7
                )


def test_without_them_a_trace_is_what_it_was(pair: Pair, prompts: list[Prompt], tmp_path: Path) -> None:
    plain = run(pair, prompts[:4], tmp_path / "plain", hidden=())
    rich = run(pair, prompts[:4], tmp_path / "rich", hidden=("target_hidden",))
    assert plain.header.hidden == {} and not set(BOTH) & set(plain.table().schema.names)
    assert rich.table(plain.table().schema.names).equals(plain.table())
    assert set(rich.table().schema.names) - set(plain.table().schema.names) == {"target_hidden"}


def test_the_published_data_paths_have_them_too(
    plain_pair: Pair, prompts: list[Prompt], prompt_ids: list[list[int]], tmp_path: Path
) -> None:
    """SpecDec++ reads the draft's states after its own tokens, DynaSD those of ten candidates of one token."""
    mixed = by_anchor(run(plain_pair, prompts[3:4], tmp_path / "mix", depth=1, mix=0.15, temperature=0.7))
    text = plain_texts(plain_pair, prompt_ids[3:4], [stream_key(0, "p3")], NEW, 0.7).tokens[0]
    read = prompt_ids[3] + text[:1]
    for (_, anchor), row in sorted(mixed.items()):
        near_half(row["draft_hidden"][0], last_states(plain_pair.draft, read)[-1])
        next_ = mixed.get((0, anchor + 1))
        if next_ is not None:
            read = [*read, int(row["tokens"][0]) if next_["mixed"] else text[anchor]]
        near_half(row["target_hidden"], last_states(plain_pair.target, prompt_ids[3] + text[:anchor])[-2])
    wide = by_anchor(run(plain_pair, prompts[3:4], tmp_path / "wide", tree="10", temperature=1.0))
    for row in wide.values():
        assert (row["draft_hidden"] == row["draft_hidden"][:1]).all(), "all are drawn from one distribution"


def test_given_texts_have_them_too(
    pair: Pair, prompts: list[Prompt], prompt_ids: list[list[int]], tmp_path: Path
) -> None:
    keys = [stream_key(0, p.id) for p in prompts]
    texts = plain_texts(pair, prompt_ids, keys, NEW, 0.0).tokens
    completions = {p.id: pair.tokenizer.decode(text) for p, text in zip(prompts, texts, strict=True)}
    rows = by_anchor(run(pair, prompts[4:6], tmp_path / "given", completions=completions))
    own = by_anchor(run(pair, prompts[4:6], tmp_path / "own"))
    assert len(rows) > 10
    for key, row in rows.items():
        for name in BOTH:
            np.testing.assert_allclose(
                row[name].astype(np.float64), own[key][name].astype(np.float64), rtol=2 * HALF, atol=1e-7
            )


def test_a_trace_is_read_by_datasets_and_says_what_it_holds(pair: Pair, prompts: list[Prompt], tmp_path: Path) -> None:
    trace = run(pair, prompts[:3], tmp_path / "trace")
    again = load_trace(tmp_path / "trace")
    assert again.header.hidden == trace.header.hidden
    assert again.table().schema.field("draft_hidden").type == pa.list_(pa.float16(), 16 * DEPTH)
    card = data_card(trace.header)
    assert f"draft_hidden ({DEPTH} x 16, float16), target_hidden (16, float16)" in card
    loaded = datasets.load_dataset(str(tmp_path / "trace"), split="train", cache_dir=str(tmp_path / "cache"))
    first = loaded.with_format("numpy")[0]
    assert np.asarray(first["draft_hidden"]).shape == (16 * DEPTH,)
    assert first["draft_hidden"].tolist() == again.rows.with_format("numpy")[0]["draft_hidden"].tolist()
    layout = pq.ParquetFile(next((tmp_path / "trace" / "data").glob("*.parquet"))).metadata.row_group(0)
    by_path = {layout.column(i).path_in_schema: layout.column(i) for i in range(layout.num_columns)}
    assert "BYTE_STREAM_SPLIT" in by_path["draft_hidden.list.element"].encodings
    assert "RLE_DICTIONARY" in by_path["tokens.list.element"].encodings, "other columns are written as ever"


def test_large_states_make_more_shards(pair: Pair, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch) -> None:
    import specstop.collect.run as module

    each = 2 * 16 * (DEPTH + 1) * NEW
    monkeypatch.setattr(module, "SHARD_BYTES", 3 * each)
    options = {"depth": DEPTH, "max_new_tokens": NEW}
    assert plan_run(pair, prompts, **options, hidden=BOTH).header.shards == 3
    assert plan_run(pair, prompts, **options, hidden=BOTH, shards=2).header.shards == 2
    assert plan_run(pair, prompts, **options).header.shards == 1
    monkeypatch.setattr(module, "PROMPTS_PER_SHARD", len(prompts))
    twice = {**options, "temperature": 0.7, "draws": 2}
    assert [plan_run(pair, prompts, **twice, hidden=hidden).header.shards for hidden in (BOTH, ())] == [6, 1]


def test_an_unknown_hidden_state_is_refused(pair: Pair, prompts: list[Prompt]) -> None:
    with pytest.raises(PolicyError, match=r"hidden: unknown hidden state 'draft' .*known: draft_hidden, target_hidden"):
        plan_run(pair, prompts, max_new_tokens=NEW, hidden=["draft"])


def test_a_header_tells_the_hidden_states_and_the_columns_are_of_their_widths(tmp_path: Path) -> None:
    raw = json.loads(HEADER.to_json())
    del raw["hidden"]
    with pytest.raises(TraceError, match="unknown fields: hidden"):
        Header.from_json(json.dumps(raw), "x")
    header = dataclasses.replace(HEADER, hidden={"target_hidden": 4})
    write(tmp_path, header)
    assert Header.from_json(header.to_json(), "x") == header
    assert load_trace(tmp_path).table().schema.equals(arrow_schema(header))


@pytest.mark.parametrize(
    "hidden", [{"draft": 4}, {"draft_hidden": 0}, {"draft_hidden": -1}, {"draft_hidden": 1.5}, ["draft_hidden"],
                {"draft_hidden": True}, {"draft_hidden": 1 << 40}],
)  # fmt: skip
def test_a_header_with_other_hidden_states_is_refused(hidden: object) -> None:
    with pytest.raises(TraceError, match=r"here: the header has .*hidden"):
        Header.from_json(json.dumps({**json.loads(HEADER.to_json()), "hidden": hidden}), "here")


class Carrying(StopPolicy):
    """Drafts one token more for every few rounds that it has seen, from text to text."""

    name, carries, max_depth = "carrying", True, DEPTH

    def start(self, streams: int, keys: Array) -> State:
        return np.zeros(streams, dtype=np.int64)

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        return step.alive & (step.depth <= state // 5 % DEPTH)[:, None], state

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        return state + outcome.active


TIMELESS = ("sequence", "anchor", "tokens", "drawn", "sent", "committed", "decisions", "accepted")


@pytest.mark.parametrize("shards", [None, 4])
def test_a_carrying_policy_resumed_is_one_undisturbed(
    pair: Pair, prompts: list[Prompt], tmp_path: Path, shards: int | None
) -> None:
    """With each shard it starts anew; unless told, there is one, so that its state passes through all texts."""
    from specstop.collect.shards import record
    from specstop.collect.store import finished

    options = {"depth": DEPTH, "max_new_tokens": NEW, "collector": "live", "shards": shards}
    whole = run(pair, prompts, tmp_path / "whole", policy=Carrying(), hidden=(), collector="live", shards=shards)
    assert whole.header.shards == (shards or 1)
    plan = plan_run(pair, prompts, **options, policy=Carrying())

    def interrupted(batch: Any) -> Any:
        if finished(tmp_path / "broken", plan.header):
            raise KeyboardInterrupt
        return plan.rows(batch)

    with contextlib.suppress(KeyboardInterrupt):
        record(dataclasses.replace(plan, rows=interrupted), tmp_path / "broken")
    again = plan_run(pair, prompts, **options, policy=Carrying())
    resumed = record(again, tmp_path / "broken", resume=True)
    assert resumed.table(TIMELESS).equals(whole.table(TIMELESS))
    drawn = [int(row["drawn"].sum()) for row in numpy_rows(whole)]
    assert len(set(drawn)) > 3


def test_a_policy_that_fails_ends_the_collection(pair: Pair, prompts: list[Prompt], tmp_path: Path) -> None:
    class Fails(Confidence):
        def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
            raise RuntimeError("now")

    with pytest.warns(match="failed"), pytest.raises(PolicyFailure, match=r"failed: .*now"):
        run(pair, prompts, tmp_path, hidden=(), collector="live", policy=Fails(0.4, DEPTH), shards=3)


def test_the_default_of_other_policies_is_many_shards(pair: Pair, prompts: list[Prompt]) -> None:
    many = [dataclasses.replace(p, id=f"{p.id}-{i}") for i in range(9) for p in prompts]
    options = {"depth": DEPTH, "max_new_tokens": NEW, "collector": "live"}
    assert plan_run(pair, many, **options, policy=FixedLength(2)).header.shards == 3
    assert plan_run(pair, many, **options, policy=Carrying()).header.shards == 1
