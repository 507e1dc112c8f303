"""A policy that fails has no speed: commands name the place of the error, and those that measure exit with an error."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import cli, model_options
from specstop.collect.store import Trace
from specstop.decode.models.pair import Pair
from specstop.decode.run import decode
from specstop.decode.settings import Settings
from specstop.policies.profile import Profile
from specstop.policies.registry import load_policy

MODULE = """
import numpy as np
from specstop.policies import StopPolicy

class Raiser(StopPolicy):
    name, features, max_depth = "raiser", ("top1",), 4

    def __init__(self, method="keep", after=0):
        self.method, self.left = method, after

    def act(self, method):
        if method == self.method:
            self.left -= 1
            if self.left < 0:
                raise ValueError("boom")  # here

    def start(self, streams, keys):
        self.act("start")

    def keep(self, step, state):  # keep
        self.act("keep")
        if self.method == "shape":
            return np.zeros((9, 9), dtype=bool), state
        if self.method == "numbers":
            return np.full(step.alive.shape, np.nan), state
        if self.method == "print":
            print("noise")
        return step.alive, state

    def select(self, tree, state):
        self.act("select")

    def observe(self, outcome, state):
        self.act("observe")
"""
METHODS = ("start", "keep", "select", "observe", "shape", "numbers")


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The module of an installed plugin."""
    site = tmp_path / "site"
    info = site / "raiser-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: raiser\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[specstop.policies]\nraiser = raiser_plugin:Raiser\n")
    (site / "raiser_plugin.py").write_text(MODULE)
    monkeypatch.syspath_prepend(site)
    importlib.invalidate_caches()
    yield site / "raiser_plugin.py"
    sys.modules.pop("raiser_plugin", None)


def line_of(method: str) -> int:
    """Return the line at which the policy fails."""
    mark = "# keep" if method in ("shape", "numbers") else "# here"
    return next(at for at, line in enumerate(MODULE.splitlines(), 1) if line.endswith(mark))


def check(told: dict[str, object], module: Path, method: str) -> None:
    assert told["failed"] is True and told["error"]
    assert (told["file"], told["line"]) == (str(module), line_of(method))


def prompts(folder: Path) -> Path:
    (folder / "prompts.jsonl").write_text('{"prompt": "w7 w8"}\n{"prompt": "w9 w20 w8"}\n')
    return folder / "prompts.jsonl"


@pytest.mark.parametrize("method", METHODS)
def test_bench_and_decode_tell_it(pair_folder: Path, tmp_path: Path, module: Path, method: str) -> None:
    pair = model_options(pair_folder, "--dtype", "float64", "--max-new-tokens", "12")
    policies = ["--policy", f"raiser?method={method}", "--policy", "fixed:2"]
    bench = ["bench", *pair, *policies, "--prompts", prompts(tmp_path), "--no-library", "--quiet"]
    answer = cli(*bench, "--json")
    plain, failed, fixed = json.loads(answer.out)["lines"]
    assert answer.code == 2 and f"{module}:{line_of(method)}" in answer.err
    check(failed, module, method)
    assert failed["ratio"] is None and failed["tokens_per_s"] is None
    assert not plain["failed"] and not fixed["failed"] and fixed["ratio"] > 0
    answer = cli("decode", "w7 w8", *pair, *policies[:2], "--json")
    told = json.loads(answer.out)
    check(told, module, method)
    without = json.loads(cli("decode", "w7 w8", *pair, "--policy", "fixed:0", "--json").out)
    assert told["texts"] == without["texts"] and without["failed"] is False
    if method == "keep":
        answer = cli(*bench)
        assert answer.code == 2 and "raiser?method=keep FAILED" in answer.out
        assert "FAILED" in cli("decode", "w7 w8", *pair, *policies[:2]).out


@pytest.mark.usefixtures("few_draws")
@pytest.mark.parametrize("method", ["keep", "observe"])
def test_evaluate_leaves_it_out_and_tells_it(
    traces: dict[float, Trace], profile: Profile, tmp_path: Path, module: Path, method: str
) -> None:
    profile.with_decisions({"raiser": 1e-5, "confidence": 1e-5}).save(tmp_path / "profile.json")
    costs = ["--traces", traces[0.7].folder, "--profile", tmp_path / "profile.json"]
    policies = ["--policy", f"raiser?method={method}", "--policy", "confidence:0.7"]
    answer = cli("evaluate", *costs, *policies, "--out", tmp_path / "report", "--json")
    report = json.loads(answer.out)
    assert answer.code == 2 and f"{module}:{line_of(method)}" in answer.err
    check(report["failed"][0], module, method)
    names = [line["name"] for line in report["lines"]]
    assert "confidence:0.7" in names and not any("raiser" in name for name in names)
    assert json.loads((tmp_path / "report/report.json").read_text())["failed"] == report["failed"]
    assert "raiser" in (tmp_path / "report/report.md").read_text()
    answer = cli("evaluate", *costs, *policies, "--out", tmp_path / "other", "--primary", f"raiser?method={method}")
    assert answer.code == 2 and not (tmp_path / "other").exists()


@pytest.mark.usefixtures("module")
def test_no_trace_and_no_price_is_recorded_under_its_name(pair_folder: Path, tmp_path: Path) -> None:
    pair = model_options(pair_folder, "--dtype", "float64")
    common = ["--prompts", prompts(tmp_path), "--depth", 4, "--quiet"]
    live = ["--collector", "live", "--policy", "raiser?after=5", "--max-new-tokens", 12]
    answer = cli("collect", *pair, *common, *live, "--out", tmp_path / "live")
    assert answer.code == 2 and "raiser failed" in answer.err and "Traceback" not in answer.err
    answer = cli("profile", *pair, *common, "--policy", "raiser", "--repeats", 1, "--out", tmp_path / "profile.json")
    assert answer.code == 2 and "raiser failed" in answer.err and not (tmp_path / "profile.json").exists()


def test_a_text_knows_that_the_policy_failed(pair: Pair, module: Path) -> None:
    policy = load_policy("raiser?after=20")
    with pytest.warns(UserWarning, match=f"raiser failed .*{module.name}:{line_of('keep')}"):
        texts = decode(pair, ["w7 w8", "w9 w20 w8", "w7"], policy, settings=Settings(0.0, 16, 4))
    failures = [text.failure for text in texts]
    assert failures[0] is None and failures[-1] is not None
    assert (failures[-1].policy, failures[-1].file, failures[-1].line) == ("raiser", str(module), line_of("keep"))


@pytest.mark.usefixtures("module")
def test_what_a_policy_prints_leaves_the_results_readable(pair_folder: Path, tmp_path: Path) -> None:
    pair = model_options(pair_folder, "--dtype", "float64", "--max-new-tokens", "6")
    for command in (["decode", "w7 w8"], ["bench", "--no-library", "--prompts", prompts(tmp_path)]):
        answer = cli(*command, *pair, "--policy", "raiser?method=print", "--json")
        assert answer.code == 0 and "noise" in answer.err and json.loads(answer.out)
