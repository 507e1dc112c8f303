"""Standard output that is full, closed or cannot show a character; arguments and names that are no text."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ascii_locale, cli
from specstop.collect.prompts import Prompt
from specstop.collect.run import collect
from specstop.collect.store import Trace, load_trace
from specstop.decode.models.pair import Pair
from specstop.policies.errors import TraceError
from specstop.policies.profile import Profile
from specstop.policies.storage import load_policy_folder

FULL = "specstop: No space left on device; check the path, its permissions and the free disk space\n"
pytestmark = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")


def test_results_that_cannot_be_shown_are_still_written(
    sides: tuple[Trace, Trace], full_profile: Profile, tmp_path: Path
) -> None:
    full_profile.save(tmp_path / "profile.json")
    options = ["--traces", sides[0].folder, "--profile", tmp_path / "profile.json", "--out", tmp_path / "policy"]
    with open("/dev/full", "w") as full:
        answer = cli("train", *options, "--quiet", stdout=full)
    assert (answer.code, answer.err) == (2, FULL)
    assert load_policy_folder(tmp_path / "policy").head.kind == "logistic"
    assert (tmp_path / "policy" / "run.yaml").is_file()


def test_one_line_of_json_that_cannot_be_shown() -> None:
    with open("/dev/full", "w") as full:
        assert cli("policies", "--json", stdout=full)[::2] == (2, FULL)


SCRIPT = [sys.executable, "-c", "from specstop.cli.main import run; run()"]


@pytest.mark.parametrize(
    ("streams", "code", "err"),
    [
        (">/dev/full", 2, FULL),
        ("2>&-", 0, ""),
        ("2>/dev/full", 0, ""),
        ("<&-", 0, ""),
        ("| true", 0, ""),
    ],
)  # fmt: skip
def test_a_process_with_other_streams(streams: str, code: int, err: str) -> None:
    command = f'"$@" --version {streams}'
    run = subprocess.run(["sh", "-c", command, "sh", *SCRIPT], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (code, err)


def on_ascii(*args: object) -> str:
    """Return what a command shows on a console that knows ASCII only."""
    console = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    answer = cli(*args, stdout=console)
    assert (answer.code, answer.err) == (0, "")
    console.seek(0)
    return console.read()


def test_a_console_without_a_character_shows_another_one(pair: Pair, tmp_path: Path) -> None:
    named = [Prompt("naïve-日本-😀", "w7 w8", "größe"), Prompt("b", "w9", "größe")]
    collect(pair, named, tmp_path / "trace-é", depth=2, max_new_tokens=5)
    shown = on_ascii("info", tmp_path / "trace-é")
    assert "1: gr??e" in shown
    assert "trace-?" in shown
    assert json.loads(on_ascii("info", tmp_path / "trace-é", "--json"))["groups"] == "1: größe"


def test_a_name_that_an_ascii_locale_cannot_write() -> None:
    """What can be written is, in such a locale: see `test_pipeline`."""
    run = subprocess.run([*SCRIPT, "collect", "--out", "trace-é"], capture_output=True, check=False, env=ascii_locale())
    assert run.returncode == 2
    assert (
        b"--out: expected text in the encoding of this locale" in run.stderr and b"trace-\\udcc3\\udca9" in run.stderr
    )
    assert run.stderr.count(b"\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["collect", "--out", "a\udcff"],
        ["decode", "w7", "\udcff", "--target", "a", "--draft", "b"],
        ["evaluate", "--traces", "a", "--profile", "b", "--out", "c", "--policy", "fixed:2", "--policy", "\udcff"],
        ["info", "\udcff"],
    ],
)
def test_an_argument_that_is_no_text_is_one_line(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = cli(*arguments)
    assert (answer.code, answer.err.count("\n"), answer.out) == (2, 1, "")
    assert "expected text in the encoding of this locale" in answer.err
    assert "\\ud" in answer.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("field", ["id", "group", "category"])
def test_half_a_surrogate_pair_in_a_prompt_is_one_line(field: str, tmp_path: Path, pair_folder: Path) -> None:
    lines = [json.dumps({"prompt": "w7", "id": "a"}), json.dumps({"prompt": "w8", "id": "b", field: "c\ud800"})]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    models = ["--target", pair_folder / "target", "--draft", pair_folder / "draft"]
    for command in (
        ["collect", "--out", tmp_path / "out"],
        ["decode"],
        ["bench"],
        ["profile", "--out", tmp_path / "out"],
    ):
        answer = cli(*command, *models, "--prompts", tmp_path / "prompts.jsonl")
        assert (answer.code, answer.err.count("\n")) == (2, 1)
        name = "group" if field == "category" else field
        assert f"prompts.jsonl, line 2: the {name} has half a surrogate pair, which is not valid text" in answer.err
        assert not (tmp_path / "out").exists()


def test_half_a_surrogate_pair_in_a_trace_is_one_line(
    sides: tuple[Trace, Trace], full_profile: Profile, tmp_path: Path
) -> None:
    folder = shutil.copytree(sides[1].folder, tmp_path / "trace")
    raw = json.loads((folder / "header.json").read_text())
    (folder / "header.json").write_text(json.dumps({**raw, "target": "\ud800"}))
    full_profile.save(tmp_path / "profile.json")
    with pytest.raises(TraceError, match="the header has Invalid JSON"):
        load_trace(folder)
    for command in (
        ["info", folder],
        ["evaluate", "--traces", folder, "--profile", tmp_path / "profile.json", "--out", tmp_path / "report"],
    ):
        answer = cli(*command)
        assert (answer.code, answer.err.count("\n"), answer.out) == (2, 1, "")
        assert "the header has Invalid JSON" in answer.err
    assert not (tmp_path / "report").exists()
