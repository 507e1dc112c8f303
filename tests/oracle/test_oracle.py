"""The recorder of frozen behaviour runs on the present code, and two runs agree."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

RECORDER = Path(__file__).parent / "record.py"


def test_two_runs_agree_and_a_change_is_listed(tmp_path: Path) -> None:
    """In processes of their own, because the recorder turns plugins off."""

    def run(name: str, *options: str) -> subprocess.CompletedProcess[str]:
        command = [
            sys.executable,
            str(RECORDER),
            str(tmp_path / name),
            "--small",
            "--only",
            "trees",
            "--only",
            "decisions",
        ]
        return subprocess.run([*command, *options], capture_output=True, text=True)

    first = run("first")
    assert first.returncode == 0, first.stderr
    same = run("second", "--check", str(tmp_path / "first"))
    assert same.returncode == 0 and "0 differences" in same.stdout + same.stderr
    record = tmp_path / "first" / "trees.json"
    record.write_text(record.read_text().replace("1", "2"))
    assert run("third", "--check", str(tmp_path / "first")).returncode == 1
