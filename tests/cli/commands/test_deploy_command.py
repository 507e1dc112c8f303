"""`specstop deploy` for every runtime: the commands of its page, and what is said where something is missing."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from commands import cli, files
from specstop.collect.store import Trace
from specstop.policies.profile import Profile
from specstop.train.fit.run import train

PAGE = Path(__file__).parents[3] / "docs" / "deploy.md"
TARGETS = ("onnx", "hf", "vllm", "sglang", "trtllm", "llama.cpp")


@pytest.fixture(scope="module")
def policy(sides: tuple[Trace, Trace], full_profile: Profile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "policy"
    train(sides[0], full_profile, head="logistic", out=folder)
    return folder


@pytest.fixture
def home(
    sides: tuple[Trace, Trace], policy: Path, full_profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A folder as the page says that one stands in."""
    shutil.copytree(policy, tmp_path / "policy")
    full_profile.save(tmp_path / "profile.json")
    (tmp_path / "traces").symlink_to(sides[0].folder)
    (tmp_path / "others").symlink_to(sides[1].folder)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def commands() -> list[list[str]]:
    blocks = re.findall(r"```console\n(.*?)```", PAGE.read_text(), re.DOTALL)
    lines = [shlex.split(line) for block in blocks for line in block.splitlines() if line.startswith("specstop ")]
    return [words[1:] for words in lines]


def test_the_page_shows_every_runtime() -> None:
    assert [words[words.index("--to") + 1] for words in commands()] == [
        "hf",
        "hf",
        "onnx",
        "vllm",
        "sglang",
        "trtllm",
        "llama.cpp",
    ]
    assert all(f"| `{target}` |" in PAGE.read_text() for target in TARGETS)


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_the_commands_of_the_page_run(words: list[str], home: Path) -> None:
    if "onnx" in words:
        pytest.importorskip("onnx")
    answer = cli(*words, "--quiet")
    assert answer.code == 0, answer.err
    out = home / words[words.index("--out") + 1]
    assert out.is_file() or "## What is lost" in (out / "README.md").read_text()


def test_json_is_the_figures_and_the_options_are_saved(home: Path) -> None:
    answer = cli("deploy", "--to", "vllm", "--traces", "traces", "--profile", "profile.json", "--held-out", "others",
                 "--out", "v", "--json")  # fmt: skip
    assert answer.code == 0, answer.err
    assert json.loads(answer.out) == json.loads((home / "v" / "figures.json").read_text())
    assert [line["batch"] for line in json.loads(answer.out)["batches"]] == [1]
    before = files(home / "v")
    again = cli("deploy", "--config", home / "v" / "run.yaml", "--out", home / "w", "--quiet")
    assert again.code == 0, again.err
    after = files(home / "w")
    assert {k: v for k, v in before.items() if k != "run.yaml"} == {k: v for k, v in after.items() if k != "run.yaml"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--to vlm",
            "--to: expected one of onnx, hf, vllm, sglang, trtllm, llama.cpp, not 'vlm' (did you mean 'vllm'?)",
        ),
        ("--to vllm", "--traces and --profile: expected as well"),
        ("--to sglang --profile profile.json", "--traces: expected as well"),
        ("--to llama.cpp --traces traces", "--profile: expected as well"),
        ("--to hf", "--policy: expected a policy folder"),
        ("--to onnx", "--policy: expected a policy folder"),
        ("--to hf --policy policy --traces traces", "--profile: expected as well"),
        ("--to vllm --traces nowhere --profile profile.json", "nowhere"),
        ("--to vllm --traces traces --profile nowhere.json", "nowhere.json"),
        ("--to vllm --traces traces --profile profile.json --held-out traces", "prompts are in --traces too"),
        ("--to vllm --traces traces --profile profile.json --policy nowhere/x", "does not exist"),
    ],
)
def test_what_is_missing_is_one_line(words: str, message: str, home: Path) -> None:
    answer = cli("deploy", *words.split(), "--out", "x")
    assert answer.code == 2 and answer.out == ""
    assert message in answer.err and answer.err.count("\n") == 1
    assert not (home / "x").exists()


def test_the_help_names_the_runtimes() -> None:
    text = " ".join(cli("deploy", "--help").out.replace("│", " ").split())
    assert all(target in text for target in TARGETS)
