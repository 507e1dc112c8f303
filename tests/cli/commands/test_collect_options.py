"""`specstop collect` and `merge`: which prompts, how a run is stopped, shared and mended, and what it would take."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from commands import COMPACT, cli, files, loading_once
from conftest import make_prompts
from specstop.cli.commands.info import branch_rows
from specstop.cli.options.prompts import Asked
from specstop.collect import collect as collect_trace, shards
from specstop.collect.store import Trace, open_trace, shard_path
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
    made = make_prompts(COUNT, "c", 50)
    lines = [{"question_id": p.id, "turns": [p.text, "more"], "category": f"g{i % 2}"} for i, p in enumerate(made)]
    (folder / "bench.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    (folder / "plain.txt").write_text("\n".join(p.text for p in made))
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
            "--prompts", home / "bench.jsonl", "--preset", "spec-bench", "--depth", 2, "--max-new-tokens", 5,
            "--shards", 4, "--json"]  # fmt: skip


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def done(collect: list[object], home: Path) -> Trace:
    answer = cli(*collect, "--out", home / "done")
    assert answer.code == 0, answer.err
    return open_trace(home / "done")


def ids(trace: Trace) -> set[str]:
    return set(trace.table(["prompt_id"])["prompt_id"].to_pylist())


def same_rows(first: Trace, second: Trace) -> bool:
    return bool(first.rows.data.table.equals(second.rows.data.table))


def test_groups_and_the_source_travel_to_the_trace(done: Trace) -> None:
    assert set(done.table(["group"])["group"].to_pylist()) == {"g0", "g1"}
    assert done.header.facts["prompts from"].endswith("bench.jsonl, preset spec-bench")
    assert "bench.jsonl, preset spec-bench |" in (done.folder / "README.md").read_text()


def test_both_sides_together_are_everything(collect: list[object], done: Trace, tmp_path: Path) -> None:
    sides = []
    for side in ("train", "test"):
        answer = cli(*collect, "--side", side, "--test-share", 0.4, "--out", tmp_path / side)
        assert answer.code == 0, answer.err
        sides.append(ids(open_trace(tmp_path / side)))
    assert sides[0] | sides[1] == ids(done)
    assert not sides[0] & sides[1]


def test_chosen_prompts_run_again_from_the_saved_configuration(
    collect: list[object], done: Trace, tmp_path: Path
) -> None:
    answer = cli(*collect, "--shuffle-seed", 3, "--deduplicate", "--limit", 6, "--group", "question_id", "--out",
                 tmp_path / "a")  # fmt: skip
    assert answer.code == 0, answer.err
    first = open_trace(tmp_path / "a")
    assert first.header.prompts == 6
    rows = first.table(["prompt_id", "group"]).to_pylist()
    assert all(row["prompt_id"] == row["group"] for row in rows)
    answer = cli("collect", "--config", tmp_path / "a" / "run.yaml", "--out", tmp_path / "b", "--json")
    assert answer.code == 0, answer.err
    assert same_rows(open_trace(tmp_path / "b"), first)


def test_a_plain_text_is_a_prompt_a_line(collect: list[object], home: Path, done: Trace, tmp_path: Path) -> None:
    command = [c for c in collect if c not in ("--preset", "spec-bench")]
    answer = cli(*command, "--prompts", home / "plain.txt", "--out", tmp_path / "out")
    assert answer.code == 0, answer.err
    assert open_trace(tmp_path / "out").row_count == done.row_count


def test_samples_of_a_prompt_go_through_all_commands(collect: list[object], tmp_path: Path) -> None:
    texts = [
        {"prompt_id": "q", "id": name, "prompt": "w7 w8", "answer": f"w{9 + at} w10"} for at, name in enumerate("ab")
    ]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, texts)))
    command = [
        *collect,
        "--preset",
        "humaneval",
        "--prompts",
        tmp_path / "p.jsonl",
        "--shards",
        1,
        "--temperature",
        0.7,
    ]
    answer = cli(*command, "--completions", "answer", "--depth", 1, "--verification", "match", "--out", tmp_path / "a")
    assert answer.code == 0, answer.err
    rows = open_trace(tmp_path / "a").table(["prompt_id", "sample", "text_tokens"]).to_pylist()
    assert {(row["prompt_id"], row["sample"]) for row in rows} == {("q", "a"), ("q", "b")}
    live = ["--collector", "live", "--batch", 2]
    assert cli(*command, *live, "--out", tmp_path / "b").code == 0
    assert set(open_trace(tmp_path / "b").table(["sample"])["sample"].to_pylist()) <= {"a", "b"}
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
               for t in (open_trace(tmp_path / "out"), done)]  # fmt: skip
    assert {name: length - 2 for name, length in lengths[0].items()} == {n: lengths[1][n] for n in lengths[0]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--preset", "spec-bnch"], "did you mean 'spec-bench'?"),
        (["--preset", "demo"], "--preset demo: brings its own prompts"),
        (["--side", "left"], "--side: expected train or test, not 'left'"),
        (["--test-share", "1.5"], "--test-share: expected"),
        (["--column", "turn"], 'bench.jsonl, line 1: expected an object with a non-empty string "turn", but it has'),
        (["--split", "test"], "--split: expected a data set"),
        (["--chat"], "--chat: the tokenizer has no chat template"),
        (["--repair"], "--repair: expected --resume with it"),
        (["--shards", "0"], "--shards: expected"),
        (["--prompts", "hf:a/b/c"], "--prompts: expected hf:organisation/name"),
    ],
)
def test_a_bad_choice_is_one_line_and_exit_code_2(
    collect: list[object], tmp_path: Path, options: list[str], message: str
) -> None:
    answer = cli(*collect, *options, "--out", tmp_path / "out")
    assert answer.code == 2
    assert answer.err.count("\n") == 1
    assert message in answer.err
    assert not (tmp_path / "out").exists()


def test_a_preset_without_a_home_asks_for_a_file(pair_folder: Path, tmp_path: Path) -> None:
    answer = cli("collect", "--target", pair_folder / "target", "--draft", pair_folder / "draft", "--preset",
                 "spec-bench", "--out", tmp_path / "out")  # fmt: skip
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert "--prompts: expected a file for --preset spec-bench" in answer.err


def test_the_demo_preset_reads_the_prompts_of_the_shipped_pair(tmp_path: Path) -> None:
    for side in ("train", "test"):
        (tmp_path / f"prompts-{side}.jsonl").write_text("".join(f'{{"prompt": "{side} {i}"}}\n' for i in range(3)))

    def read(preset: str | None, side: str | None) -> list[str]:
        asked = Asked(preset=preset, side=side, limit=2)
        assert asked.described().startswith("preset demo")
        return [prompt.text for prompt in asked.read(tmp_path)]

    assert read("demo", None) == read(None, "train") == ["train 0", "train 1"]
    assert read("demo", "test") == ["test 0", "test 1"]


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


def test_a_dry_run_says_what_it_would_take_and_writes_nothing(
    collect: list[object], done: Trace, tmp_path: Path
) -> None:
    answer = cli(*collect, "--dry-run", "--out", tmp_path / "out")
    assert (answer.code, answer.err) == (0, "")
    facts = json.loads(answer.out)
    assert (facts["prompts"], facts["shards"], facts["tried"], facts["processes"]) == (COUNT, 4, 16, 1)
    assert facts["rows"] == pytest.approx(done.row_count, rel=0.25)
    assert not (tmp_path / "out").exists()
    shown = cli(*[c for c in collect if c != "--json"], "--quiet", "--dry-run", "--out", tmp_path / "out")
    assert "expected, from 16 of 24 prompts" in shown.out


def test_a_dry_run_warns_of_a_disk_that_is_too_small(
    collect: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 1000

    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage)
    answer = cli(*collect, "--dry-run", "--out", tmp_path / "out")
    assert answer.err == "warning: the trace will not fit on the disk; choose another --out, or fewer prompts\n"


def test_each_process_collects_its_shards_and_merge_says_what_is_lost(
    collect: list[object], done: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    answer = cli(*collect, "--out", out)
    assert json.loads(answer.out) == {"rank": 1, "world": 2, "complete": False, "shards": "2 of 4"}
    merged = cli("merge", out)
    assert merged.code == 2
    assert "not complete, 2 of its shards missing (0, 2); run the collect command again with --resume" in merged.err
    assert merged.err.count("\n") == 1
    refused = cli(*collect, "--out", out, "--overwrite")
    assert refused.code == 2
    assert "--overwrite: expected one process" in refused.err
    monkeypatch.setenv("RANK", "0")
    assert json.loads(cli(*collect, "--out", out).out)["shards"] == "4 of 4"
    assert same_rows(open_trace(out), done)
    assert json.loads(cli("merge", out, "--json").out) == {"rows": done.row_count, "missing": [], "quarantined": []}
    monkeypatch.setenv("RANK", "2")
    assert "RANK: expected less than WORLD_SIZE (2), not 2" in cli(*collect, "--out", out).err


def test_a_damaged_shard_is_named_moved_aside_and_made_good(collect: list[object], done: Trace, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert cli(*collect, "--out", out).code == 0
    path = shard_path(out, 2, 4)
    path.write_bytes(path.read_bytes()[:-1])
    for command in (["merge", out], ["info", out], [*collect, "--out", out, "--resume"]):
        answer = cli(*command)
        assert answer.code == 2
        assert f"the shard {path} cannot be read" in answer.err
        assert f"specstop merge --repair {out}" in answer.err
    answer = cli("merge", "--repair", out)
    assert answer.code == 2
    first, second = answer.err.splitlines()
    assert first.endswith(f"moved to {out / 'quarantine' / path.name}.0")
    assert "1 of its shards missing (2)" in second
    assert cli(*collect, "--out", out, "--resume").code == 0
    assert same_rows(open_trace(out), done)
    path.write_bytes(b"")
    assert cli(*collect, "--out", out, "--resume", "--repair").code == 0
    assert same_rows(open_trace(out), done)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_finishes_the_shard_and_says_how_to_go_on(
    number: int, code: int, collect: list[object], done: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    write = shards.write_shard

    def press(folder: Path, header: Any, index: int, rows: Any) -> None:
        if index == 1:
            os.kill(os.getpid(), number)
        write(folder, header, index, rows)

    monkeypatch.setattr(shards, "write_shard", press)
    answer = cli(*collect, "--out", out)
    assert answer.code == code
    assert answer.err.splitlines() == [
        "specstop: interrupted with 2 of 4 shards finished; go on with: "
        f"specstop collect --config {out / 'run.yaml'} --resume"
    ]
    monkeypatch.undo()
    assert yaml.safe_load((out / "run.yaml").read_text())["command"] == "collect"
    assert cli("collect", "--config", out / "run.yaml", "--resume", "--json").code == 0
    assert same_rows(open_trace(out), done)


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
        ("live", ("--collector", "live", "--policy", "confidence:0.3", "--verification", "block", "--explore", 0.5)),
        ("mixed", ("--depth", 1, "--mix", 0.2)),
    ):
        answer = cli(*collect, "--temperature", 0.7, *options, "--out", home / name)
        assert answer.code == 0, answer.err
        made[name] = open_trace(home / name)
    assert made["tree"].header.tree.name == "2,1"
    assert (made["live"].header.verification, made["live"].header.label) == ("block", "block")
    assert made["mixed"].header.mix == 0.2


def test_hidden_states_are_collected_where_they_are_asked_for(collect: list[object], done: Trace, home: Path) -> None:
    assert done.header.hidden == {}
    expected = json.loads(cli(*collect, "--hidden", "target, draft", "--dry-run", "--out", home / "dry").out)
    assert not (home / "dry").exists()
    for name, words in (
        ("dense", ("--hidden", "target,draft")),
        ("rounds", ("--hidden", "draft", "--collector", "live")),
    ):
        answer = cli(*collect, *words, "--out", home / f"hidden-{name}")
        assert answer.code == 0, answer.err
    made = open_trace(home / "hidden-dense")
    assert made.header.hidden == {"draft_hidden": 16, "target_hidden": 16}
    size = sum(path.stat().st_size for path in (made.folder / "data").iterdir())
    assert expected["disk_bytes"] == pytest.approx(size, rel=0.2)
    assert size > sum(path.stat().st_size for path in (done.folder / "data").iterdir()) + 32 * 3 * made.row_count // 2
    facts = json.loads(cli("info", made.folder, "--json").out)
    assert facts["hidden states"] == "draft_hidden (2 x 16, float16), target_hidden (16, float16)"
    assert "hidden states" in cli("info", made.folder).out
    assert list(open_trace(home / "hidden-rounds").header.hidden) == ["draft_hidden"]
    yaml_file = yaml.safe_load((home / "hidden-dense" / "run.yaml").read_text())
    assert yaml_file["hidden"] == "target,draft"


def test_records_are_made_a_trace_without_options_of_a_run(home: Path) -> None:
    counts = {"num_spec_tokens": 3, "per_step_accepted": [1, 2], "per_step_drafted": [3, 3]}
    (home / "records.jsonl").write_text(json.dumps({"metrics": {"speculative_decoding": counts}}))
    command = ("collect", "--from-vllm", home / "records.jsonl", "--target", "t", "--json", "--out", home / "records")
    for options in (("--temperature", 0.7), ("--dry-run",), ("--resume",), ("--seed", 1), ("--collector", "live"),
                    ("--top-k", 5), ("--dtype", "float64"), ("--draws", 2)):  # fmt: skip
        answer = cli(*command, *options)
        assert (answer.code, answer.err.count("\n")) == (2, 1)
        assert f"{options[0]}: --from-vllm reads what vLLM recorded" in answer.err and not (home / "records").exists()
    assert cli(*command).code == 0
    again = cli("collect", "--config", home / "records" / "run.yaml", "--out", home / "again")
    assert again.code == 0, again.err


def test_options_that_do_not_go_together_are_one_line(collect: list[object], home: Path) -> None:
    for options, expected in (
        (("--collector", "life"), "--collector: expected dense or live, not 'life'"),
        (("--explore", 0.2), "give --collector live"),
        (("--mix", 0.2), "--mix: expected a share between 0 and 1, --depth 1"),
        (("--tree", "2;1"), "--tree: expected widths"),
        (("--hidden", "both"), "--hidden: expected draft, target, or draft,target, not 'both'"),
        (("--hidden", ""), "--hidden: expected draft, target"),
        (("--memory", 0), "--memory: expected"),
        (("--collector", "live", "--draws", 0), "--draws: expected"),
        (("--from-vllm", home / "nothing.jsonl"), "--from-vllm reads what vLLM recorded"),
    ):
        answer = cli(*collect, *options, "--out", home / "refused")
        assert answer.code == 2 and expected in answer.err and answer.err.count("\n") == 1
        assert not (home / "refused").exists()


def test_long_prompts_are_left_out_and_counted(collect: list[object], home: Path, pair: Pair, tmp_path: Path) -> None:
    lines = [{"turns": ["w7 w8"]}, {"turns": [" ".join(["w9"] * 200)]}, {"turns": ["w10"]}]
    (tmp_path / "mixed.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    command = [*collect, "--prompts", tmp_path / "mixed.jsonl", "--shards", 1]
    answer = cli(*command, "--out", tmp_path / "skipped")
    assert answer.code == 0, answer.err
    assert answer.err.startswith(f"warning: 1 of 3 prompts have more than {pair.readable - 5 - 2} tokens (")
    assert answer.err.endswith(" has 200) and are left out (--long)\n")
    assert json.loads(answer.out)["prompts left out"] == "1 of 3, longer than the pair reads"
    refused = cli(*command, "--long", "refuse", "--out", tmp_path / "refused")
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    cut = json.loads(cli(*command, "--long", "left", "--out", tmp_path / "cut").out)
    assert (cut["prompts"], "prompts left out" in cut) == (3, False)
