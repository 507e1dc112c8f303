"""The tutorial's plugin, installed as its page says, in every command that takes a policy; and the switch."""

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
from attack_families import family
from specstop.collect.store import Trace, load_trace
from specstop.policies import registry
from specstop.policies.errors import PolicyError
from specstop.policies.profile import Profile
from specstop.policies.registry import BUILTINS, POLICIES, load_policy

ROOT = Path(__file__).parents[2]
EXAMPLE, PAGE = ROOT / "examples" / "patience", ROOT / "docs" / "plugins.md"

from commands import Answer, cli  # noqa: E402


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as somebody writes it who copies the page."""
    folder = tmp_path_factory.mktemp("patience")
    blocks = re.findall(r"^`([\w./]+)`: [^`]*?\n\n```\w+\n(.*?)```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    for name, text in blocks:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def target(written: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder it is installed into, by pip, without network."""
    target = tmp_path_factory.mktemp("site")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--no-index"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(target), str(written)]
    subprocess.run(command, check=True, capture_output=True)
    return target


@pytest.fixture
def installed(target: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(target)
    importlib.invalidate_caches()
    yield target
    sys.modules.pop("specstop_patience", None)


def test_the_page_writes_the_package_in_examples(written: Path) -> None:
    names = sorted(
        str(p.relative_to(written)) for p in written.rglob("*") if p.is_file() and p.suffix in (".py", ".toml")
    )
    assert names == ["pyproject.toml", "specstop_patience.py", "tests/test_patience.py"]
    for name in names:
        assert (written / name).read_text() == (EXAMPLE / name).read_text()


def test_the_commands_of_the_page_exist() -> None:
    for line in re.findall(r"^specstop (\w+)(.*)$", PAGE.read_text(), re.MULTILINE):
        answer = cli(line[0], "--help")
        assert answer.code == 0
        for option in re.findall(r"--[a-z-]+", line[1]):
            assert option in answer.out


@pytest.mark.usefixtures("installed")
def test_it_is_listed_without_being_imported_and_loads() -> None:
    (point,) = registry.entry_points(group=POLICIES.group, name="patience")
    assert point.value == "specstop_patience:Patience" and "patience" in POLICIES.names()
    assert "specstop_patience" not in sys.modules
    (found,) = (p for p in POLICIES.listed() if p.name == "patience")
    assert (found.where, found.module, found.problem) == ("specstop-patience 0.1", "specstop_patience", "")
    assert load_policy("patience?chances=3").name == "patience:3"
    with pytest.raises(PolicyError, match="expected 1 chance or more"):
        load_policy("patience?chances=0")


@pytest.mark.usefixtures("installed")
def test_its_own_tests_pass(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(written / "tests")
    case = importlib.import_module("test_patience").TestPatience()
    checks = [name for name in dir(case) if name.startswith("test_")]
    assert len(checks) > 6
    for name in checks:
        getattr(case, name)()
    sys.modules.pop("test_patience")


def answered(answer: Answer) -> object:
    assert answer.code == 0, answer.err
    return json.loads(answer.out)


@pytest.mark.usefixtures("installed")
def test_it_is_seen_in_policies_decode_and_evaluate(
    pair_folder: Path, traces: dict[float, Trace], profile: Profile, tmp_path: Path
) -> None:
    (line,) = (p for p in answered(cli("policies", "--json")) if p["name"] == "patience")
    assert line["loads"] and line["module"] == "specstop_patience"
    pair = ["--target", pair_folder / "target", "--draft", pair_folder / "draft", "--dtype", "float64"]
    texts = [
        answered(cli("decode", "w7 w8", "w9", *pair, "--policy", policy, "--json", "--max-new-tokens", 20))
        for policy in ("patience?chances=1", "fixed:0")
    ]
    assert texts[0]["texts"] == texts[1]["texts"]
    assert texts[0]["drafted"] > 0 == texts[1]["drafted"]
    profile.with_decisions({"patience": 1e-5}).save(tmp_path / "profile.json")
    costs = ["--traces", traces[0.7].folder, "--profile", tmp_path / "profile.json", "--out", tmp_path / "report"]
    report = answered(cli("evaluate", *costs, "--policy", "patience?chances=3&max_depth=4", "--json"))
    assert "patience?chances=3&max_depth=4" in [line["name"] for line in report["lines"]], "as it was typed"


@pytest.mark.usefixtures("installed")
def test_it_is_recorded_by_collect_and_tuned_by_train(
    pair_folder: Path, traces: dict[float, Trace], profile: Profile, tmp_path: Path
) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "w7 w8"}\n{"prompt": "w9 w20 w8"}\n')
    pair = ["--target", pair_folder / "target", "--draft", pair_folder / "draft", "--dtype", "float64"]
    where = ["--prompts", tmp_path / "prompts.jsonl", "--out", tmp_path / "live", "--depth", 4, "--max-new-tokens", 20]
    live = ["--collector", "live", "--policy", "patience?chances=1&max_depth=4"]
    assert cli("collect", *pair, *where, *live, "--quiet").code == 0
    header = load_trace(tmp_path / "live").header
    assert (header.collector, header.policy) == ("live", "patience:1")

    profile.with_decisions({"patience": 1e-5, "logistic": 7e-5}).save(tmp_path / "profile.json")
    costs = ["--traces", traces[0.7].folder, "--profile", tmp_path / "profile.json", "--out", tmp_path / "tuned"]
    tuned = cli(
        "train",
        *costs,
        "--tune",
        6,
        "--head",
        "logistic",
        "--policy",
        "patience?chances=1|2",
        "--report-share",
        0,
        "--quiet",
    )
    assert tuned.code == 0, tuned.err
    assert "patience" in tuned.out


@pytest.mark.usefixtures("installed")
def test_discovery_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [[p["name"] for p in answered(cli(*args, "--json"))] for args in (
        ["policies"], ["--no-plugins", "policies"])]  # fmt: skip
    assert "patience" in names[0]
    assert names[1] == list(BUILTINS)
    monkeypatch.setenv(registry.SWITCH, "0")
    assert POLICIES.names() == list(BUILTINS)
    with pytest.raises(PolicyError, match="unknown policy 'patience'"):
        load_policy("patience")


@pytest.mark.usefixtures("installed")
def test_a_second_policy_of_that_name_is_an_error_that_names_both(monkeypatch: pytest.MonkeyPatch) -> None:
    known = list(registry.entry_points(group=POLICIES.group))
    other = EntryPoint("patience", "other:Patience", POLICIES.group)
    monkeypatch.setattr(registry, "entry_points", lambda group: [*known, other])
    problem = (
        "two policies are called 'patience': other:Patience and specstop_patience:Patience of specstop-patience 0.1; "
        "uninstall one"
    )
    listed = {(p["where"], p["problem"]) for p in answered(cli("policies", "--json")) if p["name"] == "patience"}
    assert listed == {("?", problem)}
    answer = cli("decode", "w7", "--policy", "patience?chances=1")
    assert (answer.code, answer.out, answer.err) == (2, "", f"specstop: --policy: {problem}\n")


def test_plugins_that_do_not_load_are_listed_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [EntryPoint(n, v, POLICIES.group) for n, v in {"gone": "no_such_module:X", "five": "math:pi"}.items()]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    problems = {p.name: p.problem for p in POLICIES.listed() if p.where == "?"}
    assert "no_such_module" in problems["gone"]
    assert "math:pi" in problems["five"]
    answer = cli("policies")
    assert answer.code == 0 and "no_such_module" in answer.out


README = ROOT / "README.md"


@pytest.fixture
def readme_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The class of the README as a module on the path; returns its name there."""
    (code,) = re.findall(r"```python\n(import specstop as ss\n\n\nclass .*?)```", README.read_text(), re.DOTALL)
    (tmp_path / "your_module.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    yield re.findall(r"^class (\w+)", code, re.MULTILINE)[0]
    sys.modules.pop("your_module", None)


def test_the_readmes_policy_works_under_the_entry_point_that_it_gives(
    readme_policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = r'```toml\n\[project.entry-points."specstop.policies"\]\n([\w-]+) = "(.*)"\n```'
    ((name, value),) = re.findall(written, README.read_text())
    assert value == f"your_module:{readme_policy}" and name not in BUILTINS
    monkeypatch.setattr(registry, "entry_points", lambda group: [EntryPoint(name, value, group)])
    assert load_policy(name).name == name
    (listed,) = (p for p in answered(cli("policies", "--json")) if p["where"] == "?")
    assert (listed["name"], listed["loads"]) == (name, True)


@pytest.mark.usefixtures("readme_policy")
def test_a_plugin_with_the_name_of_a_built_in_fails_under_that_name_alone(
    readme_policy: str, pair_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = EntryPoint("entropy", f"your_module:{readme_policy}", POLICIES.group)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point])
    problem = f"two policies are called 'entropy': your_module:{readme_policy} and a built-in; rename that entry point"
    listed = answered(cli("policies", "--json"))
    assert {p["name"]: p["problem"] for p in listed if not p["loads"]} == {"entropy": problem}
    assert len(listed) == len(BUILTINS)
    table = cli("policies")
    assert table.code == 0 and "rename that entry point" in " ".join(table.out.replace("│", " ").split())
    assert max(map(len, table.out.splitlines())) <= 80
    pair = ["--target", pair_folder / "target", "--draft", pair_folder / "draft", "--dtype", "float64"]
    for name in ("entropy", "entropy:0.6", "entropy?level=1"):
        answer = cli("decode", "w7 w8", *pair, "--policy", name)
        assert (answer.code, answer.out, answer.err) == (2, "", f"specstop: --policy: {problem}\n")
    for name in ("fixed:2", "maxprob:0.6"):
        assert answered(cli("decode", "w7 w8", *pair, "--policy", name, "--json", "--max-new-tokens", 4))


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
EXITS, LEAVES = (at for at, line in enumerate(ODD.splitlines(), 1) if "raise SystemExit" in line)


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("works", 0, []),
        ("exits", 2, [f"specstop: --policy: 'odd?how=exits': making it failed: SystemExit, at FILE:{EXITS}"]),
        (
            "leaves",
            0,
            [
                f"warning: policy odd failed (keep() failed: SystemExit: 0, at FILE:{LEAVES}); using fixed:4 from "
                "here on"
            ],
        ),
        ("interrupted", 130, ["specstop: interrupted"]),
    ],
)
def test_prints_exits_and_ctrl_c_of_a_plugin_on_the_command_line(
    how: str, code: int, said: list[str], pair_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "odd_plugin.py").write_text(ODD)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "entry_points", lambda group: [EntryPoint("odd", "odd_plugin:Odd", group)])
    pair = ["--target", pair_folder / "target", "--draft", pair_folder / "draft", "--dtype", "float64"]
    answer = cli("decode", "w7 w8", *pair, "--policy", f"odd?how={how}", "--json", "--max-new-tokens", 12)
    sys.modules.pop("odd_plugin")
    assert answer.code == code
    lines = answer.err.replace(str(tmp_path / "odd_plugin.py"), "FILE").splitlines()
    assert [line for line in lines if not line.startswith("noise")] == said
    assert "noise at import" in answer.err and "noise in __init__" in answer.err
    if code:
        assert answer.out == ""
    else:
        assert len(json.loads(answer.out)["texts"]) == 1


def test_misbehaving_plugins_are_refused_or_replaced(tmp_path: Path) -> None:
    """A sample of the misbehaviours of `benchmarks/fuzz.py`, in three modes."""
    plugins = family("plugins")
    seen, faults = plugins.attack(6, 7, tmp_path)
    assert faults == []
    assert sum(seen.values()) == 18 and {name.split(": ")[0] for name in seen} == set(plugins.MODES)


def test_a_plugin_that_is_trusted_by_mistake_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugins = family("plugins")
    monkeypatch.setattr("specstop.policies.host.is_trusted", lambda policy: True)
    monkeypatch.setattr(
        plugins, "CASES", tuple(case for case in plugins.CASES if case.what == "keep: raise SystemExit")
    )
    _, faults = plugins.attack(1, 0, tmp_path)
    assert faults
