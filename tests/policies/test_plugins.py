"""Policies by name: built-ins, folders, and plugins, including the package of the tutorial."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from commands import Answer, cli
from specstop.policies import registry
from specstop.policies.errors import PolicyError
from specstop.policies.features import PLUGIN_SWITCH
from specstop.policies.registry import BUILTINS, POLICIES, load_policy

ROOT = Path(__file__).parents[2]
EXAMPLE, PAGE = ROOT / "examples" / "patience", ROOT / "docs" / "plugins.md"

MODULE = """
print("noise at import")
import dataclasses
import torch
from specstop.policies.contract import StopPolicy

class Even(StopPolicy):
    def __init__(self, length: int = 2, label: str = "even"):
        if length % 2:
            raise ValueError("odd")
        self.max_depth, self.name = length, label
    def keep(self, step, state):
        return step.alive & (step.depth < self.max_depth), state

class Exits(StopPolicy):
    def __init__(self):
        raise SystemExit(0)

def nothing():
    return 5

@dataclasses.dataclass(frozen=True)
class Frozen(StopPolicy):
    max_depth: int = 4
    def keep(self, step, state):
        return step.alive, state
    def limited(self, depth):
        return dataclasses.replace(self, max_depth=min(self.max_depth, depth))
"""


def declare(monkeypatch: pytest.MonkeyPatch, *more: tuple[str, str], **points: str) -> None:
    """Declare entry points of policies, as (name, value) or by keyword."""
    declared = [EntryPoint(name, value, POLICIES.group) for name, value in (*points.items(), *more)]
    monkeypatch.setattr(registry, "entry_points", lambda group: declared if group == POLICIES.group else [])


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """A module on the path, not imported, with entry points."""
    (tmp_path / "even_plugin.py").write_text(MODULE)
    (tmp_path / "broken_plugin.py").write_text("import a_module_that_does_not_exist")
    monkeypatch.syspath_prepend(tmp_path)
    points = {"even": "Even", "exits": "Exits", "frozen": "Frozen", "nothing": "nothing", "gone": "Gone"}
    declare(monkeypatch, broken="broken_plugin:X", **{name: f"even_plugin:{value}" for name, value in points.items()})
    yield "even_plugin"
    sys.modules.pop("even_plugin", None)


@pytest.mark.parametrize(
    ("spec", "name", "attributes"),
    [
        ("fixed:0", "fixed:0", {"max_depth": 0}), ("fixed", "fixed:4", {"max_depth": 4}),
        ("fixed?length=7", "fixed:7", {"max_depth": 7}),
        ("confidence:0.3?max_depth=6", "confidence:0.3", {"threshold": 0.3, "max_depth": 6}),
        ("heuristic?start=5&up=1", "heuristic:5", {"max_depth": 20}), ("ddd:-0.7?every=1", "ddd:-0.7", {"max_depth": 11}),
        ("eagle:30?top=4&max_depth=6", "eagle:30", {"max_depth": 6}),
        ("bandit:0.5", "bandit:ucb", {"max_depth": 40}),
        ("bandit?kind=thompson&arms=fixed:2,confidence:0.3", "bandit:thompson", {"max_depth": 20}),
    ],
)  # fmt: skip
def test_a_spec_is_its_policy(spec, name, attributes):
    policy = load_policy(spec)
    assert policy.name == name
    assert {name: getattr(policy, name) for name in attributes} == attributes


@pytest.mark.parametrize(
    ("spec", "nouns"),
    [
        ("fixd:4", "unknown policy 'fixd:4'.*'fixed'"), ("", "unknown policy ''"),
        ("x" * 5000, "unknown policy"), ("x" * 5000 + "/y", "does not exist"), ("hub:" + "x" * 5000, "does not exist"),
        ("fixed:four", "number.*four"),
        ("fixed:", "number after the colon"), ("fixed:-1", "length"), ("fixed:2.5", "length"), ("fixed:nan", "length"),
        ("fixed?length=True", "length"), ("confidence:1.5", "between 0 and 1"),
        ("confidence?treshold=0.4", "'treshold'.*threshold, max_depth"),
        ("confidence?threshold=0.4&threshold=0.5", "threshold is given twice"),
        ("confidence?threshold", "key=value"), ("some/where", "folder some/where"), ("./fixed", "folder ./fixed"),
        ("heuristic?up=-1", "up"), ("roc?samples=2.5", "whole number"), ("entropy:-1", "level"), ("adaedl?gamma=0", "gamma"),
        ("product:0", "threshold"), ("online?prior=0", "prior"), ("ddd:1", "threshold"), ("eagle:0", "nodes"),
        ("bandit?kind=best", "kind"), ("bandit?arms=fixed:2,c2t", "c2t:2 trims"), ("bandit?arms=fixd:2", "'fixed'"),
        ("evn", "'even'"), ("even:six", "number after the colon"), ("even?length=3", "odd"), ("even?size=2", "length, label"),
        ("nothing", "StopPolicy"), ("exits", "SystemExit"), ("broken", "a_module_that_does_not_exist"), ("gone", "Gone"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("plugin")
def test_a_wrong_spec_is_refused_in_one_line(spec, nouns):
    with pytest.raises(PolicyError, match=nouns) as error:
        load_policy(spec)
    assert "\n" not in str(error.value)


def test_a_plugin_is_imported_when_it_is_used(plugin):
    assert set(POLICIES.names()) - set(BUILTINS) == {"even", "exits", "frozen", "nothing", "broken", "gone"}
    assert load_policy("fixed:2").max_depth == 2 and plugin not in sys.modules
    policy = load_policy("even?length=6&label=mine")
    assert (policy.max_depth, policy.name) == (6, "mine")
    assert load_policy("even").max_depth == 2 and load_policy("even:4").max_depth == 4, "the first parameter"
    frozen = load_policy("frozen?max_depth=3")
    assert (frozen.max_depth, frozen.shown_name, frozen.limited(2).max_depth) == (3, "frozen?max_depth=3", 2)


@pytest.mark.usefixtures("plugin")
def test_a_name_that_two_policies_have_is_refused_and_no_other(monkeypatch):
    declare(monkeypatch, ("a", "y:Y"), a="x:X", fixed="x:X", entropy="x:X", even="even_plugin:Even")
    for spec, nouns in {
        "a": "'a': .*x:X", "a?b=1": "'a': .*x:X", "fixed": "'fixed': x:X and a built-in", "fixed:4": "'fixed': x:X",
        "bandit?arms=entropy:1": "'entropy': x:X",
    }.items():  # fmt: skip
        with pytest.raises(PolicyError, match=f"^policy: two policies are called {nouns}"):
            load_policy(spec)
    assert set(POLICIES.names()) - set(BUILTINS) == {"even"}
    assert load_policy("even").name == "even" and load_policy("roc").name == "roc:0.4"


# The package of the tutorial


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder into which pip installs the package of the tutorial, without network."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(EXAMPLE, folder / "source")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--no-index"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(folder), str(folder / "source")]
    subprocess.run(command, check=True, capture_output=True)
    return folder


@pytest.fixture
def installed(site, monkeypatch):
    monkeypatch.syspath_prepend(site)
    importlib.invalidate_caches()
    yield site
    sys.modules.pop("specstop_patience", None)


@pytest.fixture(scope="module")
def pair_options(pair_folder):
    return ["--target", pair_folder / "target", "--draft", pair_folder / "draft", "--dtype", "float64"]


def result(answer: Answer) -> Any:
    assert answer.code == 0, answer.err
    return json.loads(answer.out)


def test_the_page_contains_the_package_in_examples():
    blocks = re.findall(r"^`([\w./]+)`: [^`]*?\n\n```\w+\n(.*?)```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert {name for name, _ in blocks} == {"pyproject.toml", "specstop_patience.py", "tests/test_patience.py"}
    for name, text in blocks:
        assert (EXAMPLE / name).read_text() == text


@pytest.mark.usefixtures("installed")
def test_the_package_is_listed_without_an_import_decodes_and_passes_its_tests(pair_options, monkeypatch):
    (row,) = (p for p in POLICIES.listed() if p.name == "patience")
    assert (row.where, row.module, row.problem) == ("specstop-patience 0.1", "specstop_patience", "")
    with pytest.raises(PolicyError, match="chance"):
        load_policy("patience?chances=0")
    command = ["decode", "w7 w8", "w9", *pair_options, "--json", "--max-new-tokens", 20, "--policy"]
    ours, plain = (result(cli(*command, name)) for name in ("patience?chances=1", "fixed:0"))
    assert ours["texts"] == plain["texts"] and ours["drafted"] > 0 == plain["drafted"]
    monkeypatch.syspath_prepend(EXAMPLE / "tests")
    case = importlib.import_module("test_patience").TestPatience()
    for name in (name for name in dir(case) if name.startswith("test_")):
        getattr(case, name)()
    sys.modules.pop("test_patience")


@pytest.mark.usefixtures("installed")
def test_discovery_can_be_turned_off(monkeypatch):
    names = [[p["name"] for p in result(cli(*args, "policies", "--json"))] for args in ([], ["--no-plugins"])]
    assert "patience" in names[0] and names[1] == list(BUILTINS)
    monkeypatch.setenv(PLUGIN_SWITCH, "0")
    assert POLICIES.names() == list(BUILTINS)
    with pytest.raises(PolicyError, match="unknown policy 'patience'"):
        load_policy("patience")


@pytest.mark.usefixtures("plugin")
def test_plugins_that_do_not_load_are_listed_with_the_reason(pair_options, monkeypatch):
    """Output of a plugin is not in the result."""
    values = {"gone": "no_such_module:X", "five": "math:pi", "entropy": "math:tau"}
    declare(monkeypatch, **values, even="even_plugin:Even")
    answer = cli("policies", "--json")
    rows = result(answer)
    assert "noise at import" in answer.err
    problems = {row["name"]: row["problem"] for row in rows if not row["loads"]}
    assert problems.keys() == values.keys() and len(rows) == len(BUILTINS) + 3
    for name, noun in {"gone": "no_such_module", "five": "math:pi", "entropy": "built-in"}.items():
        assert noun in problems[name]
    assert cli("policies").code == 0
    answer = cli("decode", "w7 w8", *pair_options, "--policy", "entropy:0.6")
    assert (answer.code, answer.out) == (2, "") and "built-in" in answer.err
    assert result(cli("decode", "w7 w8", *pair_options, "--policy", "fixed:2", "--json", "--max-new-tokens", 4))
