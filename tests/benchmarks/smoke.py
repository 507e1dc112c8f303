"""A smoke run of every benchmark script. It takes minutes; pytest collects this file only if it is an argument.

python -m pytest -n0 tests/benchmarks/smoke.py
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_benchmarks import BENCHMARKS, script


@pytest.mark.parametrize("name", script("tools/bars").SCRIPTS)
def test_a_smoke_run_meets_the_bars_on_correctness(name: str, tmp_path: Path) -> None:
    options = ["--smoke", "--check", "--out", tmp_path / "out.json"]
    done = subprocess.run([sys.executable, BENCHMARKS / f"{name}.py", *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    if "skipped" in done.stdout and "{" not in done.stdout:
        return
    line = json.loads(done.stdout.splitlines()[-1])
    assert line["smoke"] and not line["missed"] and line["figures"]
    assert json.loads((tmp_path / "out.json").read_text()) == line
