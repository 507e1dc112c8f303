"""`specstop import`: a released file becomes a policy folder that every other command takes, or one line says why not."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import cli, model_options
from specstop.collect.run import collect
from specstop.collect.store import Trace
from specstop.decode.models.pair import Pair
from specstop.policies.profile import Profile
from torch import nn


class DecisionModel(nn.Module):
    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, 1), nn.Sigmoid())


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    torch.save(DecisionModel(11, 44).state_dict(), tmp_path / "hard.pt")
    return tmp_path / "hard.pt"


def test_a_released_model_is_imported_shown_and_listed(weights: Path, tmp_path: Path) -> None:
    answer = cli("import", weights, "--out", tmp_path / "p", "--threshold", "0.55", "--json")
    assert answer.code == 0, answer.err
    facts = json.loads(answer.out)
    assert (facts["layout"], facts["weights"]) == ("dynasd-hard", 11 * 44 + 44 + 44 + 1 + 1)
    shown = json.loads(cli("info", tmp_path / "p", "--json").out)
    assert (shown["name"], shown["head"], shown["rule"], shown["max depth"]) == ("dynasd-hard", "dynasd-hard", "any", 5)
    assert shown["features"].startswith("entropy, top1, top2")
    again = cli("import", "--config", tmp_path / "p" / "run.yaml", "--out", tmp_path / "q", weights)
    assert again.code == 0, again.err
    assert json.loads((tmp_path / "q" / "policy.json").read_text())["rule"] == {"kind": "any", "threshold": 0.55}


def test_an_imported_policy_is_evaluated_and_decodes(
    weights: Path, tmp_path: Path, pair_folder: Path, traces: dict[float, Trace], profile: Profile
) -> None:
    assert cli("import", weights, "--out", tmp_path / "p").code == 0
    (tmp_path / "profile.json").write_text(json.dumps(profile.to_dict()))
    options: list[Any] = [
        "--traces",
        traces[0.7].folder,
        "--profile",
        tmp_path / "profile.json",
        "--policy",
        tmp_path / "p",
    ]
    report = cli("evaluate", *options, "--out", tmp_path / "r", "--json")
    assert report.code == 0, report.err
    assert "dynasd-hard" in report.out
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "w6 w7 w8"}\n')
    models = model_options(pair_folder, "--prompts", str(tmp_path / "prompts.jsonl"))
    plain, mine = (
        json.loads(cli("decode", *models, "--policy", policy, "--max-new-tokens", "9", "--json").out)
        for policy in ("fixed:0", tmp_path / "p")
    )
    assert plain["texts"] == mine["texts"]


def test_a_soft_model_of_another_size_is_refused_by_name(
    tmp_path: Path, pair: Pair, pair_folder: Path, profile: Profile
) -> None:
    torch.save(DecisionModel(768, 4).state_dict(), tmp_path / "soft.pt")
    assert cli("import", tmp_path / "soft.pt", "--out", tmp_path / "p").code == 0
    assert "draft_hidden (768 numbers)" in cli("info", tmp_path / "p", "--json").out
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "w6 w7 w8"}\n{"prompt": "w9"}\n')
    models = model_options(pair_folder, "--prompts", str(tmp_path / "prompts.jsonl"))
    answer = cli("decode", *models, "--policy", tmp_path / "p", "--max-new-tokens", "9")
    assert answer.code == 2 and "draft_hidden of 768 numbers" in answer.err
    from specstop.collect.prompts import read_prompts

    trace = collect(
        pair,
        read_prompts(tmp_path / "prompts.jsonl"),
        tmp_path / "t",
        depth=5,
        max_new_tokens=8,
        hidden=["draft_hidden"],
    )
    (tmp_path / "profile.json").write_text(json.dumps(profile.to_dict()))
    answer = cli(
        "evaluate", "--traces", trace.folder, "--profile", tmp_path / "profile.json", "--policy", tmp_path / "p", "--out",
        tmp_path / "r",
    )  # fmt: skip
    assert answer.code == 2 and "of 768 numbers" in answer.err, answer.err


class Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def test_a_crafted_pickle_is_one_line_and_does_nothing(tmp_path: Path) -> None:
    torch.save({"layers.0.weight": Evil(tmp_path / "mark")}, tmp_path / "w.pt")
    answer = cli("import", tmp_path / "w.pt", "--out", tmp_path / "p")
    assert answer.code == 2
    assert answer.err.count("\n") == 1 and "holds more than tensors" in answer.err
    assert not (tmp_path / "mark").exists() and not (tmp_path / "p").exists()
