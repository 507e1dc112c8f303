"""Plugins on the command line: the package of the tutorial in every command, and plugins that misbehave."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from commands import Answer, cli
from specstop.collect.store import Trace, load_trace
from specstop.policies import registry
from specstop.policies.errors import PolicyError
from specstop.policies.features import PLUGIN_SWITCH
from specstop.policies.profile import Profile
from specstop.policies.registry import BUILTINS, POLICIES, load_policy

ROOT = Path(__file__).parents[2]
EXAMPLE, PAGE = ROOT / "examples" / "patience", ROOT / "docs" / "plugins.md"


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as a reader of the page writes it."""
    folder = tmp_path_factory.mktemp("patience")
    blocks = re.findall(r"^`([\w./]+)`: [^`]*?\n\n```\w+\n(.*?)```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    for name, text in blocks:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def site(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which pip installs the package, without network."""
    folder = tmp_path_factory.mktemp("site")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--no-index"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(folder), str(package)]
    subprocess.run(command, check=True, capture_output=True)
    return folder


@pytest.fixture
def installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(site)
    importlib.invalidate_caches()
    yield site
    sys.modules.pop("specstop_patience", None)


@pytest.fixture(scope="module")
def pair_options(pair_folder: Path) -> list[object]:
    return ["--target", pair_folder / "target", "--draft", pair_folder / "draft", "--dtype", "float64"]


def result(answer: Answer) -> object:
    assert answer.code == 0, answer.err
    return json.loads(answer.out)


def test_the_page_contains_the_package_in_examples(package: Path) -> None:
    files = [p.relative_to(package) for p in package.rglob("*") if p.is_file() and p.suffix in (".py", ".toml")]
    assert sorted(map(str, files)) == ["pyproject.toml", "specstop_patience.py", "tests/test_patience.py"]
    for name in files:
        assert (package / name).read_text() == (EXAMPLE / name).read_text()
    for command, rest in re.findall(r"^specstop (\w+)(.*)$", PAGE.read_text(), re.MULTILINE):
        usage = cli(command, "--help")
        assert usage.code == 0 and all(option in usage.out for option in re.findall(r"--[a-z-]+", rest))


@pytest.mark.usefixtures("installed")
def test_it_is_listed_without_an_import_and_its_tests_pass(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "patience" in POLICIES.names() and "specstop_patience" not in sys.modules
    (row,) = (p for p in POLICIES.listed() if p.name == "patience")
    assert (row.where, row.module, row.problem) == ("specstop-patience 0.1", "specstop_patience", "")
    assert load_policy("patience?chances=3").name == "patience:3"
    with pytest.raises(PolicyError, match="chance"):
        load_policy("patience?chances=0")
    monkeypatch.syspath_prepend(package / "tests")
    case = importlib.import_module("test_patience").TestPatience()
    checks = [name for name in dir(case) if name.startswith("test_")]
    assert len(checks) > 6
    for name in checks:
        getattr(case, name)()
    sys.modules.pop("test_patience")


@pytest.mark.usefixtures("installed")
def test_every_command_accepts_it(
    pair_options: list[object], traces: dict[float, Trace], profile: Profile, tmp_path: Path
) -> None:
    (line,) = (p for p in result(cli("policies", "--json")) if p["name"] == "patience")
    assert line["loads"] and line["module"] == "specstop_patience"
    texts = [
        result(cli("decode", "w7 w8", "w9", *pair_options, "--policy", name, "--json", "--max-new-tokens", 20))
        for name in ("patience?chances=1", "fixed:0")
    ]
    assert texts[0]["texts"] == texts[1]["texts"] and texts[0]["drafted"] > 0 == texts[1]["drafted"]
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "w7 w8"}\n{"prompt": "w9 w20 w8"}\n')
    options = [
        "--prompts",
        tmp_path / "prompts.jsonl",
        "--out",
        tmp_path / "live",
        "--depth",
        4,
        "--max-new-tokens",
        20,
    ]
    options += ["--collector", "live", "--policy", "patience?chances=1&max_depth=4", "--quiet"]
    assert cli("collect", *pair_options, *options).code == 0
    header = load_trace(tmp_path / "live").header
    assert (header.collector, header.policy) == ("live", "patience:1")
    profile.with_decisions({"patience": 1e-5}).save(tmp_path / "profile.json")
    options = ["--traces", traces[0.7].folder, "--profile", tmp_path / "profile.json", "--out"]
    name = "patience?chances=3&max_depth=4"
    report = result(cli("evaluate", *options, tmp_path / "report", "--policy", name, "--json"))
    assert name in [line["name"] for line in report["lines"]], "as it was typed"


@pytest.mark.usefixtures("installed")
def test_discovery_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [[p["name"] for p in result(cli(*args, "policies", "--json"))] for args in ([], ["--no-plugins"])]
    assert "patience" in names[0] and names[1] == list(BUILTINS)
    monkeypatch.setenv(PLUGIN_SWITCH, "0")
    assert POLICIES.names() == list(BUILTINS)
    with pytest.raises(PolicyError, match="unknown policy 'patience'"):
        load_policy("patience")


def test_plugins_that_do_not_load_are_listed_with_the_reason(
    pair_options: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"gone": "no_such_module:X", "five": "math:pi", "entropy": "math:tau"}
    points = [EntryPoint(name, value, POLICIES.group) for name, value in values.items()]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    rows = result(cli("policies", "--json"))
    problems = {row["name"]: row["problem"] for row in rows if not row["loads"]}
    assert problems.keys() == values.keys() and len(rows) == len(BUILTINS) + 2
    for name, noun in {"gone": "no_such_module", "five": "math:pi", "entropy": "built-in"}.items():
        assert noun in problems[name]
    table = cli("policies")
    assert table.code == 0 and "no_such_module" in table.out and max(map(len, table.out.splitlines())) <= 80
    for name in ("entropy", "entropy:0.6", "entropy?level=1"):
        answer = cli("decode", "w7 w8", *pair_options, "--policy", name)
        assert (answer.code, answer.out) == (2, "") and "built-in" in answer.err
    for name in ("fixed:2", "maxprob:0.6"):
        assert result(cli("decode", "w7 w8", *pair_options, "--policy", name, "--json", "--max-new-tokens", 4))


ODD = """
import signal
from specstop.policies import StopPolicy
print("noise at import")
class Odd(StopPolicy):
    features, name, max_depth = ("top1",), "odd", 4
    def __init__(self, how="works"):
        print("noise in __init__")
        self.how = how
        if how == "exits":
            raise SystemExit
    def keep(self, step, state):
        print("noise in keep")
        if self.how == "leaves":
            raise SystemExit(0)
        if self.how == "interrupted":
            signal.raise_signal(signal.SIGINT)
        return step.alive, state
"""
EXITS, LEAVES = (number for number, line in enumerate(ODD.splitlines(), 1) if "raise SystemExit" in line)


@pytest.mark.parametrize(
    ("how", "code", "nouns"),
    [
        ("works", 0, ()),
        ("exits", 2, ("--policy", "SystemExit", f"FILE:{EXITS}")),
        ("leaves", 0, ("warning", "keep()", "SystemExit", f"FILE:{LEAVES}", "fixed:4")),
        ("interrupted", 130, ("interrupted",)),
    ],
)
def test_prints_exits_and_ctrl_c_of_a_plugin(
    how: str,
    code: int,
    nouns: tuple[str, ...],
    pair_options: list[object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Standard output contains the result only."""
    (tmp_path / "odd_plugin.py").write_text(ODD)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "entry_points", lambda group: [EntryPoint("odd", "odd_plugin:Odd", group)])
    answer = cli("decode", "w7 w8", *pair_options, "--policy", f"odd?how={how}", "--json", "--max-new-tokens", 12)
    sys.modules.pop("odd_plugin")
    lines = answer.err.replace(str(tmp_path / "odd_plugin.py"), "FILE").splitlines()
    messages = [line for line in lines if not line.startswith("noise")]
    assert answer.code == code and len(messages) == bool(nouns) and all(noun in messages[0] for noun in nouns)
    assert "noise at import" in answer.err and "noise in __init__" in answer.err
    assert answer.out == "" if code else len(json.loads(answer.out)["texts"]) == 1
