"""Text files that `benchmarks/make_pair.py --text` reads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from benchmark_scripts import script
from specstop.policies.errors import InputError
from specstop.train.demo.pair_text import Document

read_documents = script("text_files").read_documents


def test_records_and_folders_are_read(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text('{"prompt": "a b", "completion": "c"}\n\n{"prompt": "d", "group": "g"}\n')
    assert read_documents(path) == [Document("1", "a b\nc", "all", "a b"), Document("3", "d", "g", "d")]
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "x.txt").write_text("text")
    assert read_documents(tmp_path) == [Document("sub/x.txt", "text", "sub")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1", "records.jsonl:1: expected a JSON object"),
        ('{"text": "x"}', "records.jsonl:1: expected an object with a non-empty text field 'prompt'"),
        ('{"prompt": "x", "completion": 3}', "expected text in the field 'completion', got int"),
    ],
)
def test_a_bad_record_names_its_line(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(InputError, match=re.escape(message)):
        read_documents(path)


def test_a_missing_text_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        read_documents(tmp_path / "none.jsonl")
