"""`specstop train`: tables, several traces, a work folder, a search, and one line for what cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import cli, files
from specstop.collect.store.folder import Trace
from specstop.policies.files import MANIFEST
from specstop.policies.profile import Profile
from specstop.policies.storage import load_policy_folder


@pytest.fixture(scope="module")
def start(sides: tuple[Trace, Trace], full_profile: Profile, tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    path = tmp_path_factory.mktemp("costs") / "profile.json"
    full_profile.save(path)
    return ["train", "--traces", sides[0].folder, "--profile", path, "--quiet"]


def test_the_tables_say_how_it_did(start: list[object], tmp_path: Path) -> None:
    options = ["--rule", "survival", "--threshold", 0.45, "--param", "C=0.5"]
    short = cli(*start, "--out", tmp_path / "short", *options, "--no-cross-fit")
    assert "held_out_ratio_to_best_fixed" in short.out and "accept_auc" not in short.out
    assert "Survival by depth" not in short.out and "(--verbose)" in short.out
    answer = cli(*start, "--out", tmp_path / "p", *options, "--verbose")
    assert answer.code == 0, answer.err
    assert "held_out_ratio_to_best_fixed" in answer.out and "accept_auc" in answer.out
    lines = answer.out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("Survival by depth"))
    heading = next(line for line in lines[at:] if "ece perfect" in line)
    assert all(word in heading for word in ("temperature", "depth", "rounds", "predicted", "observed", "brier", "auc"))
    assert sum(line.lstrip("│ ").startswith("0.7") for line in lines[at:]) >= 3
    policy = load_policy_folder(tmp_path / "p")
    assert policy.rule.kind == "survival"
    assert "## Reliability" in (tmp_path / "p" / "README.md").read_text()
    assert set(files(tmp_path / "p")) == {"policy.json", "weights.safetensors", "README.md", "run.yaml", MANIFEST}


def test_the_same_configuration_gives_the_same_policy(start: list[object], tmp_path: Path) -> None:
    first = cli(*start, "--out", tmp_path / "p", "--rule", "step", "--threshold", 0.99, "--no-cross-fit")
    assert first.code == 0, first.err
    again = cli("train", "--config", tmp_path / "p" / "run.yaml", "--out", tmp_path / "q", "--json")
    assert again.code == 0, again.err
    assert files(tmp_path / "p")["weights.safetensors"] == files(tmp_path / "q")["weights.safetensors"]
    metrics = json.loads(again.out)
    assert metrics["survival_maps"]
    assert metrics["held_out_ratio_to_best_fixed"] < 1.0
    assert "slower than the best fixed length" in first.out + first.err


def test_a_network_with_a_work_folder_can_be_resumed(start: list[object], tmp_path: Path) -> None:
    options = ["--head", "mlp", "--no-cross-fit", "--rule", "step", "--threshold", 0.5, "--epochs", 2, "--batch-size", 64,
               "--checkpoints", tmp_path / "work", "--param", "width=8"]  # fmt: skip
    first = cli(*start, "--out", tmp_path / "p", *options)
    assert first.code == 0, first.err
    work = set(files(tmp_path / "work"))
    assert {"pass-0/fold-0/last.ckpt", "pass-0/fold-0/logs/version_0/metrics.csv"} <= work
    refused = cli(*start, "--out", tmp_path / "q", *options)
    assert refused.code == 2
    assert "pass --resume" in refused.err
    assert cli(*start, "--out", tmp_path / "q", *options, "--resume").code == 0
    assert files(tmp_path / "p")["weights.safetensors"] == files(tmp_path / "q")["weights.safetensors"]


def test_a_search_ends_with_its_trials(start: list[object], tmp_path: Path) -> None:
    answer = cli(*start, "--out", tmp_path / "p", "--tune", 1, "--tune-folds", 2, "--head", "logistic", "--rule", "step",
                 "--policy", "confidence?threshold=0.2|0.6")  # fmt: skip
    assert answer.code == 0, answer.err
    lines = answer.out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("Trials"))
    assert sum("confidence" in line for line in lines[at:]) == 1
    assert sum("logistic" in line for line in lines[at:]) == 1
    assert load_policy_folder(tmp_path / "p").rule.kind == "step"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--resume"], "--resume: give the work folder"),
        (["--policy", "fixed:4"], "--policy: policies are compared with --tune N"),
        (["--tune", 2, "--threshold", 0.4], "--tune: leave out --threshold"),
        (["--tune", 2, "--passes", 3], "--tune: leave out --threshold"),
        (["--tune", 2, "--no-cross-fit"], "--tune: leave out --threshold"),
        (["--tune", 0], "--tune: expected"),
        (["--param", "C"], "--param: expected key=value, not 'C'"),
        (["--param", "widht=8"], "--param: unknown hyper-parameter 'widht' (did you mean 'width'?)"),
        (["--param", "C=0"], "--param C: expected"),
        (["--head", "mlp", "--param", "width=1e9"], "--param width: expected"),
        (["--head", "mlp", "--param", "layers=1000000"], "--param layers: expected"),
        (["--head", "mlp", "--param", "learning_rate=1e30"], "--param learning_rate: expected"),
        (["--head", "mlp", "--param", "weight_decay=nan"], "--param weight_decay: expected"),
        (["--head", "xgboost", "--param", "trees=100000000000"], "--param trees: expected"),
        (["--head", "xgboost", "--param", "max_depth=64"], "--param max_depth: expected"),
        (["--head", "xgboost", "--param", "eta=warm"], "--param eta: expected"),
        (
            ["--head", "mlp", "--epochs", 1, "--learning-rate", 10, "--param", "layers=32"],
            "--learning-rate: training diverged",
        ),
        (["--epochs", 0], "--epochs: expected"),
        (["--folds", 1], "--folds: expected"),
        (["--passes", 0], "--passes: expected"),
        (["--rule", "never"], "--rule: expected derived"),
        (["--head", "mlp", "--logger", "cvs", "--checkpoints", "work"], "did you mean 'csv'?"),
        (["--head", "mlp", "--logger", "csv"], "give a work folder with --checkpoints"),
        (["--head", "mlp", "--accelerator", "gpuu"], "--accelerator, --devices, --precision"),
        (["--head", "xgboost", "--device", "warp"], "--device warp: XGBoost cannot use it here"),
    ],
)
def test_what_cannot_be_is_one_line_and_leaves_nothing(
    start: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[object], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = cli(*start, "--out", tmp_path / "p", *options)
    assert answer.code == 2
    assert message in answer.err
    assert answer.err.startswith("specstop: ") and answer.err.count("\n") == 1
    assert not (tmp_path / "p").exists()
