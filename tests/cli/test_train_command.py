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


def test_the_table_and_the_folder_of_a_policy(home: Path) -> None:
    answer = cli(*TRAIN, "p", "--rule", "survival", "--threshold", 0.45, "--param", "C=0.5", "--quiet")
    assert answer.code == 0, answer.err
    assert "held_out_ratio_to_best_fixed" in answer.out and "accept_auc" not in answer.out
    assert load_policy_folder(home / "p").rule.kind == "survival"
    assert "accept_auc" in (home / "p" / "README.md").read_text()
    assert set(files(home / "p")) == {"policy.json", "weights.safetensors", "README.md", "run.yaml", MANIFEST}


def test_a_policy_slower_than_the_best_fixed_length_has_a_warning(home: Path) -> None:
    answer = cli(*TRAIN, "p", "--rule", "step", "--threshold", 0.99, "--quiet")
    assert answer.code == 0 and "slower than the best fixed length" in answer.err


def test_a_search_lists_its_trials(home: Path) -> None:
    answer = cli(*TRAIN, "p", "--tune", 2, "--head", "logistic", "--rule", "step,survival", "--quiet")
    assert answer.code == 0, answer.err
    lines = answer.out.splitlines()
    trials = lines[next(at for at, line in enumerate(lines) if line.startswith("Trials")) :]
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
    target = ("--target", pair_folder / "target")
    few = ("--max-new-tokens", 12)
    fit = ("--depth", 3, "--epochs", 2, "--out", "medusa", "--checkpoints", "work", "--quiet")
    answer = cli("train-drafter", "--kind", "medusa", *target, *few, "--prompts", "train.jsonl", *fit)
    assert answer.code == 0, answer.err
    assert f"Next: specstop decode PROMPT --target {pair_folder / 'target'} --drafter medusa:medusa" in answer.out
    assert (home / "medusa" / "run.yaml").exists()
    facts = parsed("info", "medusa")
    assert (facts["kind"], facts["network"], facts["depth"], len(facts["target"])) == ("drafter", "medusa", 3, 16)
    assert all(0.0 <= facts[f"acceptance, depth {depth}"] <= 1.0 for depth in (1, 2, 3)) and facts["hash"]
    spec = ("--drafter", "medusa:medusa")
    texts = parsed("decode", "w7 w8 w9", *target, *few, *spec)
    assert texts["texts"] == parsed("decode", "w7 w8 w9", *target, *few, "--drafter", "suffix")["texts"]
    assert texts["drafted"] > 0
    bench = ("bench", *target, *few, *spec, "--prompts", "test.jsonl", "--policy", "fixed:2", "--json")
    answer = cli(*bench, "--tree", "2,2", "--temperature", 0.7)
    assert answer.code == 0, answer.err
    lines = json.loads(answer.out)["lines"]
    assert [line["same_text"] for line in lines][:2] == [6, 6], "match"
    assert not any("assist" in line["name"] for line in lines)
    for side in ("train", "test"):
        prompts = ("--prompts", f"{side}.jsonl", "--out", f"traces-{side}", "--depth", 3, "--quiet")
        answer = cli("collect", *target, *few, *spec, *prompts)
        assert answer.code == 0, answer.err
    measured = ("--prompts", "train.jsonl", "--depth", 3, "--repeats", 1, "--out", "costs.json", "--quiet")
    assert cli("profile", *target, *spec, *measured, "--policy", "confidence:0.4").code == 0
    answer = cli("train", "--traces", "traces-train", "--profile", "costs.json", "--out", "learned", "--quiet")
    assert answer.code == 0, answer.err
    answer = cli("evaluate", "--traces", "traces-test", "--policy", "learned", "--profile", "costs.json", "--quiet")
    assert answer.code == 0, answer.err
    assert parsed("decode", "w7 w8 w9", *target, *few, *spec, "--policy", "learned")["texts"] == texts["texts"]
