"""What benchmarks share: their bars and last line, and the runner that says which of them falls over."""

from __future__ import annotations

import argparse
import json
import re
import time
from pathlib import Path
from types import ModuleType

import pytest
from benchmark_scripts import BENCHMARKS, script

MAIN = '\nif __name__ == "__main__":\n    {}\n'
SCRIPTS = {
    "runs": "print('words'); print('{\"figures\": 1}')",
    "falls": "print('the end of it'); raise SystemExit(3)",
    "talks": "print('{}'); print('and more')",
    "lists": "print('[1]')",
    "silent": "pass",
}


@pytest.fixture(scope="module")
def runner() -> ModuleType:
    return script("run_all")


def options(**changes: object) -> argparse.Namespace:
    return argparse.Namespace(**{"quick": False, "check": False, "out": None, **changes})


def test_every_script_with_a_main_is_found_and_nothing_else(runner: ModuleType, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text(f"{MAIN.format('pass')}")
    (tmp_path / "shared.py").write_text("X = 1\n")
    assert [path.stem for path in runner.scripts(tmp_path)] == ["one", "two"]
    found = {path.stem for path in runner.scripts()}
    assert {"ab", "decision", "slice"} <= found
    assert not found & {"bars", "make_pair", "pairs", "run_all"}
    assert found >= {path.stem for path in BENCHMARKS.glob("*.py") if "def main()" in path.read_text()} - {
        "run_all",
        "make_pair",
    }


def test_the_page_has_a_row_for_every_script(runner: ModuleType) -> None:
    rows = re.findall(r"^\| `(\w+)\.py` \|", (BENCHMARKS.parent / "docs" / "benchmarks.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted([*(path.stem for path in runner.scripts()), "run_all", "make_pair"])


def test_those_that_fall_over_are_named_with_the_end_of_their_output(
    runner: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, body in SCRIPTS.items():
        (tmp_path / f"{name}.py").write_text(MAIN.format(body))
    found = runner.run_all(runner.scripts(tmp_path), options(), tmp_path, time.monotonic() + 3600)
    assert {name: outcome.fault for name, outcome in found.items()} == {
        "runs": "",
        "falls": "exit code 3",
        "talks": "its last line is no JSON",
        "lists": "its last line is no JSON object",
        "silent": "its last line is no JSON",
    }
    shown = capsys.readouterr().out
    assert "FAULT falls: exit code 3" in shown and "the end of it" in shown
    late = runner.run_all([tmp_path / "runs.py"], options(), tmp_path, time.monotonic())
    assert late["runs"].fault == "stopped by --stop-after"


@pytest.mark.parametrize(("body", "code"), [("runs", 0), ("falls", 1)])
def test_the_exit_code_says_whether_all_run(
    runner: ModuleType, body: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    path = tmp_path / "one.py"
    path.write_text(MAIN.format(SCRIPTS[body]))
    monkeypatch.setattr(runner, "scripts", lambda: [path])
    monkeypatch.setattr("sys.argv", ["run_all.py", "--out", str(tmp_path / "out")])
    assert runner.main() == code
    lines = capsys.readouterr().out.splitlines()
    assert json.loads(lines[-1])["scripts"]["one"]["fault"] == ("" if code == 0 else "exit code 3")
    assert lines[-3].startswith("one ") and lines[-3].endswith("runs" if code == 0 else "exit code 3")
    assert (tmp_path / "out" / "figures.json").is_file()


def test_a_bar_that_falls_short_is_named_and_only_a_whole_run_is_a_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bars = script("bars").Bars()
    bars.add("speed", 2.0, True, "2.0; at least 1")
    assert bars.finish(options(check=True), "one figure") == 0
    assert bars.finish(options(check=True), "one figure", whole=False) == 1
    bars.add("size", 3.0, False, "3.0; at most 1")
    for given, code in (({"check": True}, 1), ({}, 0), ({"quick": True}, 0), ({"quick": True, "check": True}, 1)):
        out = tmp_path / "f.json"
        assert bars.finish(options(**given, out=out), "two figures", details={"rows": [1]}) == code
        line = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert (line["speed"], line["size"], line["checked"]) == (2.0, 3.0, "quick" not in given)
        assert "size: 3.0; at most 1" in line["missed"]
        assert json.loads(out.read_text()) == {**line, "rows": [1]}
