"""Coefficients for vLLM's adaptive verification, on a class of the form that vLLM 0.32 and 0.33 have."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest
import torch
from specstop.decode.engines.vllm_plugin import SWITCH, read_coefficients, register, set_coefficients
from specstop.policies.errors import InputError, SpecstopWarning

MODULE = "vllm.v1.worker.gpu.spec_decode.acceptance_estimator"


def estimator() -> type:
    class OnlineAcceptanceEstimator:
        def __init__(self, max_num_reqs: int, num_speculative_steps: int, device: torch.device) -> None:
            self.slope = torch.full((1,), 0.5)
            self.intercepts = torch.full((num_speculative_steps,), -0.2)
            self.features = torch.zeros(max_num_reqs, num_speculative_steps)

    return OnlineAcceptanceEstimator


def test_an_estimator_begins_with_the_coefficients_however_often_it_is_told() -> None:
    kind = estimator()
    for slope in (0.1, 0.9):
        set_coefficients(kind, slope, [0.3, -0.4])
    made = kind(8, 4, device=torch.device("cpu"))
    assert made.slope.tolist() == pytest.approx([0.9])
    assert made.intercepts.tolist() == pytest.approx([0.3, -0.4, -0.4, -0.4])
    assert made.features.shape == (8, 4)


def test_it_reads_the_file_that_is_named_and_else_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "acceptance.json"
    path.write_text(json.dumps({"slope": 0.7, "intercepts": [0.1], "rows": 9}))
    module = ModuleType(MODULE)
    kind = module.OnlineAcceptanceEstimator = estimator()  # type: ignore[attr-defined]
    for name in [".".join(MODULE.split(".")[:n]) for n in range(1, 7)]:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, MODULE, module)
    monkeypatch.delenv(SWITCH, raising=False)
    register()
    assert kind(1, 2, None).slope.tolist() == [0.5]
    monkeypatch.setenv(SWITCH, str(path))
    register()
    assert kind(1, 2, None).intercepts.tolist() == pytest.approx([0.1, 0.1])


def test_a_vllm_without_it_goes_on_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "acceptance.json"
    path.write_text('{"slope": 0.7, "intercepts": [0.1]}')
    monkeypatch.setenv(SWITCH, str(path))
    monkeypatch.setitem(sys.modules, MODULE, None)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        register()
    assert [w.category for w in told] == [SpecstopWarning] and "no adaptive verification" in str(told[0].message)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"slope": 1}', '{"slope": "x", "intercepts": [1]}', '{"slope": 1, "intercepts": []}',
             '{"slope": NaN, "intercepts": [1]}'],
)  # fmt: skip
def test_another_file_is_one_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "acceptance.json"
    path.write_text(text)
    with pytest.raises(InputError, match=SWITCH):
        read_coefficients(path)
