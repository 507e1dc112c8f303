"""Hidden states in traces: they are what the models compute, and only there if they were requested."""

from __future__ import annotations

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
from contract_policies import DEPTH
from random_trace import HEADER, write
from specstop.collect.prompts import Prompt
from specstop.collect.run import collect, plan_run
from specstop.collect.schema import Header, arrow_schema
from specstop.collect.store import Trace, hidden_text, load_trace
from specstop.decode.models.pair import Pair
from specstop.decode.plain import plain_texts
from specstop.decode.verify.noise import stream_key
from specstop.policies.errors import PolicyError, TraceError
from specstop.policies.features import HIDDEN_STATES
from trace_rows import by_anchor

TREE = "3,2,1,1,1"
BOTH = tuple(HIDDEN_STATES)
HALF = 2.0**-11


def run(pair: Pair, prompts: list[Prompt], out: Path, **more: Any) -> Trace:
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
    trace = run(plain_pair, prompts[3:6], tmp_path, tree=tree, temperature=temperature)
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


def test_without_them_a_trace_is_what_it_was(pair: Pair, prompts: list[Prompt], tmp_path: Path) -> None:
    plain = run(pair, prompts[:4], tmp_path / "plain", hidden=())
    rich = run(pair, prompts[:4], tmp_path / "rich", hidden=("target_hidden",))
    assert plain.header.hidden == {} and not set(BOTH) & set(plain.table().schema.names)
    assert rich.table(plain.table().schema.names).equals(plain.table())
    assert set(rich.table().schema.names) - set(plain.table().schema.names) == {"target_hidden"}


def test_a_trace_is_read_by_datasets_and_says_what_it_holds(pair: Pair, prompts: list[Prompt], tmp_path: Path) -> None:
    trace = run(pair, prompts[:3], tmp_path / "trace")
    again = load_trace(tmp_path / "trace")
    assert again.header.hidden == trace.header.hidden
    assert again.table().schema.field("draft_hidden").type == pa.list_(pa.float16(), 16 * DEPTH)
    assert f"draft_hidden ({DEPTH} x 16, float16), target_hidden (16, float16)" == hidden_text(trace.header)
    loaded = datasets.load_dataset(str(tmp_path / "trace"), split="train", cache_dir=str(tmp_path / "cache"))
    first, same = loaded.with_format("numpy")[0]["draft_hidden"], again.rows.with_format("numpy")[0]["draft_hidden"]
    assert first.shape == (16 * DEPTH,) and first.tolist() == same.tolist()
    layout = pq.ParquetFile(next((tmp_path / "trace" / "data").glob("*.parquet"))).metadata.row_group(0)
    by_path = {layout.column(i).path_in_schema: layout.column(i) for i in range(layout.num_columns)}
    assert "BYTE_STREAM_SPLIT" in by_path["draft_hidden.list.element"].encodings
    assert "RLE_DICTIONARY" in by_path["tokens.list.element"].encodings


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


def test_an_unknown_hidden_state_is_refused(pair: Pair, prompts: list[Prompt]) -> None:
    with pytest.raises(PolicyError, match="unknown hidden state 'draft'"):
        plan_run(pair, prompts, max_new_tokens=NEW, hidden=["draft"])


def test_the_columns_are_of_the_widths_in_the_header(tmp_path: Path) -> None:
    header = dataclasses.replace(HEADER, hidden={"target_hidden": 4})
    write(tmp_path, header)
    assert Header.from_json(header.to_json(), "x") == header
    assert load_trace(tmp_path).table().schema.equals(arrow_schema(header))


@pytest.mark.parametrize(
    "hidden", [{"draft": 4}, {"draft_hidden": 0}, {"draft_hidden": -1}, {"draft_hidden": 1.5}, ["draft_hidden"],
                {"draft_hidden": True}, {"draft_hidden": 1 << 40}],
)  # fmt: skip
def test_a_header_with_other_hidden_states_is_refused(hidden: object) -> None:
    with pytest.raises(TraceError, match="hidden"):
        Header.from_json(json.dumps({**json.loads(HEADER.to_json()), "hidden": hidden}), "here")
