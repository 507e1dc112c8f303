"""Prompts: the same from any source, samples, chat templates and token ids; what cannot be read is refused in one line."""

from __future__ import annotations

import copy
import io
import json
import os
import sys
import threading
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import datasets
import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies
from pyarrow import parquet
from specstop.collect.prompts import (
    Prompt,
    apply_chat_template,
    prompts_json,
    read_prompts,
    stored_prompts,
    tokenize_prompts,
)
from specstop.decode.run import decode
from specstop.decode.settings import Settings
from specstop.policies.errors import InputError, SpecstopWarning, TraceError
from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast

TEXTS = strategies.text(strategies.characters(exclude_categories=("C", "Z")), min_size=1)
SYSTEM = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]
PARTS = [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}]


def write(folder: Path, text: str | bytes, name: str = "prompts.jsonl") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def write_records(folder: Path, records: Sequence[Any]) -> Path:
    return write(folder, "\n".join(map(json.dumps, records)))


def record(id: str | None, prompt: Any = "a", **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, **({} if id is None else {"id": id}), **more}


def refused(source: str | Path, message: str, **options: Any) -> None:
    with pytest.raises(InputError, match=message) as caught:
        read_prompts(source, **options)
    assert "\n" not in str(caught.value)


@given(strategies.lists(strategies.tuples(TEXTS, TEXTS), min_size=1, max_size=4, unique_by=lambda pair: pair[0]))
@settings(max_examples=25, deadline=None)
def test_every_source_gives_the_same_prompts(tmp_path_factory, pairs):
    folder = tmp_path_factory.mktemp("sources")
    rows = [{"id": id, "prompt": text, "category": "k"} for id, text in pairs]
    table = datasets.Dataset.from_list(rows)
    write_records(folder, rows)
    write(folder, json.dumps(rows, indent=1), "prompts.json")
    table.to_csv(str(folder / "prompts.CSV"))
    table.to_parquet(str(folder / "prompts.parquet"))
    table.save_to_disk(str(folder / "saved"))
    expected = [Prompt(id, text, "k") for id, text in pairs]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SpecstopWarning)  # of equal texts
        for name in ("prompts.jsonl", "prompts.json", "prompts.CSV", "prompts.parquet", "saved"):
            assert read_prompts(folder / name) == expected, name


@pytest.mark.parametrize(
    ("data", "options", "expected"),
    [
        ({"task_id": "HumanEval/0", "prompt": "def f():", "entry_point": "f"}, {}, Prompt("HumanEval/0", "def f():")),
        ({"question_id": 81, "category": "c", "turns": ["one", "two"]}, {}, Prompt("81", "one", "c")),
        ({"id": 5, "question": "2 + 2?", "answer": "4"}, {}, Prompt("5", "2 + 2?")),
        ({"id": "a", "prompt": None, "question": "q", "group": None, "category": 3}, {}, Prompt("a", "q", "3")),
        ({"id": "a", "messages": SYSTEM}, {}, Prompt("a", "a", system="s")),
        ({"id": "a", "messages": [{"role": "user", "content": PARTS}]}, {}, Prompt("a", "1\n2")),
        ({"id": "a", "conversations": [{"from": "gpt", "value": "x"}, {"from": "human", "value": "y"}]}, {},
         Prompt("a", "y")),
        ({"id": "a", "prompt": PARTS}, {}, Prompt("a", "1\n2")),
        ({"id": 1, "prompt": "no", "text": "yes", "answer": "42"}, {"column": "text", "completion": "answer"},
         Prompt("1", "yes", completion="42")),
        ({"id": 1, "prompt": "a", "answer": [4, 2]}, {"completion": "answer"}, Prompt("1", "a", completion=(4, 2))),
        ({"id": "a", "prompt": "a", "sample": "w7"}, {"completion": "sample"}, Prompt("a", "a", completion="w7")),
        ({"id": "a", "prompt": "a", "sample": "w7"}, {"column": "sample"}, Prompt("a", "w7")),
        ({"id": "q", "prompt": "a", "sample": 1}, {}, Prompt("q", "a", sample="1")),
        ({"id": "r", "prompt": "a", "prompt_id": 7}, {}, Prompt("7", "a", sample="r")),
        ({"id": "r", "prompt": "a", "prompt_id": "q", "sample": "x"}, {}, Prompt("q", "a", sample="x")),
        ({"id": "q", "prompt": "a", "prompt_id": "q"}, {}, Prompt("q", "a")),
        ({"id": "q", "prompt": "a", "prompt_id": "", "sample": ""}, {}, Prompt("q", "a")),
    ],
)  # fmt: skip
def test_a_record_becomes_a_prompt(tmp_path, data, options, expected):
    assert read_prompts(write_records(tmp_path, [data]), **options) == [expected]


@pytest.mark.parametrize(
    ("content", "message", "options"),
    [
        ('{"prompt": "a"}\n\n{oops', "line 3: invalid JSON", {}), ("[", "invalid JSON", {}), ("\n \n", "is empty", {}),
        ('{"prompt": "a"}\n["b"]', "line 2: expected an object", {}), ('["a"]', "item 1: expected an object", {}),
        ('{"promt": "a"}', "line 1: .*it has promt .did you mean.*`column`", {}), (b'{"prompt": "\xff"}', "not UTF-8", {}),
        ('{"prompt": "a", "prompt": "b"}', "'prompt' occurs twice", {}),
        (r'{"prompt": "\ud800"}', "text of prompt .* surrogate", {}),
        (r'{"prompt": "a", "id": "b\udc00"}', "id of prompt .* surrogate", {}),
        ('{"prompt": "a"}', '"text", but it has prompt', {"column": "text"}),
        ('{"prompt": "a"}', 'completions: .*line 1: .*"answer"', {"completion": "answer"}),
        ('{"prompt": "a", "out": [8, "w9"]}', "completions: .*line 1", {"completion": "out"}),
        ('{"prompt": "a"}', "limit: expected", {"limit": 0}),
        *(([record("ok"), record("a", value)], f"line 2: .*{noun}", {}) for value, noun in (
            ("", "empty"), (3, "int"), ({"a": 1}, "dict"), ([], "empty"), ([[3]], "type"), ([{"a": 1}], "user"),
            ([{"role": "assistant", "content": "a"}], "assistant"), ([{"role": "user", "content": 3}], "int"),
            ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "image_url"),
        )),
        ([record("q", sample="x"), record("q", sample="x")], "prompt.* 2.*`sample`", {}),
        ([record(None), record(None)], "prompt.* 2.*`sample`", {}),
        ([record("r1", prompt_id="q"), record("r2", "b", prompt_id="q")], "prompt.* 2.*another text", {}),
        ([record(1), record("1", "b")], "prompt.* 2.*another text", {}),
        ([record("q", sample="x"), record("q", SYSTEM, sample="y")], "prompt.* 2.*another text", {}),
    ],
)  # fmt: skip
def test_malformed_and_contradictory_records_are_refused(tmp_path, content, message, options):
    path = write_records(tmp_path, content) if isinstance(content, list) else write(tmp_path, content)
    refused(path, message, **options)


def test_a_file_is_read_as_far_as_the_limit_and_unreadable_files_are_refused(tmp_path):
    path = write(tmp_path, '{"prompt": "a"}\n\n{"prompt": "b\u2028c"}\nbroken')
    assert [p.text for p in read_prompts(path, 2)] == ["a", "b\u2028c"]
    refused(tmp_path / "nowhere.jsonl", "does not exist")
    refused(write(tmp_path, "prompt,id,id\na,b,c\n", "p.csv"), "'id'")
    for name, text in (("p.csv", b"prompt\na,b\n"), ("p.parquet", b"PAR1 not")):
        refused(write(tmp_path, text, name), "cannot be read as")
    late = pa.array([1 << 62], pa.timestamp("us"))  # after the year 9999
    parquet.write_table(pa.table({"prompt": ["a"], "day": late}), tmp_path / "late.parquet")
    refused(tmp_path / "late.parquet", "cannot be read as")
    refused("a text instead of a file " * 20, "does not exist")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one\n\n  two\n", ["one", "two"]), ('{"prompt": "one"}\n{"prompt": "two"}\n', ["one", "two"]),
        ('[\n {"prompt": "one"},\n {"prompt": "two"}\n]', ["one", "two"]), ('\ufeff{"prompt": "one"}', ["one"]),
    ],
    ids=["lines", "json lines", "array", "byte order mark"],
)  # fmt: skip
def test_pipes_are_read_and_their_form_recognised(text, expected, monkeypatch, tmp_path):
    stream = io.TextIOWrapper(io.BytesIO(text.encode()))
    monkeypatch.setattr(sys, "stdin", stream)
    assert [p.text for p in read_prompts("-")] == expected and not stream.closed
    refused("-", "standard input is empty")
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=(text,), kwargs={"encoding": "utf-8"})
    writer.start()
    assert [p.text for p in read_prompts(tmp_path / "pipe")] == expected
    writer.join(10)


def test_folders_are_read_as_data_sets(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    refused(folder, "no data set can be read")
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text(f'{{"text": "{split} 1"}}\n{{"text": "{split} 2"}}\n')
    assert [p.text for p in read_prompts(folder, column="text")] == ["train 1", "train 2"]
    refused(folder, "row 1: .* it has text")
    data = datasets.Dataset.from_dict({"prompt": ["a", "b"]})
    datasets.DatasetDict({"test": data}).save_to_disk(str(tmp_path / "one"))
    assert [p.text for p in read_prompts(tmp_path / "one")] == ["a", "b"], "its only split"
    datasets.DatasetDict({"test": data, "dev": data}).save_to_disk(str(tmp_path / "two"))
    refused(tmp_path / "two", "splits test, dev")


def test_a_hub_name_has_configuration_and_split(monkeypatch):
    load_dataset = Mock(return_value=datasets.Dataset.from_list([{"question": "q"}]))
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert read_prompts("hf:openai/gsm8k:main:train[:5]")[0].text == read_prompts("hf:me/mine")[0].text == "q"
    arguments = [(*call.args, *call.kwargs.values()) for call in load_dataset.call_args_list]
    assert arguments == [("openai/gsm8k", "main", "train[:5]"), ("me/mine", None, None)]
    refused("hf:a/b/c", "expected hf:organisation/name")
    load_dataset.side_effect = ConnectionError("no way\nthere")
    refused("hf:a/b", "hf:a/b: no way$")


def test_equal_texts_under_several_ids_are_counted(tmp_path):
    rows = [record("a"), record("b"), record("c", "b"), record("d"), record("c", "b", sample="x")]
    with pytest.warns(SpecstopWarning, match="2 of 5 prompts repeat the text"):
        read_prompts(write_records(tmp_path, rows))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_prompts(write_records(tmp_path, [rows[0], rows[2], rows[4]]))


@given(strategies.lists(strategies.builds(Prompt, TEXTS, TEXTS, TEXTS, TEXTS | strategies.lists(
    strategies.integers(0, 9), min_size=1).map(tuple), TEXTS, strategies.booleans(), TEXTS), max_size=3))  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_stored_prompts_are_read_as_they_were(tmp_path_factory, prompts):
    folder = tmp_path_factory.mktemp("stored")
    (folder / "prompts.jsonl").write_text(prompts_json(prompts))
    assert stored_prompts(folder) == prompts
    for damage in ("[]\n", '{"id": "a"}\n', '{"id": '):
        (folder / "prompts.jsonl").write_text(damage + prompts_json(prompts))
        with pytest.raises(TraceError, match="damaged"):
            stored_prompts(folder)


def test_prompts_are_encoded_and_those_without_a_place_are_refused_or_left_out(tokenizer):
    assert tokenize_prompts([Prompt("a", "w7 w9 </s>"), Prompt("b", "w6")], tokenizer, 3)[1] == [[7, 9, 16], [6]]
    for text, limit, message in (("w7 w8 w9 w10", 3, "'me' has 4"), (" ", 3, "'me' has 0"), ("w7", 0, "no room")):
        with pytest.raises(InputError, match=message):
            tokenize_prompts([Prompt("ok", "w7"), Prompt("me", text)], tokenizer, limit, skip_long=False)
    with pytest.raises(InputError, match="tokenizer"):
        tokenize_prompts([Prompt("a", "w7")], None, 3)
    prompts = [Prompt("ok", "w7 w8"), Prompt("me", "w8 w9 w10")]
    with pytest.warns(SpecstopWarning, match="1 of 2 prompts have more than 2 tokens .'me' has 3."):
        assert tokenize_prompts(prompts, tokenizer, 2) == ([prompts[0]], [[7, 8]])
    with pytest.raises(InputError, match="2 of 2 prompts have more than 1 tokens"):
        tokenize_prompts(prompts, tokenizer, 1)


CHAT = "{% for m in messages %}w3 {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}w4{% endif %}"


def beginning_with(tokenizer: PreTrainedTokenizerFast, word: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer that begins texts with a word."""
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    special = [(word, backend.token_to_id(word))]
    backend.post_processor = processors.TemplateProcessing(single=f"{word} $A", special_tokens=special)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=word)


def test_a_chat_template_writes_the_prompt_and_its_first_token(tokenizer):
    chatty = beginning_with(tokenizer, "<s>")
    prompts = [Prompt("a", "w7 w8", "g"), Prompt("b", "w9", system="w10")]
    for missing in (chatty, None):
        with pytest.raises(InputError, match="no chat template"):
            apply_chat_template(prompts, missing)
    chatty.chat_template = CHAT
    rendered = apply_chat_template(prompts, chatty)
    assert [(p.id, p.group, p.templated) for p in rendered] == [("a", "g", True), ("b", "", True)]
    assert tokenize_prompts(rendered, chatty, 9)[1] == [[3, 7, 8, 4], [3, 10, 3, 9, 4]]
    assert tokenize_prompts(prompts, chatty, 9)[1] == [[1, 7, 8], [1, 9]]
    refusing = copy.deepcopy(chatty)
    refusing.chat_template = "{{ raise_exception('no system message here') }}"
    with pytest.raises(InputError, match="prompt 'a': no system message here"):
        apply_chat_template(prompts, refusing)


def test_two_bos_tokens_are_warned_about_once(tokenizer, pair):
    word = next(iter(tokenizer.get_vocab()))
    adding = beginning_with(tokenizer, word)
    prompts = [Prompt("a", f"{word} {word}"), Prompt("b", word), Prompt("c", word, templated=True)]
    with pytest.warns(SpecstopWarning, match="2 of 3 prompts begin with two") as caught:
        tokenize_prompts(prompts, adding, 100)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tokenize_prompts(prompts[2:], adding, 100)
    with pytest.warns(SpecstopWarning, match="1 of 1 prompts begin with two"):
        decode(replace(pair, tokenizer=adding), f"{word} w7", "fixed:1", settings=Settings(max_new_tokens=2))
