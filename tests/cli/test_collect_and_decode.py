"""`specstop collect`, `decode` and `bench`: prompts, processes, interruptions, sampling, and policies that fail."""

from __future__ import annotations

import importlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from byte_pair import PERSON, byte_pair, is_person
from commands import COMPACT, cli, during, loading_once, model_options, parsed, refused
from conftest import make_prompts
from specstop.collect import shards
from specstop.collect.store import Trace, load_trace
from specstop.decode.verify.modes import MODES

COUNT = 24
SHARDS = ("--extra", "shards=4")


@pytest.fixture(scope="module", autouse=True)
def loaded_once():
    with loading_once():
        yield


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with prompts."""
    folder = tmp_path_factory.mktemp("options")
    prompts = make_prompts(COUNT, "c", 50)
    lines = [{"id": p.id, "question": [p.text, "more"], "category": f"g{i % 2}"} for i, p in enumerate(prompts)]
    (folder / "bench.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    return folder


@pytest.fixture(scope="module")
def collect(home, pair_folder):
    return ["collect", *model_options(pair_folder, *COMPACT), "--prompts", home / "bench.jsonl", "--column", "question",
            "--depth", 2, "--max-new-tokens", 5, "--quiet"]  # fmt: skip


def extra(**parameters: object) -> list[str]:
    return [word for name, value in parameters.items() for word in ("--extra", f"{name}={value}")]


def collected(*command: object) -> Trace:
    answer = cli(*command)
    assert answer.code == 0, answer.err
    return load_trace(Path(str(command[-1])))


@pytest.fixture(scope="module")
def done(collect, home):
    return collected(*collect, *SHARDS, "--out", home / "done")


def remove_shards(out: Path) -> None:
    """Leave the trace as an interrupted process does."""
    for file in out.glob("data/*0000[12]*"):
        file.unlink()


def set_stdin(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


def test_resume_reads_the_stored_prompts_of_a_pipe(collect, monkeypatch, tmp_path):
    out = tmp_path / "trace"
    command = [word for word in collect if word not in ("--column", "question")]
    set_stdin(monkeypatch, "".join(f"w{n} w{n + 1}\n" for n in range(5, 20)))
    first = cli(*command, "--prompts", "-", *extra(shards=3), "--out", out)
    assert first.code == 0 and "--prompts PROMPTS" in first.out, "the pipe is empty for the next command"
    whole = load_trace(out).table()
    remove_shards(out)
    set_stdin(monkeypatch, "")
    assert cli("collect", "--config", out / "run.yaml", "--resume").code == 0
    assert load_trace(out).table() == whole
    remove_shards(out)
    set_stdin(monkeypatch, "w1\nw2\nw3\n")
    assert "prompts" in refused("collect", "--config", out / "run.yaml", "--resume", "--limit", 3), "another selection"
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "several processes" in refused(*command, "--prompts", "-", "--out", tmp_path / "other")


def test_each_process_collects_its_shards_and_info_checks_that_all_exist(collect, done, tmp_path, monkeypatch):
    out = tmp_path / "out"
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert "process 1 of 2 has ended; 2 of 4 shards exist" in cli(*collect, *SHARDS, "--out", out).out
    assert "(0, 2)" in refused("info", out, "--check")
    assert "--overwrite: expected one process" in refused(*collect, "--out", out, "--overwrite")
    monkeypatch.setenv("RANK", "0")
    assert collected(*collect, *SHARDS, "--out", out).table() == done.table()
    assert cli("info", out, "--check").code == 0


def test_ctrl_c_keeps_completed_shards_and_states_how_to_continue(collect, done, tmp_path, monkeypatch):
    out = tmp_path / "out"
    during(monkeypatch, shards, "write_shard", 1)
    answer = cli(*collect, *SHARDS, "--out", out)
    assert (answer.code, answer.out, answer.err.count("\n")) == (130, "", 1) and "--resume" in answer.err
    monkeypatch.undo()
    assert yaml.safe_load((out / "run.yaml").read_text())["command"] == "collect"
    assert cli("collect", "--config", out / "run.yaml", "--resume").code == 0
    assert load_trace(out).table() == done.table()


# Decoding

PROMPTS = ["w7 w8 w9 w7", "w20 w33 w9"]


@pytest.fixture(scope="module")
def models(pair_folder):
    return model_options(pair_folder, "--dtype", "float64", "--max-new-tokens", "14")


def decoded(models: list[str], *options: object, prompts: list[str] = PROMPTS) -> dict[str, Any]:
    return dict(parsed("decode", *prompts, *models, *options))


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_is_named_with_its_label_and_the_seed_decides(models, mode):
    label = "lossless" if MODES[mode].lossless else "LOSSY"
    options = ["--verification", mode, *(["--tree", "3,2"] if mode != "block" else []), "--temperature", 0.7]
    first, second = (decoded(models, *options) for _ in range(2))
    assert first["verification"] == f"{mode} ({label})" and first["texts"] == second["texts"]


def test_structured_output(tmp_path):
    pytest.importorskip("llguidance")
    pair = byte_pair()
    for name, model in (("target", pair.target), ("draft", pair.draft_model)):
        model.save_pretrained(tmp_path / name)
        pair.tokenizer.save_pretrained(tmp_path / name)  # type: ignore[union-attr]
    (tmp_path / "person.json").write_text(json.dumps(PERSON))
    (tmp_path / "list.ebnf").write_text('root ::= "[" [a-c]{2,4} "]"')
    (tmp_path / "p.txt").write_text("the name\na tag\n")
    models = model_options(tmp_path, "--dtype", "float64")
    schema, grammar = (f"json_schema={tmp_path / 'person.json'}", f"grammar={tmp_path / 'list.ebnf'}")
    command = ["decode", *models, "the name", "a tag", "--sampling", schema, "--json", "--max-new-tokens"]
    result = json.loads(cli(*command, 90, "--temperature", 0.7).out)
    assert all(map(is_person, result["texts"])) and result["incomplete"] == 0
    answer = cli(*command, 5)
    assert json.loads(answer.out)["incomplete"] == 2 and "--max-new-tokens" in answer.err
    command = ["collect", *models, "--prompts", tmp_path / "p.txt", "--max-new-tokens", 20, "--depth", 3, "--quiet"]
    assert cli(*command, "--sampling", grammar, "--out", tmp_path / "t").code == 0
    assert "grammar" in parsed("info", tmp_path / "t")["filter"]
    assert "grammar" in refused("decode", *models, "a", "--sampling", f"grammar={tmp_path / 'p.txt'}")


@pytest.mark.parametrize(
    ("text", "is_terminal", "is_read"),
    [("w7 w8\nw9\n", False, True), ("w7", True, False), ("", False, False), (" \n", False, False)],
)
def test_standard_input(models, monkeypatch, text, is_terminal, is_read):
    stream = io.TextIOWrapper(io.BytesIO(text.encode()))
    stream.isatty = lambda: is_terminal  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdin", stream)
    if is_read:
        assert parsed("decode", *models)["texts"] == decoded(models, prompts=["w7 w8\nw9"])["texts"]
    else:
        assert "standard input" in refused("decode", *models)


# Policies that fail


MODULE = """
from specstop.policies import StopPolicy

class Raiser(StopPolicy):
    name, features, max_depth = "raiser", ("top1",), 4

    def __init__(self, method="keep"):
        self.method = method

    def act(self, method):
        if method == self.method:
            raise ValueError("boom")

    def keep(self, step, state):
        self.act("keep")
        return step.alive, state

    def observe(self, outcome, state):
        self.act("observe")
"""
LINE = next(at for at, line in enumerate(MODULE.splitlines(), 1) if "boom" in line)


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The file of an installed plugin."""
    info = tmp_path / "site" / "raiser-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: raiser\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[specstop.policies]\nraiser = raiser_plugin:Raiser\n")
    (tmp_path / "site" / "raiser_plugin.py").write_text(MODULE)
    (tmp_path / "p.txt").write_text("w7 w8\nw9 w20 w8\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    importlib.invalidate_caches()
    yield str(tmp_path / "site" / "raiser_plugin.py")
    sys.modules.pop("raiser_plugin", None)


@pytest.mark.parametrize("method", ["keep", "observe"])
def test_a_failing_policy_is_reported_with_its_file_and_line(models, tmp_path, module, method):
    policies = ["--policy", f"raiser?method={method}", "--policy", "fixed:2"]
    bench = ["bench", *models, *policies, "--prompts", tmp_path / "p.txt", "--no-library", "--quiet"]
    answer = cli(*bench, "--json")
    plain, failed, fixed = json.loads(answer.out)["lines"]
    assert answer.code == 2 and f"{module}:{LINE}" in answer.err
    assert (failed["failed"], failed["file"], failed["line"], failed["ratio"]) == (True, module, LINE, None)
    assert not plain["failed"] and not fixed["failed"] and fixed["ratio"] > 0
    decode = ["decode", "w7 w8", *models, *policies[:2]]
    answer = cli(*decode, "--json")
    result = json.loads(answer.out)
    assert (answer.code, result["failed"], result["line"]) == (0, True, LINE)
    assert result["texts"] == decoded(models, "--policy", "fixed:0", prompts=["w7 w8"])["texts"]
    assert "FAILED" in cli(*bench).out and "FAILED" in cli(*decode).out


@pytest.mark.usefixtures("few_draws")
def test_evaluate_leaves_out_a_policy_that_fails(traces, profile, tmp_path, module):
    profile.with_decisions({"raiser": 1e-5, "confidence": 1e-5}).save(tmp_path / "profile.json")
    command = ["evaluate", "--traces", traces[0.7].folder, "--profile", tmp_path / "profile.json",
               "--policy", "raiser", "--policy", "confidence:0.7", "--out"]  # fmt: skip
    answer = cli(*command, tmp_path / "report", "--json")
    report = json.loads(answer.out)
    assert answer.code == 2 and f"{module}:{LINE}" in answer.err
    assert (report["failed"][0]["file"], report["failed"][0]["line"]) == (module, LINE)
    names = [entry["name"] for entry in report["lines"]]
    assert "confidence:0.7" in names and not any("raiser" in name for name in names)
    assert "raiser" in refused(*command, tmp_path / "other", "--primary", "raiser", "--quiet")
    assert not (tmp_path / "other").exists()
