"""The README and the pages of `docs/`: their commands and Python blocks run, and their options, paths and links exist."""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import shlex
import shutil
from pathlib import Path

import pytest
from commands import cli, loading_once, write_prompts
from conftest import make_prompts
from small_drafters import small_network
from specstop.cli.main import COMMANDS
from specstop.decode.drafters import TrainedDrafter, save_drafter
from specstop.decode.profile.measuring import Effort
from specstop.train.evaluate.plots import Plot

import specstop

ROOT = Path(__file__).parents[1]
RUN = (("quickstart.md", "engines.md", "verification.md"), ("guide.md",))
"""Pages that run one after the other in one folder. `plugins.md` is followed by the tests of plugins."""

BLOCK = re.compile(r"^```(console|sh|python)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.fixture
def place(pair_folder, tmp_path, monkeypatch):
    """A folder with the inputs of the guide: `target`, `draft`, `train.jsonl` and `test.jsonl`."""
    for name in ("target", "draft"):
        shutil.copytree(pair_folder / name, tmp_path / name)
    for side, count, seed in (("train", 6, 21), ("test", 3, 22)):
        write_prompts(tmp_path / f"{side}.jsonl", make_prompts(count, side, seed))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def commands(block: str) -> list[list[str]]:
    """Return the commands of a console block as words; a backslash continues a line."""
    lines = block.replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.strip() and not line.startswith("#")]


@pytest.fixture
def quick(place, monkeypatch):
    """Measure profiles with one repetition instead of until the budget is spent, load the pair once, and draw no plots."""
    check = Effort.__post_init__

    def bounded(effort: Effort) -> None:
        check(effort)
        object.__setattr__(effort, "repetitions", effort.repetitions or 1)

    monkeypatch.setattr(Effort, "__post_init__", bounded)
    monkeypatch.setattr(Plot, "svg", lambda plot, name: "")
    with loading_once():
        yield


@pytest.mark.parametrize("pages", RUN, ids=" ".join)
@pytest.mark.usefixtures("module_cache", "quick", "few_draws")
def test_every_block_of_the_pages_runs(pages):
    names: dict[str, object] = {}
    for page in pages:
        blocks = BLOCK.findall((ROOT / "docs" / page).read_text())
        assert any(kind == "console" for kind, _ in blocks)
        for kind, text in blocks:
            if kind == "python" and page != "verification.md":
                exec(compile(text, page, "exec"), names)
            for words in commands(text) if kind == "console" else ():
                result = cli(*words[1:])
                assert words[0] == "specstop" and result.code == 0, (page, words, result.err)


@pytest.mark.usefixtures("module_cache", "quick", "few_draws")
def test_the_first_hour_in_python_runs(place, tmp_path, monkeypatch):
    """With the small pair and fewer prompts than the page has."""
    for side in ("train", "test"):
        (place / f"{side}.jsonl").rename(place / f"prompts-{side}.jsonl")
    monkeypatch.setattr(specstop, "shipped_pair", lambda: place)
    names: dict[str, object] = {}
    for kind, text in BLOCK.findall((ROOT / "docs" / "python.md").read_text()):
        if kind == "python":
            exec(compile(text, "python.md", "exec"), names)
    assert (tmp_path / "policy" / "policy.json").is_file() and (tmp_path / "sweep.svg").is_file()


@pytest.mark.usefixtures("module_cache")
def test_the_published_systems_run_as_their_table_says(plain_pair, place):
    """Run every line of the table of `drafters.md`, with small heads; all but the lossy one give plain decoding's text."""
    rows = re.findall(
        r"^\| ([^|]*) \| `(--drafter ([\w-]+):PATH [^`]*)` \|$", (ROOT / "docs/drafters.md").read_text(), re.M
    )
    assert [kind for _, _, kind in rows] == ["medusa", "medusa", "hydra", "ctc-released", "ctc"]
    head = plain_pair.target.get_output_embeddings().weight.float()
    common = ("decode", "--target", "target", "--max-new-tokens", "8", "--json", "a b c")
    plain = json.loads(cli(*common, "--drafter", "lookup", "--policy", "fixed:0").out)
    for name, options, kind in rows:
        trained = kind.removesuffix("-released")
        network = small_network(trained, head.shape[1], plain_pair.vocabulary, head, 4)
        save_drafter(TrainedDrafter(trained, network, plain_pair.fingerprint["target"]), place / trained)
        words = shlex.split(options.replace("PATH", trained))
        result = cli(*common, *words)
        assert result.code == 0, (name, result.err)
        output, lossy = json.loads(result.out), "typical" in words
        assert lossy == ("lossy" in name) == ("lossless" not in output["verification"]), name
        assert lossy or output["texts"] == plain["texts"], name


@functools.cache
def help_of(name: str) -> str:
    """Return the help of a command."""
    answer = cli(name, "--help")
    assert answer.code == 0, f"specstop {name}"
    return answer.out


def documents() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@functools.cache
def known_options() -> set[str]:
    """Return the options of all commands and benchmarks."""
    texts = [cli("--help").out, *map(help_of, COMMANDS), *(p.read_text() for p in (ROOT / "benchmarks").rglob("*.py"))]
    return set(re.findall(r"--[a-z][a-z-]+", " ".join(texts)))


@pytest.mark.parametrize("page", documents(), ids=lambda p: p.name)
def test_every_command_and_option_named_in_a_page_exists(page):
    """Options alone are not checked in `engines.md`, which names options of other engines."""
    text = page.read_text()
    references: list[tuple[str, str]] = re.findall(r"`specstop ([a-z]+)([^`]*)`", text)
    consoles = [block for kind, block in BLOCK.findall(text) if kind != "python"]
    named = [words for block in consoles for words in commands(block) if words[0] == "specstop"]
    references += [(words[1], " ".join(words[2:])) for words in named]
    for name, rest in references:
        for option in re.findall(r"--[a-z][a-z-]+", rest):
            assert option in help_of(name), f"specstop {name} {option}"
    if page.name != "engines.md":
        assert set(re.findall(r"`(--[a-z][a-z-]+)[^`]*`", text)) <= known_options()


@pytest.mark.parametrize("page", [*documents(), ROOT / "CONTRIBUTING.md"], ids=lambda p: p.name)
def test_every_link_and_every_path_of_the_map_exists(page):
    text, missing = page.read_text(), []
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if not link.startswith("https://")]
    if page.name == "CONTRIBUTING.md":
        paths = re.findall(r"`((?:policies|decode|collect|train|cli|tests|benchmarks)/[\w./]*)`", text)
        assert len(paths) > 30
        missing = [path for path in paths if not (ROOT / path).exists()]
    assert missing + [link for link in links if not (page.parent / link).exists()] == []


PACKAGES = ("specstop.policies", "specstop.decode", "specstop.collect", "specstop.train")


def test_the_reference_is_made_from_docstrings(tmp_path, monkeypatch, recwarn):
    pdoc = pytest.importorskip("pdoc")
    monkeypatch.setenv("EAGER_IMPORT", "1")
    for package in PACKAGES:
        importlib.reload(importlib.import_module(package))
    pdoc.render.configure(show_source=False, search=False)  # halves the time
    pdoc.pdoc(*PACKAGES, output_directory=tmp_path)
    assert not [warning for warning in recwarn if "does not resolve" in str(warning.message)]
    for package in PACKAGES:
        page = (tmp_path / f"{package.replace('.', os.sep)}.html").read_text()
        for name in importlib.import_module(package).__all__:
            assert f'id="{name}"' in page
