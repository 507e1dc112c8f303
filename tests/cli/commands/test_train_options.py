"""`specstop train`: tables, several traces, a work folder, a search, and one line for what cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import cli, files
from specstop.collect.store import Trace
from specstop.policies.files import MANIFEST
from specstop.policies.profile import Profile
from specstop.policies.storage import load_policy_folder


@pytest.fixture(scope="module")
def start(sides: tuple[Trace, Trace], full_profile: Profile, tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    path = tmp_path_factory.mktemp("costs") / "profile.json"
    full_profile.save(path)
    return ["train", "--traces", sides[0].folder, "--profile", path, "--quiet"]


def test_the_table_says_how_it_did(start: list[object], tmp_path: Path) -> None:
    answer = cli(*start, "--out", tmp_path / "p", "--rule", "survival", "--threshold", 0.45, "--param", "C=0.5")
    assert answer.code == 0, answer.err
    assert "held_out_ratio_to_best_fixed" in answer.out and "accept_auc" not in answer.out
    assert load_policy_folder(tmp_path / "p").rule.kind == "survival"
    readme = (tmp_path / "p" / "README.md").read_text()
    assert "accept_auc" in readme
    assert set(files(tmp_path / "p")) == {"policy.json", "weights.safetensors", "README.md", "run.yaml", MANIFEST}


def test_the_same_configuration_gives_the_same_policy(start: list[object], tmp_path: Path) -> None:
    first = cli(*start, "--out", tmp_path / "p", "--rule", "step", "--threshold", 0.99)
    assert first.code == 0, first.err
    again = cli("train", "--config", tmp_path / "p" / "run.yaml", "--out", tmp_path / "q", "--json")
    assert again.code == 0, again.err
    assert files(tmp_path / "p")["weights.safetensors"] == files(tmp_path / "q")["weights.safetensors"]
    metrics = json.loads(again.out)
    assert metrics["accept_calibration"]
    assert metrics["held_out_ratio_to_best_fixed"] < 1.0
    assert "slower than the best fixed length" in first.out + first.err


def test_a_search_ends_with_its_trials(start: list[object], tmp_path: Path) -> None:
    answer = cli(*start, "--out", tmp_path / "p", "--tune", 2, "--head", "logistic", "--rule", "step,survival")  # fmt: skip
    assert answer.code == 0, answer.err
    lines = answer.out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("Trials"))
    assert sum("logistic" in line for line in lines[at:]) == 2
    assert load_policy_folder(tmp_path / "p").rule.kind in ("step", "survival")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--storage", "trials.log"], "--tune"),
        (["--head", "mlp,logistic"], "--tune"),
        (["--tune", 2, "--threshold", 0.4], "--tune: leave out --threshold"),
        (["--tune", 2, "--storage", "tests.txt"], "--storage: tests.txt is not a journal of optuna"),
        (["--tune", 0], "--tune: expected"),
        (["--param", "C"], "--param: expected key=value with each key once, not 'C'"),
        (["--head", "mlp", "--param", "widht=8"], "--param: unknown hyper-parameter 'widht' (did you mean 'width'?)"),
        (["--param", "C=0"], "--param C: expected"),
        (["--head", "mlp", "--param", "width=1e9"], "--param width: expected"),
        (["--head", "mlp", "--param", "layers=1000000"], "--param layers: expected"),
        (["--head", "mlp", "--param", "learning_rate=1e30"], "--param learning_rate: expected"),
        (["--head", "mlp", "--param", "weight_decay=nan"], "--param weight_decay: expected"),
        (["--head", "xgboost", "--param", "trees=100000000000"], "--param trees: expected"),
        (["--head", "xgboost", "--param", "max_depth=64"], "--param max_depth: expected"),
        (["--head", "xgboost", "--param", "eta=warm"], "--param eta: expected"),
        (
            ["--head", "mlp", "--param", "epochs=1", "--param", "learning_rate=10", "--param", "layers=32"],
            "--param learning_rate: training diverged",
        ),
        (["--head", "mlp", "--param", "epochs=0"], "--param epochs: expected"),
        (["--nodes", "4,x"], "--nodes: expected numbers such as"),
        (["--rule", "never"], "--rule: expected derived"),
        (["--head", "mlp", "--trainer", "accelerator=gpuu"], "--trainer: "),
        (["--head", "logistic", "--trainer", "accelerator=gpu"], "--trainer: the head logistic is not a network"),
        (["--head", "xgboost", "--param", "device=warp"], "--param device warp: XGBoost cannot use it here"),
    ],
)
def test_what_cannot_be_is_one_line_and_leaves_nothing(
    start: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[object], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tests.txt").write_text("not a journal\n")
    answer = cli(*start, "--out", tmp_path / "p", *options)
    assert answer.code == 2
    assert message in answer.err
    assert answer.err.startswith("specstop: ") and answer.err.count("\n") == 1
    assert not (tmp_path / "p").exists()
