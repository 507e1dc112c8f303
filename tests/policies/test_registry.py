"""Policies by name: built-ins, folders and plugins, and the errors for wrong names and options."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
from learned_policies import learned
from specstop.policies import registry
from specstop.policies.errors import PolicyError, SpecstopWarning
from specstop.policies.fixed import Confidence, FixedLength
from specstop.policies.registry import BUILTINS, POLICIES, load_policy
from specstop.policies.storage import save_policy

MODULE = """
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
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module on the path, not imported, with entry points."""
    (tmp_path / "even_plugin.py").write_text(MODULE)
    (tmp_path / "broken_plugin.py").write_text("import a_module_that_does_not_exist")
    monkeypatch.syspath_prepend(tmp_path)
    points = {"even": "Even", "frozen": "Frozen", "nothing": "nothing", "gone": "Gone"}
    declare(monkeypatch, broken="broken_plugin:X", **{name: f"even_plugin:{value}" for name, value in points.items()})
    yield "even_plugin"
    sys.modules.pop("even_plugin", None)


@pytest.mark.parametrize(
    ("spec", "name", "attributes"),
    [
        ("fixed:4", "fixed:4", {"max_depth": 4}), ("fixed:0", "fixed:0", {"max_depth": 0}),
        ("fixed", "fixed:4", {"max_depth": 4}), ("fixed?length=7", "fixed:7", {"max_depth": 7}),
        ("confidence:0.4", "confidence:0.4", {"threshold": 0.4, "max_depth": 20}),
        ("confidence:0", "confidence:0", {"threshold": 0}),
        ("confidence?threshold=0.25&max_depth=6", "confidence:0.25", {"max_depth": 6}),
        ("confidence:0.3?max_depth=6", "confidence:0.3", {"threshold": 0.3, "max_depth": 6}),
        ("heuristic", "heuristic:20", {"max_depth": 20}), ("heuristic?start=5&up=1", "heuristic:5", {"max_depth": 20}),
        ("roc", "roc:0.4", {"max_depth": 20}), ("entropy:0.8", "entropy:0.8", {"max_depth": 40}),
        ("entropy", "entropy:0.6", {"max_depth": 40}), ("adaedl", "adaedl:0.6", {"max_depth": 20}),
        ("maxprob:0.75?max_depth=16", "maxprob:0.75", {"max_depth": 16}), ("maxprob", "maxprob:0.6", {"max_depth": 6}),
        ("product:0.3", "product:0.3", {"max_depth": 20}), ("online?threshold=0.5&prior=5", "online:0.5", {"max_depth": 20}),
        ("ddd:-0.7?every=1", "ddd:-0.7", {"max_depth": 11}), ("eagle:30?top=4&max_depth=6", "eagle:30", {"max_depth": 6}),
        ("opt", "opt:0.5", {"max_depth": 10}), ("c2t:3", "c2t:3", {"max_depth": 20}),
        ("gain?row=0.01&step=0.2", "gain:0.2", {"max_depth": 20}), ("bandit:0.5", "bandit:ucb", {"max_depth": 40}),
        ("bandit?kind=thompson&arms=fixed:2,confidence:0.3", "bandit:thompson", {"max_depth": 20}),
    ],
)  # fmt: skip
def test_a_spec_is_its_policy(spec: str, name: str, attributes: dict[str, object]) -> None:
    policy = load_policy(spec)
    assert policy.name == name
    assert {name: getattr(policy, name) for name in attributes} == attributes


@pytest.mark.parametrize(
    ("spec", "nouns"),
    [
        ("fixd:4", "unknown policy 'fixd:4'.*'fixed'"), ("", "unknown policy ''"), ("fixed:four", "number.*four"),
        ("fixed:", "number after the colon"), ("fixed:-1", "length"), ("fixed:2.5", "length"), ("fixed:nan", "length"),
        ("fixed:inf", "length"), ("fixed?length=two", "length"), ("fixed?length=True", "length"),
        ("confidence:1.5", "between 0 and 1"), ("confidence:nan", "between 0 and 1"),
        ("confidence?threshold=some", "threshold"), ("confidence:0.4?max_depth=0", "max_depth"),
        ("confidence?max_depth=2.5", "max_depth"), ("confidence?treshold=0.4", "'treshold'.*threshold, max_depth"),
        ("confidence?threshold=0.4&threshold=0.5", "threshold is given twice"),
        ("confidence:0.4?threshold=0.5", "threshold is given twice"), ("confidence?threshold", "key=value"),
        ("confidence?=3", "key=value"),
        ("some/where", "folder some/where"), ("./fixed", "folder ./fixed"), ("~nobody/fixed", "folder ~nobody"),
        ("heuristic:0", "start"), ("heuristic?up=-1", "up"), ("roc:1.5", "threshold"), ("roc?samples=2.5", "whole number"),
        ("entropy:-1", "level"), ("entropy:nan", "level"), ("adaedl?gamma=0", "gamma"), ("maxprob?max_depth=0", "max_depth"),
        ("product:0", "threshold"), ("online?prior=0", "prior"), ("ddd:1", "threshold"), ("eagle:0", "nodes"),
        ("opt?top=x", "top"), ("c2t?entropy=much", "entropy"), ("gain?verify=-1", "verify"), ("bandit?kind=best", "kind"),
        ("bandit?arms=,", "arm"), ("bandit?arms=fixed:2,c2t", "c2t:2 trims"), ("bandit?arms=eagle", "eagle:59 trims"),
        ("bandit?arms=fixd:2", "'fixed'"), ("bandit?arms=fixed:1,fixed:2&explore=inf", "explore"),
        ("evn", "'even'"), ("even:six", "number after the colon"), ("even?length=3", "odd"), ("even?size=2", "length, label"),
        ("nothing", "StopPolicy"), ("broken", "a_module_that_does_not_exist"), ("gone", "Gone"),
        ("x" * 5000, "unknown policy"), ("x" * 5000 + "/y", "does not exist"), ("hub:" + "x" * 5000, "does not exist"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("plugin")
def test_a_wrong_spec_is_refused_in_one_line(spec: str, nouns: str) -> None:
    with pytest.raises(PolicyError, match=nouns) as error:
        load_policy(spec)
    assert "\n" not in str(error.value)


def test_a_spec_may_be_longer_than_the_name_of_a_file() -> None:
    assert len(load_policy("bandit?arms=" + ",".join(f"fixed:{length}" for length in range(100))).parts) == 100


def test_parameters_may_be_numbers_of_numpy() -> None:
    lengths = [FixedLength(length) for length in np.arange(3)]  # type: ignore[arg-type]
    assert [type(policy.max_depth) for policy in lengths] == [int] * 3
    assert Confidence(np.float32(0.5)).threshold == 0.5  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="threshold"):
        Confidence(np.float64("nan"))


def test_a_folder_is_loaded_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_policy(learned(), tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    for spec in (tmp_path / "mine", str(tmp_path / "mine"), "mine", "./mine"):
        assert load_policy(spec).name == "mine"
    with pytest.raises(PolicyError, match=r"policy\.json"):
        load_policy(tmp_path)


def test_a_plugin_is_listed_without_an_import_and_loaded_on_use(plugin: str) -> None:
    assert set(POLICIES.names()) - set(BUILTINS) == {"even", "frozen", "nothing", "broken", "gone"}
    assert load_policy("fixed:2").max_depth == 2 and plugin not in sys.modules
    policy = load_policy("even?length=6&label=mine")
    assert (policy.max_depth, policy.name) == (6, "mine")
    assert load_policy("even").max_depth == 2 and load_policy("even:4").max_depth == 4, "the first parameter"
    frozen = load_policy("frozen?max_depth=3")
    assert (frozen.max_depth, frozen.shown_name, frozen.limited(2).max_depth) == (3, "frozen?max_depth=3", 2)


@pytest.mark.usefixtures("plugin")
def test_a_name_that_two_policies_have_is_refused_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    declare(monkeypatch, ("a", "y:Y"), a="x:X", fixed="x:X", entropy="x:X", even="even_plugin:Even")
    for spec, nouns in {
        "a": "'a': .*x:X", "a?b=1": "'a': .*x:X", "fixed": "'fixed': x:X and a built-in", "fixed:4": "'fixed': x:X",
        "bandit?arms=entropy:1": "'entropy': x:X",
    }.items():  # fmt: skip
        with pytest.raises(PolicyError, match=f"^policy: two policies are called {nouns}"):
            load_policy(spec)
    assert set(POLICIES.names()) - set(BUILTINS) == {"even"}
    for name in ("even", *BUILTINS):
        if name not in ("fixed", "entropy", "bandit"):  # the bandit has two of them as arms
            assert load_policy(name).name.startswith(name)


@pytest.mark.parametrize("name", ["a b", "a:b", "ä", "xxx/y", ""])
def test_a_name_that_a_spec_cannot_contain_affects_no_other(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    declare(monkeypatch, (name, "x:X"))
    assert load_policy("fixed:4").max_depth == 4
    (listed,) = (p for p in POLICIES.listed() if p.where != "built in")
    assert repr(name) in listed.problem


def test_damaged_metadata_of_a_package_leaves_the_built_in_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(group: str) -> None:
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")

    monkeypatch.setattr(registry, "entry_points", fail)
    with pytest.warns(SpecstopWarning, match="UnicodeDecodeError"):
        assert load_policy("fixed:4").max_depth == 4


def test_built_in_policies_are_listed_with_their_usage() -> None:
    rows = {row.name: row for row in POLICIES.listed() if row.where == "built in"}
    assert set(rows) == set(BUILTINS)
    for name, row in rows.items():
        assert load_policy(name).name.startswith(name) and row.what.startswith(f"{name}:") and not row.problem
