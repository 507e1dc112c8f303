"""Training a drafter and using it, from the command line: no draft model anywhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import cli
from conftest import make_prompts


@pytest.fixture(scope="module")
def place(pair_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    (folder / "target").symlink_to(pair_folder / "target")
    for side, count, seed in (("train", 16, 21), ("test", 6, 22)):
        lines = [json.dumps({"id": p.id, "prompt": p.text, "group": p.id[-1]}) for p in make_prompts(count, side, seed)]
        (folder / f"{side}.jsonl").write_text("\n".join(lines))
    return folder


def test_a_drafter_is_trained_and_used_by_every_command(place: Path) -> None:
    target = ("--target", place / "target", "--max-new-tokens", "12")
    fit = ("--depth", "3", "--epochs", "2", "--out", place / "medusa", "--checkpoints", place / "work")
    answer = cli("train-drafter", "--kind", "medusa", *target, "--prompts", place / "train.jsonl", *fit, "--quiet")
    assert answer.code == 0, answer.err
    assert "acceptance by depth" in answer.out
    assert f"Next: specstop decode PROMPT --target {place / 'target'} --drafter medusa:{place / 'medusa'}" in answer.out
    assert (place / "medusa" / "run.yaml").exists()
    told = json.loads(cli("info", place / "medusa", "--json").out)
    assert (told["kind"], told["network"], told["depth"], len(told["target"])) == ("drafter", "medusa", 3, 16)
    assert all(0.0 <= told[f"acceptance, depth {depth}"] <= 1.0 for depth in (1, 2, 3)) and told["hash"]
    spec = ("--drafter", f"medusa:{place / 'medusa'}")
    answer = cli("decode", "w7 w8 w9", *target, *spec, "--json")
    assert answer.code == 0, answer.err
    decoded = json.loads(answer.out)
    assert (
        decoded["texts"] == json.loads(cli("decode", "w7 w8 w9", *target, "--drafter", "suffix", "--json").out)["texts"]
    )
    assert decoded["drafted"] > 0
    test = ("--prompts", place / "test.jsonl")
    answer = cli("bench", *target, *test, *spec, "--policy", "fixed:2", "--json")
    assert answer.code == 0, answer.err
    names = [line["name"] for line in json.loads(answer.out)["lines"]]
    assert "fixed:2" in names and not any("assist" in name for name in names)
    answer = cli(
        "bench", *target, *test, *spec, "--policy", "fixed:2", "--tree", "2,2", "--temperature", "0.7", "--json"
    )
    assert answer.code == 0, answer.err
    assert [line["same_text"] for line in json.loads(answer.out)["lines"]][:2] == [6, 6], (
        "match, beside plain decoding too"
    )
    for side in ("train", "test"):
        prompts = ("--prompts", place / f"{side}.jsonl", "--out", place / f"traces-{side}", "--depth", "3", "--quiet")
        answer = cli("collect", *target, *spec, *prompts)
        assert answer.code == 0, answer.err
    measured = ("--prompts", place / "train.jsonl", "--depth", "3", "--repeats", "1", "--out", place / "profile.json")
    answer = cli("profile", *target[:2], *spec, *measured, "--policy", "confidence:0.4", "--quiet")
    assert answer.code == 0, answer.err
    priced = ("--profile", place / "profile.json", "--quiet")
    answer = cli("train", "--traces", place / "traces-train", *priced, "--out", place / "policy")
    assert answer.code == 0, answer.err
    report = ("--traces", place / "traces-test", "--policy", "confidence:0.4", "--policy", place / "policy")
    answer = cli("evaluate", *report, *priced, "--out", place / "report")
    assert answer.code == 0, answer.err
    answer = cli("decode", "w7 w8 w9", *target, *spec, "--policy", place / "policy", "--json")
    assert answer.code == 0 and "warning" not in answer.err, answer.err
    assert json.loads(answer.out)["texts"] == decoded["texts"]


@pytest.mark.parametrize(
    ("options", "measured"),
    [
        (
            ("--drafter", "lookup", "--temperature", "0.7", "--depth", "2"),
            "--drafter lookup --temperature 0.7 --verification match --depth 2",
        ),
        (("--drafter", "lookup", "--depth", "2"), "--drafter lookup --depth 2"),
        (("--drafter", "lookup"), "--drafter lookup --depth 10"),
        (("--drafter", "lookup", "--tree", "2,1,1"), "--drafter lookup --depth 3 --tree 2,1,1"),
    ],
)
def test_what_comes_next_times_the_rounds_that_the_trace_holds(
    place: Path, options: tuple[str, ...], measured: str, tmp_path: Path
) -> None:
    """Sampled rounds of a drafter are those of match, where `profile` by itself takes block."""
    prompts = place / "test.jsonl"
    few = ("--prompts", prompts, "--limit", "2", "--max-new-tokens", "6", "--out", tmp_path / "t")
    answer = cli("collect", "--target", place / "target", *options, *few, "--quiet")
    assert answer.code == 0, answer.err
    expected = f"Next: specstop profile --target {place / 'target'} {measured} --prompts {prompts} --out profile.json"
    assert expected in answer.out


def test_rounds_that_stay_shorter_than_asked_are_told_of(place: Path, tmp_path: Path) -> None:
    target, heads = ("--target", place / "target", "--quiet"), ("--drafter", f"medusa:{tmp_path / 'heads'}")
    fit = ("--kind", "medusa", "--depth", "2", "--epochs", "1", "--max-new-tokens", "12")
    answer = cli("train-drafter", *target, *fit, "--prompts", place / "train.jsonl", "--out", tmp_path / "heads")
    assert answer.code == 0, answer.err
    short = f"{' '.join(heads)}: proposes 2 tokens at most"
    cut = "--tree 2,1: nodes deeper than 1 are left out; give --depth 2 for all"
    for number, (asked, told) in enumerate({"2": [], "3": [short], "1 --tree 2,1": [cut]}.items()):
        options = (*target, *heads, "--depth", *asked.split(), "--prompts", place / "test.jsonl")
        few = ("--limit", "2", "--max-new-tokens", "6")
        collected = cli("collect", *options, *few, "--out", tmp_path / f"t{number}")
        measured = cli("profile", *options, "--repeats", "1", "--out", tmp_path / f"p{number}.json")
        for answer in (collected, measured):
            assert answer.code == 0, answer.err
            assert [message for message in (short, cut) if message in answer.err] == told, answer.err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (
            ("decode", "w7", "--drafter", "suffix+model"),
            "--draft: expected a draft model, which the drafter suffix+model",
        ),
        (("decode", "w7", "--drafter", "medusa:none"), "--drafter: none: expected the folder of a drafter"),
        (("decode", "w7", "--drafter", "medusa"), "--drafter: expected one of model, lookup"),
        (("train-drafter", "--kind", "eagle", "--out", "x"), "--kind: expected one of medusa, hydra, ctc, layer"),
        (("train-drafter", "--kind", "ctc", "--out", "x", "--depth", "0"), "--depth: expected"),
        (
            ("train-drafter", "--kind", "medusa", "--out", "x", "--depth", "65"),
            "--depth: expected at most 64 with --kind medusa, not 65",
        ),
        (
            ("train-drafter", "--kind", "ctc", "--out", "x", "--depth", "63"),
            "--depth: expected at most 62 with --kind ctc, not 63",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    place: Path, words: tuple[str, ...], why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    prompts = ("--prompts", place / "train.jsonl") if words[0] == "train-drafter" else ()
    answer = cli(*words, "--target", place / "target", *prompts)
    assert answer.code == 2 and answer.out == ""
    assert answer.err.startswith(f"specstop: {why}") and answer.err.count("\n") == 1, answer.err
    assert not list(tmp_path.iterdir())
