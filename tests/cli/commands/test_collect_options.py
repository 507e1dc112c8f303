"""`specstop collect`: prompts, several processes, interruption, `--extra`; and what `info` prints of a trace."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from commands import COMPACT, cli, files, loading_once
from conftest import make_prompts
from specstop.cli.commands.info import branch_rows
from specstop.cli.options import Models, PromptSource
from specstop.collect import collect as collect_trace, shards
from specstop.collect.store import Trace, load_trace, shard_path
from specstop.decode.models.pair import Pair
from transformers import AutoTokenizer

COUNT = 24


@pytest.fixture(scope="module", autouse=True)
def loaded_once() -> Iterator[None]:
    with loading_once():
        yield


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, pair_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("options")
    prompts = make_prompts(COUNT, "c", 50)
    lines = [{"id": p.id, "question": [p.text, "more"], "category": f"g{i % 2}"} for i, p in enumerate(prompts)]
    (folder / "bench.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    (folder / "plain.txt").write_text("\n".join(p.text for p in prompts))
    tokenizer = AutoTokenizer.from_pretrained(pair_folder / "target")
    tokenizer.chat_template = (
        "{% for m in messages %}w3 {{ m['content'] }}{% endfor %}{% if add_generation_prompt %} w4{% endif %}"
    )
    (folder / "chat").mkdir()
    for file in (pair_folder / "target").iterdir():
        (folder / "chat" / file.name).write_bytes(file.read_bytes())
    tokenizer.save_pretrained(folder / "chat")
    return folder


@pytest.fixture(scope="module")
def collect(home: Path, pair_folder: Path) -> list[object]:
    return ["collect", "--target", pair_folder / "target", "--draft", pair_folder / "draft", *COMPACT,
            "--prompts", home / "bench.jsonl", "--column", "question", "--depth", 2, "--max-new-tokens", 5,
            "--quiet"]  # fmt: skip


SHARDS = ("--extra", "shards=4")


def extra(**parameters: object) -> list[str]:
    return [word for name, value in parameters.items() for word in ("--extra", f"{name}={value}")]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def done(collect: list[object], home: Path) -> Trace:
    answer = cli(*collect, *SHARDS, "--out", home / "done")
    assert answer.code == 0, answer.err
    return load_trace(home / "done")


def ids(trace: Trace) -> set[str]:
    return set(trace.table(["prompt_id"])["prompt_id"].to_pylist())


def same_rows(first: Trace, second: Trace) -> bool:
    return bool(first.rows.data.table.equals(second.rows.data.table))


def test_groups_and_the_source_are_recorded(done: Trace) -> None:
    assert set(done.table(["group"])["group"].to_pylist()) == {"g0", "g1"}
    assert done.header.facts["prompts from"] == "bench.jsonl, column question"
    assert "bench.jsonl, column question" in (done.folder / "README.md").read_text()


def test_a_run_is_repeated_from_its_configuration(collect: list[object], tmp_path: Path) -> None:
    answer = cli(*collect, "--limit", 6, "--out", tmp_path / "a")
    assert answer.code == 0, answer.err
    first = load_trace(tmp_path / "a")
    assert first.header.prompts == 6
    answer = cli("collect", "--config", tmp_path / "a" / "run.yaml", "--out", tmp_path / "b")
    assert answer.code == 0, answer.err
    assert same_rows(load_trace(tmp_path / "b"), first)


def test_a_plain_text_has_a_prompt_per_line(collect: list[object], home: Path, done: Trace, tmp_path: Path) -> None:
    answer = cli(*collect, "--prompts", home / "plain.txt", "--out", tmp_path / "out")
    assert answer.code == 0, answer.err
    assert load_trace(tmp_path / "out").row_count == done.row_count


def test_samples_of_a_prompt_go_through_all_commands(collect: list[object], tmp_path: Path) -> None:
    texts = [
        {"prompt_id": "q", "id": name, "prompt": "w7 w8", "answer": f"w{9 + at} w10"} for at, name in enumerate("ab")
    ]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, texts)))
    command = [*collect, "--column", "prompt", "--prompts", tmp_path / "p.jsonl", "--temperature", 0.7]
    recorded = ["--depth", 1, "--verification", "match", *extra(completions="answer")]
    answer = cli(*command, *recorded, "--out", tmp_path / "a")
    assert answer.code == 0, answer.err
    rows = load_trace(tmp_path / "a").table(["prompt_id", "sample", "text_tokens"]).to_pylist()
    assert {(row["prompt_id"], row["sample"]) for row in rows} == {("q", "a"), ("q", "b")}
    live = ["--collector", "live", *extra(batch=2)]
    assert cli(*command, *live, "--out", tmp_path / "b").code == 0
    assert set(load_trace(tmp_path / "b").table(["sample"])["sample"].to_pylist()) <= {"a", "b"}
    facts = json.loads(cli("info", tmp_path / "a", "--json").out)
    assert (facts["prompts"], facts["prompts with rows"], facts["distinct prompt ids"]) == (2, 2, 1)
    assert json.loads(cli("info", tmp_path / "b", "--json").out)["batch"] == 2
    resumed = cli(*command, *live[:2], "--out", tmp_path / "b", "--resume")
    assert resumed.code == 2 and "another batch" in resumed.err
    models = [*collect[1:5], *COMPACT, "--prompts", tmp_path / "p.jsonl", "--temperature", 0.9, "--max-new-tokens", 12]
    decoded = cli("decode", *models, "--policy", "fixed:1")
    assert "[1 of 2: q, sample a]" in decoded.out and "[2 of 2: q, sample b]" in decoded.out, decoded.err
    first, second = json.loads(cli("decode", *models, "--policy", "fixed:1", "--json").out)["texts"]
    assert first != second


def test_the_chat_template_is_written_around_each_prompt(
    collect: list[object], home: Path, done: Trace, tmp_path: Path
) -> None:
    answer = cli(*collect, "--chat", "--target", home / "chat", "--out", tmp_path / "out")
    assert answer.code == 0, answer.err
    lengths = [dict(zip(*t.table(["prompt_id", "prompt_tokens"]).to_pydict().values(), strict=True))
               for t in (load_trace(tmp_path / "out"), done)]  # fmt: skip
    assert {name: length - 2 for name, length in lengths[0].items()} == {n: lengths[1][n] for n in lengths[0]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--column", "turn"], 'bench.jsonl, line 1: expected an object with a non-empty string "turn", but it has'),
        (["--chat"], "--chat: the tokenizer has no chat template"),
        (["--prompts", "hf:a/b/c"], "--prompts: expected hf:organisation/name"),
        (["--collector", "life"], "--collector: expected one of dense, live, vllm, not 'life'"),
        (["--tree", "2;1"], "--tree: expected widths"),
        (extra(shards=0), "--extra shards: expected"),
        (extra(explore=0.2), "give --collector live"),
        (extra(mix=0.2), "--extra mix: expected a share between 0 and 1, --depth 1"),
        (extra(hidden="both"), "--extra hidden: expected draft, target, or draft,target, not 'both'"),
        (extra(hidden=""), "--extra hidden: expected draft, target"),
        (extra(memory=0), "--extra memory: expected"),
        (["--collector", "live", *extra(draws=0)], "--extra draws: expected"),
        (extra(colour=1), "--extra: expected one of"),
    ],
)
def test_a_bad_choice_is_one_line_and_exit_code_2(
    collect: list[object], tmp_path: Path, options: Sequence[str], message: str
) -> None:
    answer = cli(*collect, *options, "--out", tmp_path / "out")
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert message in answer.err
    assert not (tmp_path / "out").exists()


def test_the_prompts_of_the_shipped_pair_are_used_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for side in ("train", "test"):
        (tmp_path / f"prompts-{side}.jsonl").write_text("".join(f'{{"prompt": "{side} {i}"}}\n' for i in range(3)))
    monkeypatch.setattr("specstop.train.shipped_pair.shipped_pair", lambda: tmp_path)
    for side in ("train", "test"):
        prompts = PromptSource(limit=2).read(Models(), side)
        assert [prompt.text for prompt in prompts] == [f"{side} 0", f"{side} 1"]


def test_info_shows_acceptance_by_branch(pair: Pair, tmp_path: Path) -> None:
    trace = collect_trace(pair, make_prompts(4, "t", 60), tmp_path / "t", tree="2,1", max_new_tokens=6)
    rows = branch_rows(trace)
    assert [row[:2] for row in rows] == [
        ("1", "1 of the anchor"), ("1", "2 of the anchor"), ("2", "1 of node 0"), ("2", "1 of node 1")
    ]  # fmt: skip
    accepted = np.array(trace.rows["accepted"])
    labelled = np.array(trace.rows["observed"])
    for node, row in enumerate(rows):
        assert int(row[3]) == labelled[:, node].sum()
        assert row[2] == (f"{accepted[labelled[:, node], node].mean():.3f}" if labelled[:, node].any() else "-")
    assert "acceptance by branch" in cli("info", trace.folder).out


def test_each_process_collects_its_shards_and_info_checks_that_all_exist(
    collect: list[object], done: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    answer = cli(*collect, *SHARDS, "--out", out)
    assert "process 1 of 2 has ended; 2 of 4 shards exist" in answer.out
    checked = cli("info", out, "--check")
    assert (checked.code, checked.err.count("\n")) == (2, 1)
    assert "is not complete, 2 of its" in checked.err and "(0, 2)" in checked.err and "--resume" in checked.err
    refused = cli(*collect, "--out", out, "--overwrite")
    assert refused.code == 2
    assert "--overwrite: expected one process" in refused.err
    monkeypatch.setenv("RANK", "0")
    assert cli(*collect, *SHARDS, "--out", out).code == 0
    assert same_rows(load_trace(out), done)
    assert cli("info", out, "--check").code == 0
    monkeypatch.setenv("RANK", "2")
    assert "RANK below WORLD_SIZE" in cli(*collect, "--out", out).err


def test_a_damaged_shard_is_named_and_collected_again(collect: list[object], done: Trace, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert cli(*collect, *SHARDS, "--out", out).code == 0
    path = shard_path(out, 2, 4)
    path.write_bytes(path.read_bytes()[:-1])
    for command in (["info", out, "--check"], ["info", out]):
        answer = cli(*command)
        assert (answer.code, answer.err.count("\n")) == (2, 1)
        assert str(path) in answer.err
    answer = cli(*collect, *SHARDS, "--out", out, "--resume")
    assert answer.code == 0, answer.err
    assert str(path) in answer.err and "collected again" in answer.err
    assert same_rows(load_trace(out), done)
    assert cli("info", out, "--check").code == 0


def test_ctrl_c_keeps_completed_shards_and_states_how_to_continue(
    collect: list[object], done: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    write = shards.write_shard

    def press(folder: Path, header: Any, index: int, rows: Any) -> None:
        if index == 1:
            os.kill(os.getpid(), signal.SIGINT)
        write(folder, header, index, rows)

    monkeypatch.setattr(shards, "write_shard", press)
    answer = cli(*collect, *SHARDS, "--out", out)
    assert answer.code == 130
    command = f"specstop collect --config {out / 'run.yaml'} --resume"
    assert answer.err == f"specstop: interrupted; completed shards are kept; continue with: {command}\n"
    monkeypatch.undo()
    assert yaml.safe_load((out / "run.yaml").read_text())["command"] == "collect"
    assert cli("collect", "--config", out / "run.yaml", "--resume").code == 0
    assert same_rows(load_trace(out), done)


def test_info_shows_counts_groups_and_a_row(done: Trace) -> None:
    facts = json.loads(cli("info", done.folder, "--json").out)
    assert facts["positions"] == done.row_count
    assert facts["groups"] == "2: g0, g1" or facts["groups"] == "2: g1, g0"
    assert facts["bytes"] == sum(len(raw) for name, raw in files(done.folder).items() if name.endswith(".parquet"))
    assert set(facts["sample"]) == set(done.table().column_names)
    assert [a["depth"] for a in facts["acceptance"]] == [1, 2]
    assert [b["rows"] for b in facts["branches"]] == np.array(done.rows["observed"]).sum(0).tolist()
    shown = cli("info", done.folder).out
    assert "P(A >= depth)" in shown
    assert "a row" in shown


def test_trees_rounds_of_the_loop_and_mixed_text_are_collected(collect: list[object], home: Path) -> None:
    made = {}
    for name, options in (
        ("tree", ("--tree", "2,1")),
        ("live", ("--collector", "live", "--policy", "confidence:0.3", "--verification", "block", *extra(explore=0.5))),
        ("mixed", ("--depth", 1, *extra(mix=0.2))),
    ):
        answer = cli(*collect, "--temperature", 0.7, *options, "--out", home / name)
        assert answer.code == 0, answer.err
        made[name] = load_trace(home / name)
    assert made["tree"].header.tree.name == "2,1"
    assert (made["live"].header.verification, made["live"].header.label) == ("block", "block")
    assert made["mixed"].header.mix == 0.2


def test_hidden_states_are_collected_where_they_are_asked_for(collect: list[object], done: Trace, home: Path) -> None:
    assert done.header.hidden == {}
    for name, words in (
        ("dense", extra(hidden="target,draft")),
        ("rounds", (*extra(hidden="draft"), "--collector", "live")),
    ):
        answer = cli(*collect, *SHARDS, *words, "--out", home / f"hidden-{name}")
        assert answer.code == 0, answer.err
    made = load_trace(home / "hidden-dense")
    assert made.header.hidden == {"draft_hidden": 16, "target_hidden": 16}
    size = sum(path.stat().st_size for path in (made.folder / "data").iterdir())
    assert size > sum(path.stat().st_size for path in (done.folder / "data").iterdir()) + 32 * 3 * made.row_count // 2
    facts = json.loads(cli("info", made.folder, "--json").out)
    assert facts["hidden states"] == "draft_hidden (2 x 16, float16), target_hidden (16, float16)"
    assert "hidden states" in cli("info", made.folder).out
    assert list(load_trace(home / "hidden-rounds").header.hidden) == ["draft_hidden"]
    yaml_file = yaml.safe_load((home / "hidden-dense" / "run.yaml").read_text())
    assert yaml_file["extra"] == ["shards=4", "hidden=target,draft"]


def info(folder: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(cli("info", folder, "--json").out)
    return facts


def test_long_prompts_are_left_out_and_counted(collect: list[object], home: Path, pair: Pair, tmp_path: Path) -> None:
    lines = [{"question": ["w7 w8"]}, {"question": [" ".join(["w9"] * 200)]}, {"question": ["w10"]}]
    (tmp_path / "mixed.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    command = [*collect, "--prompts", tmp_path / "mixed.jsonl"]
    answer = cli(*command, "--out", tmp_path / "skipped")
    assert answer.code == 0, answer.err
    assert answer.err.startswith(f"warning: 1 of 3 prompts have more than {pair.readable - 5 - 2} tokens (")
    assert answer.err.endswith(" has 200) and are left out\n")
    assert info(tmp_path / "skipped")["prompts left out"] == "1 of 3, longer than the pair reads"
