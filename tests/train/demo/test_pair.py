"""The demo pair: deterministic, ordinary Hugging Face folders, whole or not at all."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pair_documents import documents
from safetensors.torch import load_file
from specstop.policies.errors import InputError
from specstop.train.demo import pair as module, pair_fit
from specstop.train.demo.pair import demo_pair, make_pair
from specstop.train.demo.pair_recipe import RECIPES
from specstop.train.demo.pair_text import Document, split_documents, stdlib_documents
from transformers import AutoModelForCausalLM, AutoTokenizer

TINY = RECIPES["tiny"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pair(documents(), TINY, tmp_path_factory.mktemp("built") / "pair")


def records(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_same_seed_gives_identical_weights_and_another_seed_does_not(built: Path, tmp_path: Path) -> None:
    again = make_pair(documents(), TINY, tmp_path / "again")
    other = make_pair(documents(), dataclasses.replace(TINY, seed=1), tmp_path / "other")
    for name in ("target", "draft"):
        first, second, third = (load_file(out / name / "model.safetensors") for out in (built, again, other))
        assert first.keys() == second.keys()
        assert all(torch.equal(first[key], second[key]) for key in first)
        assert all(value.dtype == torch.float32 for value in first.values())
        key = "model.embed_tokens.weight"
        assert first[key].shape != third[key].shape or not torch.equal(first[key], third[key])
    for name in ("prompts-train.jsonl", "prompts-test.jsonl", "target/tokenizer.json"):
        assert (built / name).read_bytes() == (again / name).read_bytes()


def test_a_built_pair_is_an_ordinary_pair(built: Path) -> None:
    target = AutoModelForCausalLM.from_pretrained(built / "target")
    draft = AutoModelForCausalLM.from_pretrained(built / "draft")
    tokenizers = [AutoTokenizer.from_pretrained(built / name) for name in ("target", "draft")]
    assert tokenizers[0].get_vocab() == tokenizers[1].get_vocab()
    assert len(tokenizers[0]) <= target.config.vocab_size == draft.config.vocab_size
    assert tokenizers[0].eos_token_id == target.config.eos_token_id == draft.config.eos_token_id
    assert target.config.max_position_embeddings >= 1024
    text = "doc0_1 = beta(alpha, gamma)\n\ttabs, é and \U0001f600\n"
    ids = tokenizers[0](text, return_tensors="pt")
    assert tokenizers[0].decode(ids.input_ids[0]) == text
    assert target.generate(**ids, max_new_tokens=3, min_new_tokens=3).shape[1] == ids.input_ids.shape[1] + 3


def test_pair_json_describes_the_build(built: Path) -> None:
    described = json.loads((built / "pair.json").read_text(encoding="utf-8"))
    target, draft = TINY.parameters()
    assert described["parameters"] == {"target": target, "draft": draft}
    assert described["recipe"] == json.loads(json.dumps(dataclasses.asdict(TINY)))
    assert described["losses"]["target_cross_entropy"] > 0
    assert described["versions"].keys() == {"python", "torch", "transformers", "tokenizers"}


def test_prompts_come_from_held_out_documents(built: Path) -> None:
    split = split_documents(documents(), TINY.held_out, TINY.seed)
    groups = {"train": split.prompts_train, "test": split.prompts_test}
    seen = {}
    for name, held_out in groups.items():
        found = records(built / f"prompts-{name}.jsonl")
        assert found
        texts = {document.name: document.text for document in held_out}
        for record in found:
            assert record.keys() == {"id", "prompt", "group"}
            source = texts[record["id"].rpartition("#")[0]]
            begin = source.index(record["prompt"])
            assert begin == 0 or source[begin - 1] == "\n"
        seen[name] = {record["id"].rpartition("#")[0] for record in found}
    assert not seen["train"] & seen["test"]
    assert not (seen["train"] | seen["test"]) & {document.name for document in split.learn}


def test_an_interrupted_build_leaves_nothing_behind(tmp_path: Path) -> None:
    def interrupt(task: str, done: int, total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_pair(documents(), TINY, tmp_path / "pair", interrupt)
    assert list(tmp_path.iterdir()) == []


def test_progress_counts_every_step(tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    make_pair(documents(), TINY, tmp_path / "pair", lambda task, done, total: calls.append((task, done, total)))
    assert [done for _, done, _ in calls] == list(range(TINY.steps + TINY.own_steps + 1))
    assert {(task, total) for task, _, total in calls} == {("demo pair", TINY.steps + TINY.own_steps)}


def test_a_build_leaves_torch_as_it_was_and_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(3)
    before = (torch.get_rng_state(), torch.get_num_threads(), torch.get_default_dtype())
    make_pair(documents(), TINY, tmp_path / "pair")
    after = (torch.get_rng_state(), torch.get_num_threads(), torch.get_default_dtype())
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("number", [torch.float32, torch.bfloat16])
def test_models_are_trained_in_the_number_type_that_is_faster_here(
    number: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    def repeat(
        product: Callable[[], torch.Tensor], number: int, repeat: int, fast: torch.dtype = number
    ) -> list[float]:
        return [1.0 if product().dtype == fast else 2.0] * repeat

    monkeypatch.setattr(pair_fit.timeit, "repeat", repeat)
    pair_fit._fast_type.cache_clear()
    try:
        model, seen = TINY.draft.build(16, 8), []
        model.model.layers[0].mlp.up_proj.register_forward_hook(lambda own, given, out: seen.append(out.dtype))
        logits = pair_fit._logits(model, torch.tensor([[1, 2]]))
    finally:
        pair_fit._fast_type.cache_clear()
    assert seen == [number] and logits.dtype == torch.float32


@pytest.mark.parametrize("size", ["small", "15m"])
def test_the_target_has_fifteen_times_the_parameters(size: str) -> None:
    target, draft = RECIPES[size].parameters()
    assert target >= 15 * draft


def test_parameters_counts_what_is_saved(built: Path) -> None:
    target, draft = TINY.parameters()
    for name, count in (("target", target), ("draft", draft)):
        weights = load_file(built / name / "model.safetensors")
        assert sum(value.numel() for value in weights.values()) == count


def test_the_demo_pair_is_built_once_and_again_when_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECSTOP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(RECIPES, "small", TINY)
    monkeypatch.setattr(module, "stdlib_documents", documents)
    steps: list[int] = []

    def count(task: str, done: int, total: int) -> None:
        steps.append(done)

    out = demo_pair(0, count)
    assert out.parent == tmp_path / "cache"
    built = len(steps)
    assert demo_pair(0, count) == out
    assert len(steps) == built
    assert demo_pair(1, count) != out
    (out / "draft" / "model.safetensors").unlink()
    again = len(steps)
    assert demo_pair(0, count) == out
    assert len(steps) == again + built
    (out / "pair.json").write_text("{}")
    demo_pair(0, count)
    assert len(steps) == again + 2 * built
    weights = out / "target" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    demo_pair(0, count)
    assert len(steps) == again + 3 * built


def test_the_standard_library_has_text_and_no_tests() -> None:
    found = stdlib_documents()
    names = {document.name for document in found}
    assert {"json/decoder.py", "argparse.py"} <= names
    assert not any(name.startswith(("test/", "site-packages/", "idlelib/idle_test/")) for name in names)
    assert found == sorted(found, key=lambda document: Path(document.name))


def test_held_out_records_give_their_whole_prompt(tmp_path: Path) -> None:
    found = [
        Document(document.name, document.text, document.group, f"prompt of {document.name}") for document in documents()
    ]
    make_pair(found, TINY, tmp_path / "pair")
    for record in records(tmp_path / "pair" / "prompts-test.jsonl"):
        assert record["prompt"] == f"prompt of {record['id'].rpartition('#')[0]}"


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (documents(3), "expected at least 4 documents to make a pair from, got 3"),
        ([Document(f"d{i}", "x", "g") for i in range(8)], "train prompt of 8 tokens"),
        ([Document(f"d{i}", "x", "g", "x") for i in range(8)], "expected more than 32 tokens of text"),
    ],
)
def test_too_little_text_is_an_input_error(found: list[Document], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        make_pair(found, TINY, tmp_path / "pair")
    assert list(tmp_path.iterdir()) == []
