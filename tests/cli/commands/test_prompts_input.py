"""Prompts of `decode` and `collect` that come through a pipe, or are written by a template that changes."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path

import pytest
from commands import COMPACT, cli, model_options
from specstop.collect import load_trace
from specstop.collect.store import Trace
from transformers import AutoTokenizer

SMALL = ("--depth", 2, "--max-new-tokens", 6, "--extra", "shards=3", "--quiet")


@pytest.fixture
def models(pair_folder: Path) -> list[str]:
    return [*model_options(pair_folder), *COMPACT]


def give(monkeypatch: pytest.MonkeyPatch, text: str, terminal: bool = False) -> None:
    stream = io.TextIOWrapper(io.BytesIO(text.encode()))
    stream.isatty = lambda: terminal  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdin", stream)


def unfinished(out: Path) -> None:
    """Remove a shard, as a kill leaves a trace."""
    for file in out.glob("data/*0000[12]*"):
        file.unlink()


def test_decode_without_a_prompt_reads_standard_input(models: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    options = (*models, "--max-new-tokens", 5, "--json")
    expected = cli("decode", "w7 w8\nw9", *options)
    give(monkeypatch, "w7 w8\nw9\n")
    answer = cli("decode", *options)
    assert answer.code == 0, answer.err
    assert json.loads(answer.out)["texts"] == json.loads(expected.out)["texts"]


@pytest.mark.parametrize(("text", "terminal"), [("w7", True), ("", False), (" \n", False)])
def test_decode_without_anything_to_read_says_what_it_expects(
    models: list[str], monkeypatch: pytest.MonkeyPatch, text: str, terminal: bool
) -> None:
    give(monkeypatch, text, terminal)
    answer = cli("decode", *models)
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert "standard input" in answer.err and "--prompts" in answer.err


def test_prompts_of_a_pipe_are_kept_for_resume(
    models: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path / "trace"
    give(monkeypatch, "".join(f"w{n} w{n + 1}\n" for n in range(5, 20)))
    first = cli("collect", *models, "--prompts", "-", "--out", out, *SMALL)
    assert first.code == 0 and "--prompts PROMPTS" in first.out, "the pipe is empty for the next command"
    whole = load_trace(out).table()
    unfinished(out)
    give(monkeypatch, "")
    answer = cli("collect", "--config", out / "run.yaml", "--resume")
    assert answer.code == 0, answer.err
    assert load_trace(out).table() == whole
    unfinished(out)
    give(monkeypatch, "w1\nw2\nw3\n")
    answer = cli("collect", "--config", out / "run.yaml", "--resume", "--limit", 3)  # of other options
    assert answer.code == 2 and "prompts" in answer.err


@pytest.fixture
def ticking(pair_folder: Path, tmp_path: Path) -> Path:
    """The pair with a chat template whose text is another one each time."""
    folder = shutil.copytree(pair_folder, tmp_path / "pair")
    for side in ("target", "draft"):
        tokenizer = AutoTokenizer.from_pretrained(folder / side)
        tokenizer.chat_template = (
            "{% for c in strftime_now('%f') %}w{{ c }} {% endfor %}"
            "{% for m in messages %}{{ m['content'] }}{% endfor %}"
        )
        tokenizer.save_pretrained(folder / side)
    return folder


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_template_that_writes_the_time_is_rendered_once(
    ticking: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    file, out = tmp_path / "p.jsonl", tmp_path / "trace"
    file.write_text("".join(json.dumps({"prompt": f"w{n} w{n + 1}"}) + "\n" for n in range(5, 20)))
    options = (*model_options(ticking), *COMPACT, "--prompts", file, "--chat", "--out", out, *SMALL)
    for rank in range(ranks):
        if ranks > 1:
            monkeypatch.setenv("RANK", str(rank))
            monkeypatch.setenv("WORLD_SIZE", str(ranks))
        answer = cli("collect", *options)
        assert answer.code == 0, answer.err
    trace: Trace = load_trace(out)
    assert trace.complete
    whole = trace.table()
    unfinished(out)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    answer = cli("collect", *options, "--resume")
    assert answer.code == 0, answer.err
    assert load_trace(out).table() == whole
    unfinished(out)
    answer = cli("collect", *(word for word in options if word != "--chat"), "--resume")
    assert answer.code == 2 and "prompts" in answer.err


def test_several_processes_cannot_read_one_pipe(
    models: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    answer = cli("collect", *models, "--prompts", "-", "--out", tmp_path / "trace", *SMALL)
    assert answer.code == 2 and "several processes" in answer.err


def test_damaged_prompts_of_a_run_are_refused(models: list[str], tmp_path: Path) -> None:
    file, out = tmp_path / "p.txt", tmp_path / "trace"
    file.write_text("".join(f"w{n} w{n + 1}\n" for n in range(5, 20)))
    options = ("collect", *models, "--prompts", file, "--out", out, *SMALL)
    assert cli(*options).code == 0
    kept = (out / "prompts.jsonl").read_text()
    for text in (kept.replace("w9", "w8"), kept[:-20], "[]\n" + kept, kept.replace('"id"', '"number"')):
        unfinished(out)
        (out / "prompts.jsonl").write_text(text)
        answer = cli(*options, "--resume")
        assert (answer.code, "Traceback" in answer.err) == (2, False)
        (out / "prompts.jsonl").write_text(kept)
        assert cli(*options, "--resume").code == 0
