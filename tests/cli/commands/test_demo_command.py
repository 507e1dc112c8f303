"""`specstop demo` as a new user sees it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import specstop.train.demo as module
from commands import cli
from conftest import make_prompts
from specstop.decode.profile.measuring import Effort
from specstop.train.demo import Sizes

EFFORT = Effort(repetitions=1)


@pytest.fixture
def small(pair_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few_draws: None) -> Path:
    """Return the folder of a random pair with prompts, on which `--quick` takes seconds."""
    shutil.copytree(pair_folder, tmp_path / "pair")
    for side, seed in (("train", 21), ("test", 22)):
        lines = [json.dumps({"id": p.id, "prompt": p.text}) for p in make_prompts(20, side, seed)]
        (tmp_path / "pair" / f"prompts-{side}.jsonl").write_text("\n".join(lines))
    sizes = Sizes(
        train=10, test=4, live=2, tokens=12, depth=3, heads=("logistic",), effort=EFFORT, decision_effort=EFFORT
    )
    monkeypatch.setattr(module, "QUICK", sizes)
    monkeypatch.setattr(module, "REFERENCE_TOKEN_S", 1.0)  # any machine is fast enough
    monkeypatch.chdir(tmp_path)
    return tmp_path / "pair"


def test_it_prints_stages_a_table_a_verdict_and_what_to_run_next(small: Path) -> None:
    answer = cli("demo", "--quick", "--pair", small)
    assert answer.code == 0, answer.err
    for stage in ("collect:", "profile:", "train:", "evaluate:", "decode:"):
        assert sum(line.startswith(stage) for line in answer.out.splitlines()) == 1
    for name in ("plain decoding", "best fixed", "logistic", "oracle bound"):
        assert name in answer.out
    assert "specstop-demo/report/report.html" in answer.out
    assert all(f"specstop {command} --" in answer.out for command in ("collect", "profile", "train"))
    assert Path("specstop-demo/report/report.html").is_file()
    assert cli("demo", "--quick", "--pair", small, "--json").code == 0
    assert Path("specstop-demo-2/run.yaml").is_file()


def test_json_is_one_line_and_nothing_else(small: Path) -> None:
    answer = cli("demo", "--quick", "--pair", small, "--json", "--out", "out")
    found = json.loads(answer.out)
    assert answer.out.count("\n") == 1
    assert {line["policy"] for line in found["live"]} >= {"logistic"}


@pytest.mark.parametrize(
    ("options", "word"),
    [(["--pair", "missing"], "missing"), (["--out", "pair"], "--out"), (["--temperature", "-1"], "temperature")],
)
def test_bad_input_is_one_line_and_exit_code_2(small: Path, options: list[str], word: str) -> None:
    answer = cli("demo", "--quick", *options)
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert word in answer.err
    assert not Path("specstop-demo").exists()
