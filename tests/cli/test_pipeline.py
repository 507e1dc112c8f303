"""The command line from prompts to a report, on the tiny pair."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import COMMANDS, COMPACT, Answer, ascii_locale, cli, files, model_options
from conftest import NEW, make_prompts
from specstop.collect.store.folder import open_trace, shard_path
from specstop.decode.models.pair import Pair
from specstop.decode.plain import plain_texts
from specstop.decode.verify.noise import stream_key
from specstop.policies.profile import Profile
from specstop.policies.storage import load_policy_folder

SCRIPT = Path(sys.executable).with_name("specstop")
DEPTH = 4


def parsed(answer: Answer) -> Any:
    assert answer.code == 0, answer.err
    assert answer.err == ""
    assert answer.out.count("\n") == 1
    return json.loads(answer.out)


def write_prompts(path: Path, count: int, side: str, seed: int) -> Path:
    lines = [{"id": p.id, "prompt": p.text, "group": side} for p in make_prompts(count, side, seed)]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    write_prompts(folder / "fit.jsonl", 36, "fit", 21)
    write_prompts(folder / "held.jsonl", 10, "held", 22)
    return folder


@pytest.fixture(scope="module")
def models(pair_folder: Path) -> list[str]:
    return model_options(pair_folder, *COMPACT)


@pytest.fixture(scope="module")
def done(home: Path, models: list[str], few_draws: None) -> dict[str, Any]:
    """Run every command once; return their JSON answers."""
    sampled = [*models, "--temperature", "0.7", "--depth", str(DEPTH), "--verification", "match"]
    out: dict[str, Any] = {}
    for side in ("fit", "held"):
        answer = cli("collect", "--out", home / side, "--prompts", home / f"{side}.jsonl", *sampled,
                     "--max-new-tokens", NEW, "--quiet")  # fmt: skip
        assert (answer.code, answer.err) == (0, "")
    answer = cli("profile", "--out", home / "profile.json", "--prompts", home / "fit.jsonl", *sampled,
                 "--policy", "confidence:0.4", "--repeats", 1, "--quiet")  # fmt: skip
    assert answer.code == 0
    out["profile"] = parsed(cli("info", home / "profile.json", "--json"))
    warned = f"warning: {out['profile']['verdict']}\n" if out["profile"]["machine"] == "busy" else ""
    assert answer.err == warned, "silent, but for the warning that this machine deserves"
    costs = Profile.load(home / "profile.json").with_decisions({"logistic": 5e-5})
    costs.save(home / "costs.json")
    out["train"] = parsed(
        cli(
            "train",
            "--traces",
            home / "fit",
            "--profile",
            home / "costs.json",
            "--out",
            home / "policy",
            "--json",
        )
    )
    out["evaluate"] = parsed(
        cli("evaluate", "--traces", home / "held", "--profile", home / "costs.json", "--out", home / "report",
            "--train-traces", home / "fit", "--policy", home / "policy", "--policy", "fixed:2", "--json")
    )  # fmt: skip
    for policy in ("fixed:0", "fixed:3", home / "policy"):
        out[f"decode {policy}"] = parsed(
            cli("decode", "--prompts", home / "held.jsonl", "--policy", policy, *models,
                "--verification", "match", "--temperature", "0.7", "--max-new-tokens", NEW, "--json")
        )  # fmt: skip
    for name in ("fit", "policy", "profile.json"):
        out[f"info {name}"] = parsed(cli("info", home / name, "--json"))
    out["policies"] = parsed(cli("policies", "--json"))
    return out


def test_collect_describes_what_it_wrote(done: dict[str, Any], home: Path) -> None:
    trace = open_trace(home / "fit")
    facts = done["info fit"]
    assert (facts["prompts"], facts["depth"], facts["temperature"]) == (36, DEPTH, 0.7)
    assert facts["positions"] == len(trace.rows)
    assert facts["shards"] == "2 of 2"
    assert facts["verification"] == "match (lossless)"


def test_profile_and_its_description(done: dict[str, Any], home: Path) -> None:
    profile = Profile.load(home / "profile.json")
    assert profile.max_depth == DEPTH
    assert set(profile.decision_s) == {"confidence"}
    assert done["profile"]["kind"] == "profile"
    assert (home / "profile.json.run.yaml").is_file()


def test_train_answers_its_metrics(done: dict[str, Any], home: Path) -> None:
    policy = load_policy_folder(home / "policy")
    assert policy.metadata.metrics == done["train"]
    info = done["info policy"]
    assert (info["kind"], info["name"], info["head"], info["rule"]) == (
        "policy",
        "logistic",
        "logistic",
        "derived",
    )
    assert info["accept_auc"] == done["train"]["accept_auc"]


def test_evaluate_answers_its_report(done: dict[str, Any], home: Path) -> None:
    report = done["evaluate"]
    written = json.loads((home / "report" / "report.json").read_text())
    assert report == {name: value for name, value in written.items() if name not in ("run", "prompt_texts")}
    assert set(written["prompt_texts"]) == {prompt["prompt"] for prompt in report["details"]["prompts"]}
    names = [line["name"] for line in report["lines"]]
    assert names[:2] == ["plain decoding", "best fixed"]
    assert {"logistic", "fixed:2", "confidence, tuned"} <= set(names)
    assert {p.name for p in (home / "report").iterdir()} == {
        "report.csv",
        "report.html",
        "report.json",
        "report.md",
        "run.yaml",
        ".specstop.json",
    }


def test_decode_gives_the_targets_text_whatever_the_policy(done: dict[str, Any], home: Path, pair: Pair) -> None:
    prompts = make_prompts(10, "held", 22)
    ids = [pair.tokenizer(p.text)["input_ids"] for p in prompts]
    keys = [stream_key(0, p.id) for p in prompts]
    plain = plain_texts(pair, ids, keys, NEW, 0.7).tokens
    texts = [pair.tokenizer.decode(t, skip_special_tokens=True) for t in plain]
    answers = [done[f"decode {policy}"] for policy in ("fixed:0", "fixed:3", home / "policy")]
    for answer in answers:
        assert answer["texts"] == texts
        assert answer["tokens"] == sum(map(len, plain))
    assert answers[0]["drafted"] == 0 < answers[1]["drafted"]
    assert answers[0]["acceptance"] == []
    assert [row[0] for row in answers[1]["acceptance"]] == [1, 2, 3]


def test_policies_lists_the_built_in_ones(done: dict[str, Any]) -> None:
    assert {row["name"] for row in done["policies"]} >= {"fixed", "confidence"}
    assert all(set(row) == {"name", "where", "module", "what", "loads", "problem"} for row in done["policies"])
    assert all(row["loads"] and row["module"].startswith("specstop.") for row in done["policies"])


def test_tables_are_for_people(done: dict[str, Any], home: Path, models: list[str]) -> None:
    for args, words in (
        (("policies", "--wide"), ("fixed", "confidence", "built in")),
        (("info", home / "fit"), ("acceptance", "36", "match (lossless)")),
        (("info", home / "policy"), ("logistic", "derived")),
        (("info", home / "profile.json"), ("draft step, ms",)),
        (("decode", "w7 w8 w9", *models, "--max-new-tokens", 8), ("w7 w8 w9", "tokens/s", "lossless")),
        (("evaluate", "--traces", home / "held", "--profile", home / "costs.json", "--out", home / "table", "--wide"),
         ("plain decoding", "oracle bound", "P(A >= k)", "Hugging Face default")),
    ):  # fmt: skip
        answer = cli(*args)
        assert answer.code == 0, answer.err
        for word in words:
            assert word in answer.out


def test_quiet_keeps_standard_error_empty_and_without_it_progress_goes_there(
    home: Path, done: dict[str, Any], models: list[str], tmp_path: Path
) -> None:
    options = ["--prompts", home / "held.jsonl", *models, "--depth", 2, "--max-new-tokens", 4]
    assert cli("collect", "--out", tmp_path / "a", *options, "--quiet").err == ""
    assert cli("collect", "--out", tmp_path / "b", *options).err.startswith("collect: 10 of 10")


def test_one_prompt_file_of_another_limit(home: Path, done: dict[str, Any], models: list[str], tmp_path: Path) -> None:
    answer = cli("collect", "--out", tmp_path / "a", "--prompts", home / "fit.jsonl", *models, "--limit", 3,
                 "--max-new-tokens", 6, "--depth", 2)  # fmt: skip
    assert answer.code == 0, answer.err
    header = open_trace(tmp_path / "a").header
    assert (header.prompts, header.depth) == (3, 2)


# The same again


def test_a_saved_configuration_collects_the_same_rows(home: Path, done: dict[str, Any], tmp_path: Path) -> None:
    config = home / "held" / "run.yaml"
    saved = yaml.safe_load(config.read_text())
    assert (saved["command"], saved["depth"], saved["temperature"]) == ("collect", DEPTH, 0.7)
    assert cli("collect", "--config", config, "--out", tmp_path / "again", "--quiet").code == 0
    first, second = (open_trace(f).rows.data.table for f in (home / "held", tmp_path / "again"))
    assert first.equals(second)
    again = yaml.safe_load((tmp_path / "again" / "run.yaml").read_text())
    assert {**saved, "out": "", "quiet": True} == {**again, "out": ""}


def test_a_saved_configuration_trains_the_same_policy(home: Path, done: dict[str, Any], tmp_path: Path) -> None:
    answer = cli("train", "--config", home / "policy" / "run.yaml", "--out", tmp_path / "again")
    assert answer.code == 0, answer.err
    first, second = files(home / "policy"), files(tmp_path / "again")
    del first["run.yaml"], second["run.yaml"]
    assert first == second


def test_a_saved_configuration_writes_the_same_report(home: Path, done: dict[str, Any], tmp_path: Path) -> None:
    answer = cli("evaluate", "--config", home / "report" / "run.yaml", "--out", tmp_path / "again")
    assert answer.code == 0, answer.err
    reports = []
    for written in (files(home / "report"), files(tmp_path / "again")):
        data = json.loads(written["report.json"])
        assert data.pop("run")["command"].startswith("specstop evaluate --")
        lines = written["report.md"].decode().splitlines()
        text = [line for line in lines if not line.startswith(("- Date: ", "- Command: "))]
        assert len(text) == len(lines) - 2
        reports.append((data, text, written["report.csv"]))
    assert reports[0] == reports[1]


def test_the_command_line_takes_precedence_over_a_file(
    home: Path, done: dict[str, Any], models: list[str], tmp_path: Path
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump({"depth": 2, "max-new-tokens": 5, "limit": 2, "seed": 9, "quiet": True}))
    answer = cli("collect", "--config", config, "--limit", 1, "--prompts", home / "held.jsonl", "--out", tmp_path / "t",
                 *models)  # fmt: skip
    assert answer.code == 0, answer.err
    header = open_trace(tmp_path / "t").header
    assert (header.depth, header.prompts, header.seed, header.max_new_tokens) == (2, 1, 9, 5)


def test_resume_after_a_lost_shard_gives_the_same_rows(
    home: Path, done: dict[str, Any], models: list[str], tmp_path: Path
) -> None:
    options = ["--prompts", home / "fit.jsonl", *models, "--temperature", "0.7", "--depth", 3, "--max-new-tokens", 8,
               "--out", tmp_path / "t"]  # fmt: skip
    assert cli("collect", *options).code == 0
    whole = open_trace(tmp_path / "t").rows.data.table.to_pylist()
    shard_path(tmp_path / "t", 1, 2).unlink()
    assert len(open_trace(tmp_path / "t").rows) < len(whole)
    refused = cli("evaluate", "--traces", tmp_path / "t", "--profile", home / "costs.json", "--out", tmp_path / "r")
    assert (refused.code, "not complete" in refused.err) == (2, True)
    answer = cli("collect", *options, "--resume")
    assert answer.code == 0, answer.err
    assert open_trace(tmp_path / "t").rows.data.table.to_pylist() == whole


# The installed script


def script(*args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(SCRIPT), *map(str, args)], capture_output=True, text=True, check=False)


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


def test_a_process_of_its_own_collects_decodes_and_trains_an_mlp_in_silence(
    home: Path, done: dict[str, Any], models: list[str], tmp_path: Path
) -> None:
    """In an ASCII locale, whose encoding no file has: what is read and written is UTF-8 there too."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "w7 w8", "id": "é", "group": "größe"}', encoding="utf-8")
    collect = ["collect", "--out", tmp_path / "t", "--prompts", tmp_path / "prompts.jsonl", *models,
               "--max-new-tokens", 5, "--depth", 2, "--quiet"]  # fmt: skip
    same = [*models, "--max-new-tokens", 9, "--temperature", 0.7, "--verification", "match", "--json"]
    decode = ["decode", "w7 w8 w9", "--policy", home / "policy", *same]
    train = ["train", "--traces", home / "fit", "--profile", home / "costs.json", "--out", tmp_path / "p",
             "--head", "mlp", "--epochs", 2, "--folds", 2, "--json"]  # fmt: skip
    info = ["info", tmp_path / "t", "--json"]
    lines = json.dumps([[str(word) for word in words] for words in (collect, info, decode, train)])
    command = [sys.executable, "-c", EACH, lines]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=ascii_locale())
    assert (run.returncode, run.stderr) == (0, "")
    collected, decoded, trained = map(json.loads, run.stdout.splitlines()[-3:])
    assert collected["groups"] == "1: größe" and open_trace(tmp_path / "t").rows["group"][0] == "größe"
    assert decoded["texts"] == parsed(cli("decode", "w7 w8 w9", *same))["texts"]
    assert trained["rows"] > 100
    assert load_policy_folder(tmp_path / "p").head.kind == "mlp"


def test_the_installed_script_says_what_is_wrong_in_one_line(tmp_path: Path) -> None:
    run = script("info", tmp_path / "nowhere")
    assert run.returncode == 2
    assert run.stdout == ""
    assert run.stderr.startswith(
        "specstop: expected the folder of a trace, a policy, a drafter or a model, or a profile"
    )
    assert run.stderr.count("\n") == 1


HELP = f"""
import sys
from specstop.cli.main import run
for command in [[], *([name] for name in {COMMANDS!r})]:
    sys.argv = ["specstop", *command, "--help"]
    try:
        run()
    except SystemExit as end:
        assert not end.code, (command, end.code)
heavy = {{"torch", "transformers", "lightning", "datasets", "xgboost", "sklearn", "matplotlib"}} & set(sys.modules)
assert not heavy, heavy
"""


def test_help_of_every_command_answers_without_heavy_imports() -> None:
    run = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    for command in COMMANDS:
        assert f"specstop {command}" in run.stdout
