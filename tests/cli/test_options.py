"""The options of all commands: their number, their help, and what is refused before large libraries are imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from commands import COMMANDS, cli
from specstop.cli.main import app
from specstop.cli.options import VERIFICATIONS
from specstop.decode.verify.modes import MODES

MAX_OPTIONS, MAX_TOTAL = 25, 200


def test_the_number_of_options(capsys: pytest.CaptureFixture[str]) -> None:
    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    counts = {name: sum(one.param_type_name == "option" for one in known[name].params) for name in COMMANDS}
    with capsys.disabled():
        print(f"\noptions: {sum(counts.values())} in all; {counts}")
    assert set(known) == set(COMMANDS) and len(COMMANDS) == 12
    assert max(counts.values()) <= MAX_OPTIONS
    assert sum(counts.values()) <= MAX_TOTAL


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_and_fits_80_columns(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    answer = cli(command, "--help")
    assert answer.code == 0, answer.err
    assert f"Example: specstop {command}" in " ".join(answer.out.split())
    assert max(map(len, answer.out.splitlines())) <= 80


def test_verification_modes_are_those_of_the_decoder() -> None:
    labels = {name: "lossless" if mode.lossless else "LOSSY" for name, mode in MODES.items()}
    assert {"auto": "lossless", **labels} == VERIFICATIONS


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


def test_invalid_input_is_refused_before_large_libraries_are_imported(tmp_path: Path) -> None:
    """Importing torch and transformers takes 4 s."""
    for name, text in (
        ("column", '{"text": "a"}'),
        ("empty", "\n"),
        ("invalid", '{"prompt": '),
        ("good", '{"prompt": "a"}'),
    ):
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
    call = [sys.executable, "-c", RUN, json.dumps(commands)]
    run = subprocess.run(call, capture_output=True, text=True, check=True, cwd=tmp_path)
    answers = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(answers) == len(commands) == run.stderr.count("\n")
    for words, code, imported in answers:
        assert (code, imported) == (2, []), words


def test_policies_are_listed_without_large_libraries() -> None:
    call = [sys.executable, "-c", RUN, json.dumps([["policies", "--json"]])]
    run = subprocess.run(call, capture_output=True, text=True, check=True)
    assert json.loads(run.stdout.splitlines()[-1])[1:] == [0, []]
