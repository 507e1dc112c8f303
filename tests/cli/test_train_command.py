"""`specstop train`, `deploy` and `train-drafter`: policies and drafters, and the commands that read them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import cli, files, parsed, write_prompts
from conftest import make_prompts
from specstop.collect.store import Trace
from specstop.policies.files import MANIFEST
from specstop.policies.learned import LearnedPolicy
from specstop.policies.profile import Profile
from specstop.policies.storage import load_policy_folder, save_policy

pytestmark = pytest.mark.usefixtures("few_draws")


@pytest.fixture
def home(
    sides: tuple[Trace, Trace], full_profile: Profile, learned: LearnedPolicy, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:  # fmt: skip
    """A folder with `traces`, `others`, `policy` and `profile.json`."""
    full_profile.save(tmp_path / "profile.json")
    (tmp_path / "traces").symlink_to(sides[0].folder)
    (tmp_path / "others").symlink_to(sides[1].folder)
    save_policy(learned, tmp_path / "policy")
    monkeypatch.chdir(tmp_path)
    return tmp_path


TRAIN = ("train", "--traces", "traces", "--profile", "profile.json", "--out")


def test_the_folder_of_a_policy_and_the_warning_of_a_slow_one(home: Path) -> None:
    answer = cli(*TRAIN, "p", "--rule", "survival", "--threshold", 0.99, "--param", "C=0.5", "--quiet")
    assert answer.code == 0 and "slower than the best fixed length" in answer.err
    assert "held_out_ratio_to_best_fixed" in answer.out and "accept_auc" not in answer.out
    assert load_policy_folder(home / "p").rule.kind == "survival"
    assert set(files(home / "p")) == {"policy.json", "weights.safetensors", "README.md", "run.yaml", MANIFEST}


def test_a_search_lists_its_trials(home: Path) -> None:
    answer = cli(*TRAIN, "p", "--tune", 2, "--head", "logistic", "--rule", "step,survival", "--quiet")
    assert answer.code == 0, answer.err
    trials = answer.out[answer.out.index("\nTrials") :].splitlines()
    assert [sum(rule in line for line in trials) for rule in ("step", "survival")] == [1, 1]


# Other runtimes


@pytest.mark.parametrize("target", ["hf", "onnx", "vllm", "sglang", "trtllm", "llama.cpp"])
def test_an_export_lists_what_is_lost(target: str, home: Path) -> None:
    if target == "onnx":
        pytest.importorskip("onnx")
    portable = target in ("hf", "onnx")
    source = () if portable else ("--traces", "traces", "--profile", "profile.json")
    policy = ("--policy", "policy") if portable or target in ("sglang", "llama.cpp") else ()
    answer = cli("deploy", "--to", target, *source, *policy, "--out", "out", "--quiet")
    assert answer.code == 0, answer.err
    out = home / "out"
    assert out.is_file() or "## What is lost" in (out / "README.md").read_text()
    assert (out / "run.yaml").exists() != portable


def test_an_export_prints_its_figures_and_is_reproduced_from_its_run_file(home: Path) -> None:
    export = ("deploy", "--to", "vllm", "--traces", "traces", "--profile", "profile.json", "--held-out", "others")
    answer = cli(*export, "--out", "v", "--json")
    assert answer.code == 0, answer.err
    assert json.loads(answer.out) == json.loads((home / "v" / "figures.json").read_text())
    assert cli("deploy", "--config", "v/run.yaml", "--out", "w", "--quiet").code == 0
    before, after = files(home / "v"), files(home / "w")
    del before["run.yaml"], after["run.yaml"]
    assert before == after


# Drafters


def test_a_drafter_is_trained_and_used_by_every_command(home: Path, pair_folder: Path) -> None:
    for side, count, seed in (("train", 16, 21), ("test", 6, 22)):
        write_prompts(home / f"{side}.jsonl", make_prompts(count, side, seed))

    def succeed(command: str, *options: object) -> str:
        answer = cli(command, *options, "--quiet")
        assert answer.code == 0, answer.err
        return answer.out

    target, few = ("--target", pair_folder / "target"), ("--max-new-tokens", 12)
    fit = ("--prompts", "train.jsonl", "--depth", 3, "--epochs", 2, "--out", "medusa", "--checkpoints", "work")
    out = succeed("train-drafter", "--kind", "medusa", *target, *few, *fit)
    assert f"Next: specstop decode PROMPT --target {pair_folder / 'target'} --drafter medusa:medusa" in out
    facts = parsed("info", "medusa")
    assert (facts["kind"], facts["network"], facts["depth"], len(facts["target"])) == ("drafter", "medusa", 3, 16)
    assert all(0.0 <= facts[f"acceptance, depth {depth}"] <= 1.0 for depth in (1, 2, 3)) and facts["hash"]
    spec = (*target, "--drafter", "medusa:medusa")
    texts = parsed("decode", "w7 w8 w9", *few, *spec)
    assert texts["texts"] == parsed("decode", "w7 w8 w9", *target, *few, "--drafter", "suffix")["texts"]
    assert texts["drafted"] > 0
    bench = (
        "bench",
        *few,
        *spec,
        "--prompts",
        "test.jsonl",
        "--policy",
        "fixed:2",
        "--tree",
        "2,2",
        "--temperature",
        0.7,
    )
    lines = json.loads(cli(*bench, "--json").out)["lines"]
    assert [line["same_text"] for line in lines][:2] == [6, 6], "match"
    assert not any("assist" in line["name"] for line in lines)
    for side in ("train", "test"):
        succeed("collect", *few, *spec, "--prompts", f"{side}.jsonl", "--out", f"traces-{side}", "--depth", 3)
    measured = ("--prompts", "train.jsonl", "--depth", 3, "--repeats", 1, "--policy", "confidence:0.4")
    succeed("profile", *spec, *measured, "--out", "costs.json")
    succeed("train", "--traces", "traces-train", "--profile", "costs.json", "--out", "learned")
    succeed("evaluate", "--traces", "traces-test", "--policy", "learned", "--profile", "costs.json")
    assert parsed("decode", "w7 w8 w9", *few, *spec, "--policy", "learned")["texts"] == texts["texts"]
