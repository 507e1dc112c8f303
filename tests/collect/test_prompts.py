"""Prompts: from any source the same way, or one line that says which record is wrong and why."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from specstop.collect.presets import PRESETS
from specstop.collect.prompts import Choice, Columns, Prompt, apply_chat_template, encode, read_prompts
from specstop.policies.errors import InputError
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


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--prompts: expected a JSON Lines file"):
        read_prompts(tmp_path / "nowhere.jsonl")


def test_a_byte_order_mark_is_no_part_of_the_first_record(tmp_path: Path) -> None:
    assert read_prompts(write(tmp_path, b'\xef\xbb\xbf{"prompt": "a"}'))[0].text == "a"


def test_each_line_of_a_plain_text_is_a_prompt(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("  one two \n\n{not json\n")
    assert [p.text for p in read_prompts(path)] == ["one two", "{not json"]


def test_encode_gives_the_tokenizers_ids(tokenizer: PreTrainedTokenizerFast) -> None:
    assert encode([Prompt("a", "w7 w9 </s>"), Prompt("b", "w6")], tokenizer, 3) == [[7, 9, 16], [6]]


@pytest.mark.parametrize(("text", "count"), [("w7 w8 w9 w10", 4), (" ", 0)])
def test_a_prompt_that_does_not_fit_is_named(tokenizer: PreTrainedTokenizerFast, text: str, count: int) -> None:
    with pytest.raises(InputError, match=f"prompt 'me' has {count} tokens; expected 1 to 3"):
        encode([Prompt("ok", "w7"), Prompt("me", text)], tokenizer, 3)


LAYOUTS = {
    "gsm8k": ({"question": "2 + 2?", "answer": "#### 4"}, Prompt("", "2 + 2?", "gsm8k")),
    "humaneval": (
        {"task_id": "HumanEval/0", "prompt": "def f():", "canonical_solution": "    pass", "entry_point": "f"},
        Prompt("HumanEval/0", "def f():", "humaneval"),
    ),
    "mt-bench": (
        {"question_id": 81, "category": "writing", "turns": ["first", "second"]},
        Prompt("81", "first", "writing"),
    ),
    "spec-bench": (
        {"question_id": 200, "category": "translation", "turns": ["only"]},
        Prompt("200", "only", "translation"),
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_preset_knows_the_layout(tmp_path: Path, name: str) -> None:
    assert set(LAYOUTS) == set(PRESETS)
    record, expected = LAYOUTS[name]
    (prompt,) = read_prompts(write(tmp_path, json.dumps(record)), preset=name)
    assert (prompt.text, prompt.group) == (expected.text, expected.group)
    assert prompt.id == expected.id or not expected.id


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_preset_reads_the_common_layout_too(tmp_path: Path, name: str) -> None:
    record = {"id": 5, "category": "c", "prompt": "a"}
    assert read_prompts(write(tmp_path, json.dumps(record)), preset=name)[0].text == "a"


def test_named_columns_take_the_place_of_the_layouts(tmp_path: Path) -> None:
    record = {"prompt": "no", "text": "yes", "kind": "k", "group": "no", "answer": "42"}
    columns = Columns("text", "kind", "answer")
    (prompt,) = read_prompts(write(tmp_path, json.dumps(record)), columns=columns)
    assert (prompt.text, prompt.group, prompt.completion) == ("yes", "k", "42")


def test_the_first_message_of_the_user_is_the_prompt(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a"},
    ]
    (prompt,) = read_prompts(write(tmp_path, json.dumps({"messages": messages})), columns=Columns("messages"))
    assert (prompt.text, prompt.system) == ("u", "s")


@pytest.mark.parametrize(
    ("record", "columns", "message"),
    [
        ({"promt": "a"}, Columns(), "line 1: .*it has promt .did you mean 'promt'.*--column names another"),
        ({"prompt": "a"}, Columns("text"), 'line 1: .*string "text", but it has prompt; --column'),
        ({"prompt": "a"}, Columns(group="topic"), "--group names another column"),
        (
            {"prompt": "a"},
            Columns(completion="answer"),
            '--completions: .*line 1: expected a non-empty string "answer"',
        ),
        ({"prompt": []}, Columns(), "line 1: expected an object"),
        ({"prompt": [3]}, Columns(), "line 1: expected an object"),
        ({"prompt": [{"role": "assistant", "content": "a"}]}, Columns(), "line 1: expected an object"),
    ],
    ids=["typo", "column", "group", "completion", "no turns", "number", "no user"],
)
def test_a_record_without_the_column_says_what_it_has(
    tmp_path: Path, record: dict[str, Any], columns: Columns, message: str
) -> None:
    with pytest.raises(InputError, match=message) as caught:
        read_prompts(write(tmp_path, json.dumps(record)), columns=columns)
    assert "\n" not in str(caught.value)


@pytest.fixture
def numbered(tmp_path: Path) -> Path:
    """Four hundred prompts by number, every fourth text again under another id."""
    records = [{"id": i, "prompt": f"text {i - i % 4 if i % 4 == 3 else i}"} for i in range(400)]
    return write(tmp_path, "\n".join(json.dumps(r) for r in records))


def reversed_lines(path: Path) -> Path:
    other = path.with_name("backwards.jsonl")
    other.write_text("\n".join(path.read_text().split("\n")[::-1]))
    return other


def test_sides_share_nothing_and_leave_nothing_out(numbered: Path) -> None:
    both = {p.id for p in read_prompts(numbered)}
    train, test = ({p.id for p in read_prompts(numbered, choice=Choice(side=side))} for side in ("train", "test"))
    assert train | test == both
    assert not train & test
    assert 0.14 < len(test) / len(both) < 0.26  # 400 fair coins of 0.2: 3 standard deviations
    assert {p.id for p in read_prompts(reversed_lines(numbered), choice=Choice(side="test"))} == test
    other = {p.id for p in read_prompts(numbered, choice=Choice(side="test", split_seed=1))}
    assert other != test
    assert {p.id for p in read_prompts(numbered, choice=Choice(side="test", test_share=0.5))} > test


def test_a_shuffled_order_hangs_on_the_seed_and_not_on_the_file(numbered: Path) -> None:
    def order(path: Path, seed: int, limit: int | None = None) -> list[str]:
        return [p.id for p in read_prompts(path, choice=Choice(shuffle_seed=seed, limit=limit))]

    once = order(numbered, 0)
    assert sorted(once, key=int) == [str(i) for i in range(400)] != once
    assert order(reversed_lines(numbered), 0) == once
    assert order(numbered, 1) != once
    assert order(numbered, 0, 7) == once[:7]


def test_a_text_that_comes_again_is_dropped_where_asked(numbered: Path) -> None:
    prompts = read_prompts(numbered, choice=Choice(deduplicate=True))
    assert [int(p.id) for p in prompts] == [i for i in range(400) if i % 4 != 3]


def test_a_repeated_text_without_ids_is_refused_with_the_way_out(tmp_path: Path) -> None:
    path = write(tmp_path, '{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": "a"}')
    with pytest.raises(InputError, match=r"line 3: id .* stands in line 1 too; --deduplicate drops"):
        read_prompts(path)
    assert [p.text for p in read_prompts(path, choice=Choice(deduplicate=True))] == ["a", "b"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"side": "tset"}, "--side: expected train or test, not 'tset' .did you mean 'test'"),
        ({"test_share": 1.0}, "--test-share: expected more than 0 and less than 1"),
        ({"limit": 0}, "--limit: expected 1 or more"),
    ],
)
def test_a_choice_out_of_range_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Choice(**options)


def test_a_side_without_prompts_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, '{"prompt": "a"}')
    with pytest.raises(InputError, match="is on the test side"):
        read_prompts(path, choice=Choice(side="test", test_share=1e-9))


def test_an_unknown_preset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"expected one of demo, gsm8k, .*not 'gsm9k' .did you mean 'gsm8k'"):
        read_prompts(write(tmp_path, '{"prompt": "a"}'), preset="gsm9k")


@pytest.fixture
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `datasets` write its copies here."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.usefixtures("private_cache")
def test_a_folder_of_files_is_read_as_a_data_set(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text(f'{{"question": "{split} 1"}}\n{{"question": "{split} 2"}}\n')
    for split, expected in ((None, "train"), ("test", "test")):
        prompts = read_prompts(folder, split=split, columns=Columns("question"))
        assert [p.text for p in prompts] == [f"{expected} 1", f"{expected} 2"]
    with pytest.raises(InputError, match=r"no data set can be read from .*dev"):
        read_prompts(folder, split="dev")
    with pytest.raises(InputError, match=r"set, row 1: expected an object .* but it has question"):
        read_prompts(folder)


@pytest.mark.parametrize("split", [None, "test"])
def test_what_save_to_disk_wrote_is_read(tmp_path: Path, split: str | None) -> None:
    data = datasets.Dataset.from_dict({"prompt": ["a", "b"], "category": ["x", "y"]})
    (data if split is None else datasets.DatasetDict({"test": data})).save_to_disk(str(tmp_path / "set"))
    assert [(p.text, p.group) for p in read_prompts(tmp_path / "set", split=split)] == [("a", "x"), ("b", "y")]
    with pytest.raises(InputError, match="--split: "):
        read_prompts(tmp_path / "set", split="dev")


@pytest.mark.usefixtures("private_cache")
def test_a_folder_without_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    with pytest.raises(InputError, match="no data set can be read from"):
        read_prompts(tmp_path / "set")


@pytest.mark.parametrize("name", ["hf:", "hf:a/b/c", "hf:a:b:c", "hf:a:"])
def test_a_mangled_hub_name_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="--prompts: expected hf:organisation/name"):
        read_prompts(name)


def test_a_hub_name_is_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(path: str, name: str | None, split: str) -> list[dict[str, str]]:
        asked.append((path, name, split))
        return [{"question": "a"}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert read_prompts("hf:openai/gsm8k:main", preset="gsm8k", split="test")[0].text == "a"
    read_prompts("hf:me/mine", columns=Columns("question"))
    assert asked == [("openai/gsm8k", "main", "test"), ("me/mine", None, "train")]


def test_what_the_hub_answers_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*args: object, **options: object) -> None:
        raise ConnectionError("no way\nthere")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(InputError, match=r"no data set can be read from hf:a/b: no way$"):
        read_prompts("hf:a/b")


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
    with pytest.raises(InputError, match="--chat: the tokenizer has no chat template"):
        apply_chat_template([Prompt("a", "w7")], tokenizer)


def test_a_template_that_refuses_a_prompt_names_it(chatty: PreTrainedTokenizerFast) -> None:
    chatty.chat_template = "{{ raise_exception('no system message here') }}"
    with pytest.raises(InputError, match=r"--chat: .*refuses prompt 'a': no system message here"):
        apply_chat_template([Prompt("a", "w7")], chatty)
