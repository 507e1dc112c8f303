"""Policies by name: built-ins, folders and plugins, and what a wrong name is told."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from learned_policies import learned
from specstop.policies import registry
from specstop.policies.contract import StopPolicy
from specstop.policies.errors import PolicyError, SpecstopWarning
from specstop.policies.fixed import Confidence, FixedLength
from specstop.policies.registry import POLICIES, load_policy
from specstop.policies.storage import save_policy

PLUGIN = """
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


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module on the path with a policy, known under three entry points; not imported."""
    (tmp_path / "even_plugin.py").write_text(PLUGIN)
    (tmp_path / "broken_plugin.py").write_text("import a_module_that_is_not_there")
    monkeypatch.syspath_prepend(tmp_path)
    declare(
        monkeypatch,
        even="even_plugin:Even",
        nothing="even_plugin:nothing",
        broken="broken_plugin:X",
        gone="even_plugin:Gone",
    )
    yield "even_plugin"
    sys.modules.pop("even_plugin", None)


def declare(monkeypatch: pytest.MonkeyPatch, *more: EntryPoint, **points: str) -> None:
    found = [EntryPoint(name, value, POLICIES.group) for name, value in points.items()]
    monkeypatch.setattr(registry, "entry_points", lambda group: [*found, *more] if group == POLICIES.group else [])


@pytest.mark.parametrize(
    ("spec", "kind", "attributes"),
    [
        ("fixed:4", FixedLength, {"max_depth": 4, "name": "fixed:4"}),
        ("fixed:0", FixedLength, {"max_depth": 0}),
        ("fixed", FixedLength, {"max_depth": 4}),
        ("fixed?length=7", FixedLength, {"max_depth": 7}),
        ("confidence:0.4", Confidence, {"threshold": 0.4, "max_depth": 20}),
        ("confidence", Confidence, {"threshold": 0.4}),
        ("confidence:0", Confidence, {"threshold": 0}),
        ("confidence?threshold=0.25&max_depth=6", Confidence, {"max_depth": 6}),
        ("confidence:0.3?max_depth=6", Confidence, {"threshold": 0.3, "max_depth": 6}),
    ],
)
def test_a_good_spec_is_its_policy(spec: str, kind: type[StopPolicy], attributes: dict[str, object]) -> None:
    policy = load_policy(spec)
    assert type(policy) is kind
    assert {name: getattr(policy, name) for name in attributes} == attributes


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("fixd:4", r"unknown policy 'fixd:4' \(did you mean 'fixed'\?\); expected .* confidence, .*fixed"),
        ("", "unknown policy ''"),
        ("fixed:four", "expected a number after the colon, not 'four'"),
        ("fixed:", "expected a number after the colon, not ''"),
        ("fixed:-1", "length: .*whole number of 0 or more"),
        ("fixed:2.5", "length"),
        ("fixed:nan", "length"),
        ("fixed:inf", "length"),
        ("fixed?length=two", "fixed"),
        ("confidence:1.5", "between 0 and 1"),
        ("confidence:nan", "between 0 and 1"),
        ("confidence:0.4?max_depth=0", "max_depth: .*whole number of 1 or more"),
        ("confidence?max_depth=2.5", "max_depth"),
        ("confidence?treshold=0.4", "unexpected .*'treshold'; it takes threshold, max_depth"),
        ("confidence?threshold=0.4&threshold=0.5", "threshold is given twice; give it once"),
        ("bandit?arms=fixed:1,fixed:2&explore=inf", "explore: .*number of 0 or more"),
        ("confidence:0.4?threshold=0.5", "threshold is given twice; give it once"),
        ("confidence?threshold", "expected key=value after the question mark, not 'threshold'"),
        ("confidence?=3", "key=value"),
        ("some/where", "the folder some/where does not exist"),
        ("./fixed", "the folder ./fixed does not exist"),
        ("~nobody-here/fixed", "the folder ~nobody-here/fixed does not exist"),
    ],
)
def test_a_bad_spec_is_told_what_is_wrong(spec: str, message: str) -> None:
    with pytest.raises(PolicyError, match=f"{message}") as caught:
        load_policy(spec)
    assert "\n" not in str(caught.value)


def test_a_folder_is_loaded_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_policy(learned(), tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    for spec in (tmp_path / "mine", str(tmp_path / "mine"), "mine", "./mine"):
        assert load_policy(spec).name == "mine"
    with pytest.raises(PolicyError, match=r"policy\.json"):
        load_policy(tmp_path)


def test_a_plugin_is_listed_without_importing_it_and_loaded_on_use(plugin: str) -> None:
    assert set(POLICIES.names()) - set(registry.BUILTINS) == {"even", "nothing", "broken", "gone"}
    assert load_policy("fixed:2").max_depth == 2
    assert plugin not in sys.modules
    policy = load_policy("even?length=6&label=mine")
    assert (policy.max_depth, policy.name) == (6, "mine")
    assert load_policy("even").max_depth == 2 and load_policy("even:4").max_depth == 4, "its first parameter"


def test_a_plugin_that_cannot_be_written_to_is_called_as_the_user_did(
    plugin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    declare(monkeypatch, frozen="even_plugin:Frozen")
    policy = load_policy("frozen?max_depth=3")
    assert (policy.max_depth, policy.shown_name, policy.limited(2).max_depth) == (3, "frozen?max_depth=3", 2)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("evn", "did you mean 'even'"),
        ("even:six", "expected a number after the colon"),
        ("even?length=3", "odd"),
        ("even?size=2", "it takes length, label"),
        ("nothing", "StopPolicy"),
        ("broken", "a_module_that_is_not_there"),
        ("gone", "Gone"),
    ],
)
@pytest.mark.usefixtures("plugin")
def test_a_plugin_that_cannot_be_used_is_told_why(spec: str, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        load_policy(spec)


@pytest.mark.usefixtures("plugin")
def test_two_policies_of_one_name_are_refused_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    declare(
        monkeypatch,
        EntryPoint("a", "y:Y", POLICIES.group),
        a="x:X",
        fixed="x:X",
        entropy="x:X",
        even="even_plugin:Even",
    )
    for spec, message in {
        "a": "two policies are called 'a': y:Y and x:X; uninstall one",
        "a?b=1": "two policies are called 'a': y:Y and x:X; uninstall one",
        "fixed": "two policies are called 'fixed': x:X and a built-in; rename that entry point",
        "fixed:4": "two policies are called 'fixed': x:X and a built-in; rename that entry point",
        "bandit?arms=entropy:1": "two policies are called 'entropy': x:X and a built-in; rename that entry point",
    }.items():
        with pytest.raises(PolicyError, match=f"^policy: {message}$".replace("?", r"\?")):
            load_policy(spec)
    assert set(POLICIES.names()) - set(registry.BUILTINS) == {"even"}
    for name in ("even", *registry.BUILTINS):
        if name not in ("fixed", "entropy", "bandit"):  # two of the bandit's arms by default
            assert load_policy(name).name.startswith(name)


@pytest.mark.parametrize("name", ["a b", "a:b", "ä", "x" * 3 + "/y", ""])
def test_a_name_that_cannot_be_written_in_a_spec_spoils_no_other(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    declare(monkeypatch, EntryPoint(name, "x:X", POLICIES.group))
    assert load_policy("fixed:4").max_depth == 4
    (listed,) = (p for p in POLICIES.listed() if p.where != "built in")
    assert listed.problem == f"the policy {name!r} of x:X needs a name of letters, digits, - and _"


def test_damaged_metadata_of_some_package_leaves_the_built_in_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(group: str) -> None:
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")

    monkeypatch.setattr(registry, "entry_points", fail)
    with pytest.warns(SpecstopWarning, match="installed policies cannot be listed: UnicodeDecodeError"):
        assert load_policy("fixed:4").max_depth == 4


def test_every_builtin_is_made_by_its_bare_name_and_listed() -> None:
    listed = {row.name: row for row in POLICIES.listed() if row.where == "built in"}
    assert set(listed) == set(registry.BUILTINS)
    for name, row in listed.items():
        assert load_policy(name).name.startswith(name)
        assert row.what.startswith(f"{name}:") and not row.problem
