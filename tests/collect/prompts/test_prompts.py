"""Prompts: from any source the same way, or one line that says which record is wrong and why."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from specstop.collect.prompts import Prompt, apply_chat_template, encode, fit, read_prompts
from specstop.policies.errors import InputError, SpecstopWarning
from tokenizers.processors import TemplateProcessing
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
    with pytest.raises(InputError, match="limit: expected a whole number"):
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
        (
            '{"prompt": "a", "id": 1}\n{"prompt": "b", "id": "1"}',
            "line 2: prompt id '1' appears in line 1 too, with another text",
        ),
        ('{"prompt": "a"}\n{"prompt": "a"}', "line 2: prompt .* appears in line 1 too; remove repeated records"),
        (r'{"prompt": "\ud800"}', "line 1: the prompt has half a surrogate pair"),
        (r'{"prompt": "a", "id": "b\udc00"}', "line 1: the id has half a surrogate pair"),
        (
            r'{"prompt": "a"}' + "\n" + r'{"prompt": "b", "category": "\udfff"}',
            "line 2: the group has half a surrogate",
        ),
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
        "surrogate in an id",
        "surrogate in a group",
        "empty",
        "blank",
        "bytes",
    ],
)
def test_a_bad_file_is_one_line_with_the_place(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        read_prompts(write(tmp_path, text))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["id", "text", "group", "completion", "system"])
def test_a_prompt_is_text_throughout(name: str) -> None:
    good = {"id": "a", "text": "b", "group": "c", "completion": "d", "system": "e"}
    assert Prompt(**{**good, name: "\U0001f600"})
    with pytest.raises(InputError, match=f"the {name} of prompt .* has half a surrogate pair"):
        Prompt(**{**good, name: "\ud83d"})


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="prompts: expected a JSON Lines file"):
        read_prompts(tmp_path / "nowhere.jsonl")


def test_a_byte_order_mark_is_no_part_of_the_first_record(tmp_path: Path) -> None:
    assert read_prompts(write(tmp_path, b'\xef\xbb\xbf{"prompt": "a"}'))[0].text == "a"


def test_encode_gives_the_tokenizers_ids(tokenizer: PreTrainedTokenizerFast) -> None:
    assert encode([Prompt("a", "w7 w9 </s>"), Prompt("b", "w6")], tokenizer, 3) == [[7, 9, 16], [6]]


@pytest.mark.parametrize(
    ("text", "told"),
    [("w7 w8 w9 w10", r"1 of 2 prompts have more than 3 tokens \('me' has 4\);"), (" ", "'me' has 0 tokens")],
)
def test_a_prompt_that_does_not_fit_is_named(tokenizer: PreTrainedTokenizerFast, text: str, told: str) -> None:
    with pytest.raises(InputError, match=told):
        encode([Prompt("ok", "w7"), Prompt("me", text)], tokenizer, 3)


def test_long_prompts_are_left_out_with_a_warning(tokenizer: PreTrainedTokenizerFast) -> None:
    prompts = [Prompt("ok", "w7"), Prompt("me", "w8 w9 w10")]
    with pytest.warns(
        SpecstopWarning, match=r"^1 of 2 prompts have more than 2 tokens \('me' has 3\) and are left out$"
    ):
        kept, found = fit(prompts, tokenizer, 2)
    assert ([p.id for p in kept], found) == (["ok"], [[7]])


def test_where_no_prompt_fits_nothing_is_skipped_in_silence(tokenizer: PreTrainedTokenizerFast) -> None:
    many = [Prompt(str(i), "w7 w8") for i in range(7)]
    named = "'0' has 2, '1' has 2, '2' has 2, '3' has 2, '4' has 2, ..."
    with pytest.raises(InputError, match=rf"7 of 7 prompts have more than 1 tokens \({named}\)"):
        fit(many, tokenizer, 1)
    with pytest.raises(InputError, match="long: expected skip or refuse, not 'rihgt'"):
        fit(many, tokenizer, 9, "rihgt")


CHAT = "{% for m in messages %}w3 {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}w4{% endif %}"


@pytest.fixture
def chatty(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """A tokenizer with a chat template, which puts a token of its own before every other text."""
    other = copy.deepcopy(tokenizer)
    other.chat_template = CHAT
    other.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return other


def test_a_chat_template_writes_the_prompt_and_is_not_begun_twice(chatty: PreTrainedTokenizerFast) -> None:
    prompts = [Prompt("a", "w7 w8", "g"), Prompt("b", "w9", system="w10")]
    done = apply_chat_template(prompts, chatty)
    assert [(p.id, p.group) for p in done] == [("a", "g"), ("b", "")]
    assert encode(done, chatty, 9) == [[3, 7, 8, 4], [3, 10, 3, 9, 4]]
    assert encode(prompts, chatty, 9) == [[1, 7, 8], [1, 9]]


def test_a_tokenizer_without_a_chat_template_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(InputError, match="chat: the tokenizer has no chat template"):
        apply_chat_template([Prompt("a", "w7")], tokenizer)


def test_a_template_that_refuses_a_prompt_names_it(chatty: PreTrainedTokenizerFast) -> None:
    chatty.chat_template = "{{ raise_exception('no system message here') }}"
    with pytest.raises(InputError, match=r"chat: .*refuses prompt 'a': no system message here"):
        apply_chat_template([Prompt("a", "w7")], chatty)


def test_no_room_for_any_prompt_is_said_as_such(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(InputError, match="max_new_tokens: leaves no room for a prompt"):
        encode([Prompt("a", "w7")], tokenizer, 0)
