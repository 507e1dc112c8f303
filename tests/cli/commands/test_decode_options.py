"""`specstop decode`: trees, verification modes, drafters, sampling options and stop strings on the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import cli, loading_once
from conftest import VOCABULARY
from specstop.decode.models.pair import Pair, load_pair
from specstop.decode.plain import plain_texts
from specstop.decode.verify.modes import MODES
from specstop.decode.verify.noise import stream_key
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

PROMPTS = ["w7 w8 w9 w7", "w20 w33 w9"]


@pytest.fixture(scope="module", autouse=True)
def loaded_once() -> Iterator[None]:
    with loading_once():
        yield


@pytest.fixture(scope="module")
def models(pair_folder: Path) -> list[str]:
    return ["--target", str(pair_folder / "target"), "--draft", str(pair_folder / "draft"), "--dtype", "float64",
            "--max-new-tokens", "14"]  # fmt: skip


def decoded(models: list[str], *options: object, prompts: list[str] = PROMPTS) -> dict[str, Any]:
    answer = cli("decode", *prompts, *models, *options, "--json")
    assert answer.code == 0, answer.err
    assert answer.err == ""
    return json.loads(answer.out)


@pytest.fixture(scope="module")
def expected(pair: Pair) -> dict[float, list[str]]:
    """The target's own texts by temperature."""
    ids = [pair.tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    keys = [stream_key(0, str(i)) for i in range(len(ids))]
    return {
        t: [
            pair.tokenizer.decode(text, skip_special_tokens=True) for text in plain_texts(pair, ids, keys, 14, t).tokens
        ]
        for t in (0.0, 0.7)
    }


@pytest.mark.parametrize(
    ("tree", "temperature"),
    [
        ("4,2,2,1", 0.0),
        ("8", 0.7),
        ("fork:4x5", 0.0),
        ("parents:-1,-1,0,0,1,2,5", 0.7),
        ("chain:3", 0.0),
        ("chain:3", 0.7),
    ],
)
def test_any_tree_gives_the_targets_text(
    models: list[str], expected: dict[float, list[str]], tree: str, temperature: float
) -> None:
    options = ["--verification", "match", "--policy", "confidence:0.2", "--temperature", temperature]
    made = decoded(models, "--tree", tree, *options)
    assert made["texts"] == expected[temperature]
    assert made["verification"] == "match (lossless)"
    wide = tree != "chain:3"
    assert (made["verified"] > made["target_calls"] * 3) == wide


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_is_named_with_its_label(models: list[str], expected: dict[float, list[str]], mode: str) -> None:
    """Lossy ones shout, in the table and in JSON."""
    label = "lossless" if MODES[mode].lossless else "LOSSY"
    options = ["--verification", mode, *(["--tree", "3,2"] if mode != "block" else [])]
    made = decoded(models, *options, "--temperature", 0.7)
    assert made["verification"] == f"{mode} ({label})"
    assert decoded(models, *options, "--temperature", 0.7)["texts"] == made["texts"], "the seed says it all"
    if label == "lossless":
        assert decoded(models, *options)["texts"] == expected[0.0]
    table = cli("decode", PROMPTS[0], *models, *options, "--temperature", 0.7)
    assert table.code == 0, table.err
    assert f"{mode} ({label})" in " ".join(table.out.split())
    assert ("LOSSY" in table.out) == (label == "LOSSY")


def test_the_mode_follows_the_tree_unless_one_is_named(models: list[str]) -> None:
    for options, mode in ((("--tree", "3,2"), "match"), ((), "block"), (("--temperature", 0), "match")):
        assert decoded(models, "--temperature", 0.7, *options)["verification"] == f"{mode} (lossless)"


def test_the_help_says_which_modes_are_lossy() -> None:
    text = " ".join(cli("decode", "--help").out.replace("│", " ").split())
    assert "typical: LOSSY" in text
    for option in ("--tree", "--verification", "--drafter", "--sampling", "top_k", "top_p", "min_p",
                   "repetition_penalty", "no_repeat_ngram", "min_new_tokens", "--stop"):  # fmt: skip
        assert option in text


@pytest.mark.parametrize("drafter", ["lookup", "lookup:1"])
@pytest.mark.parametrize("tree", [[], ["--tree", "3,2"]])
def test_lookup_asks_no_draft_model(
    models: list[str], expected: dict[float, list[str]], drafter: str, tree: list[str]
) -> None:
    target = [*models[:2], *models[4:]]
    assert decoded(target, "--drafter", drafter, *tree)["texts"] == expected[0.0]
    repeated = decoded(target, "--drafter", drafter, *tree, prompts=[" ".join([*PROMPTS * 3])])
    assert repeated["drafted"] > 0


OPTIONS: dict[str, list[object]] = {
    "top-k": ["--sampling", "top_k=2"],
    "top-p": ["--sampling", "top_p=0.4"],
    "min-p": ["--sampling", "min_p=0.6"],
    "repetition": ["--sampling", "repetition_penalty=2.5"],
    "n-gram": ["--sampling", "no_repeat_ngram=1"],
    "min-new": ["--sampling", "min_new_tokens=14"],
}


HOT = ("--temperature", 1.5, "--verification", "match")
MORE = [*PROMPTS, "w12", "w40 w41"]


@pytest.fixture(scope="module")
def bare(models: list[str]) -> dict[str, Any]:
    """What is written without an option."""
    return decoded(models, *HOT, prompts=MORE)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_sampling_option_changes_the_text_and_no_tree_does(
    models: list[str], bare: dict[str, Any], name: str
) -> None:
    sampled, prompts = [*HOT, *OPTIONS[name]], MORE
    made = decoded(models, *sampled, prompts=prompts)
    assert (
        decoded(models, *sampled, "--tree", "3,2", "--policy", "confidence:0.3", prompts=prompts)["texts"]
        == made["texts"]
    )
    assert made["texts"] != bare["texts"]
    if name == "min-new":
        assert made["tokens"] == 14 * len(prompts)
    if name == "n-gram":
        for prompt, text in zip(prompts, made["texts"], strict=True):
            words = [w for w in text.split() if w != "<unk>"]
            assert len(set(words)) == len(words)
            assert not set(words) & set(prompt.split())


@pytest.fixture(scope="module")
def spelling(plain_pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The pair with a tokenizer of letters, which can be searched for strings."""
    folder = tmp_path_factory.mktemp("letters")
    words = {chr(ord("A") + i) if i != 16 else "</s>": i for i in range(VOCABULARY - 10)}
    words |= {
        first + second: VOCABULARY - 10 + i
        for i, (first, second) in enumerate(zip("abcdefghij", "klmnopqrst", strict=True))
    }
    letters = {letter: i for i, letter in enumerate("abcdef")}
    vocabulary = {**{w: i for w, i in words.items() if i >= 6}, **letters}
    inner = Tokenizer(BPE(vocabulary, [], unk_token="a"))
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", unk_token="a")
    for name, model in (("target", plain_pair.target), ("draft", plain_pair.draft)):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    assert load_pair(folder / "target", folder / "draft").vocabulary == VOCABULARY
    return ["--target", str(folder / "target"), "--draft", str(folder / "draft"), "--dtype", "float64",
            "--max-new-tokens", "20"]  # fmt: skip


def test_a_stop_string_ends_the_text(spelling: list[str]) -> None:
    prompts = ["fad", "be", "cab"]
    whole = decoded(spelling, prompts=prompts)["texts"]
    first = next(text for text in whole if len(text) > 9)
    ends = [first[4:7], "never"]
    for tree in ([], ["--tree", "3,2"]):
        made = decoded(spelling, "--stop", ends[0], "--stop", ends[1], *tree, prompts=prompts)["texts"]
        assert made != whole
        for text, long in zip(made, whole, strict=True):
            assert long.startswith(text)
            assert (ends[0] in text) == (ends[0] in long)
            assert ends[0] not in text[: -len(ends[0]) - 1], "cut at the first"


BAD: dict[str, tuple[list[object], str]] = {
    "tree": (["--tree", "4;2"], "--tree: expected widths such as 4,2,2,1"),
    "tree of nothing": (["--tree", "0"], "tree: expected widths of 1 or more, not 0"),
    "tree too large": (["--tree", "64,64"], "tree: more than 1024 tokens"),
    "tree of wrong parents": (["--tree", "parents:-1,5"], "tree: node 1 has parent 5"),
    "verification": (["--verification", "mach"], "did you mean 'match'"),
    "block of a tree": (["--verification", "block", "--tree", "2,2", "--temperature", 1], "block: expected a chain"),
    "drafter": (["--drafter", "modle"], "two such as suffix+model, not 'modle' (did you mean 'model'?)"),
    "drafter-path": (["--drafter", "medusa"], "layer:PATH, or two such as suffix+model, not 'medusa'"),
    "batch": (["--batch", "0"], "--batch: expected"),
    "top-k": (["--sampling", "top_k=-1"], "--sampling top_k: expected"),
    "top-p": (["--sampling", "top_p=1.5"], "--sampling top_p: expected"),
    "min-p": (["--sampling", "min_p=-0.5"], "--sampling min_p: expected"),
    "repetition": (["--sampling", "repetition_penalty=0"], "--sampling repetition_penalty: expected"),
    "n-gram": (["--sampling", "no_repeat_ngram=-1"], "--sampling no_repeat_ngram: expected"),
    "min-new": (["--sampling", "min_new_tokens=-1"], "--sampling min_new_tokens: expected"),
    "sampling twice": (
        ["--sampling", "top_k=1", "--sampling", "top_k=2"],
        "key=value with each key once",
    ),
    "sampling without a value": (["--sampling", "top_k"], "--sampling: expected key=value"),
    "sampling of text": (["--sampling", "top_k=many"], "--sampling top_k: expected"),
    "stop": (["--stop", ""], "--stop: expected strings that are not empty"),
    "stop without letters": (["--stop", "w7"], "--stop: this pair's tokenizer cannot be searched"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_value_is_one_line_and_exit_code_2(models: list[str], name: str) -> None:
    options, message = BAD[name]
    answer = cli("decode", "w7", *models, *options)
    assert answer.code == 2
    assert answer.err.count("\n") == 1, answer.err
    assert answer.err.startswith("specstop: ")
    assert message in answer.err
    assert answer.out == ""


def test_several_texts_stand_apart_and_quiet_writes_them_alone(models: list[str]) -> None:
    command = ["decode", "w7 w8", "w9 w10", *models, "--policy", "fixed:2", "--max-new-tokens", "4"]
    texts = json.loads(cli(*command, "--json").out)["texts"]
    quiet, plain = cli(*command, "--quiet"), cli(*command)
    alone = f"[1 of 2: 0]\nw7 w8{texts[0]}\n\n[2 of 2: 1]\nw9 w10{texts[1]}\n"
    assert (quiet.code, quiet.out.replace(" ", "")) == (0, alone.replace(" ", ""))
    assert plain.out.startswith(quiet.out)
    assert "tokens/s" in plain.out


def test_a_long_prompt_is_refused(models: list[str]) -> None:
    command = ["decode", " ".join(["w7"] * 200), *models, "--policy", "fixed:2", "--max-new-tokens", "4", "--quiet"]
    refused = cli(*command)
    assert (refused.code, refused.out, refused.err.count("\n")) == (2, "", 1)
    assert refused.err.startswith("specstop: --prompts: 1 of 1 prompts have more than ")


def test_a_policy_drafts_up_to_its_own_limit(models: list[str]) -> None:
    rows = decoded(models, "--policy", "fixed:24", "--max-new-tokens", 30)["acceptance"]
    assert max(row[0] for row in rows) == 24
