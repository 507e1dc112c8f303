"""The arithmetic of the harness of `benchmarks/`; `smoke.py` runs the scripts."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def script(name: str) -> ModuleType:
    """Return a script, such as `tools/ab`, as the module `benchmark_<name>`."""
    alias = f"benchmark_{Path(name).name}"
    if alias not in sys.modules:
        if str(BENCHMARKS) not in sys.path:
            sys.path.append(str(BENCHMARKS))  # for `harness`
        spec = importlib.util.spec_from_file_location(alias, BENCHMARKS / f"{name}.py")
        assert spec is not None and spec.loader is not None
        sys.modules[alias] = importlib.util.module_from_spec(spec)  # dataclasses look up their module
        spec.loader.exec_module(sys.modules[alias])
    return sys.modules[alias]


positive = st.floats(0.1, 10.0)


@pytest.mark.parametrize(
    ("limits", "smoke", "always", "met"),
    [
        ({"at_least": 1.0}, False, False, True),
        ({"at_least": 1.3}, False, False, False),
        ({"at_most": 1.1}, False, False, False),
        ({"above": 1.0}, False, False, False),
        ({"above": 0.9}, False, False, True),
        ({"at_least": 1.3}, True, False, None),
        ({"at_least": 1.3}, True, True, False),
    ],
)
def test_a_bar_decides_on_value_or_interval_and_in_a_smoke_run_only_on_correctness(limits, smoke, always, met, capsys):
    harness = script("harness")

    def part(run: object) -> None:
        run.bar("ratio", harness.Ratio(1.2, 0.95, 1.4), always=always, **limits)

    run = harness.Run("", [part], argv=["--check", *(["--smoke"] if smoke else [])])
    assert run.execute() == (met is False)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["bars"]["ratio"]["met"] is met


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(positive, min_size=3, max_size=20), positive)
def test_a_constant_ratio_of_sums_has_an_interval_without_width(values, factor):
    ratio = script("harness").ratio_of_sums([factor * value for value in values], values)
    assert np.allclose([ratio.value, ratio.low, ratio.high], factor)


def test_values_of_one_cluster_are_resampled_together():
    generator = np.random.default_rng(0)
    values = np.repeat(generator.uniform(1.0, 3.0, 20), 10)
    harness, ones = script("harness"), np.ones(200)
    alone, clustered = (harness.ratio_of_sums(values, ones, labels) for labels in (None, np.arange(200) // 10))
    assert alone.value == clustered.value
    assert 2.5 < (clustered.high - clustered.low) / (alone.high - alone.low) < 4.0  # the root of 10
