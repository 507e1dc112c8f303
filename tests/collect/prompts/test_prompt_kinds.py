"""Prompts from pipes and JSON arrays, chat messages of several kinds, and prompts with two BOS tokens."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from specstop.collect.prompts import Prompt, fit, read_prompts
from specstop.decode.models.pair import Pair
from specstop.decode.run import decode
from specstop.decode.settings import Settings
from specstop.policies.errors import InputError, SpecstopWarning
from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast

SHAREGPT = {"id": "a", "conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "hello"},
                                         {"from": "gpt", "value": "hi"}, {"from": "human", "value": "more"}]}  # fmt: skip
PARTS = {"id": "b", "messages": [{"role": "system", "content": [{"type": "text", "text": "s"}]},
                                 {"role": "user", "content": [{"type": "text", "text": "one"},
                                                              {"type": "text", "text": "two"}]}]}  # fmt: skip
STREAMS = {
    "lines": ("one\n\n  two\n", ["one", "two"]),
    "json lines": ('{"prompt": "one"}\n{"prompt": "two"}\n', ["one", "two"]),
    "array": (json.dumps([{"prompt": "one"}, {"prompt": "two"}], indent=1), ["one", "two"]),
    "messages": (json.dumps({"messages": [{"role": "user", "content": "one"}]}), ["one"]),
    "byte order mark": ('\ufeff{"prompt": "one"}', ["one"]),
}


@pytest.mark.parametrize("form", STREAMS)
def test_standard_input_is_read_and_its_form_recognised(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text, expected = STREAMS[form]
    stream = io.TextIOWrapper(io.BytesIO(text.encode()))
    monkeypatch.setattr(sys, "stdin", stream)
    assert [p.text for p in read_prompts("-")] == expected
    assert not stream.closed


@pytest.mark.parametrize("form", STREAMS)
def test_a_named_pipe_is_read_once(form: str, tmp_path: Path) -> None:
    text, expected = STREAMS[form]
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_text, args=(text,), kwargs={"encoding": "utf-8"})
    writer.start()
    assert [p.text for p in read_prompts(path)] == expected
    writer.join(10)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "standard input is empty"),
        ("{oops", "standard input, line 1: invalid JSON"),
        ('["a"]', "standard input, item 1: expected an object"),
        ("[", "invalid JSON"),
    ],
)
def test_a_stream_that_cannot_be_read_is_one_line(text: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    with pytest.raises(InputError, match=message) as caught:
        read_prompts("-")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", ["json", "jsonl"])
@pytest.mark.parametrize("columns", [True, False])
@pytest.mark.parametrize(
    ("record", "text"), [(SHAREGPT, "hello"), (PARTS, "one\ntwo")], ids=["from and value", "parts"]
)
@pytest.mark.parametrize("array", [True, False])
def test_conversations_are_read_in_any_form(
    tmp_path: Path, suffix: str, columns: bool, record: dict[str, Any], text: str, array: bool
) -> None:
    path = tmp_path / f"prompts.{suffix}"
    path.write_text(json.dumps([record], indent=2) if array else json.dumps(record))
    name = next(name for name in record if name != "id")
    (prompt,) = read_prompts(path, column=name if columns else None)
    assert (prompt.id, prompt.text, prompt.system) == (record["id"], text, "s")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "'image_url'"),
        ([{"role": "user", "content": [{"type": "text", "text": 3}]}], "a value of type int as its text"),
        ([{"role": "user", "content": 3}], "a value of type int"),
        ([{"a": 1}], "a list of objects with a; messages have"),
        ([3], "a value of type int"),
        ([[3]], "a list of int|a value of type int"),
        ({"a": 1}, "an object"),
        ([{"from": "gpt", "value": "x"}], "only messages of gpt"),
        ([], "an empty list"),
    ],
    ids=str,
)  # fmt: skip
def test_a_column_of_another_form_says_which(tmp_path: Path, value: Any, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": value}))
    with pytest.raises(InputError, match=rf"line 1: expected .*got .*({message})") as caught:
        read_prompts(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", [
    '{"prompt": "a", "prompt": "b"}',
    '[{"prompt": "a", "prompt": "b"}]',
    '{"messages": [{"role": "user", "content": "a", "content": "b"}]}',
])  # fmt: skip
def test_a_key_that_occurs_twice_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=r"the key '(prompt|content)' occurs twice"):
        read_prompts(path)


def test_two_bos_tokens_are_warned_about_once(tokenizer: PreTrainedTokenizerFast, pair: Pair) -> None:
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    word = next(iter(backend.get_vocab()))
    backend.post_processor = processors.TemplateProcessing(
        single=f"{word} $A", special_tokens=[(word, backend.token_to_id(word))]
    )
    adding = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=word)
    given = [Prompt("a", f"{word} {word}"), Prompt("b", word), Prompt("c", word, templated=True)]
    with pytest.warns(SpecstopWarning, match=r"2 of 3 prompts begin with two .* tokens.*`chat`") as caught:
        fit(given, adding, 100)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(given[2:], adding, 100)
    with pytest.warns(SpecstopWarning, match=r"1 of 1 prompts begin with two .* tokens"):
        decode(replace(pair, tokenizer=adding), f"{word} w7", "fixed:1", settings=Settings(max_new_tokens=2))
