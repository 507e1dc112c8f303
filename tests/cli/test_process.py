"""Help and imports, standard streams that are full or closed, and Ctrl-C."""

from __future__ import annotations

import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import COMMANDS, cli, during
from specstop.collect.store import load_trace
from specstop.policies.storage import load_policy_folder

RUN_EACH = """
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


def results(commands: list[list[str]], folder: Path, env: dict[str, str] | None = None) -> tuple[list[Any], str]:
    """Run commands in one process; return the words, exit code and imported large libraries of each, and the errors."""
    call = [sys.executable, "-c", RUN_EACH, json.dumps(commands)]
    run = subprocess.run(call, capture_output=True, text=True, check=True, cwd=folder, env=env)
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("[[")], run.stderr


def test_help_lists_and_refusals_need_no_large_libraries(tmp_path):
    """Importing torch and transformers takes 4 s."""
    texts = {"column": '{"text": "a"}', "empty": "\n", "invalid": '{"prompt": ', "good": '{"prompt": "a"}'}
    for name, text in texts.items():
        (tmp_path / f"{name}.jsonl").write_text(text)
    good = [["policies", "--json"], ["--help"], *([name, "--help"] for name in COMMANDS)]
    bad = [["collect", "--out", "new", "--prompts", "good.jsonl", "--extra", "shards=0"], ["info", "none"]]
    for words in (["collect", "--out", "new"], ["decode"], ["bench"], ["profile", "--out", "new"]):
        bad += [[*words, "--prompts", f"{name}.jsonl"] for name in ("missing", "column", "empty", "invalid")]
        for option in ("--depht=3", "--limit=many", "--temperature=-1", "--sampling=top_p=2", "--sampling=topp=1",
                       "--verification=mach", "--policy=fixd:2", "--config=none.yaml", "--target=folder"):  # fmt: skip
            bad.append([*words, "--prompts", "good.jsonl", option])
    for commands, expected, lines in ((good, 0, 0), (bad, 2, len(bad))):
        answers, errors = results(commands, tmp_path)
        assert len(answers) == len(commands) and errors.count("\n") == lines
        for words, code, imported in answers:
            assert (code, imported) == (expected, []), words


def test_files_are_utf8_in_an_ascii_locale(tmp_path):
    record = {"id": "größe", "num_spec_tokens": 3, "per_step_accepted": [1, 2, 0]}
    (tmp_path / "r.jsonl").write_text(json.dumps(record, ensure_ascii=False), encoding="utf-8")
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    commands = [["import", "r.jsonl", "--out", "t"], ["info", "t", "--json"]]
    answers, errors = results(commands, tmp_path, environment)
    assert [code for _, code, _ in answers] == [0, 0], errors
    assert load_trace(tmp_path / "t").rows["prompt_id"][0] == "größe"


FULL = "specstop: No space left on device; check the path, its permissions and the free disk space\n"
SCRIPT = [sys.executable, "-c", "from specstop.cli.main import main; main()"]
linux = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")


@linux
def test_results_are_written_when_standard_output_is_full(sides, full_profile, tmp_path):
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
def test_a_process_with_other_streams(streams, code, err):
    run = subprocess.run(["sh", "-c", f'"$@" --version {streams}', "sh", *SCRIPT], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (code, err)


INTERRUPTED = (130, "specstop: interrupted\n")

INTERRUPTIONS = {
    "within Lightning": (["train", "--head", "mlp"], "lightning.pytorch.callbacks:EarlyStopping.on_train_epoch_end", 1),
    "within scikit-learn": (["train"], "sklearn.linear_model:LogisticRegression.fit", 0),
    "while a report is written": (["evaluate"], "os:fsync", 0),
}
"""The command, where the signal comes, and after how many calls."""


@pytest.mark.parametrize("case", INTERRUPTIONS)
def test_ctrl_c_in_the_middle_of_a_command(case, full_profile, sides, tmp_path, monkeypatch):
    full_profile.save(tmp_path / "profile.json")
    (command, *options), place, after = INTERRUPTIONS[case]
    module, _, path = place.partition(":")
    owner, _, name = path.rpartition(".")
    during(monkeypatch, pkgutil.resolve_name(f"{module}:{owner}"), name, after)
    traces = sides[command == "evaluate"].folder
    answer = cli(command, *options, "--traces", traces, "--profile", tmp_path / "profile.json", "--out", tmp_path / "out",
                 "--quiet")  # fmt: skip
    assert (answer.code, answer.err) == INTERRUPTED
    assert answer.out == ""
    assert {path.name for path in tmp_path.rglob("*")} <= {"out", "profile.json"}
