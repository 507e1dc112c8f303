"""Options, help pages and what is imported before a command begins."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from commands import COMMANDS, cli
from specstop.cli.main import app
from specstop.cli.options import OPTIONS, VERIFICATIONS
from specstop.decode.verify.modes import MODES

MAX_OPTIONS, MAX_TOTAL = 25, 200


def commands() -> dict[str, Any]:
    return typer.main.get_command(app).commands  # type: ignore[attr-defined, no-any-return]


def test_the_number_of_options(capsys: pytest.CaptureFixture[str]) -> None:
    counts = {name: sum(one.param_type_name == "option" for one in commands()[name].params) for name in COMMANDS}
    with capsys.disabled():
        print(f"\noptions: {sum(counts.values())} in all; {counts}")  # noqa: T201
    assert set(counts) == set(commands()) and len(COMMANDS) == 12
    assert max(counts.values()) <= MAX_OPTIONS
    assert sum(counts.values()) <= MAX_TOTAL


def test_every_text_belongs_to_an_option() -> None:
    names = {f"{name} {one.name}" for name in COMMANDS for one in commands()[name].params}
    assert {name for name in OPTIONS if " " in name} <= names
    assert {name for name in OPTIONS if " " not in name} <= {name.partition(" ")[2] for name in names}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_and_fits_80_columns(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    answer = cli(command, "--help")
    assert answer.code == 0, answer.err
    assert f"Example: specstop {command}" in " ".join(answer.out.split())
    assert max(map(len, answer.out.splitlines())) <= 80


def test_without_a_command_the_commands_are_listed() -> None:
    answer = cli()
    assert all(name in answer.out + answer.err for name in COMMANDS)
    assert cli("--version").out.startswith("specstop 0.")


def test_verification_modes_are_those_of_the_decoder() -> None:
    assert set(VERIFICATIONS) == {"auto", *MODES}
    assert [name for name, mode in MODES.items() if not mode.lossless] == ["typical"]


RUN = """
import json, sys
from specstop.cli.main import run
large = {"torch", "transformers", "numba", "datasets", "sklearn", "lightning", "matplotlib", "pandas"}
for words in json.loads(sys.argv[1]):
    sys.argv = ["specstop", *words]
    try:
        run()
    except SystemExit as end:
        print(json.dumps([words, end.code, sorted(large & set(sys.modules))]))
"""


def results(commands: list[list[str]], folder: Path) -> tuple[list[Any], str]:
    """Run commands in one process; return the words, exit code and imported large libraries of each, and the errors."""
    call = [sys.executable, "-c", RUN, json.dumps(commands)]
    run = subprocess.run(call, capture_output=True, text=True, check=True, cwd=folder)
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("[[")], run.stderr


def test_invalid_input_is_refused_before_large_libraries_are_imported(tmp_path: Path) -> None:
    """Importing torch and transformers takes 4 s."""
    texts = {"column": '{"text": "a"}', "empty": "\n", "invalid": '{"prompt": ', "good": '{"prompt": "a"}'}
    for name, text in texts.items():
        (tmp_path / f"{name}.jsonl").write_text(text)
    commands = []
    for words in (["collect", "--out", "new"], ["decode"], ["bench"], ["profile", "--out", "new"]):
        commands += [[*words, "--prompts", f"{name}.jsonl"] for name in ("missing", "column", "empty", "invalid")]
        valid = [*words, "--prompts", "good.jsonl"]
        for option in ("--depht=3", "--limit=many", "--temperature=-1", "--sampling=top_p=2", "--sampling=topp=1",
                       "--verification=mach", "--policy=fixd:2", "--config=none.yaml", "--target=folder"):  # fmt: skip
            commands.append([*valid, option])
    commands.append(["collect", "--out", "new", "--prompts", "good.jsonl", "--extra", "shards=0"])
    commands.append(["info", "none"])
    answers, errors = results(commands, tmp_path)
    assert len(answers) == len(commands) == errors.count("\n")
    for words, code, imported in answers:
        assert (code, imported) == (2, []), words


def test_help_and_lists_need_no_large_libraries(tmp_path: Path) -> None:
    answers, errors = results([["policies", "--json"], ["--help"], *([name, "--help"] for name in COMMANDS)], tmp_path)
    assert errors == "" and all(answer[1:] == [0, []] for answer in answers)
    assert len(answers) == 2 + len(COMMANDS)
