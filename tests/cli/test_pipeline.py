"""The command line from prompts to a report, on the tiny pair."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import COMPACT, cli, files, model_options, parsed, write_prompts
from conftest import NEW, make_prompts
from specstop.collect.store import load_trace
from specstop.decode.models.pair import Pair
from specstop.decode.plain import plain_texts
from specstop.decode.verify.noise import stream_key
from specstop.policies.profile import Profile

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
    assert answer.err == warning, "only the warning of a noisy machine"
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


def test_decode_gives_the_texts_of_the_target_with_every_policy(done: dict[str, Any], pair: Pair) -> None:
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
