"""Prompts: JSON Lines in, or one line that says which record is wrong and why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from specstop.collect.prompts import Prompt, encode, read_prompts
from specstop.policies.errors import InputError
from transformers import PreTrainedTokenizerFast


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "prompts.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_ids_and_groups_are_read_as_text(tmp_path: Path) -> None:
    records = [
        {"prompt": "a", "id": 7, "group": "g"}, {"prompt": "b", "id": "x", "category": "c"},
        {"prompt": "c", "id": "y", "group": None}, {"prompt": "d", "id": "z", "more": [1]},
    ]  # fmt: skip
    path = write(tmp_path, "\r\n\n".join(json.dumps(r) for r in records) + "\n\n")
    assert read_prompts(path) == [
        Prompt("7", "a", "g"),
        Prompt("x", "b", "c"),
        Prompt("y", "c"),
        Prompt("z", "d"),
    ]


def test_a_record_without_an_id_is_known_by_its_text(tmp_path: Path) -> None:
    first, second = read_prompts(write(tmp_path, '{"prompt": "a"}\n{"prompt": "b"}'))
    (again,) = read_prompts(write(tmp_path, '{"group": "g", "prompt": "a"}'))
    assert first.id == again.id != second.id


def test_limit_reads_no_further(tmp_path: Path) -> None:
    path = write(tmp_path, '{"prompt": "a"}\n\n{"prompt": "b"}\nbroken')
    assert [p.text for p in read_prompts(path, 2)] == ["a", "b"]
    with pytest.raises(InputError, match="--limit: expected 1 or more, not 0"):
        read_prompts(path, 0)


def test_a_line_separator_inside_a_string_does_not_end_the_record(tmp_path: Path) -> None:
    assert read_prompts(write(tmp_path, '{"prompt": "a\u2028b"}'))[0].text == "a\u2028b"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\n\n{oops', "line 3: invalid JSON"),
        ('{"prompt": "a"}\n["b"]', 'line 2: expected an object with a non-empty string "prompt"'),
        ('{"text": "a"}', "line 1: expected an object"),
        ('{"prompt": ""}', "line 1: expected an object"),
        ('{"prompt": 3}', "line 1: expected an object"),
        ('{"prompt": "a", "id": 1}\n{"prompt": "b", "id": "1"}', "line 2: id '1' stands in line 1 too"),
        ('{"prompt": "a"}\n{"prompt": "a"}', "line 2: id .* stands in line 1 too"),
        (r'{"prompt": "\ud800"}', "line 1"),
        ("", "is empty"),
        ("\n \n", "is empty"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
    ],
    ids=[
        "json",
        "list",
        "no prompt",
        "empty prompt",
        "number",
        "same id",
        "same text",
        "surrogate",
        "empty",
        "blank",
        "bytes",
    ],
)
def test_a_bad_file_is_one_line_with_the_place(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        read_prompts(write(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_a_missing_file_or_a_folder_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere.jsonl", tmp_path):
        with pytest.raises(InputError, match="--prompts: expected a JSON Lines file"):
            read_prompts(path)


def test_encode_gives_the_tokenizers_ids(tokenizer: PreTrainedTokenizerFast) -> None:
    assert encode([Prompt("a", "w7 w9 </s>"), Prompt("b", "w6")], tokenizer, 3) == [[7, 9, 16], [6]]


@pytest.mark.parametrize(("text", "count"), [("w7 w8 w9 w10", 4), (" ", 0)])
def test_a_prompt_that_does_not_fit_is_named(tokenizer: PreTrainedTokenizerFast, text: str, count: int) -> None:
    with pytest.raises(InputError, match=f"prompt 'me' has {count} tokens; expected 1 to 3"):
        encode([Prompt("ok", "w7"), Prompt("me", text)], tokenizer, 3)
