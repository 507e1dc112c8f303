"""Tables of accepted lengths by drafter, imported as dense traces: compared with simulated rounds, or refused in one line."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from specstop.collect.store import check_trace, column_array
from specstop.collect.table import import_table
from specstop.policies.errors import InputError
from specstop.policies.fixed import FixedLength
from specstop.policies.registry import load_policy
from specstop.policies.routing import ThresholdRoute
from specstop.train.evaluate.evaluate import evaluate
from specstop.train.replay.run import replay

DEPTH = 5
LENGTHS = {"ngram": "acc_ngram", "eagle": "acc_eagle"}
COLUMNS = {"tokens": "token_ids"}

Row = dict[str, Any]


def make_rows(texts: int = 6, seed: int = 0) -> list[Row]:
    """Return rows of texts of 2 to 17 tokens; lengths may exceed the end of the text and `DEPTH`."""
    draw = np.random.default_rng(seed)
    rows = []
    for number, total in enumerate(draw.integers(2, 18, texts).tolist()):
        lengths = {column: (draw.geometric(0.4, total) - 1).tolist() for column in LENGTHS.values()}
        tokens = draw.integers(3, 90, total).tolist()
        rows.append(
            {"id": f"r{number}", "group": "ab"[number % 2], "prompt_tokens": 5 + number, "token_ids": tokens, **lengths}
        )
    return rows  # fmt: skip


def write(rows: list[Row], path: Path) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        cells = [
            [json.dumps(v).replace('"', '""') if isinstance(v, list) else str(v) for v in row.values()] for row in rows
        ]
        lines = [",".join(f'"{cell}"' for cell in line) for line in [list(rows[0]), *cells]]
        path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("table")
    path = write(make_rows(), folder / "table.parquet")
    return import_table(path, folder / "trace", LENGTHS, columns=COLUMNS, free=["ngram"], depth=DEPTH)


@pytest.fixture(scope="module")
def costs(profile):
    """Costs of two drafters; the first one is nearly free."""
    low, high = (dataclasses.replace(t, draft_s=(1e-6, 1e-6), later_draft_s=1e-6) for t in (profile.low, profile.high))
    return dataclasses.replace(profile, low=low, high=high, temperature=0.0, others=(profile,))


def test_a_trace_has_what_the_table_says(trace):
    header, rows = check_trace(trace.folder).header, make_rows()
    assert (header.depth, header.tree.drafters, header.readings) == (DEPTH, 2, ("nothing", "path"))
    table = {
        name: column_array(column)
        for name, column in zip(trace.table().column_names, trace.table().columns, strict=True)
    }
    at = 0
    for text in rows:
        total, run, rate = len(text["token_ids"]), 0, 0.0
        for anchor in range(1, total):
            agrees = text["acc_ngram"][anchor - 1] > 0  # with the anchor token, the one at index anchor - 1
            run, rate = (run + 1) * agrees, 0.9 * rate + 0.1 * agrees
            assert (table["prompt_id"][at], table["anchor"][at], table["text_tokens"][at]) == (
                text["id"],
                anchor,
                total,
            )
            assert table["agreement_run"][at].tolist() == [run, 0]
            np.testing.assert_allclose(table["agreement_rate"][at], [rate, 0], rtol=1e-6)
            for node, (depth, drafter) in enumerate(zip(header.tree.depth[1:], header.tree.drafter[1:], strict=True)):
                length = min(text[list(LENGTHS.values())[drafter]][anchor], total - anchor)
                known = depth <= length
                token = text["token_ids"][anchor + depth - 1] if known else -1
                observed = depth <= length + 1 and anchor + depth <= total
                found = (table[name][at, node] for name in ("accepted", "tokens", "observed"))
                assert tuple(found) == (known, token, observed)
            at += 1
    assert at == len(table["anchor"])


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_formats_and_the_bonus_give_the_same_rows(trace, suffix, tmp_path):
    rows = [row | {name: [n + 1 for n in row[name]] for name in LENGTHS.values()} for row in make_rows()]
    path = write(rows, tmp_path / f"table.{suffix}")
    other = import_table(path, tmp_path / "out", LENGTHS, columns=COLUMNS, free=["ngram"], depth=DEPTH, bonus=True)
    assert other.table().equals(trace.table())


def simulate(text: Row, choose: Any) -> list[tuple[int, int]]:
    """Return (anchor, committed) of the rounds of a text; `choose(anchor)` returns (column, draft length)."""
    rounds, anchor, total = [], 1, len(text["token_ids"])
    while anchor < total:
        column, length = choose(anchor)
        committed = min(min(text[column][anchor], length) + 1, total - anchor)
        rounds.append((anchor, committed))
        anchor += committed
    return rounds


@pytest.mark.parametrize("length", [0, 1, 3, DEPTH])
@pytest.mark.parametrize("drafter", LENGTHS)
def test_fixed_lengths_play_the_rounds_of_the_table(trace, costs, drafter, length):
    rounds = replay(trace, load_policy(f"fixed:{length}@{drafter}"), costs)
    played = list(zip(rounds.anchor.tolist(), rounds.committed.tolist(), strict=True))
    assert played == [one for text in make_rows() for one in simulate(text, lambda t: (LENGTHS[drafter], length))]


def test_routing_by_agreement_plays_the_rounds_of_the_table(trace, costs):
    rounds = replay(trace, ThresholdRoute("agreement_run", 1, [FixedLength(4), FixedLength(2)]), costs)
    expected = []
    for text in make_rows():

        def choose(anchor: int, text: Row = text) -> tuple[str, int]:
            return ("acc_ngram", 4) if text["acc_ngram"][anchor - 1] else ("acc_eagle", 2)

        expected += simulate(text, choose)
    assert list(zip(rounds.anchor.tolist(), rounds.committed.tolist(), strict=True)) == expected
    assert (rounds.drafting.sum(1) <= 1).all() and rounds.drafting.any(0).all()
    report = evaluate(trace, costs, [load_policy("agreement?lengths=4+2"), "fixed:2@eagle"])
    assert report["agreement?lengths=4+2"].speedup.value > 0


def changed(**values: Any) -> list[Row]:
    """Return the rows with other values in the second one."""
    rows = make_rows()
    rows[1] = {key: value for key, value in (rows[1] | values).items() if value is not ...}
    return rows


@pytest.mark.parametrize(
    ("rows", "options", "words"),
    [
        (changed(acc_eagle=[1, 2]), {}, "row 2.*lengths in 'acc_eagle'.*got 2"),
        (changed(acc_ngram=[-1] * len(make_rows()[1]["token_ids"])), {}, "row 2.*0 or more in 'acc_ngram'"),
        (changed(acc_ngram="many"), {}, "acc_ngram.*row"),
        (changed(token_ids=None), {}, "row 2.*list of whole numbers.*token_ids"),
        (changed(prompt_tokens=-4), {}, "row 2.*number of tokens in 'prompt_tokens'"),
        (changed(id=None), {}, "row 2.*id"),
        (changed(id="r0", group="a"), {}, "distinct ids.*r0.*sample"),
        (make_rows(), {"lengths": {"eagle": "acc_eagel"}}, "column 'acc_eagel' \\(did you mean 'acc_eagle'"),
        (make_rows(), {"columns": {}}, "column 'tokens'"),
        (make_rows(), {"columns": {"token": "token_ids"}}, "column.*'token'.*tokens"),
        (make_rows(), {"lengths": {"a b": "acc_eagle"}}, "lengths.*'a b'"),
        (make_rows(), {"free": ["engram"]}, "free.*'engram'.*ngram"),
        (make_rows(), {"bonus": True}, "1 or more.*included"),
        (make_rows(), {"depth": 0}, "depth"),
        ([], {}, "table"),
        ([row | {"acc_ngram": [0] * len(row["token_ids"]), "acc_eagle": [0] * len(row["token_ids"])} for row in make_rows()],
         {}, "no token was accepted"),
        ([{**make_rows()[0], "token_ids": [3], "acc_ngram": [1], "acc_eagle": [0]}], {}, "two tokens"),
    ],
)  # fmt: skip
def test_malformed_tables_are_refused(rows, options, words, tmp_path):
    path = write(rows, tmp_path / "table.jsonl")
    with pytest.raises(InputError, match=words) as caught:
        import_table(path, tmp_path / "out", **{"lengths": LENGTHS, "columns": COLUMNS, **options})
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["absent.parquet", "table.txt", "broken.parquet", "broken.jsonl"])
def test_files_that_are_no_tables_are_refused(name, tmp_path):
    if name != "absent.parquet":
        (tmp_path / name).write_bytes(b"\xff no table")
    with pytest.raises(InputError, match=name.partition(".")[0]):
        import_table(tmp_path / name, tmp_path / "out", LENGTHS)
