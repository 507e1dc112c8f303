"""Malformed tables of accepted lengths are refused with one line, and no folder is left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from specstop.collect.table import import_table
from specstop.policies.errors import InputError
from test_routing_import import COLUMNS, LENGTHS, Row, make_rows, write


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
def test_malformed_tables_are_refused(rows: list[Row], options: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = write(rows, tmp_path / "table.jsonl")
    with pytest.raises(InputError, match=words) as caught:
        import_table(path, tmp_path / "out", **{"lengths": LENGTHS, "columns": COLUMNS, **options})
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["absent.parquet", "table.txt", "broken.parquet", "broken.jsonl"])
def test_files_that_are_no_tables_are_refused(name: str, tmp_path: Path) -> None:
    if name != "absent.parquet":
        (tmp_path / name).write_bytes(b"\xff no table")
    with pytest.raises(InputError, match=name.partition(".")[0]):
        import_table(tmp_path / name, tmp_path / "out", LENGTHS)
