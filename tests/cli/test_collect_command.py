"""`specstop collect`: prompts, several processes, interruption, `--extra`; and `specstop info` of a trace."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import COMPACT, cli, files, loading_once, model_options, parsed, refused
from conftest import make_prompts
from specstop.cli.options import Models, PromptSource
from specstop.collect import shards
from specstop.collect.store import Trace, load_trace
from transformers import AutoTokenizer

COUNT = 24
SHARDS = ("--extra", "shards=4")
CLOCK = "{% for c in strftime_now('%f') %}w{{ c }} {% endfor %}{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.fixture(scope="module", autouse=True)
def loaded_once() -> Iterator[None]:
    with loading_once():
        yield


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, pair_folder: Path) -> Path:
    """A folder with prompts, and with a pair whose chat template writes the current time."""
    folder = tmp_path_factory.mktemp("options")
    prompts = make_prompts(COUNT, "c", 50)
    lines = [{"id": p.id, "question": [p.text, "more"], "category": f"g{i % 2}"} for i, p in enumerate(prompts)]
    (folder / "bench.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    shutil.copytree(pair_folder, folder / "clock")
    for side in ("target", "draft"):
        tokenizer = AutoTokenizer.from_pretrained(pair_folder / side)
        tokenizer.chat_template = CLOCK
        tokenizer.save_pretrained(folder / "clock" / side)
    return folder


@pytest.fixture(scope="module")
def collect(home: Path, pair_folder: Path) -> list[object]:
    return ["collect", *model_options(pair_folder, *COMPACT), "--prompts", home / "bench.jsonl", "--column", "question",
            "--depth", 2, "--max-new-tokens", 5, "--quiet"]  # fmt: skip


def extra(**parameters: object) -> list[str]:
    return [word for name, value in parameters.items() for word in ("--extra", f"{name}={value}")]


def collected(*command: object) -> Trace:
    answer = cli(*command)
    assert answer.code == 0, answer.err
    return load_trace(Path(str(command[-1])))


@pytest.fixture(scope="module")
def done(collect: list[object], home: Path) -> Trace:
    return collected(*collect, *SHARDS, "--out", home / "done")


def remove_shards(out: Path) -> None:
    """Leave the trace as an interrupted process does."""
    for file in out.glob("data/*0000[12]*"):
        file.unlink()


def test_info_describes_a_trace(done: Trace) -> None:
    facts = parsed("info", done.folder)
    assert facts["positions"] == done.row_count and [row["depth"] for row in facts["acceptance"]] == [1, 2]
    assert facts["bytes"] == sum(len(raw) for name, raw in files(done.folder).items() if name.endswith(".parquet"))
    assert facts["prompts from"] == "bench.jsonl, column question" and facts["groups"][:3] == "2: "


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--depth", 2), "--verification block --depth 2"), (("--tree", "2,1"), "--tree 2,1 --verification match --depth 2"),
        (("--collector", "live"), "--verification match --depth 2"),
    ],
)  # fmt: skip
def test_the_next_command_times_the_rounds_of_the_trace(
    collect: list[object], home: Path, tmp_path: Path, options: tuple[str, ...], words: str
) -> None:
    sampled = ("--temperature", 0.7, "--sampling", "top_p=0.8", "--sampling", "repetition_penalty=1.2", "--limit", 3)
    answer = cli(*collect, *sampled, *options, "--out", tmp_path / "t")
    assert answer.code == 0, answer.err
    line = next(line for line in answer.out.splitlines() if line.startswith("Next: specstop profile"))
    tree, _, rest = words.rpartition("--verification")
    expected = f"--sampling top_p=0.8 --sampling repetition_penalty=1.2 {tree}--verification{rest} --prompts"
    assert "--temperature 0.7" in line and f"{expected} {home / 'bench.jsonl'} --out profile.json" in line
    assert load_trace(tmp_path / "t").header.sampling == {"top_p": 0.8, "repetition_penalty": 1.2}


def test_samples_of_a_prompt_go_through_all_commands(collect: list[object], tmp_path: Path) -> None:
    texts = [
        {"prompt_id": "q", "id": name, "prompt": "w7 w8", "answer": f"w{9 + at} w10"} for at, name in enumerate("ab")
    ]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, texts)))
    command = [*collect, "--column", "prompt", "--prompts", tmp_path / "p.jsonl", "--temperature", 0.7]
    recorded = ["--depth", 1, "--verification", "match", *extra(completions="answer")]
    rows = collected(*command, *recorded, "--out", tmp_path / "a").table(["prompt_id", "sample"]).to_pylist()
    assert {(row["prompt_id"], row["sample"]) for row in rows} == {("q", "a"), ("q", "b")}
    facts = parsed("info", tmp_path / "a")
    assert (facts["prompts"], facts["prompts with rows"], facts["distinct prompt ids"]) == (2, 2, 1)
    decode = ["decode", *collect[1:7], "--prompts", tmp_path / "p.jsonl", "--temperature", 0.9, "--max-new-tokens", 12]
    answer = cli(*decode, "--policy", "fixed:1")
    assert "[1 of 2: q, sample a]" in answer.out and "[2 of 2: q, sample b]" in answer.out, answer.err
    first, second = parsed(*decode, "--policy", "fixed:1")["texts"]
    assert first != second


def test_a_template_of_the_current_time_is_rendered_once(
    collect: list[object], home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if several processes collect the trace, and if it is resumed."""
    out = tmp_path / "trace"
    command = [*collect, *model_options(home / "clock"), *extra(shards=3), "--out", out]
    with monkeypatch.context() as launcher:
        launcher.setenv("WORLD_SIZE", "2")
        for rank in ("0", "1"):
            launcher.setenv("RANK", rank)
            assert cli(*command, "--chat").code == 0
    whole = load_trace(out).table()
    assert load_trace(out).complete
    remove_shards(out)
    assert cli(*command, "--chat", "--resume").code == 0
    assert load_trace(out).table() == whole
    remove_shards(out)
    assert "prompts" in refused(*command, "--resume")


def set_stdin(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


def test_resume_reads_the_stored_prompts_of_a_pipe(
    collect: list[object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path / "trace"
    command = [word for word in collect if word not in ("--column", "question")]
    set_stdin(monkeypatch, "".join(f"w{n} w{n + 1}\n" for n in range(5, 20)))
    first = cli(*command, "--prompts", "-", *extra(shards=3), "--out", out)
    assert first.code == 0 and "--prompts PROMPTS" in first.out, "the pipe is empty for the next command"
    whole = load_trace(out).table()
    remove_shards(out)
    set_stdin(monkeypatch, "")
    assert cli("collect", "--config", out / "run.yaml", "--resume").code == 0
    assert load_trace(out).table() == whole
    remove_shards(out)
    set_stdin(monkeypatch, "w1\nw2\nw3\n")
    assert "prompts" in refused("collect", "--config", out / "run.yaml", "--resume", "--limit", 3), "another selection"
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "several processes" in refused(*command, "--prompts", "-", "--out", tmp_path / "other")


def test_the_prompts_of_the_shipped_pair_are_used_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for side in ("train", "test"):
        (tmp_path / f"prompts-{side}.jsonl").write_text("".join(f'{{"prompt": "{side} {i}"}}\n' for i in range(3)))
    monkeypatch.setattr("specstop.train.shipped_pair.shipped_pair", lambda: tmp_path)
    for side in ("train", "test"):
        prompts = PromptSource(limit=2).read(Models(), side)
        assert [prompt.text for prompt in prompts] == [f"{side} 0", f"{side} 1"]


def test_each_process_collects_its_shards_and_info_checks_that_all_exist(
    collect: list[object], done: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert "process 1 of 2 has ended; 2 of 4 shards exist" in cli(*collect, *SHARDS, "--out", out).out
    assert "(0, 2)" in refused("info", out, "--check")
    assert "--overwrite: expected one process" in refused(*collect, "--out", out, "--overwrite")
    monkeypatch.setenv("RANK", "0")
    assert collected(*collect, *SHARDS, "--out", out).table() == done.table()
    assert cli("info", out, "--check").code == 0


def test_ctrl_c_keeps_completed_shards_and_states_how_to_continue(
    collect: list[object], done: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, write = tmp_path / "out", shards.write_shard

    def interrupt(folder: Path, header: Any, index: int, rows: Any) -> None:
        if index == 1:
            os.kill(os.getpid(), signal.SIGINT)
        write(folder, header, index, rows)

    monkeypatch.setattr(shards, "write_shard", interrupt)
    answer = cli(*collect, *SHARDS, "--out", out)
    assert (answer.code, answer.out, answer.err.count("\n")) == (130, "", 1) and "--resume" in answer.err
    monkeypatch.undo()
    assert yaml.safe_load((out / "run.yaml").read_text())["command"] == "collect"
    assert cli("collect", "--config", out / "run.yaml", "--resume").code == 0
    assert load_trace(out).table() == done.table()


def test_trees_live_rounds_mixed_text_and_hidden_states_are_collected(
    collect: list[object], done: Trace, home: Path
) -> None:
    live = ("--collector", "live", "--policy", "confidence:0.3", "--verification", "block", *extra(explore=0.5))
    tree, rounds, mixed, hidden = (
        collected(*collect, *options, "--out", home / f"kind{at}")
        for at, options in enumerate(
            (("--tree", "2,1", "--temperature", 0.7), (*live, "--temperature", 0.7), ("--depth", 1, *extra(mix=0.2)),
             (*SHARDS, *extra(hidden="target,draft")))
        )
    )  # fmt: skip
    assert tree.header.tree.name == "2,1" and mixed.header.mix == 0.2
    assert (rounds.header.verification, rounds.header.explore) == ("block", 0.5)
    assert done.header.hidden == {} and hidden.header.hidden == {"draft_hidden": 16, "target_hidden": 16}
    facts = parsed("info", hidden.folder)
    assert facts["hidden states"] == "draft_hidden (2 x 16, float16), target_hidden (16, float16)"
