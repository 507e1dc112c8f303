"""`benchmarks/make_pair.py` without its training: text, split, prompts, tokenizer, and the package data that it writes."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmark_scripts import script
from specstop.policies.errors import InputError
from specstop.train.demo import pair as shipped
from transformers import AutoModelForCausalLM, AutoTokenizer

make_pair = script("make_pair")
RECIPE = replace(make_pair.RECIPES["small"], vocabulary=320, held_out=0.4, prompt_tokens=(8, 16))
WORDS = ("alpha", "beta", "gamma", "value", "index", "return", "self", "print", "for")


def documents(count: int = 10) -> list[object]:
    chance = random.Random(5)
    texts = [
        "".join(f"doc{number}_{line} = {chance.choice(WORDS)}({chance.choice(WORDS)})\n" for line in range(40))
        for number in range(count)
    ]
    return [make_pair.Document(f"file{number}.py", text, f"group{number % 3}") for number, text in enumerate(texts)]


def test_prompts_come_from_files_that_are_not_trained_on_and_start_at_a_line() -> None:
    learn, *held_out = make_pair.split_documents(documents(), RECIPE)
    names = [{document.name for document in part} for part in (learn, *held_out)]
    assert sum(map(len, names)) == len(set.union(*names)) == 10
    tokenizer = make_pair.train_tokenizer((document.text for document in learn), RECIPE.vocabulary)
    for side in held_out:
        texts = {document.name: document.text for document in side}
        prompts = make_pair.cut_prompts(tokenizer, side, 12, RECIPE)
        assert prompts and len({prompt["id"] for prompt in prompts}) == len(prompts)
        for prompt in prompts:
            text = texts[prompt["id"].rpartition("#")[0]]
            begin = text.index(prompt["prompt"])
            assert begin == 0 or text[begin - 1] == "\n"
            assert 8 <= len(tokenizer(prompt["prompt"]).input_ids) <= 17


def test_the_standard_library_has_text_and_no_tests() -> None:
    names = {document.name for document in make_pair.stdlib_documents()}
    assert {"json/decoder.py", "argparse.py"} <= names
    assert not any(name.startswith(("test/", "site-packages/", "idlelib/idle_test/")) for name in names)


def test_records_are_read_with_their_whole_prompt(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"p{i}", "completion": f"c{i}"}) + "\n" for i in range(5)))
    found = make_pair.read_documents(path)
    assert [(document.prompt, document.text) for document in found] == [(f"p{i}", f"p{i}\nc{i}") for i in range(5)]
    path.write_text(path.read_text() + "[1]\n")
    with pytest.raises(InputError, match=r"records\.jsonl:6"):
        make_pair.read_documents(path)


@pytest.mark.parametrize("text", ["missing", "few.jsonl"])
def test_text_that_makes_no_pair_is_an_input_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "few.jsonl").write_text('{"prompt": "one"}\n')
    with pytest.raises(InputError, match="text: expected"):
        make_pair.read_documents(tmp_path / text)


def test_windows_cover_the_stream_and_share_one_token() -> None:
    windows = make_pair.windows_of(torch.arange(21), 5)
    assert windows.tolist() == [list(range(start, start + 6)) for start in (0, 5, 10, 15)]


def test_a_shipped_pair_expands_to_the_models_that_were_measured(
    pair_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = tmp_path / "pair"
    for name in ("target", "draft"):
        model = make_pair.round_weights(AutoModelForCausalLM.from_pretrained(pair_folder / name, dtype=torch.float32))
        model.save_pretrained(pair / name)
        AutoTokenizer.from_pretrained(pair_folder / name).save_pretrained(pair / name)
    for side in ("train", "test"):
        (pair / f"prompts-{side}.jsonl").write_text('{"prompt": "a"}\n')
    recipe = {"vocabulary": 48, "seed": 0, "target": {"layers": 2, "hidden": 16}, "draft": {"layers": 2, "hidden": 16}}
    described = {
        "recipe": recipe, "draft": "distilled", "parameters": {"target": 1, "draft": 1}, "text_tokens": 5,
        "losses": {"target_cross_entropy": 2.5}, "seconds": 3, "versions": {"python": "3.11"},
    }  # fmt: skip
    (pair / "pair.json").write_text(json.dumps(described))
    make_pair.ship(pair, tmp_path / "data", "the command", {"rounds": 7, "reached": [0.7], "given": [0.7]})
    card = (tmp_path / "data" / "README.md").read_text()
    assert "the command" in card and "| 1 | 0.700 | 0.700 |" in card and "target_cross_entropy 2.500" in card
    monkeypatch.setattr(shipped, "DATA", tmp_path / "data")
    monkeypatch.setenv("SPECSTOP_CACHE", str(tmp_path / "cache"))
    ids = torch.tensor([[1, 5, 9, 20]])
    for name in ("target", "draft"):
        logits = [
            AutoModelForCausalLM.from_pretrained(folder / name)(ids).logits for folder in (pair, shipped.shipped_pair())
        ]
        assert torch.equal(*logits)
    shutil.rmtree(tmp_path / "cache")
