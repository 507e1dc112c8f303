"""The options of filtered sampling: the same in every command, from collection to evaluation."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import typer
from commands import COMPACT, cli, model_options
from specstop.cli.main import app
from specstop.cli.options import SAMPLING_KEYS
from specstop.collect.store import load_trace
from specstop.policies.profile import Profile

COMMANDS = ("collect", "profile", "decode", "bench")
FILTERS = ["--sampling", "top_p=0.8", "--sampling", "repetition_penalty=1.2"]


@pytest.fixture
def models(pair_folder: Path, tmp_path: Path) -> list[object]:
    lines = [f'{{"id": "{at}", "prompt": "w7 w{at} w9"}}\n' for at in range(6, 10)]
    (tmp_path / "prompts.jsonl").write_text("".join(lines))
    named = model_options(pair_folder, *COMPACT)
    return [*named, "--prompts", tmp_path / "prompts.jsonl"]


def test_every_command_has_the_option_with_one_help() -> None:
    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    texts = {option.help for name in COMMANDS for option in known[name].params if option.name == "sampling"}
    (text,) = texts
    assert all(key in text for key in SAMPLING_KEYS)


def test_collect_records_the_filters_and_info_shows_them(models: list[object], tmp_path: Path) -> None:
    for number, more in enumerate((["--depth", 2], ["--tree", "2,1"], ["--collector", "live", "--depth", 2])):
        out = tmp_path / f"t{number}"
        answer = cli("collect", *models, *FILTERS, "--temperature", 0.7, "--max-new-tokens", 8, "--out", out, *more)
        assert answer.code == 0, answer.err
        # Than `profile` would take by itself.
        other = " --verification match" if {"--tree", "--collector"} & {*more} else ""
        other += " --depth 2" + (" --tree 2,1" if "--tree" in more else "")
        expected = f"--temperature 0.7 --sampling top_p=0.8 --sampling repetition_penalty=1.2{other} --prompts"
        assert expected in answer.out, "the next command"
        assert load_trace(out).header.sampling == {"top_p": 0.8, "repetition_penalty": 1.2}
        assert json.loads(cli("info", out, "--json").out)["filter"] == "repetition-penalty 1.2, top-p 0.8"
    again = cli("collect", "--config", tmp_path / "t0" / "run.yaml", "--out", tmp_path / "again", "--quiet")
    assert again.code == 0, again.err
    assert load_trace(tmp_path / "again").header.sampling == {"top_p": 0.8, "repetition_penalty": 1.2}


def test_a_profile_is_measured_with_the_filters_and_decisions_are_added_under_them(
    models: list[object], tmp_path: Path
) -> None:
    command = ["profile", *models, "--repeats", 1, "--depth", 2, *FILTERS, "--temperature", 0.7, "--quiet"]
    answer = cli(*command, "--out", tmp_path / "p.json")
    assert answer.code == 0, answer.err
    made = Profile.load(tmp_path / "p.json")
    assert made.sampling == {"top_p": 0.8, "repetition_penalty": 1.2}
    answer = cli("profile", *models, "--policy", "confidence:0.4", "--profile", tmp_path / "p.json", "--quiet")
    assert answer.code == 0, answer.err
    assert Profile.load(tmp_path / "p.json").sampling == made.sampling
    raw = json.loads((tmp_path / "p.json").read_text())
    (tmp_path / "odd.json").write_text(json.dumps(raw | {"sampling": {"colour": 1}}))
    answer = cli("profile", *models, "--policy", "confidence:0.4", "--profile", tmp_path / "odd.json")
    assert answer.code == 2 and "colour" in answer.err


def test_bench_runs_every_loop_with_the_filters(models: list[object]) -> None:
    options = [
        "--temperature",
        0.7,
        "--sampling",
        "top_k=1",
        "--max-new-tokens",
        8,
        "--limit",
        2,
        "--policy",
        "fixed:2",
        "--json",
    ]
    answer = cli("bench", *models, *options)
    assert answer.code == 0, answer.err
    lines = json.loads(answer.out)["lines"]
    assert len(lines) > 5 and all(line["same_text"] == 2 for line in lines), "with one token left there is one text"


@pytest.mark.parametrize("command", COMMANDS)
def test_options_out_of_range_are_named_by_every_command(command: str, tmp_path: Path) -> None:
    needed = {"collect": ["--out", tmp_path / "o"]}
    answer = cli(command, *needed.get(command, []), "--sampling", "min_p=1.5")
    assert answer.code == 2 and "--sampling min_p: expected" in answer.err


def test_the_targets_defaults_are_named_applied_and_turned_off(pair_folder: Path, tmp_path: Path) -> None:
    """A model whose generation_config sets a penalty: `decode`, `collect` and `info` say so."""
    target = shutil.copytree(pair_folder / "target", tmp_path / "target")
    raw = json.loads((target / "generation_config.json").read_text())
    (target / "generation_config.json").write_text(json.dumps(raw | {"repetition_penalty": 1.7, "top_k": 5}))
    (tmp_path / "prompts.jsonl").write_text('{"id": "a", "prompt": "w7 w8 w9"}\n{"id": "b", "prompt": "w20 w8"}\n')
    named = ["--target", target, "--draft", pair_folder / "draft", *COMPACT, "--prompts", tmp_path / "prompts.jsonl"]
    texts = []
    for more in ([], ["--sampling", "model_defaults=false"], ["--sampling", "repetition_penalty=1.0"]):
        answer = cli("decode", *named, "--max-new-tokens", 20, "--json", *more)
        assert answer.code == 0, answer.err
        assert ("generation_config sets repetition_penalty=1.7 (" in answer.err) == (not more)
        texts.append(json.loads(answer.out)["texts"])
        answer = cli(
            "collect", *named, "--max-new-tokens", 8, "--depth", 2, "--out", tmp_path / f"t{len(texts)}", *more
        )
        assert answer.code == 0, answer.err
        assert ("generation_config sets" in answer.err) == (not more)
    assert texts[0] != texts[1] == texts[2]
    sampling = [load_trace(tmp_path / f"t{number}").header.sampling for number in (1, 2, 3)]
    assert sampling == [{"repetition_penalty": 1.7, "top_k": 5}, {}, {"top_k": 5}]
    answer = cli("collect", *named, "--max-new-tokens", 8, "--depth", 2, "--out", tmp_path / "t2", "--resume")
    assert answer.code == 2 and "sampling" in answer.err
    answer = cli("info", target, "--json")
    assert json.loads(answer.out)["sampling defaults"] == "repetition-penalty 1.7, top-k 5"
