"""Where prompts come from: layouts of known sets, columns, folders and the hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from specstop.collect.prompts import Prompt, read_prompts
from specstop.policies.errors import InputError


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "prompts.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_each_line_of_a_plain_text_is_a_prompt(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("  one two \n\n{not json\n")
    assert [p.text for p in read_prompts(path)] == ["one two", "{not json"]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_rows_of_a_table_are_records(tmp_path: Path, kind: str) -> None:
    rows = {"prompt": ["one, two\nthree", "12"], "id": ["a", "7"], "category": ["x", "y"]}
    table = datasets.Dataset.from_dict(rows)
    path = tmp_path / f"prompts.{kind}"
    (table.to_csv if kind == "csv" else table.to_parquet)(str(path))
    found = read_prompts(path)
    assert found == [Prompt("a", "one, two\nthree", "x"), Prompt("7", "12", "y")]


@pytest.mark.parametrize(
    ("name", "text"),
    [("p.csv", b""), ("p.csv", b"prompt\na,b\n"), ("p.parquet", b"PAR1 not")],
)
def test_a_damaged_table_is_one_line(tmp_path: Path, name: str, text: bytes) -> None:
    (tmp_path / name).write_bytes(text)
    with pytest.raises(InputError, match=r"^prompts: .* cannot be read as (csv|parquet): .*$"):
        read_prompts(tmp_path / name)


@pytest.mark.parametrize("name", ["p.CSV", "p.Csv", "p.PARQUET", "p.TXT"])
def test_suffixes_are_read_in_any_case(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    table = datasets.Dataset.from_dict({"prompt": ["one", "two"]})
    kind = path.suffix.lower()
    if kind == ".txt":
        path.write_text("one\ntwo\n")
    else:
        (table.to_csv if kind == ".csv" else table.to_parquet)(str(path))
    assert [p.text for p in read_prompts(path)] == ["one", "two"]


@pytest.mark.parametrize("kind", ["csv", "parquet", "jsonl"])
@pytest.mark.parametrize(
    ("twice", "columns"),
    [("prompt", {}), ("id", {}), ("sample", {}), ("topic", {"group": "topic"}), ("answer", {"completion": "answer"})],
)  # fmt: skip
def test_a_column_that_is_read_and_occurs_twice_is_refused(
    tmp_path: Path, kind: str, twice: str, columns: dict[str, str]
) -> None:
    names, values = ["prompt", "id", "topic", "answer", "sample", twice], ["a", "b", "c", "d", "e", "f"]
    path = tmp_path / f"prompts.{kind}"

    def save(names: list[str]) -> None:
        if kind == "parquet":
            pq.write_table(pa.table([pa.array([value]) for value in values], names=names), path)
        elif kind == "csv":
            path.write_text(",".join(names) + "\n" + ",".join(values) + "\n")
        else:
            path.write_text("{" + ", ".join(f'"{n}": "{v}"' for n, v in zip(names, values, strict=True)) + "}")

    save(names)
    with pytest.raises(InputError, match=f"^prompts: .*prompts.{kind}.* {twice!r}") as caught:
        read_prompts(path, **columns)
    assert "\n" not in str(caught.value)
    save([*names[:2], "more", *names[3:5], "more"] if twice != "topic" else ["prompt", "id", "topic", "x", "x", "y"])
    if kind != "jsonl":  # an object with a repeated key is invalid
        assert read_prompts(path, **columns if twice != "answer" else {})[0].text == "a"


SETS = {
    "gsm8k": ({"question": "2 + 2?", "answer": "#### 4"}, Prompt("", "2 + 2?")),
    "humaneval": (
        {"task_id": "HumanEval/0", "prompt": "def f():", "canonical_solution": "    pass", "entry_point": "f"},
        Prompt("HumanEval/0", "def f():"),
    ),
    "mt-bench": (
        {"question_id": 81, "category": "writing", "turns": ["first", "second"]},
        Prompt("81", "first", "writing"),
    ),
    "spec-bench": (
        {"question_id": 200, "category": "translation", "turns": ["only"]},
        Prompt("200", "only", "translation"),
    ),
    "common": ({"id": 5, "category": "c", "prompt": "a"}, Prompt("5", "a", "c")),
}


@pytest.mark.parametrize("name", SETS)
def test_known_prompt_sets_are_read_without_options(tmp_path: Path, name: str) -> None:
    record, expected = SETS[name]
    (prompt,) = read_prompts(write(tmp_path, json.dumps(record)))
    assert (prompt.text, prompt.group) == (expected.text, expected.group)
    assert prompt.id == expected.id or not expected.id


def test_named_columns_take_the_place_of_the_layouts(tmp_path: Path) -> None:
    record = {"prompt": "no", "text": "yes", "kind": "k", "group": "no", "answer": "42"}
    (prompt,) = read_prompts(write(tmp_path, json.dumps(record)), column="text", group="kind", completion="answer")
    assert (prompt.text, prompt.group, prompt.completion) == ("yes", "k", "42")


def test_the_first_message_of_the_user_is_the_prompt(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a"},
    ]
    (prompt,) = read_prompts(write(tmp_path, json.dumps({"messages": messages})), column="messages")
    assert (prompt.text, prompt.system) == ("u", "s")


@pytest.mark.parametrize(
    ("record", "columns", "message"),
    [
        (
            {"promt": "a"},
            {},
            "line 1: .*it has promt .did you mean 'promt'.*collect takes another one with `column`",
        ),
        ({"prompt": "a"}, {"column": "text"}, '.*string "text", but it has prompt; collect takes another one with'),
        ({"prompt": "a"}, {"group": "topic"}, "collect takes another one with `group`"),
        (
            {"prompt": "a"},
            {"completion": "answer"},
            'completions: .*line 1: expected a non-empty string "answer"',
        ),
        ({"prompt": []}, {}, "line 1: expected an object"),
        ({"prompt": [3]}, {}, "line 1: expected an object"),
        ({"prompt": [{"role": "assistant", "content": "a"}]}, {}, "line 1: expected an object"),
    ],
    ids=["typo", "column", "group", "completion", "no turns", "number", "no user"],
)
def test_a_record_without_the_column_says_what_it_has(
    tmp_path: Path, record: dict[str, Any], columns: dict[str, str], message: str
) -> None:
    with pytest.raises(InputError, match=message) as caught:
        read_prompts(write(tmp_path, json.dumps(record)), **columns)
    assert "\n" not in str(caught.value)


@pytest.fixture
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `datasets` write its copies here."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.usefixtures("private_cache")
def test_a_folder_of_files_is_read_as_a_data_set(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text(f'{{"text": "{split} 1"}}\n{{"text": "{split} 2"}}\n')
    for split, expected in ((None, "train"), ("test", "test")):
        prompts = read_prompts(folder, split=split, column="text")
        assert [p.text for p in prompts] == [f"{expected} 1", f"{expected} 2"]
    with pytest.raises(InputError, match=r"no data set can be read from .*dev"):
        read_prompts(folder, split="dev")
    with pytest.raises(InputError, match=r"set, row 1: expected an object .* but it has text"):
        read_prompts(folder)


@pytest.mark.parametrize("split", [None, "test"])
def test_what_save_to_disk_wrote_is_read(tmp_path: Path, split: str | None) -> None:
    data = datasets.Dataset.from_dict({"prompt": ["a", "b"], "category": ["x", "y"]})
    (data if split is None else datasets.DatasetDict({"test": data})).save_to_disk(str(tmp_path / "set"))
    assert [(p.text, p.group) for p in read_prompts(tmp_path / "set", split=split)] == [("a", "x"), ("b", "y")]
    with pytest.raises(InputError, match="split: "):
        read_prompts(tmp_path / "set", split="dev")


@pytest.mark.usefixtures("private_cache")
def test_a_folder_without_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    with pytest.raises(InputError, match="no data set can be read from"):
        read_prompts(tmp_path / "set")


@pytest.mark.parametrize("name", ["hf:", "hf:a/b/c", "hf:a:"])
def test_a_mangled_hub_name_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="prompts: expected hf:organisation/name"):
        read_prompts(name)


def test_a_hub_name_has_configuration_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def load_dataset(path: str, name: str | None, split: str | None) -> Any:
        calls.append((path, name, split))
        data = datasets.Dataset.from_list([{"question": f"of {split}"}])
        return datasets.DatasetDict({"test": data}) if split is None else data

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert read_prompts("hf:openai/gsm8k:main", split="test")[0].text == "of test"
    assert read_prompts("hf:openai/gsm8k:main:train[:5]")[0].text == "of train[:5]"
    assert read_prompts("hf:me/mine::dev")[0].text == "of dev"
    assert read_prompts("hf:me/mine")[0].text == "of None", "its only split"
    with pytest.raises(InputError, match="split: expected one of test in hf:me/mine"):
        monkeypatch.setattr(
            datasets,
            "load_dataset",
            lambda *args, split: datasets.DatasetDict({"test": datasets.Dataset.from_list([])}),
        )
        read_prompts("hf:me/mine", split="dev")
    assert calls == [
        ("openai/gsm8k", "main", "test"), ("openai/gsm8k", "main", "train[:5]"), ("me/mine", None, "dev"),
        ("me/mine", None, None),
    ]  # fmt: skip


def test_what_the_hub_answers_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*args: object, **options: object) -> None:
        raise ConnectionError("no way\nthere")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(InputError, match=r"no data set can be read from hf:a/b: no way$"):
        read_prompts("hf:a/b")
