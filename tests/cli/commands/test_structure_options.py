"""`--sampling json_schema=FILE` and `--sampling grammar=FILE`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from byte_pair import PERSON, byte_pair, is_person
from commands import cli
from specstop.collect.store import load_trace

pytest.importorskip("llguidance")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    pair, folder = byte_pair(), tmp_path_factory.mktemp("pair")
    for name, model in (("target", pair.target), ("draft", pair.draft_model)):
        model.save_pretrained(folder / name)
        pair.tokenizer.save_pretrained(folder / name)  # type: ignore[union-attr]
    (folder / "person.json").write_text(json.dumps(PERSON))
    (folder / "list.ebnf").write_text('root ::= "[" [a-c]{2,4} "]"')
    (folder / "prompts.txt").write_text("the name\na tag\n")
    return ["--target", folder / "target", "--draft", folder / "draft", "--dtype", "float64"]


@pytest.fixture
def folder(models: list[object]) -> Path:
    return Path(str(models[1])).parent


@pytest.mark.parametrize("drafter", ["model", "lookup"])
def test_decode_writes_json_of_the_schema(models: list[object], folder: Path, drafter: str) -> None:
    chosen = models if drafter == "model" else [*models[:2], *models[4:], "--drafter", drafter]
    command = ["decode", *chosen, "the name", "a tag", "--sampling", f"json_schema={folder / 'person.json'}", "--json"]
    answer = cli(*command, "--temperature", 0.7, "--max-new-tokens", 90)
    assert answer.code == 0, answer.err
    made = json.loads(answer.out)
    assert all(map(is_person, made["texts"])) and made["incomplete"] == 0
    answer = cli(*command, "--max-new-tokens", 5)
    assert answer.code == 0 and json.loads(answer.out)["incomplete"] == 2
    assert "2 of 2 texts" in answer.err and "--max-new-tokens" in answer.err


def test_bench_and_collect_take_a_grammar(models: list[object], folder: Path, tmp_path: Path) -> None:
    command = [*models, "--prompts", folder / "prompts.txt", "--max-new-tokens", 20, "--quiet"]
    answer = cli("bench", *command, "--sampling", f"grammar={folder / 'list.ebnf'}", "--policy", "fixed:3", "--json")
    assert answer.code == 0, answer.err
    lines = {line["name"]: line for line in json.loads(answer.out)["lines"]}
    # The text of plain decoding, also through transformers' own loops.
    assert {line["same_text"] for line in lines.values()} == {2}
    out = ["--out", tmp_path / "t", "--depth", 3]
    answer = cli("collect", *command, "--sampling", f"json_schema={folder / 'person.json'}", *out)
    assert answer.code == 0, answer.err
    assert load_trace(tmp_path / "t").header.sampling["processors"][0].startswith("json-schema ")
    assert "json-schema" in json.loads(cli("info", tmp_path / "t", "--json").out)["filter"]
    again = cli("collect", *command, "--sampling", f"grammar={folder / 'list.ebnf'}", *out, "--resume")
    assert again.code == 2 and "sampling" in again.err


@pytest.mark.parametrize(
    ("options", "noun"),
    [
        ({"json_schema": "missing.json"}, "No such file"),
        ({"json_schema": "."}, "directory"),
        ({"json_schema": "target/model.safetensors"}, "UTF-8"),
        ({"json_schema": "prompts.txt"}, "JSON"),
        ({"grammar": "prompts.txt"}, "grammar"),
        ({"json_schema": "person.json", "grammar": "list.ebnf"}, "not both"),
    ],
)
def test_what_cannot_be_used_is_told_in_a_line(
    models: list[object], folder: Path, options: dict[str, str], noun: str
) -> None:
    words = [word for name, file in options.items() for word in ("--sampling", f"{name}={folder / file}")]
    answer = cli("decode", *models, "a", *words)
    assert answer.code == 2 and noun in answer.err and "--sampling" in answer.err
    assert all(name in answer.err for name in options)
    assert len(answer.err.strip().splitlines()) == 1


def test_a_pair_without_a_tokenizer_is_refused(models: list[object], folder: Path, tmp_path: Path) -> None:
    """`bench` and `collect` read prompts of token ids, or the pair is refused before."""
    for name in ("target", "draft"):
        (tmp_path / name).mkdir()
        for file in ("config.json", "model.safetensors", "generation_config.json"):
            (tmp_path / name / file).write_bytes((folder / name / file).read_bytes())
    answer = cli(
        "decode", "--target", tmp_path / "target", "--draft", tmp_path / "draft", "a", "--sampling",
        f"json_schema={folder / 'person.json'}",
    )  # fmt: skip
    assert answer.code == 2 and "tokenizer" in answer.err
