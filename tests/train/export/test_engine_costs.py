"""Costs in the formats of engines: a fixture by hand, what a reader of each format computes from it, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from specstop.collect.engines.records import import_records
from specstop.decode.engines import vllm_plugin
from specstop.policies.errors import InputError, TraceError
from specstop.policies.profile_table import profile_from_table
from specstop.train.export.deploy import deploy
from specstop.train.export.engines import CostCurves, cost_curves, sglang_costs, trtllm_costs, vllm_costs

TABLE = """part,requests,tokens,context,ms
target,1,1,,10
target,1,4,,10
target,4,4,,11
target,4,16,,17
draft,1,,,1
draft,4,,,1.5
first draft,1,,,2
first draft,4,,,3
outside,,,,0.5
"""
LENGTH = 3


@pytest.fixture(scope="module")
def curves(tmp_path_factory: pytest.TempPathFactory) -> CostCurves:
    path = tmp_path_factory.mktemp("table") / "calls.csv"
    path.write_text(TABLE)
    return cost_curves(profile_from_table(path, depth=LENGTH), (1, 4), 100.0, LENGTH)


def test_curves_are_the_costs_of_the_profile(curves: CostCurves) -> None:
    assert dict(curves.drafts) == pytest.approx({1: 2 + 2 * 1, 4: 3 + 2 * 1.5})
    calls = {1: 10.5, 2: 10.5, 3: 10.5, 4: (10.5 + 11.5) / 2, 8: 13.5, 12: 15.5, 16: 17.5}
    assert dict(curves.calls) == pytest.approx(calls)


def test_sglang_adds_up_the_time_of_a_step(curves: CostCurves) -> None:
    """The invariants and the sum of `SpsAdditiveCostTable` (SGLang 0.5.23)."""
    table = json.loads(json.dumps(sglang_costs(curves)))
    assert set(table) == {"bias_seconds", "bs_probes", "alpha_seconds", "m_probes", "theta_seconds"}
    for probes, values in (("bs_probes", "alpha_seconds"), ("m_probes", "theta_seconds")):
        assert table[probes] == sorted(set(table[probes])) and len(table[probes]) == len(table[values])
    assert table["bias_seconds"] > 0
    step = table["bias_seconds"] + np.interp(4, table["bs_probes"], table["alpha_seconds"])
    step += np.interp(4 + 12, table["m_probes"], table["theta_seconds"])
    assert step == pytest.approx((3 + 3 + 17.5) * 1e-3)


def test_tensorrt_llm_adds_up_the_time_of_a_step(curves: CostCurves) -> None:
    """The invariants and the sum of `SpsCostTable` (TensorRT-LLM, dspark_planner.py)."""
    table = json.loads(json.dumps(trtllm_costs(curves)))
    assert np.diff(table["token_counts"]).min() > 0 and np.diff(table["batch_sizes"]).min() > 0
    assert min(table["step_time_ms"]) > 0 <= min(table["batch_overhead_ms"]) and table["fixed_overhead_ms"] >= 0
    assert table["_meta"]["lookup"] == "interp"
    step = table["fixed_overhead_ms"] + np.interp(4, table["batch_sizes"], table["batch_overhead_ms"])
    assert step + np.interp(16, table["token_counts"], table["step_time_ms"]) == pytest.approx(3 + 3 + 17.5)


def test_vllm_gets_the_curves_instead_of_measured_ones(curves: CostCurves, tmp_path: Path) -> None:
    path = tmp_path / "cost_curves.json"
    path.write_text(json.dumps(vllm_costs(curves)))
    given: list[Any] = []
    manager = type("Manager", (), {"set_cost_curves": lambda self, draft, verify: given.append((draft, verify))})
    vllm_plugin.set_curves(manager, *vllm_plugin.read_curves(path))
    manager().set_initial_cost_curves([SimpleNamespace()])
    assert given == [(curves.drafts, curves.calls)]


def test_records_of_an_engine_become_its_settings(tmp_path: Path) -> None:
    """Without models: lengths by batch and context from records with drafts of one length, and from a table of calls."""
    accepted = (np.random.default_rng(0).random((30, 40, LENGTH)) < 0.7).cumprod(2).sum(2)
    steps = {f"r{at}": of_text.tolist() for at, of_text in enumerate(accepted)}
    rows = [{"id": name, "num_spec_tokens": LENGTH, "per_step_accepted": counts} for name, counts in steps.items()]
    (tmp_path / "r.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (tmp_path / "calls.csv").write_text(TABLE.replace("target,4,16,,17", "target,4,5,,30\ntarget,4,16,,60"))
    records = import_records(tmp_path / "r.jsonl", tmp_path / "trace")
    costs = profile_from_table(tmp_path / "calls.csv", depth=LENGTH)
    for engine in ("vllm", "sglang", "trtllm"):
        figures = deploy(engine, tmp_path / engine, traces=records, profile=costs)
        assert [row["length"] for row in figures["batches"]] == [LENGTH, 0] and figures["off_from"] == {"0": 4}
        assert figures["batches"][0]["to_plain"]["low"] > 1.0
        assert "do not draft from a batch of 4 on" in (tmp_path / engine / "README.md").read_text()
    table = json.loads((tmp_path / "vllm" / "speculative_config.json").read_text())
    assert table["num_speculative_tokens_per_batch_size"] == [[1, 3, LENGTH], [4, 4, 0]]
    with pytest.raises(TraceError, match="dense traces"):
        deploy("vllm", tmp_path / "with a policy", "fixed:2", traces=records, profile=costs)


GOOD = {"draft_curve": [[1, 2.0], [4, 3.0]], "verify_curve": [[1, 10.0], [8, 12.0]]}


@pytest.mark.parametrize(
    "content",
    [
        "", "[]", "{", json.dumps({"draft_curve": GOOD["draft_curve"]}),
        *(json.dumps({**GOOD, "verify_curve": curve}) for curve in (
            [], 3, [[1]], [[8, 12.0], [1, 10.0]], [[1, 10.0], [1, 11.0]], [[0, 10.0]], [[1, -1.0]], [[1, float("nan")]],
            [["a", 1.0]],
        )),
    ],
)  # fmt: skip
def test_malformed_curves_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "cost_curves.json"
    path.write_text(content)
    with pytest.raises(InputError, match=r"SPECSTOP_VLLM_COSTS.*cost_curves\.json") as caught:
        vllm_plugin.read_curves(path)
    assert "\n" not in str(caught.value)
