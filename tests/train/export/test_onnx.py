"""Learned heads as ONNX models, where onnx and onnxruntime are installed; else what the user is told."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from commands import cli
from head_tensors import HIGH, LOW, NAMES, Array, features
from learned_policies import learned
from specstop.policies.errors import PolicyError
from specstop.policies.heads import build_head
from specstop.policies.learned import Calibrator, LearnedPolicy
from specstop.policies.storage import save_policy
from specstop.train.export import onnx_model
from specstop.train.export.onnx_model import OUTPUTS, TOLERANCE, build_onnx, export_onnx


def with_head(policy: LearnedPolicy, tensors: dict[str, Array]) -> LearnedPolicy:
    head = build_head(policy.head.kind, NAMES, tensors)
    return LearnedPolicy("mine", NAMES, head, policy.accept, policy.next, policy.rule, 4, policy.metadata)


@pytest.mark.parametrize("ranged", [False, True], ids=["any number", "ranges"])
@pytest.mark.parametrize("kind", ["logistic", "mlp", "xgboost"])
def test_onnxruntime_answers_as_the_policy_does(kind: str, ranged: bool) -> None:
    pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    policy = learned(kind)
    if ranged:
        policy = with_head(policy, policy.head.tensors() | {"low": LOW, "high": HIGH})
    session = runtime.InferenceSession(build_onnx(policy).SerializeToString(), providers=["CPUExecutionProvider"])
    x = features(300)
    x[:3, 1] = [0.0, 1.0, 0.5]
    if kind == "xgboost":
        x[50:90, 2] = np.nan
    found = session.run(list(OUTPUTS), {"features": x})
    expected = [*policy.probabilities(x, 1), policy.probabilities(x, 0)[1]]
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=TOLERANCE)
    facts = json.loads({p.key: p.value for p in build_onnx(policy).metadata_props}["specstop"])
    assert facts["features"] == list(NAMES) and facts["rule"] == policy.rule.to_dict()


def test_the_command_writes_what_it_has_checked(tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    folder = save_policy(learned("mlp"), tmp_path / "p")
    answer = cli("deploy", "--policy", folder, "--to", "onnx", "--out", tmp_path / "m.onnx", "--json")
    assert answer.code == 0, answer.err
    assert json.loads(answer.out)["difference"] <= TOLERANCE
    assert (tmp_path / "m.onnx").stat().st_size == json.loads(answer.out)["bytes"]
    assert cli("deploy", "--policy", folder, "--out", tmp_path / "m.onnx").code == 2


def test_a_model_that_answers_otherwise_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    policy = learned()
    other = LearnedPolicy("mine", NAMES, policy.head, Calibrator("temperature", 3.0), policy.next, policy.rule, 4)
    monkeypatch.setattr(onnx_model, "build_onnx", lambda policy: build_onnx(other))
    with pytest.raises(PolicyError, match="nothing was written"):
        export_onnx(policy, tmp_path / "m.onnx")
    assert list(tmp_path.iterdir()) == []


def test_without_onnx_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    folder = save_policy(learned(), tmp_path / "p")
    answer = cli("deploy", "--policy", folder, "--out", tmp_path / "m.onnx")
    assert answer.code == 2
    assert 'pip install "specstop[onnx]"' in answer.err
    assert not (tmp_path / "m.onnx").exists()
