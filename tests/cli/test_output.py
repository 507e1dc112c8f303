"""Progress, tables, and standard streams that are full, closed or cannot show a character."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import ascii_locale, cli
from specstop.cli import output
from specstop.cli.output import progress_bars, table
from specstop.collect.prompts import Prompt
from specstop.collect.run import collect
from specstop.collect.store import Trace
from specstop.decode.models.pair import Pair
from specstop.policies.profile import Profile
from specstop.policies.storage import load_policy_folder

FULL = "specstop: No space left on device; check the path, its permissions and the free disk space\n"
SCRIPT = [sys.executable, "-c", "from specstop.cli.main import main; main()"]
linux = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")


def test_progress_without_a_terminal_is_a_line_every_few_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rate is of what this run did: a resumed one begins at 3."""
    now = [100.0]
    monkeypatch.setattr(output, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with progress_bars() as progress:
        for done, seconds in ((3, 2.0), (4, 2.0), (5, 4.0), (6, 1.0), (7, 1.0)):
            now[0] += seconds
            progress("collect", done, 7)
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith("collect: 5 of 7, 00:06") and "3.00s/it" in first and "00:06 left" in first
    assert last.startswith("collect: 7 of 7, 00:08") and "2.00s/it" in last


def test_a_table_fits_80_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    table("t", ("name", "value", "description"), [("a\x1b", "1.5", "word " * 60), ("b" * 200, "-", "x" * 200)])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "".join(lines).count("x") == 201, "nothing is cut off"
    assert "\x1b" not in "".join(lines), "nothing controls the terminal"


@linux
def test_results_that_cannot_be_shown_are_still_written(
    sides: tuple[Trace, Trace], full_profile: Profile, tmp_path: Path
) -> None:
    full_profile.save(tmp_path / "profile.json")
    options = ["--traces", sides[0].folder, "--profile", tmp_path / "profile.json", "--out", tmp_path / "policy"]
    with open("/dev/full", "w") as full:
        answer = cli("train", *options, "--quiet", stdout=full)
    with open("/dev/full", "w") as full:
        assert cli("policies", "--json", stdout=full)[::2] == (2, FULL)
    assert (answer.code, answer.err) == (2, FULL)
    assert load_policy_folder(tmp_path / "policy").head.kind == "logistic"
    assert (tmp_path / "policy" / "run.yaml").is_file()


@linux
@pytest.mark.parametrize(
    ("streams", "code", "err"),
    [(">/dev/full", 2, FULL), ("2>&-", 0, ""), ("2>/dev/full", 0, ""), ("<&-", 0, ""), ("| true", 0, "")],
)
def test_a_process_with_other_streams(streams: str, code: int, err: str) -> None:
    run = subprocess.run(["sh", "-c", f'"$@" --version {streams}', "sh", *SCRIPT], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (code, err)


def test_a_process_ends_with_the_exit_code_and_all_of_its_output(tmp_path: Path) -> None:
    run = subprocess.run([*SCRIPT, "policies", "--json"], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "") and json.loads(run.stdout)
    run = subprocess.run([*SCRIPT, "info", str(tmp_path / "nowhere")], capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (2, "", 1)


def test_a_console_without_a_character_shows_another_one(pair: Pair, tmp_path: Path) -> None:
    prompts = [Prompt("naïve-日本-😀", "w7 w8", "größe"), Prompt("b", "w9", "größe")]
    collect(pair, prompts, tmp_path / "trace-é", depth=2, max_new_tokens=5)
    for more, text in (((), "1: gr??e"), (("--json",), "1: gr\\u00f6\\u00dfe")):
        console = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
        answer = cli("info", tmp_path / "trace-é", *more, stdout=console)
        console.seek(0)
        assert (answer.code, answer.err) == (0, "") and text in console.read()


def test_an_argument_that_is_not_text_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments in (
        ["collect", "--out", "a\udcff"],
        ["decode", "w7", "\udcff", "--target", "a", "--draft", "b"],
        ["evaluate", "--traces", "a", "--profile", "b", "--policy", "fixed:2", "--policy", "\udcff"],
    ):
        answer = cli(*arguments)
        assert (answer.code, answer.err.count("\n"), answer.out) == (2, 1, "")
        assert "encoding" in answer.err and "\\udcff" in answer.err
    command = [*SCRIPT, "collect", "--out", "trace-é"]
    run = subprocess.run(command, capture_output=True, env=ascii_locale())
    assert run.returncode == 2 and b"encoding" in run.stderr and run.stderr.count(b"\n") == 1
    assert not list(tmp_path.iterdir())
