"""The command line from prompts to a report, on the tiny pair; `specstop demo`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import specstop.train.demo as demo_module
import yaml
from commands import COMPACT, ascii_locale, cli, files, model_options, parsed, refused, write_prompts
from conftest import NEW, make_prompts
from specstop.collect.store import load_trace, shard_path
from specstop.decode.models.pair import Pair
from specstop.decode.plain import plain_texts
from specstop.decode.profile.measuring import Effort
from specstop.decode.verify.noise import stream_key
from specstop.policies.files import MANIFEST
from specstop.policies.profile import Profile
from specstop.policies.storage import load_policy_folder
from specstop.train.demo import Sizes

DEPTH = 4
POLICIES = ("fixed:0", "fixed:3", "policy")


@pytest.fixture(scope="module")
def models(pair_folder: Path) -> list[str]:
    return model_options(pair_folder, *COMPACT)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    for side, count, seed in (("fit", 36, 21), ("held", 10, 22)):
        write_prompts(folder / f"{side}.jsonl", make_prompts(count, side, seed))
    return folder


@pytest.fixture(scope="module")
def done(home: Path, models: list[str], few_draws: None) -> dict[str, Any]:
    """Run every command once; return the lines of JSON."""
    sampled = [*models, "--temperature", "0.7", "--depth", DEPTH, "--verification", "match", "--quiet"]
    for side in ("fit", "held"):
        collect = ["collect", "--out", home / side, "--prompts", home / f"{side}.jsonl", "--max-new-tokens", NEW]
        answer = cli(*collect, *sampled)
        assert (answer.code, answer.err) == (0, "")
    profile = ["profile", "--out", home / "profile.json", "--prompts", home / "fit.jsonl", "--policy", "confidence:0.4"]
    answer = cli(*profile, *sampled, "--repeats", 1)
    assert answer.code == 0
    out = {"profile": parsed("info", home / "profile.json")}
    warning = f"warning: {out['profile']['verdict']}\n" if out["profile"]["machine"] == "busy" else ""
    assert answer.err == warning, "silent, but for the warning that this machine deserves"
    Profile.load(home / "profile.json").with_decisions({"logistic": 5e-5}).save(home / "costs.json")
    costs = ["--profile", home / "costs.json"]
    out["train"] = parsed("train", "--traces", home / "fit", *costs, "--out", home / "policy")
    out["evaluate"] = parsed("evaluate", "--traces", home / "held", *costs, "--out", home / "report", "--train-traces",
                             home / "fit", "--policy", home / "policy", "--policy", "fixed:2")  # fmt: skip
    for name in POLICIES:
        policy = home / "policy" if name == "policy" else name
        out[name] = parsed("decode", "--prompts", home / "held.jsonl", "--policy", policy, *models,
                           "--verification", "match", "--temperature", "0.7", "--max-new-tokens", NEW)  # fmt: skip
    return out


def test_artefacts_are_described(done: dict[str, Any], home: Path) -> None:
    trace, facts = load_trace(home / "fit"), parsed("info", home / "fit")
    assert (facts["prompts"], facts["depth"], facts["temperature"]) == (36, DEPTH, 0.7)
    assert (facts["positions"], facts["shards"]) == (len(trace.rows), "2 of 2")
    assert facts["verification"] == "match (lossless)"
    profile = Profile.load(home / "profile.json")
    assert (profile.max_depth, set(profile.decision_s)) == (DEPTH, {"confidence"})
    assert done["profile"]["kind"] == "profile" and (home / "profile.json.run.yaml").is_file()
    policy, facts = load_policy_folder(home / "policy"), parsed("info", home / "policy")
    assert policy.metadata.metrics == done["train"]
    assert [facts[key] for key in ("kind", "name", "head", "rule")] == ["policy", "logistic", "logistic", "derived"]
    assert facts["accept_auc"] == done["train"]["accept_auc"]


def test_evaluate_answers_its_report(done: dict[str, Any], home: Path) -> None:
    report = done["evaluate"]
    written = json.loads((home / "report" / "report.json").read_text())
    assert report == {name: value for name, value in written.items() if name not in ("run", "prompt_texts")}
    names = [line["name"] for line in report["lines"]]
    assert names[:2] == ["plain decoding", "best fixed"]
    assert {"logistic", "fixed:2", "confidence, tuned"} <= set(names)
    reports = {f"report.{kind}" for kind in ("csv", "html", "json", "md")}
    assert {path.name for path in (home / "report").iterdir()} == {*reports, "run.yaml", MANIFEST}


def test_decode_gives_the_targets_text_whatever_the_policy(done: dict[str, Any], pair: Pair) -> None:
    assert pair.tokenizer is not None
    prompts = make_prompts(10, "held", 22)
    ids = [pair.tokenizer(p.text)["input_ids"] for p in prompts]
    plain = plain_texts(pair, ids, [stream_key(0, p.id) for p in prompts], NEW, 0.7).tokens
    texts = [pair.tokenizer.decode(t, skip_special_tokens=True) for t in plain]
    for policy in POLICIES:
        assert done[policy]["texts"] == texts
        assert done[policy]["tokens"] == sum(map(len, plain))
    assert done["fixed:0"]["drafted"] == 0 < done["fixed:3"]["drafted"]
    assert done["fixed:0"]["acceptance"] == []
    assert [row[0] for row in done["fixed:3"]["acceptance"]] == [1, 2, 3]


def test_tables_are_for_people(done: dict[str, Any], home: Path, models: list[str]) -> None:
    evaluate = ("evaluate", "--traces", home / "held", "--profile", home / "costs.json")
    for args, words in (
        (("policies", "--wide"), ("fixed", "confidence", "built in")),
        (("policies", "--drafters"), ("lookup", "suffix")),
        (("info", home / "fit"), ("P(A >= depth)", "36", "match (lossless)")),
        (("info", home / "policy"), ("logistic", "derived")),
        (("info", home / "profile.json"), ("draft step, ms",)),
        (("decode", "w7 w8 w9", *models, "--max-new-tokens", 8), ("w7 w8 w9", "tokens/s", "lossless")),
        ((*evaluate, "--wide"), ("plain decoding", "oracle bound", "P(A >= k)", "Hugging Face default")),
    ):  # fmt: skip
        answer = cli(*args)
        assert answer.code == 0, answer.err
        assert all(word in answer.out for word in words), args
    listed = parsed("policies")
    assert {row["name"] for row in listed} >= {"fixed", "confidence"} and all(row["loads"] for row in listed)


def test_a_saved_configuration_gives_the_same_result(done: dict[str, Any], home: Path, tmp_path: Path) -> None:
    saved = yaml.safe_load((home / "held" / "run.yaml").read_text())
    assert (saved["command"], saved["depth"], saved["temperature"]) == ("collect", DEPTH, 0.7)
    for command, name in (("collect", "held"), ("train", "policy"), ("evaluate", "report")):
        answer = cli(command, "--config", home / name / "run.yaml", "--out", tmp_path / name, "--quiet")
        assert answer.code == 0, answer.err
    assert load_trace(home / "held").table().equals(load_trace(tmp_path / "held").table())
    again = yaml.safe_load((tmp_path / "held" / "run.yaml").read_text())
    assert {**saved, "out": ""} == {**again, "out": ""}
    first, second = files(home / "policy"), files(tmp_path / "policy")
    del first["run.yaml"], second["run.yaml"]
    assert first == second
    reports = [json.loads((folder / "report" / "report.json").read_text()) for folder in (home, tmp_path)]
    assert all(report.pop("run")["command"].startswith("specstop evaluate --") for report in reports)
    assert reports[0] == reports[1]


def test_the_command_line_takes_precedence_over_a_file(home: Path, models: list[str], tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"depth": 2, "max-new-tokens": 5, "limit": 2, "seed": 9}))
    answer = cli("collect", "--config", tmp_path / "run.yaml", "--limit", 1, "--prompts", home / "held.jsonl", *models,
                 "--out", tmp_path / "t")  # fmt: skip
    assert answer.code == 0, answer.err
    header = load_trace(tmp_path / "t").header
    assert (header.depth, header.prompts, header.seed, header.max_new_tokens) == (2, 1, 9, 5)


def test_resume_after_a_lost_shard_gives_the_same_rows(
    done: dict[str, Any], home: Path, models: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "t"
    options = ["--prompts", home / "fit.jsonl", *models, "--temperature", "0.7", "--depth", 3, "--max-new-tokens", 8]
    assert cli("collect", *options, "--out", out).code == 0
    whole = load_trace(out).table()
    shard_path(out, 1, 2).unlink()
    assert "not complete" in refused("evaluate", "--traces", out, "--profile", home / "costs.json")
    assert cli("collect", *options, "--out", out, "--resume").code == 0
    assert load_trace(out).table().equals(whole)


EACH = """
import json
import sys
from specstop.cli.main import run
for words in json.loads(sys.argv[1]):
    sys.argv = ["specstop", *words]
    try:
        run()
    except SystemExit as end:
        assert not end.code, end.code
"""


def test_a_process_collects_and_decodes_in_silence_in_any_locale(
    done: dict[str, Any], home: Path, models: list[str], tmp_path: Path
) -> None:
    """No file has the encoding of an ASCII locale: what is read and written is UTF-8 there too."""
    (tmp_path / "p.jsonl").write_text('{"prompt": "w7 w8", "id": "é", "group": "größe"}', encoding="utf-8")
    collect = ["collect", "--out", tmp_path / "t", "--prompts", tmp_path / "p.jsonl", *models, "--max-new-tokens", 5,
               "--depth", 2, "--quiet"]  # fmt: skip
    options = [*models, "--max-new-tokens", 9, "--temperature", 0.7, "--verification", "match"]
    decode = ["decode", "w7 w8 w9", "--policy", home / "policy", *options, "--json"]
    commands = [[str(word) for word in words] for words in (collect, ["info", tmp_path / "t", "--json"], decode)]
    call = [sys.executable, "-c", EACH, json.dumps(commands)]
    run = subprocess.run(call, capture_output=True, text=True, check=False, env=ascii_locale())
    assert (run.returncode, run.stderr) == (0, "")
    facts, texts = map(json.loads, run.stdout.splitlines()[-2:])
    assert facts["groups"] == "1: größe" and load_trace(tmp_path / "t").rows["group"][0] == "größe"
    assert texts["texts"] == parsed("decode", "w7 w8 w9", *options)["texts"]


# The demo

EFFORT = Effort(repetitions=1)


@pytest.fixture
def small(pair_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few_draws: None) -> Path:
    """Return the folder of a random pair with prompts, on which `--quick` takes seconds."""
    shutil.copytree(pair_folder, tmp_path / "pair")
    for side, seed in (("train", 21), ("test", 22)):
        write_prompts(tmp_path / "pair" / f"prompts-{side}.jsonl", make_prompts(20, side, seed))
    sizes = Sizes(
        train=10, test=4, live=2, tokens=12, depth=3, heads=("logistic",), effort=EFFORT, decision_effort=EFFORT
    )
    monkeypatch.setattr(demo_module, "QUICK", sizes)
    monkeypatch.setattr(demo_module, "REFERENCE_TOKEN_S", 1.0)  # any machine is fast enough
    monkeypatch.chdir(tmp_path)
    return tmp_path / "pair"


def test_the_demo_prints_stages_a_table_a_verdict_and_the_next_commands(small: Path) -> None:
    answer = cli("demo", "--quick", "--pair", small)
    assert answer.code == 0, answer.err
    for stage in ("collect:", "profile:", "train:", "evaluate:", "decode:"):
        assert sum(line.startswith(stage) for line in answer.out.splitlines()) == 1
    for word in ("plain decoding", "best fixed", "logistic", "oracle bound", "specstop-demo/report/report.html"):
        assert word in answer.out
    assert all(f"specstop {command} --" in answer.out for command in ("collect", "profile", "train"))
    assert Path("specstop-demo/report/report.html").is_file()
